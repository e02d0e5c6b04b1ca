"""One call of `train()`: where it begins and ends, and the learning in between.

None of it is called by users.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hezar_train.errors import DataError
from hezar_train.hub import HubRecord
from hezar_train.loop import HookSet, Routine
from hezar_train.runtime import logger
from hezar_train.trainer.checkpointing import pusher_of
from hezar_train.trainer.checks import size_of
from hezar_train.trainer.course import Course
from hezar_train.trainer.session import last_logged
from hezar_train.trainer.under_way import UnderWay
from hezar_train.types import Mode

__all__ = ["Calls", "RoutineResult"]


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


class Calls(UnderWay):
    """The life of a run, call by call."""

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
