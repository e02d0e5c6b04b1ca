"""One call of `train()`: where it begins and ends, what it holds while it is under way, how it goes on after a kill.

None of it is called by users.
"""

from __future__ import annotations

import copy
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hezar_train.checkpoint import Checkpoint, RunLock, initial_weights, load_shards, unwrap
from hezar_train.data import Source
from hezar_train.errors import DataError, RunLockedError, TrainingInterrupted
from hezar_train.events import FAILED, FINISHED, INTERRUPTED
from hezar_train.hooks import Progress
from hezar_train.hooks.progress import mean_distance
from hezar_train.hub import HubRecord
from hezar_train.loop import HookSet, Routine
from hezar_train.runtime import logger
from hezar_train.trainer.checks import evaluation_sets, size_of, tell_weights
from hezar_train.trainer.course import Course
from hezar_train.trainer.environment import record_environment, threads_before
from hezar_train.trainer.facts import num_parameters
from hezar_train.trainer.publishing import finish_pushes, local_weights, pusher_of
from hezar_train.trainer.records import Records, last_logged
from hezar_train.trainer.replanning import Replanning
from hezar_train.trainer.resume import apply_accepted, find_checkpoint, refuse_changes, take_over
from hezar_train.trainer.run import Run
from hezar_train.trainer.time_spent import EVALUATION, SAVING
from hezar_train.types import Mode

__all__ = ["Calls", "RoutineResult"]

SIGNAL_OF_CODE: dict[Any, str] = {128 + number: number.name for number in signal.Signals}


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


