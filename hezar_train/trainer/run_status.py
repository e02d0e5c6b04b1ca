"""Where a run stands: whether it is finished, was stopped, or is in the middle of a call; where it ends.

A run ends where its plan does. With `local_update_steps` it has no end of its own: each call of `train()` does so many
steps, and a call that was broken off is finished by the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hezar_train.errors import DataError
from hezar_train.metrics import MetricsHandler
from hezar_train.plan import End
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.data_setup import RunSetup
from hezar_train.trainer.optimizer_setup import FirstSettings
from hezar_train.trainer.run_files import RunFolder, last_logged
from hezar_train.trainer.train_step import Optimization

__all__ = ["RoutineResult", "RunStatus"]


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


@dataclass
class RunStatus:
    """Tell where a run, or one call of `train()`, begins and ends, and whether anything is left to do."""

    setup: RunSetup
    runtime: Runtime
    folder: RunFolder
    state: TrainerState
    optimization: Optimization
    first: FirstSettings
    handler: MetricsHandler

    def follow(self, setup: RunSetup) -> None:
        """Go by another plan."""
        self.setup = setup

    def refuse_to_train(self, split: Any) -> None:
        """Raise if there is nothing to train on, or if the run is not planned over that split."""
        if self.setup.only_for_eval:
            raise DataError(
                "this trainer was built without training data: it can only evaluate and predict. Give it some to "
                "train: train_dataset=..., of the Trainer or of the Recipe."
            )
        if not isinstance(split, str) or "/" in split:  # another trainer's first argument
            raise DataError(
                f"train() was called with {split!r}; expected nothing, or the name of a split. A run is resumed by the "
                "config's field resume_from_checkpoint (True: the newest checkpoint, or the folder of one), and ends "
                "with num_epochs or max_steps."
            )
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
    def first_step(self) -> int:
        """The step that the run, or this call, began after, also if a kill broke it off."""
        return 0 if self.state.call_end is None else self.state.call_end - self.setup.plan.total_steps

    @property
    def first_samples(self) -> int:
        """The samples that had been consumed when the call under way began."""
        return self.state.call_first_samples if self.setup.trains_in_rounds else self.state.samples_seen

    def is_finished(self) -> bool:
        """Tell whether nothing is left to do; the main process looks into the folder for all."""
        return bool(self.runtime.processes.share(self._is_all_done() if self.runtime.is_main else None))

    def _is_all_done(self) -> bool:
        """Tell whether the end is reached and no conclusion from it is missing.

        That of a recorded evaluation follows from the record; where nothing is evaluated, that of the mean loss is
        drawn by `result_when_finished`.
        """
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
        """Tell that the run is done, and return what it found."""
        state = self.state
        recorded = self.runtime.processes.share(self.folder.recorded_evaluation(state.global_step) or {})
        metrics = state.mean_loss() | {f"evaluation.{k}": v for k, v in recorded.items()}
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
        values |= {"mean_loss": state.loss_tracker_avg} if state.loss_tracker_count else {}
        values |= {f"evaluation.{k}": v for k, v in evaluation.items()}
        shown = ", ".join(f"{name} {self.handler.shown(name, value)}" for name, value in values.items())
        logger.info("already trained to the end (step %d, epoch %d): %s", state.global_step, state.epoch, shown)
