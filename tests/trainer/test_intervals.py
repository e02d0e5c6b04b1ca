"""What is due after each update and at each epoch's end, and in which order it is done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hezar_train.config import TrainerConfig
from hezar_train.data import Order, Splits, Window, open_source
from hezar_train.errors import TrainingInterrupted
from hezar_train.hooks import StopFlag, Stopping
from hezar_train.loop import Context, Fit, HookSet, Routine
from hezar_train.plan import make_plan
from hezar_train.runtime import Processes
from hezar_train.state import TrainerState
from hezar_train.trainer.data_setup import RunSetup
from hezar_train.trainer.intervals import Due
from hezar_train.types import Mode

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
        processes: Processes | None = None,
        **fields: Any,
    ) -> None:
        config = TrainerConfig(output_dir="run", batch_size=1, save_enabled=saves, **fields)
        self.setup = setup_of(config, num_samples, evaluates=evaluates)
        self.plan, self.state, self.flag, self.done = self.setup.plan, TrainerState(), flag or StopFlag(), []
        self.due = Due(self.setup, self.state, self.flag, self, processes or Processes())
        self.fit = self._make_fit()
        self.due.begin(self.fit)
        self.on: dict[tuple[str, int], Callable[[], object]] = {}
        self.skipped: set[int] = set()  # updates that a scaler does not apply

    def log(self) -> None:
        self._note("log")

    def save(self) -> None:
        self._note("save")

    def evaluate_and_update_best(self) -> None:
        self._note("judge")

    def what_is_saved(self) -> str:
        return f"saved at step {self.state.global_step}"

    def _note(self, action: str) -> None:
        self.done.append(f"{action} {self.state.update_step}")
        self.on.get((action, self.state.update_step), lambda: None)()

    def _make_fit(self) -> Fit:
        routine = Routine(Context(), HookSet(), Mode.TRAIN, "train")
        end, num_epochs = self.setup.end(self.state), self.plan.num_epochs
        return Fit(routine, self.setup.source, self.plan, self.state, end, num_epochs, lambda window: window)

    def go(self) -> list[str]:
        ctx = Context()
        while not self.fit.ends and self.state.epoch <= self.plan.num_epochs:
            self._epoch(ctx)
            self.due.at_epoch_end(ctx)
            self.state.update(epoch=self.state.epoch + 1, position=0)
        return self.done

    def _epoch(self, ctx: Context) -> None:
        state = self.state
        for span in self.plan.windows(state.position, self.plan.total_steps - state.global_step):
            if self.fit.ends:
                return
            ctx.step.window = Window(span.first, span.count, span.ends_epoch, [])
            for number in range(span.num_steps):
                state.global_step += 1
                ctx.step.closes_window = number == span.num_steps - 1
                ctx.step.applied = ctx.closes_window and state.global_step not in self.skipped
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
    assert run.done == told((2, "save"))
    assert not run.state.evaluation_pending


def test_a_signal_leaves_an_evaluation_that_is_due_to_the_resumed_run() -> None:
    run = SmallRun(4, num_epochs=1, eval_steps=2)
    run.on["step", 2] = lambda: setattr(run.flag, "signal", signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run.go()
    assert run.done == told((2, "save"))
    assert run.state.evaluation_pending


def test_a_signal_at_an_epochs_end_logs_and_saves_and_leaves_the_judgement_open() -> None:
    run = SmallRun(2, num_epochs=2)
    run.on["step", 2] = lambda: setattr(run.flag, "signal", signal.SIGINT)
    with pytest.raises(TrainingInterrupted, match="SIGINT: stopped, saved at step 2"):
        run.go()
    assert run.done == told((2, "log save"))
    assert run.state.evaluation_pending


def test_a_signal_during_the_judgement_leaves_after_it() -> None:
    run = SmallRun(4, num_epochs=1, eval_steps=2)
    run.on["judge", 2] = lambda: setattr(run.flag, "signal", signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run.go()
    assert run.done == told((2, "save judge"))
    assert not run.state.evaluation_pending


def test_a_signal_without_saving_leaves_at_the_end_of_the_update() -> None:
    run = SmallRun(4, num_epochs=1, saves=False)
    run.on["step", 1] = lambda: setattr(run.flag, "signal", signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run.go()
    assert run.done == []


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
    assert run.done == told((2, "save"))


def test_what_follows_a_save_can_be_done_again_at_a_resume_and_is_not_done_twice() -> None:
    run = SmallRun(2, num_epochs=1)
    run.state.update(global_step=2, update_step=2, evaluation_pending=True)
    run.due.conclude()
    run.due.at_epoch_end(Context())
    assert run.done == told((2, "judge"))
    assert not run.state.evaluation_pending


def test_a_plan_that_is_followed_later_decides_from_then_on() -> None:
    run = SmallRun(8, num_epochs=1, log_steps=2)
    other = TrainerConfig(output_dir="run", batch_size=1, num_epochs=1, save_steps=3, save_enabled=False)
    run.on["step", 4] = lambda: run.due.follow(setup_of(other, 8, evaluates=False))
    assert run.go() == told((2, "log"), (8, "log judge"))


def test_where_a_run_was_put_back_its_last_update_is_no_longer_taken_for_done() -> None:
    run = SmallRun(2, num_epochs=1)
    run.state.update(global_step=2, update_step=2)
    run.due.conclude()
    run.due.save_requested = True
    run.due.forget()
    run.due.at_epoch_end(Context())
    assert run.done == told((2, "judge"), (2, ALL))
    assert not run.due.save_requested


class AskedElsewhere(Processes):
    """Two processes, of which the other one is asked for something after so many talks; notes when they talk."""

    def __init__(self, run: Callable[[], SmallRun], stop_at: int = -1, save_at: int = -1) -> None:
        super().__init__(rank=0, count=2)
        self._run, self._stop_at, self._save_at, self._talks = run, stop_at, save_at, 0

    def sum(self, values: Sequence[Any]) -> list[float]:
        self._talks += 1
        self._run().done.append(f"agree {self._run().state.update_step}")
        return [values[0] + (self._talks == self._stop_at), values[1] + (self._talks == self._save_at), *values[2:]]

    def gather(self, value: Any) -> list[Any]:
        return [value, "asked elsewhere"]


def test_processes_agree_before_anything_is_due_and_after_what_an_evaluation_may_have_changed() -> None:
    run = SmallRun(6, num_epochs=1, gradient_accumulation_steps=2, processes=AskedElsewhere(lambda: run))
    run.due.at_start(Context())
    assert run.go() == told((0, "agree"), (1, "agree"), (2, "agree"), (3, f"agree agree {ALL} agree"))


def test_what_another_process_was_asked_for_is_done_here_too() -> None:
    run = SmallRun(5, num_epochs=2, processes=AskedElsewhere(lambda: run, save_at=1, stop_at=3))
    assert [one for one in run.go() if "agree" not in one] == told((1, "save"), (3, ALL))
    assert run.state.stop_reason == "asked elsewhere"
