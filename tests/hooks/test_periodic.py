"""LiBai's hooks on a real run: a linear model on twenty rows, ten steps, on the CPU."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import DataError, HookError
from hezar_train.events import EventWriter, JSONLinesWriter, Row, get_event_storage, read_rows
from hezar_train.hooks import (
    CallbackHook,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hezar_train.loop import Context, Moment
from hezar_train.types import Mode

NUM_STEPS = 10
POINTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
ROWS = [{"x": point, "labels": int(point.argmax())} for point in POINTS]

Build = Callable[..., Trainer]


class CrashError(Exception):
    """What a test raises to end a run badly."""


class CrashAt(Hook):
    """Fail before a step, counted from 1."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self) -> None:
        if self.trainer.state.global_step == self.step - 1:
            raise CrashError


class CrashInEvaluation(Hook):
    """Fail when the trainer's own evaluation begins, which is after the save."""

    modes = frozenset({Mode.VAL})

    def on_fit_start(self, _: Context) -> None:
        raise CrashError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x)
        return logits


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that builds a trainer of ten steps; further keywords are fields of the config."""

    def make(*hooks: Hook, out: str = "run", eval_dataset: Any = None, **settings: Any) -> Trainer:
        given = {"batch_size": 4, "num_epochs": 2, "learning_rate": 0.1, "criterion": "CrossEntropyLoss"} | settings
        return Trainer(TrainerConfig(tmp_path / out, **given), Net(), ROWS, eval_dataset, hooks=hooks)

    return make


def broken_and_resumed(build: Build, hooks: Callable[[], Sequence[Hook]], crash_step: int, **settings: Any) -> None:
    """Train until a crash, then to the end with a new trainer and new hooks."""
    with pytest.raises(CrashError):
        build(*hooks(), CrashAt(crash_step), **settings).train()
    build(*hooks(), resume_from_checkpoint=True, **settings).train()


def checkpoint_steps(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def test_libais_base_class_is_our_hook() -> None:
    assert HookBase is Hook


class TestCallbackHook:
    def test_each_function_gets_the_trainer_also_in_a_second_training(self, build: Build) -> None:
        seen: list[str] = []

        def note(letters: str) -> Callable[[Any], None]:
            return lambda trainer: seen.append(f"{letters}{trainer.state.global_step}")

        hook = CallbackHook(
            before_train=note("BT"), after_train=note("AT"), before_step=note("BS"), after_step=note("AS")
        )
        trainer = build(hook, local_update_steps=2, batch_or_epoch="batch")
        trainer.train()
        assert seen == ["BT0", "BS0", "AS1", "BS1", "AS2", "AT2"]
        trainer.train()
        assert seen[6:] == ["BT2", "BS2", "AS3", "BS3", "AS4", "AT4"]

    def test_only_the_moments_of_its_functions_are_registered(self) -> None:
        assert [moment for moment, _ in CallbackHook(after_step=print).calls()] == [Moment.BATCH_END]

    def test_what_is_no_function_is_refused(self) -> None:
        with pytest.raises(HookError, match="5 is not a function"):
            CallbackHook(after_step=5)  # type: ignore[arg-type]


class TestIterationTimer:
    def test_the_steps_after_the_warm_up_are_timed(self, build: Build) -> None:
        trainer = build(IterationTimer(warmup_iter=3))
        trainer.train()
        assert [step for _, step in trainer.storage.history("time").values()] == [3, 4, 5, 6, 7, 8, 9, 10]

    @pytest.mark.parametrize("is_first", [True, False])
    def test_the_time_of_other_hooks_does_not_count(self, build: Build, is_first: bool) -> None:
        def rest(_: Any) -> None:
            time.sleep(0.03)

        hooks = [IterationTimer(), CallbackHook(before_step=rest, after_step=rest)]
        trainer = build(*(hooks if is_first else reversed(hooks)), max_steps=5)
        trainer.train()
        assert min(seconds for seconds, _ in trainer.storage.history("time").values()) < 0.03

    def test_a_step_of_the_users_own_is_timed_too(self, tmp_path: Path) -> None:
        class OwnStep(Trainer):
            def run_step(self) -> Any:
                time.sleep(0.01)
                return self.model.get_parameter("layer.weight").sum()

        trainer = OwnStep(TrainerConfig(tmp_path, batch_size=10), Net(), ROWS, hooks=[IterationTimer(warmup_iter=0)])
        trainer.train()
        assert min(seconds for seconds, _ in trainer.storage.history("time").values()) >= 0.01

    def test_the_speed_is_told_at_the_end(self, build: Build, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="hezar_train"):
            build(IterationTimer(warmup_iter=3)).train()
        assert "8 steps of " in caplog.text


def test_the_rate_that_each_step_trains_with_is_recorded(build: Build) -> None:
    schedule = {"lr_scheduler": "exponential", "lr_scheduler_kwargs": {"gamma": 0.5}, "lr_scheduling_steps": 1}
    trainer = build(LRScheduler(), max_steps=4, **schedule)
    trainer.train()
    assert [rate for rate, _ in trainer.storage.history("lr").values()] == pytest.approx([0.1, 0.05, 0.025, 0.0125])


class TestPeriodicCheckpointer:
    @pytest.mark.parametrize(("limit", "expected"), [(None, [2, 4, 5]), (1, [5])])
    def test_every_period_and_the_end_are_saved(
        self, build: Build, tmp_path: Path, limit: int | None, expected: list[int]
    ) -> None:
        build(PeriodicCheckpointer(2), num_epochs=1, save_total_limit=limit).train()
        assert checkpoint_steps(tmp_path / "run") == expected

    def test_a_period_that_ends_inside_a_window_waits_for_its_end(self, build: Build, tmp_path: Path) -> None:
        build(PeriodicCheckpointer(3), num_epochs=1, gradient_accumulation_steps=2).train()
        assert checkpoint_steps(tmp_path / "run") == [4, 5]

    @pytest.mark.parametrize("period", [0, 2.0, True, "all"])
    def test_a_period_that_is_no_number_of_steps_is_refused(self, period: Any) -> None:
        with pytest.raises(HookError, match="expected a whole number of steps, 1 or more"):
            PeriodicCheckpointer(period)


class Evaluations:
    """An evaluation function that notes when it is called; its result tells the step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.hook = CallbackHook(before_train=self._take)

    def _take(self, trainer: Trainer) -> None:
        self._state = trainer.state

    def __call__(self) -> dict[str, Any]:
        self.steps.append(self._state.global_step)
        return {"dev": {"score": float(self._state.global_step)}, "count": torch.tensor(3)}


