"""What is held while a run trains, and let go of however that ends: lock, signals, files, writer, pusher.

None of it is called by users.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from hezar_train.checkpoint import RunLock, unwrap
from hezar_train.errors import RunLockedError, TrainingInterrupted
from hezar_train.events import FAILED, FINISHED, INTERRUPTED
from hezar_train.runtime import logger
from hezar_train.terminal import Progress
from hezar_train.terminal.display import num_parameters
from hezar_train.terminal.progress import mean_distance
from hezar_train.trainer.checkpointing import finish_pushes, pusher_of, take_over
from hezar_train.trainer.checks import evaluation_sets
from hezar_train.trainer.environment import record_environment, threads_before
from hezar_train.trainer.restoring import Restoring
from hezar_train.trainer.session import EVALUATION, SAVING, Records, Run

__all__ = ["UnderWay"]

SIGNAL_OF_CODE: dict[Any, str] = {128 + number: number.name for number in signal.Signals}


class UnderWay(Restoring):
    """A trainer at work in its folder."""

    @contextmanager
    def _under_way(self) -> Iterator[Run]:
        """Hold what exists only while the run trains, in a locked folder: signal handlers, files, the writer."""
        with self._flag, self.storage, self._model_at_hand():
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
            with closing(self._source):
                yield
            leaves_together = is_finished = True
        except TrainingInterrupted:  # on which all processes have agreed
            leaves_together = True
            raise
        except KeyboardInterrupt:  # the second Ctrl-C, also while workers end: leave at once, what is saved is saved
            run.abandon()
            raise
        finally:
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

    def _finish_pushes(self) -> None:
        """Push the end of the run, and wait for it as long as the config says; only the main process does."""
        self.hub_uploaded = finish_pushes(self._pusher, self.config.hub_wait_seconds, self.progress.say)


def _end_of(error: BaseException) -> dict[str, Any]:
    """Return how a start ended: by a signal, or by an error, of which only the kind is told (records are pushed)."""
    if isinstance(error, KeyboardInterrupt):
        return {"how": INTERRUPTED, "signal": signal.SIGINT.name}
    if isinstance(error, TrainingInterrupted):
        return {"how": INTERRUPTED, "signal": SIGNAL_OF_CODE.get(error.code)}
    return {"how": FAILED, "error": type(error).__name__}
