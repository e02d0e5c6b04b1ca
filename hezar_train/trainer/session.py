"""Where the time of a call of `train()` goes, measured where it costs nothing: around waits, saves and evaluations.

What is left is the training itself. Nothing here waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from hezar_train.checkpoint import CheckpointStore, CheckpointWriter, SharedStore
from hezar_train.config import TrainerConfig
from hezar_train.errors import DataError, HezarTrainError, TrainingInterrupted
from hezar_train.events import (
    METRICS_FILE,
    CSVWriter,
    EventStorage,
    JSONLinesWriter,
    Ledger,
    Row,
    Scalar,
    TensorBoardWriter,
    TrackerWriter,
    keep_until,
    read_rows,
)
from hezar_train.events.storage import RESERVED_NAMES
from hezar_train.hooks import Stopping
from hezar_train.hooks.signals import StopFlag
from hezar_train.hub import Pusher
from hezar_train.loop import Context
from hezar_train.optim import Schedule
from hezar_train.plan import End, Plan, is_due
from hezar_train.runtime import Processes, Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.trainer.checkpointing import Snapshot
from hezar_train.trainer.folder import RunFolder

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DATA",
    "EVALUATION",
    "SAVING",
    "TRAINING",
    "Actions",
    "Due",
    "Records",
    "Run",
    "TimeSpent",
    "append_row",
    "last_logged",
]

DATA, EVALUATION, SAVING, TRAINING = "data", "evaluation", "saving", "training"
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


# The one default hook that acts: after an update it does what is due, in one order: log, save, evaluate, best, stop.
#
# Saving comes first, so that an evaluation that fails loses nothing. What an evaluation changes follows from its
# recorded result, so a resume applies the record again, or evaluates if there is none (`after_save`). All other hooks
# only ask: `request_save`, `request_stop`.


@dataclass(frozen=True)
class Actions:
    """What can fall due, as functions: the hook decides when, the trainer says how."""

    log: Callable[[], None]
    save: Callable[[], None]
    judge: Callable[[], None]
    """Evaluate (or read the record), then update the best result and the plateau."""


class Due:
    """Decide after each update, and at each epoch's end, what is due."""

    actions: Actions  # set when a run begins

    def __init__(self, plan: Plan, state: TrainerState, flag: StopFlag, *, evaluates: bool, saves: bool) -> None:
        self.plan, self._state, self._flag = plan, state, flag
        self.evaluates, self._saves = evaluates, saves
        self._judged_step = -1
        self.save_requested = False
        self.end = End(plan.total_steps)
        self.agree: Callable[[], None] | None = None  # of several processes, on what was requested

    @property
    def run_ends(self) -> bool:
        """Tell whether this update is the last one."""
        return self._state.stop_reason is not None or self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """Tell whether the run has done all that was planned."""
        return self.end.is_reached(self._state.global_step, self._state.samples_seen)

    def at_batch_end(self, ctx: Context) -> None:
        """Do what is due inside an epoch; an update that ends it leaves all to the epoch's end."""
        if ctx.closes_window and self.agree is not None:
            self.agree()
        if not ctx.closes_window or not ctx.applied or ctx.window.ends_epoch:
            return
        if not self.run_ends:
            self._act(at_epoch_end=False)

    def at_epoch_end(self, _: Context) -> None:
        """Do what is due at the end of an epoch, or of the run, unless this very update was judged already."""
        if self._judged_step != self._state.global_step:
            self._act(at_epoch_end=True)

    def forget(self) -> None:
        """Take no update for done: the state was put back to an earlier one."""
        self._judged_step, self.save_requested = -1, False

    def after_save(self) -> None:
        """Do the part that follows a save: at a resume it is done again from the record."""
        self.actions.judge()
        self._judged_step = self._state.global_step
        self._state.evaluation_pending = False

    def _act(self, *, at_epoch_end: bool) -> None:
        plan, state, now = self.plan, self._state, self._state.update_step
        evaluates = self.evaluates and (at_epoch_end or is_due(plan.eval_updates, now))
        if at_epoch_end or is_due(plan.log_updates, now):
            self.actions.log()
        due = at_epoch_end or evaluates or is_due(plan.save_updates, now)
        judged = evaluates or at_epoch_end
        saves = self._saves and (due or self.save_requested or self._flag.asked)
        if saves:
            state.evaluation_pending = judged
            self.actions.save()
            self.save_requested = False
        if saves or not self._saves:  # a signal that came too late for this save leaves with the next
            self._leave_if_asked()
        if judged:
            self.after_save()
            self._leave_if_asked()

    def what_is_saved(self) -> str:
        """Say what a run that is left after a save has saved."""
        return f"saved at step {self._state.global_step}" if self._saves else "nothing saved (save_enabled=False)"

    def _leave_if_asked(self) -> None:
        if not self._flag.asked or self._flag.signal is None:
            return
        words = f"{self._flag.signal.name}: stopped, {self.what_is_saved()}."
        raise TrainingInterrupted(self._flag.exit_code, words)