class Calls(Replanning):
    """The life of a run, call by call."""

    _found: Checkpoint | None

    def _go_back(self) -> Checkpoint | None:
        """Restore the checkpoint that the config asks for; else load the initial weights it names."""
        checkpoint = self._found
        if checkpoint is None:
            if self.config.init_weights_from is not None:
                tell_weights(initial_weights(self.model, self._initial_source()), self.config.init_weights_from)
            return None
        if self.only_for_eval:
            load_shards(checkpoint, self.model)
            return None
        self._restore(checkpoint)
        return checkpoint

    def _initial_source(self) -> Path:
        """Return where the initial weights are; the main process downloads those that are on the Hub."""
        source, processes = self.config.init_weights_from or "", self.runtime.processes
        found = processes.on_main(lambda: str(local_weights(source)))
        return Path(str(processes.share(found)))

    def _find_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to go on from; the main process chooses it for all."""
        processes = self.runtime.processes
        found = processes.on_main(lambda: find_checkpoint(self.config, self.folder))
        path = processes.share(None if found is None else str(found.path))
        return Checkpoint(Path(path)) if path is not None and found is None else found

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Bring everything back to where a checkpoint has it, if the run can go on from there exactly."""
        refuse_changes(checkpoint, self.config, self.plan, self._snapshot.facts)
        self._snapshot.put_back(checkpoint)
        self._due.forget()
        self._freeze_as_saved()
        if self.config.accept_changes:
            apply_accepted(checkpoint, self.config, self.optimizer, self.schedule, self.model)
        self._refuse_lost_place(self._source)
        self._take_up_measuring()
        logger.info("resuming from %s", checkpoint.path)

    def _refuse_lost_place(self, source: Source) -> None:
        if source.resume_problem and self.state.position and not self.state.epoch_finished:
            raise DataError(f"cannot resume in the middle of an epoch: {source.resume_problem}")

    def _take_up_measuring(self) -> None:
        """Go on with what was measured but not logged, and with the best result if it is of the same metric."""
        state, storage = self.state, self.storage
        state.total_epochs = self.config.num_epochs
        for name, (value, step, hint) in self._snapshot.measured.items():
            storage.step = step
            storage.put_scalar(name, value, hint is not False)
        storage.step = state.global_step
        self._settle_best()

    def _refuse_to_train(self, split: str) -> None:
        if self.only_for_eval:
            raise DataError("this trainer was built without training data: it can only evaluate and predict")
        if split != "train":
            self.splits.named(split)  # a name that does not exist is told first
            raise DataError(
                f"this run is planned over the split 'train'; to train on {split!r}, build a Trainer with it as "
                f"train_dataset, or call finetune({split!r})"
            )

    def _begin_call(self) -> None:
        """Say where this call ends, if a call does only a part of the run."""
        state = self.state
        if self.config.local_update_steps is None:
            return
        if not self.call_is_open:
            state.call_end, state.stop_reason = state.global_step + self.plan.total_steps, None
            state.call_first_samples = state.samples_seen
            if self.config.global_batch_size is not None:  # a step is another amount on other numbers of processes
                place = 0 if state.epoch_finished else state.position
                call_samples = self.plan.samples_of(place, self.plan.counted_steps)
                state.call_last_samples = state.samples_seen + call_samples
            if self.config.fresh_optimizer:
                optimizer, schedule = copy.deepcopy(self._first_optimizer)
                self.optimizer.load_state_dict(optimizer)
                self.schedule.load_state_dict(schedule)
        self._due.end = self._end()

    @property
    def call_is_open(self) -> bool:
        """Whether a call of train() that does a part of the run was broken off, so that the next one finishes it.

        Also if only what follows its last step is missing: a checkpoint is older than the conclusions from it.
        """
        state = self.state
        is_done = self._end().is_reached(state.global_step, state.samples_seen)
        return state.call_end is not None and (not is_done or state.evaluation_pending)

    def _walk_run(self, hooks: HookSet, split: str) -> None:
        """Do the learning of one call of train()."""
        self._learn(self._course_of_the_run(Routine(self.ctx, hooks, Mode.TRAIN, split)))

    def _learn(self, course: Course) -> None:
        """Walk a learning routine to its end."""
        outer, is_run = (self._course, self._routine), course.state is self.state
        self._course, self._routine = course, course.routine
        (self._steps if is_run else self._tuning.steps).loss_regular_total = 0.0
        self.model.train()
        try:
            with torch.enable_grad(), course.routine.running(announce=lambda: course.announce(self.ctx)):
                course.settle(self.ctx)
                if is_run:
                    self._due.end = course.end
                    if self.state.evaluation_pending:
                        self._due.after_save()
                while not course.ends and course.enter_next_epoch():
                    with course.routine.epoch():
                        self.inner_training_loop(course.state.epoch)
        except BaseException:
            self._replicas.start_over()
            raise
        finally:
            self._course, self._routine = outer

    @contextmanager
    def _under_way(self) -> Iterator[Run]:
        """Hold everything that exists only while the run trains: lock, signal handlers, files, the writer."""
        with self._locked(), self._flag, self.storage, self._model_at_hand():
            self._steps.forget_open_window()  # of a failed call, and what a user's own backward left behind
            self.runtime.processes.on_main(self._enter_folder)
            with self._end_noted():
                self._checkpoint = None  # from here on the state says where the run is
                if self.config.accept_changes:
                    self.state.stop_reason = None
                self._source.restore(self._snapshot.cursor)
                self.progress = Progress(
                    self._total_steps(),
                    self.plan.num_epochs if self.state.call_end is None else None,
                    self.state.global_step,
                    enabled=self.runtime.is_main,
                    steps_between=self._steps_between(),
                )
                self.progress.shown = self.metrics_handler.shown
                run = self._begin_run()
                self._windows_seen = 0
                with self._brought_to_an_end(run):
                    run.reserve_buffers()
                    yield run
                    run.log_rest()

    def _steps_between(self) -> dict[str, float]:
        """Return after how many steps, on average, the run is saved and evaluated."""
        plan = self.plan
        evaluations = [plan.eval_updates] if self.evaluates else []
        in_updates = {EVALUATION: evaluations, SAVING: [plan.save_updates, *evaluations]}
        ends = [plan.updates_in_epoch, plan.total_updates]
        return {what: mean_distance(ends + periods) * plan.accumulation for what, periods in in_updates.items()}

    @contextmanager
    def _brought_to_an_end(self, run: Run) -> Iterator[None]:
        """Finish what the body leaves under way, however it ends."""
        leaves_together = is_finished = False
        try:
            yield
            leaves_together = is_finished = True
        except TrainingInterrupted:  # on which all processes have agreed
            leaves_together = True
            raise
        except KeyboardInterrupt:  # the second Ctrl-C: leave at once, what is saved is saved
            run.abandon()
            raise
        finally:
            self._source.close()
            run.finish()
            if not is_finished and self._pusher is not None:
                self._pusher.abandon()
            self._known_steps = self._store.steps()
            if leaves_together:  # a launcher ends all when one has left, and the main one may still have written
                self.runtime.processes.wait()

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

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the run's folder; the main process does it for all."""
        lock, processes = RunLock(self.folder.lock), self.runtime.processes
        processes.on_main(lock.__enter__)
        try:
            yield
        finally:
            if processes.is_main:
                lock.__exit__(None, None, None)

    @contextmanager
    def _model_at_hand(self) -> Iterator[None]:
        """Have the model on its device; with `offload_after_routine`, only while the outermost routine runs."""
        offloads = self.config.offload_after_routine and self._depth == 0
        self._depth += 1
        if offloads:
            self.model.to(self.runtime.device)
        try:
            yield
        finally:
            self._depth -= 1
            if offloads:
                self.model.to("cpu")

    @contextmanager
    def _measured_around(self) -> Iterator[dict[str, float]]:
        """With `use_diff`, evaluate on "val" before and after the body; the first result survives a kill."""
        found: dict[str, float] = {}
        if not self.config.use_diff:
            yield found
            return
        kept = self.state.hooks.setdefault("use_diff", {})
        if kept.get("call_end", "none") != self.state.call_end:
            kept |= {"before": self.evaluate("val")["loss"], "call_end": self.state.call_end}
        yield found
        found |= {
            "val_total": float(size_of(self.splits.named("val")) or 0),
            "val_avg_loss_before": kept["before"],
            "val_avg_loss_after": self.evaluate("val")["loss"],
        }

    def _enter_folder(self) -> None:
        """Make the folder this run's own and write down what it is about to do."""
        if self._store.steps() != self._known_steps:
            raise RunLockedError(
                f"{self._store.root} has changed since this trainer was built: another one has trained there. "
                "Build it again."
            )
        take_over(self.folder, self._store, self.state, self._checkpoint, saves=self.config.save_enabled)
        if self._source.resume_problem and self.config.save_enabled:
            logger.warning("this run can be resumed at epoch ends only: %s", self._source.resume_problem)
        self.config.save(self.folder.root, self.trainer_config_file)
        self.plan.save(self.folder.plan)
        self._record_environment()

    def _record_environment(self) -> None:
        before, now = threads_before(self.folder.root), torch.get_num_threads()
        if self.state.global_step and self.runtime.device.type == "cpu" and before not in {None, now}:
            logger.warning(
                "the run goes on, but not bit by bit: it computed with %d threads before, and with %d now. "
                "num_threads=%d (or OMP_NUM_THREADS) would keep it exact.", before, now, before,
            )  # fmt: skip
        bare = unwrap(self.model)
        record_environment(
            self.folder.root, device=str(self.runtime.device), num_processes=self.runtime.num_processes,
            precision=self.runtime.precision, num_parameters=num_parameters(bare), model_class=type(bare).__name__,
            train_data=self.train_dataset,
            eval_data=evaluation_sets(None, self.eval_dataset) if self.evaluates else None,
            step=self.state.global_step,
        )  # fmt: skip

    def _begin_run(self) -> Run:
        records = self._open_records() if self.runtime.is_main else None
        self.state.logs_dir = self.runtime.processes.share(self.state.logs_dir)
        self._steps.storage, self._steps.ledger = self.storage, None if records is None else records.ledger
        self._evaluation.progress = self.progress
        self._pusher = pusher_of(self.config, self.folder) if self.runtime.is_main else None
        run = Run(
            self.config, self.folder, self.state, self.storage, self.schedule, self.progress, records, self._snapshot,
            processes=self.runtime.processes,
            evaluate=self._evaluate_for_record if self.evaluates else None,
            objective=self._objective(),
            stopping=self._stopping,
            grad_norm=lambda: self.ctx.get("grad_norm"),
            pusher=self._pusher,
            spent=self._spent,
        )  # fmt: skip
        self._due.actions = run.actions
        self._run = run
        return run

    def _open_records(self) -> Records:
        records = Records(self.folder, self.state, self.storage, self.config, self.trainer_csv_log_file)
        records.follow(self.runtime, self.folder.root.name, self.config)
        self.storage.writers += [*self.build_writers(), *self._user_writers()]
        return records

    def _is_finished(self) -> bool:
        """Tell whether nothing is left to do; the main process looks into the folder for all."""
        return bool(self.runtime.processes.share(self._is_all_done() if self.runtime.is_main else None))

    def _is_all_done(self) -> bool:
        state = self.state
        if self.config.local_update_steps is not None:
            return False  # a call was made, so there is something to do
        ended = state.epoch_finished and state.epoch >= self.plan.num_epochs
        reason = state.stop_reason or self.folder.recorded_stop_reason(state.global_step)
        stopped = reason is not None and not self.config.accept_changes
        if not (self._due.is_at_end or ended or stopped):
            return False
        judged = self.folder.recorded_evaluation(state.global_step) if self.evaluates else {}
        return not state.evaluation_pending or judged is not None

    def _finish_pushes(self) -> None:
        """Push the end of the run, and wait for it as long as the config says; only the main process does."""
        self.hub_uploaded = finish_pushes(self._pusher, self.config.hub_wait_seconds, self.progress.say)

    def _push_rest(self) -> None:
        """Push the end of a run that was trained before, where that is not on the Hub yet."""
        if self.runtime.is_main and not HubRecord(self.folder.hub).is_uploaded(self.state.global_step):
            self._pusher = pusher_of(self.config, self.folder)
            self._finish_pushes()

    def _say_done(self) -> RoutineResult:
        state = self.state
        recorded = self.runtime.processes.share(self.folder.recorded_evaluation(state.global_step) or {})
        metrics = {"train.loss": state.loss_tracker_avg, **{f"evaluation.{k}": v for k, v in recorded.items()}}
        # the checkpoint is older than what its evaluation changed
        is_best = state.update_best_results(metrics.get(self.best_key, math.nan), self._objective(), state.global_step)
        # with evaluations, a record says that it is written
        if is_best and self.config.save_enabled and not self.evaluates and self.runtime.is_main:
            self.folder.write_best(state)
        if self.runtime.is_main:
            self._tell_done(recorded)
        return RoutineResult(0, metrics, self.get_model_para)

    def _tell_done(self, evaluation: Mapping[str, float]) -> None:
        """Say how well the run has ended, with the names that its lines had."""
        state = self.state
        recent = last_logged(self.folder, state, "train.recent_loss")
        values = {} if recent is None else {"loss": recent}
        values |= {"mean_loss": state.loss_tracker_avg, **{f"evaluation.{k}": v for k, v in evaluation.items()}}
        shown = ", ".join(f"{name} {self.metrics_handler.shown(name, value)}" for name, value in values.items())
        logger.info("already trained to the end (step %d, epoch %d): %s", state.global_step, state.epoch, shown)


def _end_of(error: BaseException) -> dict[str, Any]:
    """Return how a start ended: by a signal, or by an error, of which only the kind is told (records are pushed)."""
    if isinstance(error, KeyboardInterrupt):
        return {"how": INTERRUPTED, "signal": signal.SIGINT.name}
    if isinstance(error, TrainingInterrupted):
        return {"how": INTERRUPTED, "signal": SIGNAL_OF_CODE.get(error.code)}
    return {"how": FAILED, "error": type(error).__name__}