class TestEvalHook:
    @pytest.mark.parametrize(("period", "steps"), [(4, [4, 8, 10]), (5, [5, 10]), (0, [10]), (20, [10])])
    def test_it_evaluates_every_period_and_once_at_the_end(self, build: Build, period: int, steps: list[int]) -> None:
        evaluate = Evaluations()
        trainer = build(evaluate.hook, EvalHook(period, evaluate))
        trainer.train()
        assert evaluate.steps == steps
        assert trainer.storage.history("dev/score").values() == [(float(step), step) for step in steps]
        assert trainer.storage.history("dev/score").smoothing_hint is False

    def test_the_result_of_the_end_is_logged(self, build: Build, tmp_path: Path) -> None:
        evaluate = Evaluations()
        build(evaluate.hook, EvalHook(0, evaluate), log_steps=3).train()
        (path,) = tmp_path.glob("run/logs/*/metrics.json")
        assert [row.step for row in read_rows(path) if "dev/score" in row.values] == [10]

    def test_a_run_that_fails_in_its_last_step_is_not_evaluated(self, build: Build) -> None:
        evaluate = Evaluations()
        with pytest.raises(CrashError):
            build(evaluate.hook, EvalHook(0, evaluate), CrashAt(NUM_STEPS)).train()
        assert evaluate.steps == []

    @pytest.mark.parametrize("period", [0, 3, 5])
    def test_a_run_that_is_asked_to_stop_is_evaluated_once_at_its_end(self, build: Build, period: int) -> None:
        def stop(trainer: Trainer) -> None:
            if trainer.state.global_step == 3:
                trainer.request_stop("enough")

        evaluate = Evaluations()
        build(evaluate.hook, EvalHook(period, evaluate), CallbackHook(after_step=stop)).train()
        assert evaluate.steps == [3]

    @pytest.mark.parametrize("crash_step", [2, 6, 7, 10])
    def test_a_broken_run_evaluates_as_the_unbroken_one(self, build: Build, tmp_path: Path, crash_step: int) -> None:
        def hooks() -> list[Hook]:
            evaluate = Evaluations()
            return [evaluate.hook, EvalHook(3, evaluate)]

        build(*hooks(), out="unbroken", save_steps=2, log_steps=4).train()
        broken_and_resumed(build, hooks, crash_step, save_steps=2, log_steps=4)
        found = [
            [(row.step, row.values["dev/score"]) for row in read_rows(path) if "dev/score" in row.values]
            for run in ("unbroken", "run")
            for path in tmp_path.glob(f"{run}/logs/*/metrics.json")
        ]
        assert found == [[(4, 3.0), (8, 6.0), (10, 10.0)]] * 2

    def test_a_run_that_was_evaluated_at_its_end_is_not_evaluated_there_again(self, build: Build) -> None:
        evaluate = Evaluations()
        hooks = [evaluate.hook, EvalHook(0, evaluate)]
        with pytest.raises(CrashError):
            build(*hooks, CrashInEvaluation(), num_epochs=1, eval_dataset=ROWS).train()
        again = Evaluations()
        build(again.hook, EvalHook(0, again), num_epochs=1, eval_dataset=ROWS, resume_from_checkpoint=True).train()
        assert (evaluate.steps, again.steps) == ([5], [])

    @pytest.mark.parametrize(
        ("result", "words"),
        [
            ([0.5], "returned a list"),
            ({"dev": {"name": "x"}}, "'x' under 'dev/name'"),
            ({"all": [1, 2]}, "under 'all'"),
        ],
    )
    def test_a_result_that_is_no_number_is_refused(self, build: Build, result: Any, words: str) -> None:
        with pytest.raises(DataError, match=words):
            build(EvalHook(2, lambda: result)).train()

    def test_a_function_may_return_nothing(self, build: Build) -> None:
        assert build(EvalHook(2, lambda: None)).train().num_samples == 40


