"""A run while it trains: its lock, signal handlers and open files; and how to log, save and evaluate.

`RunSession` holds what exists only while a run trains and lets go of it however that ends. When each thing is due, and
in which order, `intervals` decides; the files themselves, and what a resume cuts off them, are in `run_files`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from hezar_train.checkpoint import Checkpoint, RunLock, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import Window
from hezar_train.errors import ConfigError, DataError, TrainingInterrupted, choices, suggestion
from hezar_train.events import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    EventStorage,
    Scalar,
)
from hezar_train.events.storage import RESERVED_NAMES
from hezar_train.hooks.signals import StopFlag
from hezar_train.hub import HubRecord, Pusher, PushTarget
from hezar_train.loop import Context, Fit, HookSet, Loop, Moment, Verbs
from hezar_train.metrics import MetricsHandler
from hezar_train.plan import UNLIMITED, End
from hezar_train.runtime import Processes, Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.terminal.display import num_parameters
from hezar_train.terminal.progress import mean_distance
from hezar_train.trainer.checkpointing import Checkpointing
from hezar_train.trainer.environment import record_environment, threads_before
from hezar_train.trainer.evaluator import Evaluator
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.intervals import Actions, Due
from hezar_train.trainer.model_runner import DeviceHold, Weigher
from hezar_train.trainer.optimization import FirstSettings, Optimization
from hezar_train.trainer.run_files import RunFiles, last_logged
from hezar_train.trainer.train_data import RunSetup, evaluation_sets, size_of
from hezar_train.trainer.train_step import TrainStep, UpdateLog

__all__ = ["Agreement", "RoutineResult", "RunSession", "TimeSpent"]

DATA, EVALUATION, SAVING, TRAINING = "data", "evaluation", "saving", "training"
SECONDS_BETWEEN_NOTES = 30.0
OWN_NAMES = frozenset({"train.step_loss", *RESERVED_NAMES})  # rows hold the mean of the one, and have the others
SIGNAL_OF_CODE: dict[Any, str] = {128 + number: number.name for number in signal.Signals}
T = TypeVar("T")


@dataclass(frozen=True)
class RoutineResult:
    """What a learning routine did: samples trained on in this call, and the last metrics.

    It unpacks as `num_samples, parameters, metrics`; the parameters are copied only then.
    """

    num_samples: int
    metrics: dict[str, float]
    get_parameters: Callable[[], Any] = field(default=dict, repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.num_samples, self.get_parameters(), self.metrics))


class Agreement:
    """What the processes of a run agree on at an update: its loss, and whether one of them was asked to stop."""

    def __init__(self, processes: Processes, flag: StopFlag) -> None:
        self._processes, self._flag = processes, flag

    def loss(self, loss: Any) -> float:
        """Return an update's loss over all processes, and let all know if one was asked to stop."""
        total, asked = self._processes.sum([loss, float(self._flag.signal is not None)])
        if asked:
            self._flag.agree()
        return total


