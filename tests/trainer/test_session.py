"""A run while it trains: what is due after each update, and what is written down of each start."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.config import TrainerConfig
from hezar_train.data import Order, Splits, Window, open_source
from hezar_train.errors import TrainingInterrupted
from hezar_train.hooks import StopFlag, Stopping
from hezar_train.loop import Context
from hezar_train.plan import make_plan
from hezar_train.state import TrainerState
from hezar_train.trainer.intervals import Actions, Due, TimeSpent
from hezar_train.trainer.train_data import RunSetup

Build = Callable[..., Trainer]

pytestmark = pytest.mark.filterwarnings("ignore:.*not a multiple of gradient_accumulation_steps")


def setup_of(config: TrainerConfig, num_samples: int, *, evaluates: bool) -> RunSetup:
    """Return what a run over so many samples is about."""
    splits = Splits.of(list(range(num_samples)), [0] if evaluates else None)
    source = open_source(splits.train, list, Order(config.batch_size, config.seed, shuffle=False))
    key = "evaluation.loss" if evaluates else "train.loss"
    stopping = Stopping.from_config(config, [""] if evaluates else [], None, lambda _: "minimize")
    return RunSetup(config, splits, source, make_plan(config, num_samples), evaluates, key, "minimize", stopping)


class SmallRun:
    """Walk a planned run without training: bring the state forward and let the hook decide, as the loop does."""

    def __init__(
        self,
        num_samples: int,
        *,
        evaluates: bool = True,
        saves: bool = True,
        flag: StopFlag | None = None,
        agree: Callable[[], None] | None = None,
        **fields: Any,
    ) -> None:
        config = TrainerConfig(output_dir="run", batch_size=1, save_enabled=saves, **fields)
        self.setup = setup_of(config, num_samples, evaluates=evaluates)
        self.plan, self.state, self.flag, self.log = self.setup.plan, TrainerState(), flag or StopFlag(), []
        actions = Actions(log=self._note("log"), save=self._note("save"), evaluate_and_update_best=self._note("judge"))
        self.due = Due(self.state, self.flag, actions, self.ends, agree)
        self.due.follow(self.setup)
        self.on: dict[tuple[str, int], Callable[[], object]] = {}
        self.skipped: set[int] = set()  # updates that a scaler does not apply

    def _note(self, action: str) -> Callable[[], None]:
        def act() -> None:
            self.log.append(f"{action} {self.state.update_step}")
            self.on.get((action, self.state.update_step), lambda: None)()

        return act

    def ends(self) -> bool:
        is_at_end = self.setup.end(self.state).is_reached(self.state.global_step, self.state.samples_seen)
        return self.state.stop_reason is not None or is_at_end

    def go(self) -> list[str]:
        ctx = Context()
        while not self.ends() and self.state.epoch <= self.plan.num_epochs:
            self._epoch(ctx)
            self.due.at_epoch_end(ctx)
            self.state.update(epoch=self.state.epoch + 1, position=0)
        return self.log

    def _epoch(self, ctx: Context) -> None:
        state = self.state
        for span in self.plan.windows(state.position, self.plan.total_steps - state.global_step):
            if self.ends():
                return
            ctx.window = Window(span.first, span.count, span.ends_epoch, [])
            for number in range(span.num_steps):
                state.global_step += 1
                ctx.closes_window = number == span.num_steps - 1
                ctx.applied = ctx.closes_window and state.global_step not in self.skipped
                state.update_step += ctx.applied
                self.on.get(("step", state.global_step), lambda: None)()
                self.due.at_batch_end(ctx)


def told(*entries: tuple[int, str]) -> list[str]:
    """Write (3, "log save") as ["log 3", "save 3"]."""
    return [f"{action} {update}" for update, actions in entries for action in actions.split()]


ALL = "log save judge"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [(5, ALL), (10, ALL)]),
        ({"save_steps": 3}, [(3, "save"), (5, ALL), (6, "save"), (9, "save"), (10, ALL)]),
        ({"save_steps": 5}, [(5, ALL), (10, ALL)]),
        ({"log_steps": 2}, [(2, "log"), (4, "log"), (5, ALL), (6, "log"), (8, "log"), (10, ALL)]),
        ({"eval_steps": 4}, [(4, "save judge"), (5, ALL), (8, "save judge"), (10, ALL)]),
        (
            {"log_steps": 2, "save_steps": 4, "eval_steps": 4},
            [(2, "log"), (4, ALL), (5, ALL), (6, "log"), (8, ALL), (10, ALL)],
        ),
        ({"max_steps": 7}, [(5, ALL), (7, ALL)]),
        ({"max_steps": 5}, [(5, ALL)]),
        ({"max_steps": 3, "save_steps": 3}, [(3, ALL)]),
        ({"max_steps": 8, "save_steps": 4, "log_steps": 4}, [(4, "log save"), (5, ALL), (8, ALL)]),
    ],
)
def test_what_is_due_at_each_update_of_two_epochs_of_five(fields: dict[str, Any], expected: list[Any]) -> None:
    assert SmallRun(5, num_epochs=2, **fields).go() == told(*expected)


def test_periods_inside_a_window_fall_due_at_its_end() -> None:
    # 7 steps in windows of 3, 3, 1; a period of 4 steps is two updates
    run = SmallRun(7, num_epochs=2, gradient_accumulation_steps=3, log_steps=4, save_steps=6)
    assert run.go() == told((2, "log save"), (3, ALL), (4, "log save"), (6, ALL))
    assert run.state.global_step == 14


def test_without_evaluation_only_epoch_ends_are_judged_by_the_training_loss() -> None:
    run = SmallRun(4, num_epochs=2, evaluates=False, eval_steps=2)
    assert run.go() == told((4, ALL), (8, ALL))


def test_without_saving_everything_else_goes_on() -> None:
    run = SmallRun(4, num_epochs=1, saves=False, save_steps=1, eval_steps=2, log_steps=1)
    assert run.go() == told((1, "log"), (2, "log judge"), (3, "log"), (4, "log judge"))
    assert not run.state.evaluation_pending


def test_an_update_that_was_not_applied_makes_nothing_due() -> None:
    run = SmallRun(4, num_epochs=1, save_steps=1)
    run.skipped = {2}
    assert run.go() == told((1, "save"), (2, "save"), (3, ALL))


def test_a_save_that_was_asked_for_comes_at_the_end_of_the_update_and_once() -> None:
    run = SmallRun(6, num_epochs=1, gradient_accumulation_steps=2)
    run.on["step", 1] = lambda: setattr(run.due, "save_requested", True)
    assert run.go() == told((1, "save"), (3, ALL))
    assert not run.due.save_requested


def test_a_stop_that_was_asked_for_ends_the_run_like_its_last_update() -> None:
    run = SmallRun(5, num_epochs=2, log_steps=1)
    run.on["step", 2] = lambda: run.state.update(stop_reason="enough")
    assert run.go() == told((1, "log"), (2, ALL))


def test_a_stop_inside_a_window_lets_the_window_finish() -> None:
    run = SmallRun(6, num_epochs=1, gradient_accumulation_steps=3)
    run.on["step", 1] = lambda: run.state.update(stop_reason="enough")
    assert run.go() == told((1, ALL))
    assert run.state.global_step == 3


def test_a_stop_that_follows_from_an_evaluation_does_nothing_twice() -> None:
    run = SmallRun(5, num_epochs=2, eval_steps=2, log_steps=2)
    run.on["judge", 2] = lambda: run.state.update(stop_reason="no better")
    assert run.go() == told((2, ALL))


def test_a_checkpoint_says_whether_its_judgement_is_still_to_come() -> None:
    run = SmallRun(4, num_epochs=1, save_steps=1, eval_steps=2)
    pending: list[bool] = []
    for update in range(1, 5):
        run.on["save", update] = lambda: pending.append(run.state.evaluation_pending)
    run.go()
    assert pending == [False, True, False, True]
    assert not run.state.evaluation_pending


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_end_of_the_update_and_leaves(number: signal.Signals, code: int) -> None:
    run = SmallRun(6, num_epochs=1, gradient_accumulation_steps=2)
    run.on["step", 3] = lambda: setattr(run.flag, "signal", number)
    with pytest.raises(TrainingInterrupted, match=f"{number.name}: stopped, saved at step 4") as caught:
        run.go()
    assert caught.value.code == code
    assert run.log == told((2, "save"))
    assert not run.state.evaluation_pending


def test_a_signal_leaves_an_evaluation_that_is_due_to_the_resumed_run() -> None:
    run = SmallRun(4, num_epochs=1, eval_steps=2)
    run.on["step", 2] = lambda: setattr(run.flag, "signal", signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run.go()
    assert run.log == told((2, "save"))
    assert run.state.evaluation_pending


def test_a_signal_at_an_epochs_end_logs_and_saves_and_leaves_the_judgement_open() -> None:
    run = SmallRun(2, num_epochs=2)
    run.on["step", 2] = lambda: setattr(run.flag, "signal", signal.SIGINT)
    with pytest.raises(TrainingInterrupted, match="SIGINT: stopped, saved at step 2"):
        run.go()
    assert run.log == told((2, "log save"))
    assert run.state.evaluation_pending


def test_a_signal_during_the_judgement_leaves_after_it() -> None:
    run = SmallRun(4, num_epochs=1, eval_steps=2)
    run.on["judge", 2] = lambda: setattr(run.flag, "signal", signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run.go()
    assert run.log == told((2, "save judge"))
    assert not run.state.evaluation_pending


def test_a_signal_without_saving_says_that_nothing_was_saved() -> None:
    run = SmallRun(4, num_epochs=1, saves=False)
    run.on["step", 1] = lambda: setattr(run.flag, "signal", signal.SIGTERM)
    with pytest.raises(TrainingInterrupted, match=r"nothing saved \(save_enabled=False\)"):
        run.go()
    assert run.log == []


class LateFlag(StopFlag):
    """A flag whose signal arrives between two looks at it."""

    def __init__(self, looks: list[signal.Signals | None]) -> None:
        self._looks: Iterator[signal.Signals | None] | None = None
        super().__init__()
        self._looks = iter(looks)

    @property
    def signal(self) -> signal.Signals | None:  # type: ignore[override]
        return next(self._looks, signal.SIGTERM) if self._looks else None

    @signal.setter
    def signal(self, value: signal.Signals | None) -> None: ...


def test_a_signal_that_comes_after_the_look_for_one_never_leaves_without_a_save() -> None:
    run = SmallRun(4, num_epochs=1, flag=LateFlag([None]))
    with pytest.raises(TrainingInterrupted, match="saved at step 2"):
        run.go()
    assert run.log == told((2, "save"))


def test_what_follows_a_save_can_be_done_again_at_a_resume_and_is_not_done_twice() -> None:
    run = SmallRun(2, num_epochs=1)
    run.state.update(global_step=2, update_step=2, evaluation_pending=True)
    run.due.after_save()
    run.due.at_epoch_end(Context())
    assert run.log == told((2, "judge"))
    assert not run.state.evaluation_pending


def test_a_plan_that_is_followed_later_decides_from_then_on() -> None:
    run = SmallRun(8, num_epochs=1, log_steps=2)
    other = TrainerConfig(output_dir="run", batch_size=1, num_epochs=1, save_steps=3, save_enabled=False)
    run.on["step", 4] = lambda: run.due.follow(setup_of(other, 8, evaluates=False))
    assert run.go() == told((2, "log"), (8, "log judge"))


def test_where_a_run_was_put_back_its_last_update_is_no_longer_taken_for_done() -> None:
    run = SmallRun(2, num_epochs=1)
    run.state.update(global_step=2, update_step=2)
    run.due.after_save()
    run.due.save_requested = True
    run.due.forget()
    run.due.at_epoch_end(Context())
    assert run.log == told((2, "judge"), (2, ALL))
    assert not run.due.save_requested


def test_processes_agree_once_an_update_before_anything_is_due() -> None:
    seen: list[int] = []
    run = SmallRun(6, num_epochs=1, gradient_accumulation_steps=2, agree=lambda: seen.append(run.state.global_step))
    run.go()
    assert seen == [2, 4, 6]


class At(Hook):
    """Do something after a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def after_step(self) -> None:
        if self.trainer.state.global_step == self.step:
            self.act()


