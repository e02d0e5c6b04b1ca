"""A run while it trains: its lock, signal handlers, open files, and the walk.

`RunSession` holds what exists only while a run trains and lets go of it however that ends. What is done when it is due
is in `run_actions`, when it is due in `intervals`; where a run begins and ends in `run_status`; the files themselves,
and what a resume moves out of them to `*.dropped`, in `run_files`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import Checkpoint, RunLock, unwrap
from hezar_train.errors import HookError, TrainingInterrupted
from hezar_train.events import FAILED, FEWER_ROWS, FINISHED, INTERRUPTED, EventStorage
from hezar_train.hooks.signals import StopFlag
from hezar_train.hub import HubRecord, Pusher
from hezar_train.loop import Fit, HookSet, Loop, Moment, Verbs
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import idle_part, idle_warning
from hezar_train.plan import UNLIMITED
from hezar_train.run_folder import remove_folder
from hezar_train.runtime import Runtime, logger
from hezar_train.runtime.group import limit_waiting
from hezar_train.runtime.place import PLACE, is_loss, loss_explained
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.terminal.display import num_parameters
from hezar_train.terminal.progress import SAVING
from hezar_train.trainer.checkpointing import Checkpointing
from hezar_train.trainer.data_setup import RunSetup, evaluation_sets, size_of
from hezar_train.trainer.environment import changed_ground, record_environment, threads_before
from hezar_train.trainer.intervals import Due
from hezar_train.trainer.loss_weight import Weigher
from hezar_train.trainer.model_runner import DeviceHold
from hezar_train.trainer.run_actions import RunActions
from hezar_train.trainer.run_files import RunFiles, RunFolder
from hezar_train.trainer.run_status import RoutineResult, RunStatus
from hezar_train.trainer.train_step import TrainStep, UpdateLog

__all__ = ["RunSession"]

SIGNAL_OF_CODE: dict[Any, str] = {128 + number: number.name for number in signal.Signals}


@dataclass
class RunSession:
    """Hold a run's lock, signal handlers and open files while it trains, and walk to its end."""

    setup: RunSetup
    runtime: Runtime
    folder: RunFolder
    model: nn.Module
    state: TrainerState
    storage: EventStorage
    loop: Loop
    train_step: TrainStep
    checkpointing: Checkpointing
    status: RunStatus
    actions: RunActions
    weigher: Weigher
    handler: MetricsHandler
    hold: DeviceHold
    flag: StopFlag
    progress: Progress
    log_of_updates: UpdateLog
    verbs: Verbs
    csv_file: str
    config_file: str
    hub_uploaded: bool | None = field(default=None, init=False)
    """Whether the end of the run is on the Hub; None if nothing was pushed."""

    def __post_init__(self) -> None:
        self._files: RunFiles | None = None
        self._pusher: Pusher | None = None
        self._fit: Fit | None = None
        self._has_unsettled_update = False  # of a call that failed right after it was applied
        self._due = Due(self.setup, self.state, self.flag, self.actions, self.runtime.processes)

    def follow(self, setup: RunSetup) -> None:
        """Go on with another config, other data, another plan."""
        self.setup = setup
        for part in (self.actions, self.status, self._due):
            part.follow(setup)

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour of a run, beside its steps, into a hook set."""
        hooks.register(self.checkpointing.keep_place, Moment.BATCH_END, name="keep_place", is_required=True)
        hooks.register(self.actions.show_progress, Moment.BATCH_END, name="progress")
        hooks.register(self._due.at_batch_end, Moment.BATCH_END, name="due", is_last=True, is_required=True)
        hooks.register(self._due.at_epoch_end, Moment.EPOCH_END, name="due", is_last=True, is_required=True)
        if self.runtime.num_processes > 1:  # what one is asked for before its first batch, all must know
            hooks.register(self._due.at_start, Moment.FIT_START, name="due", is_last=True)
            hooks.register(self._due.at_start, Moment.EPOCH_START, name="due", is_last=True)

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this update; inside an epoch it waits over one that the scaler skips.

        From FIT_END on it is refused; between two calls only if the run is over, else it is kept for the next call.
        """
        if not self.setup.config.save_enabled:
            raise HookError(
                "a checkpoint was asked for, but save_enabled=False: none would be written. Take the request out, or "
                "set save_enabled=True."
            )
        if self.setup.only_for_eval:
            raise HookError("a checkpoint was asked for, but this trainer has no training data, and so saves none.")
        if self._has_ended:
            raise HookError(
                "a checkpoint was asked for, but the last update of this call of train() is done and saved. Ask for it "
                "before: at on_epoch_end, or in a step."
            )
        self._due.save_requested = True

    @property
    def _has_ended(self) -> bool:
        """Whether nothing falls due any more: the walk is at its FIT_END, or there is no step left for another one."""
        if self._fit is not None:
            return self._fit.routine.is_ending
        return not self.setup.trains_in_rounds and not self.setup.config.accept_changes and self.make_fit().is_over

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go to where a checkpoint was saved."""
        self.train_step.forget_open_window()  # of a step that failed: it is none of the checkpoint's
        self.checkpointing.restore(checkpoint)
        self._due.forget()
        self._has_unsettled_update = False

    def make_fit(self, hooks: HookSet | None = None, split: str = "train") -> Fit:
        """Return the rest of the run, or of this call, as a walk of the loop."""
        setup = self.setup
        num_epochs = UNLIMITED if setup.trains_in_rounds else setup.plan.num_epochs
        return Fit(
            self.loop.training_routine(hooks, split), setup.source, setup.plan, self.state, self.status.end(),
            num_epochs, self.weigher.weigh, sum_loss=self.runtime.processes.total, timed=self.actions.spent.waiting_for,
            counts_from=self.status.first_step, is_bounded=setup.config.max_steps is not None,
        )  # fmt: skip

    def walk(self, hooks: HookSet | None, split: str) -> None:
        """Do the learning of one call of train()."""
        if self.state.global_step == 0 and self.runtime.is_main:
            self._tell_of_idle_updates(self.loop.usable(hooks))
        self.walk_fit(self.make_fit(hooks, split))

    def walk_fit(self, fit: Fit) -> None:
        """Walk to the end of a fit.

        After the hooks of FIT_START comes what still follows the save that it goes on from: its evaluation, its best.
        """
        self._due.begin(fit)
        self.train_step.begin()
        self._fit = fit
        try:
            self.loop.fit(fit, self._due.make_up)
            # A hook of the last evaluation may have asked for a save: of an update that was saved before it already.
            self._due.save_requested = False
        finally:
            self._has_unsettled_update = fit.routine.left_unsettled
            self._fit = None

    def _tell_of_idle_updates(self, hooks: HookSet) -> None:
        """Warn of a schedule that would leave a good part of the run at next to no rate, and say what to do."""
        schedule, config, plan = self.actions.optimization.schedule, self.setup.config, self.setup.plan
        if "schedule" not in hooks.names(Moment.BATCH_END):  # which ticks it
            return
        if 0 < plan.total_updates <= plan.warmup_updates:
            logger.warning(
                "the run ends inside its warm-up, before the learning rate is reached: warmup_steps=%s is %d updates, "
                "and the run has %d. Give fewer warmup_steps, or train longer (num_epochs, max_steps).",
                config.warmup_steps, plan.warmup_updates, plan.total_updates,
            )  # fmt: skip
        elif (idle := idle_part(schedule, plan)) is not None:
            logger.warning("%s", idle_warning(idle, schedule, config, plan))

    def is_finished(self) -> bool:
        """Tell whether nothing is left to do, not even what fell due after the last update of a call that failed."""
        return not self._due.is_behind and self.status.is_finished()

    def result_when_finished(self, get_parameters: Callable[[], Any]) -> RoutineResult:
        """Tell that the run is done, push what is not on the Hub yet, and return what it found; without the lock.

        A run without evaluations that was killed after its last save gets its `best.json` here.
        """
        if self.runtime.is_main and not HubRecord(self.folder.hub).is_uploaded(self.state.global_step):
            self._pusher = Pusher.started(self.setup.config, self.folder.root)
            self.finish_pushes()
        return self.status.result_when_finished(get_parameters)

    @contextmanager
    def measured_around(self, evaluate: Callable[[str], dict[str, float]]) -> Iterator[dict[str, float]]:
        """With `use_diff`, evaluate on "val" before and after the body; every checkpoint keeps the first result."""
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
        """Hold the run's folder; the main process does it for all. Whoever loses another process says which."""
        lock, processes = RunLock(self.folder.lock), self.runtime.processes
        processes.on_main(lock.__enter__)
        try:
            with self._seen_by_others():
                yield
        finally:
            if processes.is_main:
                lock.__exit__(None, None, None)

    @contextmanager
    def _seen_by_others(self) -> Iterator[None]:
        """Show the other processes where this one is, and name those that it loses; one process shows nothing."""
        rank, count, folder = self.runtime.rank, self.runtime.num_processes, self.folder.processes
        if count == 1:
            yield
            return
        if (limit := self.setup.config.collective_timeout_seconds) is not None:
            limit_waiting(limit)  # also in groups that were made for a sharded model
        self.runtime.processes.on_main(lambda: remove_folder(folder))
        with PLACE.shown(folder, rank, self.state):
            try:
                yield
            except RuntimeError as error:
                if not is_loss(error):
                    raise
                raise loss_explained(error, folder, rank, count, [*Moment]) from error

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hold what exists only while the run trains, in a locked folder: signal handlers, files, the writer.

        At the start, in this order: signal handlers are set, the folder becomes this run's (`take_over_folder`), the
        data is brought to its place, logs are cut and opened, the writer begins. At the end: the data's workers end,
        the save under way is waited for, a lost one is told, files are closed, the processes wait for one another, how
        it ended is noted, the signal handlers are put back.
        """
        self._refuse_unsettled_update()
        with self.flag, self.storage, self.hold.held():
            self.train_step.forget_open_window()  # of a failed call, and what a user's own backward left behind
            self.runtime.processes.on_main(self._enter_folder)
            with self._end_noted():
                if self.setup.config.accept_changes:  # then a stop of before ends nothing: `RunStatus.is_stopped`
                    self.state.stop_reason = None
                self.checkpointing.place_source()
                with self._brought_to_an_end(), self._files_open():
                    with self._writing(), closing(self.setup.source):
                        self.checkpointing.reserve_buffers()
                        yield
                        self.actions.log_rest()
                    self.actions.refuse_lost_end()

    def _refuse_unsettled_update(self) -> None:
        """Raise if the weights are ahead of the counters: the same samples would be trained on a second time."""
        if self._has_unsettled_update:
            raise HookError(
                "the last call of train() failed after its update was applied and before it was counted, so going on "
                "would train on the same samples twice. Build the Trainer again, with resume_from_checkpoint=True to "
                "go on from the newest checkpoint. What may fail in a hook belongs to on_gradients, or to on_batch_end "
                "behind the default hooks, where hooks are added."
            )

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
        by_length = getattr(self.setup.source, "by_length", None)
        lengths = None if by_length is None else by_length.lengths
        self.folder.write_settings(self.setup.config, self.config_file, self.setup.plan, lengths)
        self._record_environment()

    def _record_environment(self) -> None:
        before, now = threads_before(self.folder.root), torch.get_num_threads()
        if self.state.global_step and self.runtime.device.type == "cpu" and before not in {None, now}:
            logger.warning(
                "the run goes on, but not bit by bit: it computed with %d threads before, and with %d now. "
                "num_threads=%d (or OMP_NUM_THREADS) would keep it exact.", before, now, before,
            )  # fmt: skip
        runtime = self.runtime
        changes = changed_ground(self.folder.root, str(runtime.device), runtime.num_processes, runtime.precision)
        if self.state.global_step and changes:
            logger.warning("the run goes on, but perhaps not bit by bit: %s.", "; ".join(changes))
        bare, splits = unwrap(self.model), self.setup.splits
        record_environment(
            self.folder.root, device=str(self.runtime.device), num_processes=self.runtime.num_processes,
            precision=self.runtime.precision, num_parameters=num_parameters(bare), model_class=type(bare).__name__,
            train_data=splits.train,
            eval_data=evaluation_sets(None, splits.for_evaluation) if self.setup.evaluates else None,
            step=self.state.global_step,
        )  # fmt: skip

    @contextmanager
    def _brought_to_an_end(self) -> Iterator[None]:
        """Give pushes up if the body fails; let all processes leave together, unless one of them has failed."""
        leaves_together = is_finished = False
        self._pusher = None
        try:
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
    def _files_open(self) -> Iterator[None]:
        """Show progress, open the run's files and begin to push, on the main process; close what was opened."""
        self.progress.begin_run(
            self.setup.plan, self.state, self.status.total_steps, evaluates=self.setup.evaluates,
            enabled=self.runtime.is_main, shown=self.handler.shown,
        )  # fmt: skip
        try:
            self._files = self.runtime.processes.on_main(self._open_run_files)
            self._share_what_the_folder_changed()
            self.log_of_updates.open(None if self._files is None else self._files.ledger)
            self._pusher = Pusher.started(self.setup.config, self.folder.root) if self.runtime.is_main else None
            self.actions.open(self._files, self._pusher)
            yield
        finally:
            self._close_files()

    def _share_what_the_folder_changed(self) -> None:
        """Let all processes know what taking over the folder has changed of the main one's state."""
        state = self.state
        changed = (state.logs_dir, state.best_checkpoint, state.best_metric_value)
        state.logs_dir, state.best_checkpoint, state.best_metric_value = self.runtime.processes.share(changed)

    def _open_run_files(self) -> RunFiles:
        """Open the run's files: ledger and JSON lines cut where the state says that they ended, the rest put aside.

        The CSV is made anew from the rows that are left; TensorBoard begins a new file that voids later events.
        """
        return RunFiles(
            self.folder, self.state, self.storage, self.runtime, self.setup.config, self.csv_file,
            self.verbs.build_writers,
        )  # fmt: skip

    def _close_files(self) -> None:
        self.log_of_updates.close()
        self.actions.close()
        if self._files is not None:
            self.state.files = self._files.flush()  # a second call of train() goes on from here
            self._files.close()
        self._files = None
        self.progress.close()

    def _writing(self) -> AbstractContextManager[None]:
        """Be able to save while the body runs; then wait for the save under way."""
        on_saved = None if self._pusher is None else self._pusher.note_saved
        saves_for_all = self._files is not None  # which only the main process has
        return self.checkpointing.writing(
            on_saved, saves_for_all=saves_for_all, while_closing=lambda: self.actions.aside(SAVING)
        )

    @contextmanager
    def _end_noted(self) -> Iterator[None]:
        """Write down how this start ends and where its time went; one that is killed has no end."""
        self.actions.spent.start()
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
                fewer = getattr(self.setup.source, FEWER_ROWS, None)  # sources of streams do not compare
                noted = {} if fewer is None else {FEWER_ROWS: list(fewer)}
                self.folder.amend_start({"seconds": self.actions.spent.split(), "end": end, **noted})


def _end_of(error: BaseException) -> dict[str, Any]:
    """Return how a start ended: by a signal, or by an error, of which only the kind is told (records are pushed)."""
    if isinstance(error, KeyboardInterrupt):
        return {"how": INTERRUPTED, "signal": signal.SIGINT.name}
    if isinstance(error, TrainingInterrupted):
        return {"how": INTERRUPTED, "signal": SIGNAL_OF_CODE.get(error.code)}
    return {"how": FAILED, "error": type(error).__name__}
