"""A training run while it is under way: its lock, its files, and how to do what falls due.

The order of things is `hooks.Due`'s; this module only knows how each is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hezar_train.checkpoint import CheckpointStore, CheckpointWriter, SharedStore
from hezar_train.config import TrainerConfig
from hezar_train.events import EventStorage, Scalar
from hezar_train.events.storage import RESERVED_NAMES
from hezar_train.hooks import Actions, Progress, Stopping
from hezar_train.hub import Pusher
from hezar_train.optim import Schedule
from hezar_train.runtime import Processes, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.records import Records
from hezar_train.trainer.saving import Snapshot
from hezar_train.trainer.time_spent import EVALUATION, SAVING, TimeSpent

__all__ = ["Run"]

SECONDS_BETWEEN_NOTES = 30.0

OWN_NAMES = frozenset({"train.step_loss", *RESERVED_NAMES})  # rows hold the mean of the one, and have the others


@dataclass
class Run:
    """The parts that logging, saving and judging need, gathered for one call of `train()`."""

    config: TrainerConfig
    folder: RunFolder
    state: TrainerState
    storage: EventStorage
    schedule: Schedule
    progress: Progress
    records: Records | None
    """The run's files; only the main process has them."""
    snapshot: Snapshot
    evaluate: Callable[[], tuple[dict[str, float], dict[str, Any]]] | None
    objective: str
    stopping: Stopping
    processes: Processes
    grad_norm: Callable[[], float | None]
    spent: TimeSpent
    pusher: Pusher | None = None
    """What pushes to the Hub; only the main process has one, if any."""
    last_metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_abandoned = False
        self._noted_time = perf_counter()
        self._totals: dict[str, int] = {}
        self._best_on_disk: int | None = None
        group = self.snapshot.group
        root = self.folder.checkpoints
        store = CheckpointStore(root) if group is None else SharedStore(root, group)
        self._saves_here = group is not None or self.records is not None
        on_saved = None if self.pusher is None else self.pusher.note_saved
        self._writer = CheckpointWriter(store, self.config.async_save, self.config.save_total_limit, on_saved)

    @property
    def actions(self) -> Actions:
        """Return what can fall due, for the hook that decides when."""
        return Actions(log=self.log, save=self.save, judge=self.judge)

    def reserve_buffers(self) -> None:
        """Make the memory that a save copies into, while nobody waits for it."""
        if self.config.save_enabled and self.config.async_save and self._saves_here:
            size = self._writer.reserve(self.snapshot.take())
            logger.debug("background saves hold %.1f MB of host memory", size / 1e6)

    def log(self) -> None:
        """Write a row: the mean loss since the start and since the last row, rate, norm, pace, and what hooks put."""
        state = self.state
        measured = {name: value for name, value in self.storage.unlogged().items() if name not in OWN_NAMES}
        values: dict[str, Scalar] = {**measured, "train.loss": state.loss_tracker_avg}
        if state.period_loss_count:
            values["train.recent_loss"] = state.period_loss_sum / state.period_loss_count
        values["train.learning_rate"] = self.schedule.rates()[0]
        if (norm := self.grad_norm()) is not None:
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
        """Save a checkpoint of this update, in the background if the config says so.

        The main process does it; where each has a share of the model, all do it together.
        """
        if not self._saves_here:
            return
        with self._aside(SAVING):
            if self._logs_are_out():
                self.snapshot.measured = self._measured()
                before_commit = None if self.records is None else self.records.sync
                self._writer.save(self.state.global_step, self.snapshot.take(before_commit), protect=self._protected())

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Count the body's time as spent on `what`, not on training."""
        with self.progress.aside(what), self.spent.on(what):
            yield

    def _logs_are_out(self) -> bool:
        """Hand all lines on; tell whether there was room for them: no checkpoint is ahead of its logs."""
        is_full = False
        if self.records is not None:
            self.state.files = self.records.flush()
            is_full = self.records.has_pending
        if self.snapshot.group is not None:  # all save, or none
            is_full = self.processes.share(is_full)
        if is_full and self.processes.is_main:
            logger.warning(
                "step %d is not saved: the disk is too full for the logs. Training goes on.", self.state.global_step
            )
        return not is_full

    def _protected(self) -> set[int]:
        """Return the best checkpoints that retention must leave: the one on disk stays until a better one is there."""
        best = self.state.best_checkpoint
        if best is not None and self._writer.store.path(best).exists():
            self._best_on_disk = best
        return {step for step in (best, self._best_on_disk) if step is not None}

    def judge(self) -> None:
        """Evaluate, or read the record of it, and draw the conclusions: best result, plateau, log."""
        state = self.state
        found = {"train.loss": state.loss_tracker_avg}
        if self.evaluate is not None:
            recorded = self._recorded()
            if recorded is None:
                with self._aside(EVALUATION):
                    metrics, details = self.evaluate()
            else:
                metrics, details = recorded, {}
            if not self.config.accept_changes:  # else the record is judged by the new settings
                state.stop_reason = state.stop_reason or self._recorded_reason()
            found |= {f"evaluation.{name}": value for name, value in metrics.items()}
            self._write({name: value for name, value in found.items() if name.startswith("evaluation.")})
        self.last_metrics = found
        self._draw_conclusions(found)
        # last: a record says that nothing of its evaluation is missing
        if self.evaluate is not None and recorded is None and self.processes.is_main:
            details |= {"stop_reason": state.stop_reason}
            self.folder.record_evaluation(state.global_step, state.epoch, metrics, details)
            self.folder.keep_pictures_of({state.global_step, state.best_checkpoint or state.global_step})
            self._note_time()
        if self.pusher is not None and state.best_checkpoint is not None:
            self.pusher.note_best(state.best_checkpoint)

    def _recorded(self) -> dict[str, float] | None:
        found = self.folder.recorded_evaluation(self.state.global_step) if self.processes.is_main else None
        return self.processes.share(found)

    def _recorded_reason(self) -> str | None:
        found = self.folder.recorded_stop_reason(self.state.global_step) if self.processes.is_main else None
        return self.processes.share(found)

    def _note_time(self) -> None:
        """Write down now and then where the time went, so that it is known also of a run that is killed later."""
        if perf_counter() - self._noted_time > SECONDS_BETWEEN_NOTES:
            self._noted_time = perf_counter()
            self.folder.amend_start({"seconds": self.spent.split()})

    def abandon(self) -> None:
        """Do not wait for the save under way."""
        self._is_abandoned = True

    def finish(self) -> None:
        """Wait for the save under way and close the files."""
        try:
            with self._aside(SAVING):
                if self._is_abandoned:
                    self._writer.abandon()
                else:
                    self._writer.close()
        finally:
            if self.records is not None:
                self.state.files = self.records.flush()  # a second call of train() goes on from here
                self.records.close()
            self.progress.close()
        if self._writer.failed_saves:
            logger.warning("%d saves failed because the disk was full", self._writer.failed_saves)

    def _measured(self) -> dict[str, tuple[float, int, bool | None]]:
        """Return what hooks put and no row holds yet: the last value of each name, its step and its hint."""
        histories = {name: self.storage.history(name) for name in self.storage.unlogged() if name not in OWN_NAMES}
        return {name: (one.latest(), one.peek()[1], one.smoothing_hint) for name, one in histories.items()}

    def _draw_conclusions(self, found: dict[str, float]) -> None:
        state = self.state
        value = found.get(state.metric_for_best_checkpoint or "", math.nan)
        state.update_best_results(value, self.objective, state.global_step)
        # also when it is no better: a full disk may have kept the file from being written
        if self.config.save_enabled and self.processes.is_main:
            self.folder.write_best(state)
        if not math.isnan(value):
            self.schedule.after_evaluation(value)
        reason = self.stopping.judge(found)
        state.stop_reason = state.stop_reason or reason

    def _write(self, values: Mapping[str, Scalar]) -> None:
        row = self.storage.log(values, self.state.global_step, self.state.epoch)
        self.storage.flush()
        # what writers put while they wrote, such as the time left, is theirs and no news
        self._totals = {name: history.total for name, history in self.storage.histories().items()}
        self.progress.line(row)