class Measuring(Hook):
    """Put a value now and then, one more at the end."""

    def after_step(self) -> None:
        step = self.trainer.state.global_step
        if step % 3 == 0:
            self.trainer.storage.put_scalar("often", step * 0.5)
        if step == 5:
            self.trainer.storage.put_scalar("once", 7.0)

    def on_fit_end(self, ctx: Context) -> None:
        if ctx.failed is None:
            self.trainer.storage.put_scalar("final", 1.0)


class Noting(EventWriter):
    """Keep what it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, rows: Sequence[Row]) -> None:
        self.calls += [row.step for row in rows]

    def close(self) -> None:
        self.calls.append("closed")


def measured(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows of a file with what `Measuring` put."""
    names = {"often", "once", "final", "train.step_loss"}
    return [(row.step, {name: row.values[name] for name in row.values if name in names}) for row in read_rows(path)]


class TestPeriodicWriter:
    def test_each_row_holds_what_was_put_since_the_one_before(self, build: Build, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        build(Measuring(), PeriodicWriter([JSONLinesWriter(path)], period=4)).train()
        values = [{name: row[name] for name in row if name != "train.step_loss"} for _, row in measured(path)]
        assert [step for step, _ in measured(path)] == [4, 8, 10, 10]
        assert values == [{"often": 1.5}, {"often": 3.0, "once": 7.0}, {"often": 4.5}, {"final": 1.0}]

    def test_what_a_later_hook_puts_at_the_end_is_written_before_the_writers_are_closed(self, build: Build) -> None:
        writer = Noting()
        build(PeriodicWriter([writer], period=4), Measuring()).train()
        assert writer.calls == [4, 8, 10, 10, "closed"]

    def test_a_writer_that_takes_no_rows_reads_the_storage_at_the_same_times(self, build: Build) -> None:
        class Reading(EventWriter):
            def __init__(self) -> None:
                self.values: list[float] = []

            def write(self) -> None:  # type: ignore[override]
                self.values.append(get_event_storage().latest()["often"][0])

        writer = Reading()
        build(Measuring(), PeriodicWriter([writer], period=4)).train()
        assert writer.values == [1.5, 3.0, 4.5, 4.5]

    def test_a_timed_step_is_written_beside_the_rows_own_time(self, build: Build, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        before = time.time()
        build(IterationTimer(), PeriodicWriter([JSONLinesWriter(path)], period=4)).train()
        record = json.loads(path.read_text().splitlines()[0])
        assert record["time"] >= before
        assert 0 < record["train.time"] < before

    @pytest.mark.parametrize("crash_step", [3, 5, 6, 8, 9, 10])
    @pytest.mark.parametrize(("period", "log_steps"), [(1, 20), (4, 3)])
    def test_a_broken_run_writes_the_rows_of_the_unbroken_one(
        self, build: Build, tmp_path: Path, period: int, log_steps: int, crash_step: int
    ) -> None:
        def hooks(name: str) -> Callable[[], list[Hook]]:
            return lambda: [Measuring(), PeriodicWriter([JSONLinesWriter(tmp_path / name)], period)]

        build(*hooks("unbroken.json")(), out="unbroken", save_steps=2, log_steps=log_steps).train()
        broken_and_resumed(build, hooks("broken.json"), crash_step, save_steps=2, log_steps=log_steps)
        assert measured(tmp_path / "broken.json") == measured(tmp_path / "unbroken.json")

    def test_building_a_trainer_that_resumes_leaves_the_file_as_it_is(self, build: Build, tmp_path: Path) -> None:
        def hook() -> Hook:
            return PeriodicWriter([JSONLinesWriter(tmp_path / "mine.json")], period=2)

        with pytest.raises(CrashError):
            build(hook(), CrashAt(8), save_steps=2).train()
        before = measured(tmp_path / "mine.json")
        build(hook(), resume_from_checkpoint=True, save_steps=2)
        assert measured(tmp_path / "mine.json") == before

    def test_a_second_training_goes_on_in_the_same_file(self, build: Build, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        trainer = build(PeriodicWriter([JSONLinesWriter(path)], period=2), local_update_steps=4, batch_or_epoch="batch")
        trainer.train()
        trainer.train()
        assert sorted({step for step, _ in measured(path)}) == [2, 4, 6, 8]

    def test_what_is_no_writer_is_refused(self) -> None:
        with pytest.raises(HookError, match="'metrics' is not an EventWriter"):
            PeriodicWriter(["metrics"])  # type: ignore[list-item]


@pytest.mark.parametrize("hook", [IterationTimer(), LRScheduler(), PeriodicCheckpointer(1), EvalHook(1, dict)])
def test_a_hook_watches_the_training_alone(build: Build, hook: Hook) -> None:
    trainer = build(hook)
    assert not any(hook.name in name for moment in Moment for name in trainer.hooks[Mode.VAL].names(moment))