# The append-only files of a run while it trains: metrics, CSV, TensorBoard, trackers, ledger.
#
# At a resume everything past the checkpoint is moved to `*.dropped` first, so that every value is there once.


class Records:
    """Open the files of a run; know their sizes, which a checkpoint keeps."""

    def __init__(
        self, folder: RunFolder, state: TrainerState, storage: EventStorage, config: TrainerConfig, csv_file: str
    ) -> None:
        logs = folder.logs(state)
        state.logs_dir = str(logs.relative_to(folder.root))
        kept = self._drop_what_follows(folder, state, logs)
        self._root, self._storage = folder.root, storage
        self._tracking: Accelerator | None = None
        self.ledger = Ledger(folder.ledger)
        self._metrics = JSONLinesWriter(logs / METRICS_FILE)
        table = CSVWriter(logs / csv_file)
        if kept is not None:
            table.rebuild(kept)
            storage.recall(kept)
        storage.writers += [self._metrics, table]
        if config.trackers is None or "tensorboard" in config.trackers:
            storage.writers.append(_tensorboard(logs, kept, state.global_step))

    def follow(self, runtime: Runtime, name: str, config: TrainerConfig) -> None:
        """Pass rows on to the Accelerator's trackers as well, starting those that the config names."""
        accelerator = runtime.accelerator
        if accelerator.log_with and not accelerator.trackers:
            facts = {
                key: value for key, value in config.to_dict().items() if isinstance(value, str | int | float | bool)
            }
            accelerator.init_trackers(name, config=facts)
            self._tracking = accelerator
        if accelerator.trackers:
            self._storage.writers.append(TrackerWriter(accelerator))

    def flush(self) -> dict[str, int]:
        """Hand all lines to the operating system; return the sizes that a checkpoint taken now must keep."""
        self.ledger.flush()
        self._storage.flush()
        lines = [one for one in self._storage.writers if isinstance(one, JSONLinesWriter)]  # also a user's own
        files: list[Ledger | JSONLinesWriter] = [self.ledger, *lines]
        return {self._name_of(file.path): file.size for file in files}

    def _name_of(self, path: Path) -> str:
        """Name a file from the run's folder on, so that the folder may move; one outside has its full path."""
        is_inside = path.resolve().is_relative_to(self._root.resolve())
        return str(path.resolve().relative_to(self._root.resolve()) if is_inside else path.resolve())

    @property
    def has_pending(self) -> bool:
        """Tell whether lines wait for room on the disk."""
        return self.ledger.has_pending or self._metrics.has_pending

    def sync(self) -> None:
        """Make the flushed lines survive a power cut."""
        self.ledger.sync()
        self._storage.sync()

    def close(self) -> None:
        """Flush and close everything."""
        self.ledger.close()
        try:
            self._storage.close()
        finally:
            self._finish_trackers()

    def _finish_trackers(self) -> None:
        """End the trackers that were started here; those of a user go on."""
        if self._tracking is None:
            return
        started, self._tracking.trackers = self._tracking.trackers, []
        for tracker in started:
            tracker.finish()

    @staticmethod
    def _drop_what_follows(folder: RunFolder, state: TrainerState, logs: Path) -> list[Row] | None:
        """Cut the files back to the checkpoint; return the rows kept, None at a fresh start."""
        if state.global_step == 0:
            return None
        for name, size in state.files.items():
            if (surplus := keep_until(folder.root / name, size)) < 0:
                logger.warning("%s lacks %d bytes of what the checkpoint knew: part of it is lost", name, -surplus)
        folder.drop_evaluations_after(state.global_step)
        return read_rows(logs / METRICS_FILE)


def append_row(
    folder: RunFolder, state: TrainerState, storage: EventStorage, csv_file: str, values: Mapping[str, float], step: int
) -> None:
    """Write one more row behind those of a run that has ended."""
    if state.logs_dir is None:
        raise HezarTrainError(
            "log() was called before train(): there is no log yet. Log from a hook, or after train()."
        )
    logs = folder.logs(state)
    storage.writers += [JSONLinesWriter(logs / METRICS_FILE), CSVWriter(logs / csv_file)]
    if list(logs.glob("events.out.tfevents.*")):
        storage.writers.append(TensorBoardWriter(logs))
    try:
        storage.log(values, step, state.epoch)
    finally:
        storage.close()


def last_logged(folder: RunFolder, state: TrainerState, name: str) -> float | None:
    """Return the last value of a name that a run has logged until now; None if there is none, or no readable log."""
    try:
        rows = read_rows(folder.logs(state) / METRICS_FILE) if state.logs_dir else []
    except DataError:
        return None
    found = [row.values[name] for row in rows if name in row.values and row.step <= state.global_step]
    return found[-1] if found else None


def _tensorboard(logs: Path, kept: list[Row] | None, step: int) -> TensorBoardWriter:
    if kept is None:
        return TensorBoardWriter(logs)
    writer = TensorBoardWriter(logs, purge_step=step)
    writer.write([row for row in kept if row.step == step])
    return writer


# A training run while it is under way: its lock, its files, and how to do what falls due.
#
# The order of things is `hooks.Due`'s; this module only knows how each is done.

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
