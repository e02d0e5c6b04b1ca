"""What a run does when it is due: log a row, save a checkpoint, evaluate and draw the conclusions.

When each is due, and in which order, `intervals` decides. A checkpoint is never ahead of its logs, and a record of an
evaluation is written after all that follows from it, so that it says that nothing of it is missing; only telling the
pusher and the user's own `log` come later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from hezar_train.errors import CheckpointError, ConfigError, choices, suggestion
from hezar_train.events import EventStorage, Scalar
from hezar_train.events.storage import RESERVED_NAMES
from hezar_train.hub import Pusher
from hezar_train.loop import Context, Verbs
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.terminal.progress import EVALUATION, SAVING
from hezar_train.trainer.checkpointing import Checkpointing
from hezar_train.trainer.data_setup import RunSetup
from hezar_train.trainer.evaluator import Evaluator
from hezar_train.trainer.run_files import RunFiles, RunFolder
from hezar_train.trainer.train_step import Optimization

__all__ = ["RunActions", "TimeSpent"]

DATA, TRAINING = "data", "training"
SECONDS_BETWEEN_NOTES = 30.0
OWN_NAMES = frozenset({"train.step_loss", *RESERVED_NAMES})  # rows hold the mean of the one, and have the others
T = TypeVar("T")


class TimeSpent:
    """Seconds since the start by what they went into."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin from zero."""
        self._begun = perf_counter()
        self._seconds = {DATA: 0.0, EVALUATION: 0.0, SAVING: 0.0}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the body's time as spent on `what`."""
        begun = perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += perf_counter() - begun

    def waiting_for(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and count the time it takes to get each as spent on data."""
        seconds, begun = self._seconds, perf_counter()
        for item in items:
            seconds[DATA] += perf_counter() - begun
            yield item
            begun = perf_counter()

    def split(self) -> dict[str, float]:
        """Return the seconds so far, with what is left of them as training."""
        rest = perf_counter() - self._begun - sum(self._seconds.values())
        return {TRAINING: max(0.0, rest), **self._seconds}


@dataclass
class RunActions:
    """Log, save, evaluate and update the best result, for a run that trains."""

    setup: RunSetup
    runtime: Runtime
    folder: RunFolder
    state: TrainerState
    storage: EventStorage
    ctx: Context
    optimization: Optimization
    evaluator: Evaluator
    checkpointing: Checkpointing
    progress: Progress
    verbs: Verbs
    spent: TimeSpent = field(default_factory=TimeSpent, init=False)
    """Where the time of this start went."""
    last_metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._files: RunFiles | None = None
        self._pusher: Pusher | None = None
        self._noted_time = perf_counter()
        self._totals: dict[str, int] = {}
        self._last_asked: int | None = None  # the step of the last save that fell due, on every process

    def follow(self, setup: RunSetup) -> None:
        """Act for another config, on other data."""
        self.setup = setup

    def open(self, files: RunFiles | None, pusher: Pusher | None) -> None:
        """Act on the run's files, and tell the pusher of the best checkpoint; only the main process has either."""
        self._files, self._pusher = files, pusher

    def close(self) -> None:
        """Let go of files and pusher."""
        self._files = self._pusher = None

    def log(self) -> None:
        """Write a row: the mean loss since the start and since the last row, rate, norm, pace, and what hooks put.

        `train.step_loss`, which is put at every update, is in no row (`OWN_NAMES`).
        """
        state = self.state
        measured = {name: value for name, value in self.storage.unlogged().items() if name not in OWN_NAMES}
        values: dict[str, Scalar] = {**measured, **state.mean_loss()}
        if state.period_loss_count:
            values["train.recent_loss"] = state.period_loss_sum / state.period_loss_count
        values["train.learning_rate"] = self.optimization.schedule.rates()[0]
        if (norm := self.ctx.step.grad_norm) is not None:
            values["train.grad_norm"] = norm
        if (pace := self.progress.samples_per_second()) is not None:
            values["train.samples_per_second"] = pace
        state.period_loss_sum = state.period_loss_count = 0.0
        self._write(values)

    def log_rest(self) -> None:
        """Write a row of what hooks put after the last one."""
        late = {name for name, history in self.storage.histories().items() if history.total != self._totals.get(name)}
        measured = {name: value for name, value in self.storage.unlogged().items() if name in late - OWN_NAMES}
        if measured:
            self._write(measured)

    def save(self) -> None:
        """Save a checkpoint of this update, and let a user's own `save` write what it wants, also on a full disk."""
        self._save_checkpoint()
        if self.verbs.save is not None:
            with self.aside(SAVING):
                self.verbs.save(str(self.folder.export(self.state.global_step)))

    def _save_checkpoint(self) -> None:
        """Save a checkpoint; where each process has a share of the model, all do it together."""
        self._last_asked = self.state.global_step  # also where another process saves: `refuse_lost_end` asks all
        if not self.checkpointing.saves_here:
            return
        with self.aside(SAVING):
            if self._logs_are_out():
                before_commit = None if self._files is None else self._files.sync
                self.checkpointing.save(self._measured(), before_commit)

    def what_is_saved(self) -> str:
        """Say what a run that is left now has saved; waits for the save under way, which a full disk may refuse."""
        if not self.setup.config.save_enabled:
            return "nothing saved (save_enabled=False)"
        with self.aside(SAVING):
            step, newest = self.state.global_step, self.checkpointing.newest_saved()
        return f"saved at step {step}" if newest == step else self._saved_words(newest)

    def _saved_words(self, newest: int | None) -> str:
        older = "there is no checkpoint" if newest is None else f"the newest checkpoint is that of step {newest}"
        return f"step {self.state.global_step} could NOT be saved, {older}"

    def refuse_lost_end(self) -> None:
        """Raise if the last save that fell due is not on the disk, because that was full: other errors were raised.

        On all processes, after the writer has written all.
        """
        if self._last_asked is None:
            return
        newest = self.checkpointing.newest_saved()
        if newest is None or newest < self._last_asked:
            raise CheckpointError(
                f"the disk is full, and the end of this run is not on it: {self._saved_words(newest)}. Free some "
                "space; `hezar-train resume` (resume_from_checkpoint=True) then trains what is missing. In Python "
                "the weights are still in memory: trainer.save(FOLDER) writes them to another disk."
            )

    def evaluate_and_update_best(self) -> None:
        """Evaluate, or read the record of it, and draw the conclusions: best result, plateau, log."""
        state, recorded = self.state, None
        found = state.mean_loss()
        if self.setup.evaluates:
            recorded = self._recorded()
            metrics, details = self._evaluate() if recorded is None else (recorded, {})
            # The record of a call among many may say that it stops here; any other run that a record has stopped was
            # found finished before it came here (`RunStatus.is_finished`).
            if not self.setup.config.accept_changes:  # else the record is judged by the new settings
                recorded_reason = self._recorded_reason()  # on all processes: what the main one reads is shared
                state.stop_reason = state.stop_reason or recorded_reason
            found |= {f"evaluation.{name}": value for name, value in metrics.items()}
            self._write({name: value for name, value in found.items() if name.startswith("evaluation.")})
        self.last_metrics = found
        self._draw_conclusions(found)
        # last: a record says that nothing of its evaluation is missing
        if self.setup.evaluates and recorded is None and self.runtime.is_main:
            self._record(metrics, details)
        if self._pusher is not None and state.best_checkpoint is not None:
            self._pusher.note_best(state.best_checkpoint)
        if self.verbs.log is not None:
            self.verbs.log(dict(found), state.global_step)

    def show_progress(self, ctx: Context) -> None:
        """Bring the bar forward after an update; a hook at BATCH_END."""
        if ctx.step.closes_window:
            state, rate = self.state, self.optimization.optimizer.param_groups[0]["lr"]
            loss = state.period_loss_sum / state.period_loss_count if state.period_loss_count else None
            self.progress.advance(state.global_step, state.epoch, ctx.step.window.count, loss, rate)

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Count the body's time as spent on `what`, not on training."""
        with self.progress.aside(what), self.spent.on(what):
            yield

    def _write(self, values: Mapping[str, Scalar]) -> None:
        row = self.storage.log(values, self.state.global_step, self.state.epoch)
        self.storage.flush()
        # what writers put while they wrote, such as the time left, is theirs and no news
        self._totals = {name: history.total for name, history in self.storage.histories().items()}
        self.progress.line(row)

    def _logs_are_out(self) -> bool:
        """Hand all lines on; tell whether the disk took them (it keeps some pending when it is full).

        No checkpoint is ahead of its logs.
        """
        is_full = False
        if self._files is not None:
            self.state.files = self._files.flush()
            is_full = self._files.has_pending
        if self.checkpointing.saves_together:  # all save, or none
            is_full = self.runtime.processes.share(is_full)
        if is_full and self.runtime.is_main:
            logger.warning(
                "step %d is not saved: the disk is too full for the logs. Training goes on.", self.state.global_step
            )
        return not is_full

    def _measured(self) -> dict[str, tuple[float, int, bool | None]]:
        """Return what hooks put and no row holds yet: the last value of each name, its step and its hint."""
        histories = {name: self.storage.history(name) for name in self.storage.unlogged() if name not in OWN_NAMES}
        return {name: (one.latest(), one.peek()[1], one.smoothing_hint) for name, one in histories.items()}

    def _evaluate(self) -> tuple[dict[str, float], dict[str, Any]]:
        pictures = self.folder.pictures(self.state.global_step)
        with self.aside(EVALUATION):
            # On one process a signal leaves an evaluation half way, and says what is saved; a resume does it again.
            # Several processes finish it, record it, and leave then (`Due._act`).
            metrics, details = self.evaluator.evaluate_for_record(pictures, self.folder.root, self.what_is_saved)
        if metrics:
            refuse_absent_best(self.setup.best_key, metrics)
        return metrics, details

    def _recorded(self) -> dict[str, float] | None:
        """Return what an evaluation of this step found before a resume; records of later steps were put aside."""
        found = self.folder.recorded_evaluation(self.state.global_step) if self.runtime.is_main else None
        return self.runtime.processes.share(found)

    def _recorded_reason(self) -> str | None:
        found = self.folder.recorded_stop_reason(self.state.global_step) if self.runtime.is_main else None
        return self.runtime.processes.share(found)

    def _draw_conclusions(self, found: dict[str, float]) -> None:
        state = self.state
        value = found.get(state.metric_for_best_checkpoint or "", math.nan)
        state.update_best_results(value, self.setup.objective, state.global_step)
        # also when it is no better: a full disk may have kept the file from being written
        if self.setup.config.save_enabled and self.runtime.is_main:
            self.folder.write_best(state)
        if not math.isnan(value):
            self.optimization.schedule.after_evaluation(value)
        reason = self.setup.stopping.judge(found)
        state.stop_reason = state.stop_reason or reason

    def _record(self, metrics: dict[str, float], details: dict[str, Any]) -> None:
        """Write an evaluation down, drop pictures of others; now and then note where the time went: a kill may come."""
        state = self.state
        details |= {"stop_reason": state.stop_reason}
        self.folder.record_evaluation(state.global_step, state.epoch, metrics, details)
        self.folder.drop_pictures_but_of({state.global_step, state.best_checkpoint or state.global_step})
        if perf_counter() - self._noted_time > SECONDS_BETWEEN_NOTES:
            self._noted_time = perf_counter()
            self.folder.amend_start({"seconds": self.spent.split()})


def refuse_absent_best(key: str, metrics: Mapping[str, float]) -> None:
    """Raise if an evaluation did not give what decides the best model; some metrics tell their outputs only then."""
    known = ["train.loss", *(f"evaluation.{name}" for name in metrics)]
    if key not in known:
        raise ConfigError(
            f"the best model is to be told by {key!r}, which the evaluation did not give. There are: {choices(known)}."
            f"{suggestion(key, known)}"
        )
