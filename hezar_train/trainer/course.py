"""What a learning routine walks over: its data, its plan, where it is and where it ends; and the batches of an epoch.

Training and finetuning differ in this and in their hooks; the loop is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import Any

from hezar_train.data import Source, Window
from hezar_train.errors import DataError, NonFiniteError
from hezar_train.loop import Context, Routine
from hezar_train.plan import UNLIMITED, End, Plan
from hezar_train.state import TrainerState
from hezar_train.trainer.session import TimeSpent

__all__ = ["Course", "EpochBatches"]


@dataclass
class Course:
    """One learning routine: over which data, by which plan, from where to where."""

    routine: Routine
    source: Source
    plan: Plan
    state: TrainerState
    end: End
    num_epochs: int
    weigh: Callable[[Window], Window]
    batches_in_epoch: int = UNLIMITED
    agree: Callable[[Any], float] = float
    spent: TimeSpent | None = None
    """Where the time that it takes to get data is noted."""

    saw_data: bool = field(default=False, repr=False)
    open_epoch: Generator[Any, None, None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.first_step = self.state.global_step  # which the routine began after
        self._first_samples, self._first_loss = self.state.samples_seen, self.state.loss_tracker_sum

    @property
    def num_samples(self) -> int:
        """Samples trained on since the routine began."""
        return self.state.samples_seen - self._first_samples

    @property
    def loss_total(self) -> float:
        """Weighted sum of the losses since the routine began."""
        return self.state.loss_tracker_sum - self._first_loss

    @property
    def ends(self) -> bool:
        """Tell whether the last update was the last one."""
        state = self.state
        return state.stop_reason is not None or self.end.is_reached(state.global_step, state.samples_seen)

    def announce(self, ctx: Context) -> None:
        """Tell hooks how long the routine will be; what they assign at FIT_START counts."""
        total = min(self.end.step, self.state.global_step + self.plan.total_steps) - self.state.global_step
        per_epoch = max(1, self.plan.steps_in_epoch or total)
        ctx.num_train_batch = min(per_epoch, total)
        ctx.num_train_batch_last_epoch = total % per_epoch or per_epoch
        ctx.num_train_epoch = min(self.num_epochs, max(self.plan.num_epochs, 1))
        ctx.num_total_train_batch = total
        self._announced = self._lengths(ctx)

    def settle(self, ctx: Context) -> None:
        """Take over the lengths that hooks assigned."""
        told = self._lengths(ctx)
        for name, value in told.items():
            if value == self._announced[name]:
                continue
            if name == "num_train_epoch" and self.num_epochs < UNLIMITED:
                self.num_epochs, self.end = value, End()
            elif name == "num_train_epoch":  # of one call among many
                self.end = End(self.first_step + value * (self.plan.steps_in_epoch or 1))
            elif name == "num_total_train_batch":
                self.num_epochs, self.end = UNLIMITED, End(self.first_step + value)
            else:
                self.batches_in_epoch = value

    def enter_next_epoch(self) -> bool:
        """Go to the next epoch if this one is finished; return False when there is none left."""
        state = self.state
        if state.epoch_finished:
            if state.epoch >= self.num_epochs:
                return False
            state.update(epoch=state.epoch + 1, position=0, epoch_step=0, epoch_finished=False)
        return True

    def windows(self, epoch: int) -> Iterator[Window]:
        """Yield the rest of an epoch, each window weighed before its first backward, until the routine ends."""
        state = self.state
        self.saw_data = False
        steps_left = min(self.end.step - state.global_step, self.batches_in_epoch - state.epoch_step)
        samples_left = self.end.samples - state.samples_seen
        windows = self.source.windows(self.plan, epoch, state.position, steps_left, samples_left)
        for window in windows if self.spent is None else self.spent.waiting_for(windows):
            if self.ends:
                return
            self.saw_data = True
            yield self.weigh(window)

    def leave_epoch(self) -> None:
        """End the walk over an epoch's batches, also one that failed or was left early."""
        if self.open_epoch is not None:
            self.open_epoch.close()
            self.open_epoch = None

    def close_epoch(self, steps_before: int) -> None:
        """Settle an epoch whose data has run out."""
        state = self.state
        went_on = state.global_step != steps_before
        if not went_on and not self.saw_data and state.position == 0:
            raise DataError(f"the training data gave no sample in epoch {state.epoch}: it is empty")
        # no step: resumed exactly where a stream ended, or hooks that do not count
        if not went_on or state.epoch_step >= self.batches_in_epoch:
            state.epoch_finished = True

    @staticmethod
    def _lengths(ctx: Context) -> dict[str, int]:
        return {name: ctx[name] for name in ("num_train_epoch", "num_total_train_batch", "num_train_batch")}


class EpochBatches:
    """The batches that are left of an epoch; walking over them is walking the loop.

    Each batch comes after its BATCH_START; asking for the next one counts it and does what is due. Before that its loss
    must have been noted, which every step does by itself.
    """

    def __init__(self, course: Course, ctx: Context, epoch: int) -> None:
        self._course, self._ctx, self._epoch = course, ctx, epoch

    def __len__(self) -> int:
        plan = self._course.plan
        if plan.steps_in_epoch is None:
            raise TypeError("the length of the training data is unknown")
        return plan.steps_in_epoch

    def __iter__(self) -> Generator[Any, None, None]:
        course = self._course
        walk = course.routine.batches(course.windows(self._epoch), course.state.epoch_step, self._settle)
        course.open_epoch = walk
        return walk

    def refuse_left_batch(self) -> None:
        """Raise if the loop over the batches was left with one whose step is done, perhaps, and not counted."""
        walk = self._course.open_epoch
        if walk is not None and getgeneratorstate(walk) == GEN_SUSPENDED:
            raise DataError(
                "an overridden train_epoch() left its loop before the epoch's end, so its last batch was not counted. "
                "To end the run there, call request_stop() and go on; for shorter epochs set max_steps."
            )

    def _settle(self) -> None:
        """Read the loss of an update that was done in the user's own way."""
        own = self._ctx.__dict__
        if not own["is_loss_noted"]:
            raise DataError(
                "a batch went by without a loss. An overridden train_epoch() calls self.run_step(), or its own code "
                "and then self.note_loss(loss)."
            )
        if own["closes_window"]:
            own["loss_value"], own["applied"] = self._course.agree(own["window_loss"]), True
            self._refuse_non_finite(own["loss_value"])

    def _refuse_non_finite(self, loss: Any) -> None:
        if math.isfinite(loss):
            return
        state, samples = self._course.state, self._ctx.window.samples()
        raise NonFiniteError(
            f"loss {loss} in the update at step {state.global_step + 1} (epoch {state.epoch}), which was done by your "
            "own code: the weights may be spoilt. What was saved so far is intact.",
            step=state.global_step + 1,
            samples=samples,
        )
