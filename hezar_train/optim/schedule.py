"""Decide when a scheduler ticks, and save and restore it without code and without an extra step.

A schedule ticks after an applied update, when the number of updates is a multiple of its period, or at the end of an
epoch if it has no period; a plateau ticks after evaluations instead. An update that was skipped is not reported here,
so it never ticks. What is saved is the scheduler's state and what it drives in the optimizer's groups, as plain values.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.optim.plain_state import from_plain, to_plain

__all__ = ["Schedule"]

logger = logging.getLogger(__name__)

# Whatever torch's schedulers write into the groups; the rest of a group is the optimizer's alone.
_DRIVEN = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")


class Schedule:
    """A scheduler, or none, and the period at which it ticks."""

    def __init__(
        self, scheduler: LRScheduler | None, period_updates: int | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Tick `scheduler` every `period_updates` updates, or every epoch; `optimizer` is the one that trains."""
        _check(scheduler, optimizer)
        self.scheduler = scheduler
        self.period_updates = period_updates
        self.is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self._optimizer = optimizer if scheduler is None else scheduler.optimizer
        self._held_ticks = 0
        self._told_of_the_end = False
        self.state_dict()  # a state that cannot be saved is told now, not at the first save

    def after_update(self, update_step: int, ends_epoch: bool) -> None:
        """Tick if the update that was just applied is due one."""
        if self.scheduler is None or self.is_plateau:
            return
        if ends_epoch if self.period_updates is None else update_step % self.period_updates == 0:
            if isinstance(self.scheduler, OneCycleLR):
                self._hold_at_the_end(self.scheduler)
            self.scheduler.step()

    def after_evaluation(self, metric_value: float) -> None:
        """Tick a plateau with the metric that it watches."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metric_value)

    def rates(self) -> list[float]:
        """Return the learning rate of each group, as the next update will use it."""
        return [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]

    def scale_rates(self, factor: float) -> None:
        """Multiply every learning rate, also those that the scheduler starts from or aims at."""
        if self.scheduler is not None and hasattr(self.scheduler, "base_lrs"):
            self.scheduler.base_lrs = [rate * factor for rate in self.scheduler.base_lrs]
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                if name in group:
                    group[name] = group[name] * factor

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, as values that JSON can hold."""
        if self.scheduler is None:
            return {"class": None}
        groups = self.scheduler.optimizer.param_groups
        return {
            "class": type(self.scheduler).__name__,
            "scheduler": to_plain(self.scheduler.state_dict(), "state"),
            "groups": [to_plain({key: group[key] for key in _DRIVEN if key in group}, "group") for group in groups],
            "held_ticks": self._held_ticks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the scheduler and the rates back to where they were saved."""
        here = None if self.scheduler is None else type(self.scheduler).__name__
        if state["class"] != here:
            raise CheckpointError(
                f"The checkpoint's learning-rate scheduler is {state['class']}, this run's is {here}. Set lr_scheduler "
                "back, or start a new run from the checkpoint's weights."
            )
        if self.scheduler is None:
            return
        groups = self.scheduler.optimizer.param_groups
        if len(state["groups"]) != len(groups):
            raise CheckpointError(
                f"The checkpoint's schedule drives {len(state['groups'])} parameter groups, this run's {len(groups)}. "
                "Build the optimizer with the groups that it had."
            )
        self.scheduler.load_state_dict(from_plain(state["scheduler"], self.scheduler.state_dict()))
        for group, saved in zip(groups, state["groups"], strict=True):
            _restore_group(group, saved)
        self._held_ticks = state["held_ticks"]

    def _hold_at_the_end(self, scheduler: OneCycleLR) -> None:
        """Keep a one-cycle schedule at its last rate, beyond which torch overshoots and then raises."""
        if scheduler.last_epoch < scheduler.total_steps - 1:
            return
        scheduler.last_epoch = scheduler.total_steps - 2  # so that the coming step computes the last rate once more
        self._held_ticks += 1
        # The first held tick follows the run's last update and is nobody's concern.
        if self._held_ticks > 1 and not self._told_of_the_end:
            self._told_of_the_end = True
            logger.warning(
                "The one-cycle schedule was made for %d ticks and has ended; its last learning rate %g is kept.",
                scheduler.total_steps,
                self.rates()[0],
            )


def _check(scheduler: Any, optimizer: Optimizer | None) -> None:
    """Refuse what cannot tick, and what ticks in vain."""
    if scheduler is None:
        return
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"lr_scheduler is a {type(scheduler).__name__}. Expected a torch.optim.lr_scheduler.LRScheduler."
        )
    if optimizer is not None and scheduler.optimizer is not optimizer:
        raise ConfigError(
            "lr_scheduler was built over another optimizer than the one that trains, so its rates would never be used. "
            "Build it over the optimizer that is passed to the trainer, and pass both."
        )


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Write the saved values into a group; a rate that is a tensor stays the same tensor."""
    for key, plain in saved.items():
        value = from_plain(plain, group.get(key))
        if isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value