@dataclass
class RunSession:
    """Hold a run's lock, signal handlers and open files while it trains; log, save and evaluate when due."""

    setup: RunSetup
    runtime: Runtime
    folder: RunFolder
    model: nn.Module
    state: TrainerState
    storage: EventStorage
    ctx: Context
    loop: Loop
    optimization: Optimization
    first: FirstSettings
    train_step: TrainStep
    evaluator: Evaluator
    checkpointing: Checkpointing
    weigher: Weigher
    handler: MetricsHandler
    hold: DeviceHold
    flag: StopFlag
    agreement: Agreement
    progress: Progress
    log_of_updates: UpdateLog
    verbs: Verbs
    csv_file: str
    config_file: str
    hub_uploaded: bool | None = field(default=None, init=False)
    """Whether the end of the run is on the Hub; None if nothing was pushed."""
    last_metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._spent = TimeSpent()
        self._fit: Fit | None = None
        self._files: RunFiles | None = None
        self._pusher: Pusher | None = None
        self._noted_time, self._windows_seen = perf_counter(), 0
        self._totals: dict[str, int] = {}
        actions = Actions(self.log, self.save, self.evaluate_and_update_best)
        agrees = self._agree_on_requests if self.runtime.num_processes > 1 else None
        self._due = Due(self.setup, self.state, self.flag, actions, self._run_ends, agrees)

    def follow(self, setup: RunSetup) -> None:
        """Go on with another config, other data, another plan."""
        self.setup = setup
        self._due.follow(setup)

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour of a run, beside its steps, into a hook set."""
        hooks.register(self.checkpointing.keep_place, Moment.BATCH_END, name="keep_place")
        hooks.register(self.show_progress, Moment.BATCH_END, name="progress")
        hooks.register(self._due.at_batch_end, Moment.BATCH_END, name="due", is_last=True)
        hooks.register(self._due.at_epoch_end, Moment.EPOCH_END, name="due", is_last=True)

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this update."""
        self._due.save_requested = True

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go to where a checkpoint was saved."""
        self.checkpointing.restore(checkpoint)
        self._due.forget()

    def refuse_to_train(self, split: str) -> None:
        """Raise if there is nothing to train on, or if the run is not planned over that split."""
        if self.setup.only_for_eval:
            raise DataError("this trainer was built without training data: it can only evaluate and predict")
        if split != "train":
            self.setup.splits.named(split)  # a name that does not exist is told first
            raise DataError(
                f"this run is planned over the split 'train'; to train on {split!r}, build a Trainer with it as "
                f"train_dataset, or call finetune({split!r})"
            )

    def begin_call(self) -> None:
        """Say where this call ends, if a call does only a part of the run."""
        state, config, plan = self.state, self.setup.config, self.setup.plan
        if config.local_update_steps is None or self.call_is_open:
            return
        state.call_end, state.stop_reason = state.global_step + plan.total_steps, None
        state.call_first_samples = state.samples_seen
        if config.global_batch_size is not None:  # a step is another amount on other numbers of processes
            place = 0 if state.epoch_finished else state.position
            state.call_last_samples = state.samples_seen + plan.samples_of(place, plan.counted_steps)
        if config.fresh_optimizer:
            self.first.restore(self.optimization.schedule)

    @property
    def call_is_open(self) -> bool:
        """Whether a call of train() that does a part of the run was broken off, so that the next one finishes it.

        Also if only what follows its last step is missing: a checkpoint is older than the conclusions from it.
        """
        state = self.state
        is_done = self.end().is_reached(state.global_step, state.samples_seen)
        return state.call_end is not None and (not is_done or state.evaluation_pending)

    def end(self) -> End:
        """Return where the run, or this call, ends."""
        return self.setup.end(self.state)

    @property
    def total_steps(self) -> int:
        """The number of steps after which the run, or this call, ends."""
        return self.setup.plan.total_steps if self.state.call_end is None else self.state.call_end

    @property
    def first_samples(self) -> int:
        """The samples that had been consumed when the call under way began."""
        return self.state.call_first_samples if self.setup.trains_in_rounds else self.state.samples_seen

    def make_fit(self, hooks: HookSet | None = None, split: str = "train") -> Fit:
        """Return the rest of the run, or of this call, as a walk of the loop."""
        setup = self.setup
        num_epochs = UNLIMITED if setup.trains_in_rounds else setup.plan.num_epochs
        return Fit(
            self.loop.training_routine(hooks, split), setup.source, setup.plan, self.state, self.end(), num_epochs,
            self._weigh, agree=self.agreement.loss, timed=self._spent.waiting_for,
        )  # fmt: skip

    def walk(self, hooks: HookSet | None, split: str) -> None:
        """Do the learning of one call of train()."""
        self.walk_fit(self.make_fit(hooks, split))

    def walk_fit(self, fit: Fit) -> None:
        """Walk to the end of a fit; an evaluation that a kill broke off comes first."""
        self._fit = fit
        self.train_step.begin()
        self.loop.fit(fit, self._conclude_pending)

    def _conclude_pending(self) -> None:
        if self.state.evaluation_pending:
            self._due.after_save()

    def is_finished(self) -> bool:
        """Tell whether nothing is left to do; the main process looks into the folder for all."""
        return bool(self.runtime.processes.share(self._is_all_done() if self.runtime.is_main else None))

    def _is_all_done(self) -> bool:
        state = self.state
        if self.setup.trains_in_rounds:
            return False  # a call was made, so there is something to do
        ended = state.epoch_finished and state.epoch >= self.setup.plan.num_epochs
        is_at_end = self.end().is_reached(state.global_step, state.samples_seen)
        if not (is_at_end or ended or self.is_stopped):
            return False
        evaluated = self.folder.recorded_evaluation(state.global_step) if self.setup.evaluates else {}
        return not state.evaluation_pending or evaluated is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the run was asked to stop and no change is accepted that could let it go on."""
        reason = self.state.stop_reason or self.folder.recorded_stop_reason(self.state.global_step)
        return reason is not None and not self.setup.config.accept_changes

    def result_when_finished(self, get_parameters: Callable[[], Any]) -> RoutineResult:
        """Tell that the run is done, push what is not on the Hub yet, and return what it found."""
        if self.runtime.is_main and not HubRecord(self.folder.hub).is_uploaded(self.state.global_step):
            self._pusher = pusher_of(self.setup.config, self.folder)
            self.finish_pushes()
        state = self.state
        recorded = self.runtime.processes.share(self.folder.recorded_evaluation(state.global_step) or {})
        metrics = {"train.loss": state.loss_tracker_avg, **{f"evaluation.{k}": v for k, v in recorded.items()}}
        # the checkpoint is older than what its evaluation changed
        value = metrics.get(self.setup.best_key, math.nan)
        is_best = state.update_best_results(value, self.setup.objective, state.global_step)
        # with evaluations, a record says that it is written
        if is_best and self.setup.config.save_enabled and not self.setup.evaluates and self.runtime.is_main:
            self.folder.write_best(state)
        if self.runtime.is_main:
            self._tell_done(recorded)
        return RoutineResult(0, metrics, get_parameters)

    def _tell_done(self, evaluation: Mapping[str, float]) -> None:
        """Say how well the run has ended, with the names that its lines had."""
        state = self.state
        recent = last_logged(self.folder, state, "train.recent_loss")
        values = {} if recent is None else {"loss": recent}
        values |= {"mean_loss": state.loss_tracker_avg, **{f"evaluation.{k}": v for k, v in evaluation.items()}}
        shown = ", ".join(f"{name} {self.handler.shown(name, value)}" for name, value in values.items())
        logger.info("already trained to the end (step %d, epoch %d): %s", state.global_step, state.epoch, shown)

    @contextmanager
    def measured_around(self, evaluate: Callable[[str], dict[str, float]]) -> Iterator[dict[str, float]]:
        """With `use_diff`, evaluate on "val" before and after the body; the first result survives a kill."""
        found: dict[str, float] = {}
        if not self.setup.config.use_diff:
            yield found
            return
        kept = self.state.hooks.setdefault("use_diff", {})
        if kept.get("call_end", "none") != self.state.call_end:
            kept |= {"before": evaluate("val")["loss"], "call_end": self.state.call_end}
        yield found
        found |= {
            "val_total": float(size_of(self.setup.splits.named("val")) or 0),
            "val_avg_loss_before": kept["before"],
            "val_avg_loss_after": evaluate("val")["loss"],
        }

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's folder; the main process does it for all."""
        lock, processes = RunLock(self.folder.lock), self.runtime.processes
        processes.on_main(lock.__enter__)
        try:
            yield
        finally:
            if processes.is_main:
                lock.__exit__(None, None, None)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hold what exists only while the run trains, in a locked folder: signal handlers, files, the writer."""
        with self.flag, self.storage, self.hold.held():
            self.train_step.forget_open_window()  # of a failed call, and what a user's own backward left behind
            self.runtime.processes.on_main(self._enter_folder)
            with self._end_noted():
                if self.setup.config.accept_changes:
                    self.state.stop_reason = None
                self.checkpointing.place_source()
                self._begin_progress()
                self._open_all()
                with self._brought_to_an_end():
                    self.checkpointing.reserve_buffers()
                    yield
                    self.log_rest()

    def finish_pushes(self) -> None:
        """Push the end of the run, and wait for it as long as the config says; only the main process does."""
        if self._pusher is not None:
            self.hub_uploaded = self._pusher.close(self.setup.config.hub_wait_seconds)
            self.progress.say(self._pusher.summary())
        else:
            self.hub_uploaded = None

    def _enter_folder(self) -> None:
        """Make the folder this run's own and write down what it is about to do."""
        self.checkpointing.take_over_folder()
        self.setup.config.save(self.folder.root, self.config_file)
        self.setup.plan.save(self.folder.plan)
        self._record_environment()

    def _record_environment(self) -> None:
        before, now = threads_before(self.folder.root), torch.get_num_threads()
        if self.state.global_step and self.runtime.device.type == "cpu" and before not in {None, now}:
            logger.warning(
                "the run goes on, but not bit by bit: it computed with %d threads before, and with %d now. "
                "num_threads=%d (or OMP_NUM_THREADS) would keep it exact.", before, now, before,
            )  # fmt: skip
        bare, splits = unwrap(self.model), self.setup.splits
        record_environment(
            self.folder.root, device=str(self.runtime.device), num_processes=self.runtime.num_processes,
            precision=self.runtime.precision, num_parameters=num_parameters(bare), model_class=type(bare).__name__,
            train_data=splits.train,
            eval_data=evaluation_sets(None, splits.for_evaluation) if self.setup.evaluates else None,
            step=self.state.global_step,
        )  # fmt: skip

    def _begin_progress(self) -> None:
        """Show the run from here on; its pace allows for saves and evaluations, which come after so many steps."""
        plan, state = self.setup.plan, self.state
        evaluations = [plan.eval_updates] if self.setup.evaluates else []
        in_updates = {EVALUATION: evaluations, SAVING: [plan.save_updates, *evaluations]}
        ends = [plan.updates_in_epoch, plan.total_updates]
        steps_between = {what: mean_distance(ends + each) * plan.accumulation for what, each in in_updates.items()}
        self.progress.begin(
            self.total_steps, plan.num_epochs if state.call_end is None else None, state.global_step,
            enabled=self.runtime.is_main, steps_between=steps_between, shown=self.handler.shown,
        )  # fmt: skip

    def _open_all(self) -> None:
        """Open the run's files and begin to push, on the main process."""
        self._windows_seen, is_main = 0, self.runtime.is_main
        self._files = self._open_run_files() if is_main else None
        self.state.logs_dir = self.runtime.processes.share(self.state.logs_dir)
        self.log_of_updates.open(None if self._files is None else self._files.ledger)
        self._pusher = pusher_of(self.setup.config, self.folder) if is_main else None

    def _open_run_files(self) -> RunFiles:
        files = RunFiles(self.folder, self.state, self.storage, self.setup.config, self.csv_file)
        files.follow(self.runtime, self.folder.root.name, self.setup.config)
        self.storage.writers += self.verbs.build_writers()
        return files

    @contextmanager
    def _brought_to_an_end(self) -> Iterator[None]:
        """Be able to save while the body runs, and finish what it leaves under way, however it ends."""
        leaves_together = is_finished = False
        on_saved = None if self._pusher is None else self._pusher.note_saved
        writing = self.checkpointing.writing(
            on_saved, is_kept=self._files is not None, while_closing=lambda: self._aside(SAVING)
        )
        try:
            with self._files_closed(), writing, closing(self.setup.source):
                yield
            leaves_together = is_finished = True
        except TrainingInterrupted:  # on which all processes have agreed
            leaves_together = True
            raise
        finally:
            if not is_finished and self._pusher is not None:
                self._pusher.abandon()
            if leaves_together:  # a launcher ends all when one has left, and the main one may still have written
                self.runtime.processes.wait()

    @contextmanager
    def _files_closed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.log_of_updates.close()
            if self._files is not None:
                self.state.files = self._files.flush()  # a second call of train() goes on from here
                self._files.close()
            self._files = None
            self.progress.close()

    @contextmanager
    def _end_noted(self) -> Iterator[None]:
        """Write down how this start ends and where its time went; one that is killed has no end."""
        self._spent.start()
        end: dict[str, Any] = {"how": FINISHED}
        try:
            yield
            if self.state.stop_reason is not None:
                end["reason"] = self.state.stop_reason
        except BaseException as error:
            end = _end_of(error)
            raise
        finally:
            if self.runtime.is_main:
                end |= {"time": time.time(), "step": self.state.global_step}
                self.folder.amend_start({"seconds": self._spent.split(), "end": end})

    def log(self) -> None:
        """Write a row: the mean loss since the start and since the last row, rate, norm, pace, and what hooks put."""
        state = self.state
        measured = {name: value for name, value in self.storage.unlogged().items() if name not in OWN_NAMES}
        values: dict[str, Scalar] = {**measured, "train.loss": state.loss_tracker_avg}
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
        """Save a checkpoint of this update; where each process has a share of the model, all do it together."""
        if not self.checkpointing.saves_here:
            return
        with self._aside(SAVING):
            if self._logs_are_out():
                before_commit = None if self._files is None else self._files.sync
                self.checkpointing.save(self._measured(), before_commit)

    def evaluate_and_update_best(self) -> None:
        """Evaluate, or read the record of it, and draw the conclusions: best result, plateau, log."""
        state, recorded = self.state, None
        found = {"train.loss": state.loss_tracker_avg}
        if self.setup.evaluates:
            recorded = self._recorded()
            metrics, details = self._evaluate() if recorded is None else (recorded, {})
            if not self.setup.config.accept_changes:  # else the record is judged by the new settings
                state.stop_reason = state.stop_reason or self._recorded_reason()
            found |= {f"evaluation.{name}": value for name, value in metrics.items()}
            self._write({name: value for name, value in found.items() if name.startswith("evaluation.")})
        self.last_metrics = found
        self._draw_conclusions(found)
        # last: a record says that nothing of its evaluation is missing
        if self.setup.evaluates and recorded is None and self.runtime.is_main:
            self._record(metrics, details)
        if self._pusher is not None and state.best_checkpoint is not None:
            self._pusher.note_best(state.best_checkpoint)

    def show_progress(self, ctx: Context) -> None:
        """Bring the bar forward after an update; a hook at BATCH_END."""
        if ctx.step.closes_window:
            state, rate = self.state, self.optimization.optimizer.param_groups[0]["lr"]
            loss = state.period_loss_sum / state.period_loss_count if state.period_loss_count else None
            self.progress.advance(state.global_step, state.epoch, ctx.step.window.count, loss, rate)

    def _run_ends(self) -> bool:
        return self._fit is not None and self._fit.ends

    def _agree_on_requests(self) -> None:
        """Let all processes stop or save if one was asked to."""
        state, processes = self.state, self.runtime.processes
        stops, saves = processes.sum([float(state.stop_reason is not None), float(self._due.save_requested)])
        if stops:
            state.stop_reason = next(reason for reason in processes.gather(state.stop_reason) if reason is not None)
        self._due.save_requested = saves > 0

    def _weigh(self, window: Window) -> Window:
        """Weigh a window of the run; by its second one the optimizer has its state, which saves need room for."""
        self._windows_seen += 1
        if self._windows_seen == 2:
            self.checkpointing.reserve_buffers()
        return self.weigher.weigh(window)

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Count the body's time as spent on `what`, not on training."""
        with self.progress.aside(what), self._spent.on(what):
            yield

    def _logs_are_out(self) -> bool:
        """Hand all lines on; tell whether there was room for them: no checkpoint is ahead of its logs."""
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

    def _evaluate(self) -> tuple[dict[str, float], dict[str, Any]]:
        pictures = self.folder.pictures(self.state.global_step)
        with self._aside(EVALUATION):
            saved = self._due.what_is_saved()
            metrics, details = self.evaluator.evaluate_for_record(pictures, self.folder.root, saved)
        if metrics:
            refuse_absent_best(self.setup.best_key, metrics)
        return metrics, details

    def _record(self, metrics: dict[str, float], details: dict[str, Any]) -> None:
        """Write an evaluation down, and now and then where the time went: a run may be killed at any moment."""
        state = self.state
        details |= {"stop_reason": state.stop_reason}
        self.folder.record_evaluation(state.global_step, state.epoch, metrics, details)
        self.folder.keep_pictures_of({state.global_step, state.best_checkpoint or state.global_step})
        if perf_counter() - self._noted_time > SECONDS_BETWEEN_NOTES:
            self._noted_time = perf_counter()
            self.folder.amend_start({"seconds": self._spent.split()})

    def _recorded(self) -> dict[str, float] | None:
        found = self.folder.recorded_evaluation(self.state.global_step) if self.runtime.is_main else None
        return self.runtime.processes.share(found)

    def _recorded_reason(self) -> str | None:
        found = self.folder.recorded_stop_reason(self.state.global_step) if self.runtime.is_main else None
        return self.runtime.processes.share(found)

    def _measured(self) -> dict[str, tuple[float, int, bool | None]]:
        """Return what hooks put and no row holds yet: the last value of each name, its step and its hint."""
        histories = {name: self.storage.history(name) for name in self.storage.unlogged() if name not in OWN_NAMES}
        return {name: (one.latest(), one.peek()[1], one.smoothing_hint) for name, one in histories.items()}

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

    def _write(self, values: Mapping[str, Scalar]) -> None:
        row = self.storage.log(values, self.state.global_step, self.state.epoch)
        self.storage.flush()
        # what writers put while they wrote, such as the time left, is theirs and no news
        self._totals = {name: history.total for name, history in self.storage.histories().items()}
        self.progress.line(row)


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