def starts(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "environment.json").read_text())["starts"]
    return found


def fail() -> None:
    raise OSError("the disk is gone")


def test_a_start_ends_finished_with_its_time_split(toy: Build, rows: Any, tmp_path: Path) -> None:
    toy(eval_dataset=rows(8)).train()
    (start,) = starts(tmp_path / "run")
    assert (start["step"], start["end"]["how"], start["end"]["step"]) == (0, "finished", 5)
    assert list(start["seconds"]) == ["training", "data", "evaluation", "saving"]
    assert all(value > 0 for value in start["seconds"].values())
    assert sum(start["seconds"].values()) == pytest.approx(start["end"]["time"] - start["time"], abs=0.5)


def test_a_signal_and_an_error_are_told_apart_and_a_resume_says_where_it_began(toy: Build, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        toy(save_steps=1, hooks=[At(2, lambda: signal.raise_signal(signal.SIGTERM))]).train()
    with pytest.raises(OSError, match="gone"):
        toy(save_steps=1, resume_from_checkpoint=True, hooks=[At(4, fail)]).train()
    toy(save_steps=1, resume_from_checkpoint=True).train()
    first, second, third = starts(tmp_path / "run")
    assert (first["end"]["how"], first["end"]["signal"], first["end"]["step"]) == ("interrupted", "SIGTERM", 2)
    assert (second["step"], second["end"]["how"], second["end"]["error"]) == (2, "failed", "OSError")
    assert "gone" not in json.dumps(second)
    assert (third["step"] in (3, 4), third["end"]["how"]) == (True, "finished")


def test_why_a_run_stopped_early_is_told(toy: Build, tmp_path: Path) -> None:
    trainer = toy()
    trainer.register_hooks([At(3, lambda: trainer.request_stop("enough"))])
    trainer.train()
    assert starts(tmp_path / "run")[0]["end"]["reason"] == "enough"


def test_a_record_that_cannot_be_written_ends_nothing(
    toy: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def block() -> None:
        (tmp_path / "run/environment.json").unlink()
        (tmp_path / "run/environment.json").mkdir()

    toy(hooks=[At(3, block)]).train()
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("[0-9]*")] == ["00000005"]


def test_a_new_run_moves_the_report_of_the_old_one_aside(toy: Build, tmp_path: Path) -> None:
    toy().train()
    for name in ("report.html", "curves.png"):
        (tmp_path / "run" / name).write_text("old")
    toy().train()
    assert not (tmp_path / "run/report.html").exists()
    assert (tmp_path / "run/previous/0001/report.html").read_text() == "old"
    assert (tmp_path / "run/previous/0001/curves.png").read_text() == "old"


def test_time_is_counted_once_and_the_rest_is_training() -> None:
    spent = TimeSpent()
    assert list(spent.waiting_for(range(3))) == [0, 1, 2]
    with pytest.raises(ValueError, match="no"), spent.on("saving"):
        raise ValueError("no")
    split = spent.split()
    assert all(value > 0 for name, value in split.items() if name != "evaluation")
    assert split["evaluation"] == 0
    spent.start()
    assert spent.split()["data"] == 0


@pytest.fixture
def _threads_as_they_were() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("_threads_as_they_were")
def test_a_run_computes_with_the_threads_of_its_config_and_other_threads_are_told_at_a_resume(
    toy: Build, rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy(max_steps=2, num_threads=2).train()
    assert torch.get_num_threads() == starts(tmp_path / "run")[-1]["hardware"]["threads"] == 2
    toy(max_steps=3, num_threads=2, resume_from_checkpoint=True, accept_changes=True).train()
    assert "not bit by bit" not in caplog.text
    toy(max_steps=4, num_threads=1, resume_from_checkpoint=True, accept_changes=True).train()
    assert "it computed with 2 threads before, and with 1 now. num_threads=2" in caplog.text