def pusher_of(config: TrainerConfig, folder: RunFolder) -> Pusher | None:
    """Return what pushes this run, started; None if the config does not ask for it."""
    if not config.push_to_hub:
        return None
    target = PushTarget(
        str(config.hub_model_id), config.hub_revision, config.hub_private, config.hub_strategy, metadata=config.hub_card
    )
    pusher = Pusher(folder.root, target)
    pusher.start()
    return pusher


def refuse_absent_best(key: str, metrics: Mapping[str, float]) -> None:
    """Raise if an evaluation did not give what decides the best model; some metrics tell their outputs only then."""
    known = ["train.loss", *(f"evaluation.{name}" for name in metrics)]
    if key not in known:
        raise ConfigError(
            f"the best model is to be told by {key!r}, which the evaluation did not give. There are: {choices(known)}."
            f"{suggestion(key, known)}"
        )


def _end_of(error: BaseException) -> dict[str, Any]:
    """Return how a start ended: by a signal, or by an error, of which only the kind is told (records are pushed)."""
    if isinstance(error, KeyboardInterrupt):
        return {"how": INTERRUPTED, "signal": signal.SIGINT.name}
    if isinstance(error, TrainingInterrupted):
        return {"how": INTERRUPTED, "signal": SIGNAL_OF_CODE.get(error.code)}
    return {"how": FAILED, "error": type(error).__name__}
