"""Decide when the schedules of rate and momentum tick, and save and restore them without code or an extra step.

A schedule ticks after an applied update, when the number of updates is a multiple of its period, or at the end of an
epoch if it has no period or counts epochs; a plateau ticks after evaluations instead. An update that was skipped ticks
nothing but the end of its epoch. What is saved is the scheduler's state and what it drives in the optimizer's groups,
as plain values.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.optim.curve_lr import CurveLR
from hezar_train.optim.curves import Pace
from hezar_train.optim.momentum import MomentumSchedule
from hezar_train.optim.plain_state import from_plain, to_plain

__all__ = ["Schedule"]

logger = logging.getLogger(__name__)

# Whatever torch's schedulers write into the groups; the rest of a group is the optimizer's alone.
_DRIVEN = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")


class Schedule:
    """A scheduler of the rate or none, a schedule of the momentum or none, and the period at which they tick."""

    def __init__(
        self,
        scheduler: LRScheduler | None,
        period_updates: int | None = None,
        optimizer: Optimizer | None = None,
        *,
        momentum: MomentumSchedule | None = None,
    ) -> None:
        """Tick every `period_updates` updates, or every epoch; `optimizer` is the one that trains."""
        _check(scheduler, optimizer)
        self._optimizer = optimizer if scheduler is None else scheduler.optimizer
        _check_momentum(momentum, scheduler, self._optimizer)
        self.scheduler, self.momentum = scheduler, momentum
        self.period_updates = period_updates
        self._rate_pace = self._pace_of(scheduler)
        self._momentum_pace = self._pace_of(momentum)
        self.is_plateau = scheduler is not None and self._rate_pace is Pace.EVALUATION
        self._held_ticks = 0
        self._told_of_the_end = False
        self.state_dict()  # a state that cannot be saved is told now, not at the first save

    @property
    def name(self) -> str | None:
        """The short name of the curve that the rate follows, else the class of the scheduler."""
        if isinstance(self.scheduler, CurveLR):
            return self.scheduler.curve.name
        return None if self.scheduler is None else type(self.scheduler).__name__

    def after_update(self, update_step: int, ends_epoch: bool, applied: bool = True) -> None:
        """Tick what is due after an update; one that was not applied can only end an epoch."""
        is_tick = applied and self.period_updates is not None and update_step % self.period_updates == 0
        due: dict[Pace | None, bool] = {Pace.TICK: is_tick, Pace.EPOCH: ends_epoch}
        if due.get(self._rate_pace):
            self.tick_rate()
        if due.get(self._momentum_pace):
            self.tick_momentum()

    def tick_rate(self) -> None:
        """Go on by one tick of the learning rate, now."""
        if isinstance(self.scheduler, OneCycleLR):
            self._hold_at_the_end(self.scheduler)
        if self.scheduler is not None and not self.is_plateau:
            self.scheduler.step()

    def tick_momentum(self) -> None:
        """Go on by one tick of the momentum, now."""
        if self.momentum is not None and self._momentum_pace is not Pace.EVALUATION:
            self.momentum.tick()

    def after_evaluation(self, metric_value: float) -> None:
        """Tell what watches the metric its value."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metric_value)
        if isinstance(self.scheduler, CurveLR) and self.scheduler.curve.watches:
            self.scheduler.observe(metric_value)
        if self.momentum is not None and self.momentum.curve.watches:
            self.momentum.observe(metric_value)

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
        if isinstance(self.scheduler, CurveLR):
            self.scheduler.refresh()  # a curve between given rates stays where it is

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, as values that JSON can hold."""
        driven = {} if self.momentum is None else {"momentum": self.momentum.state_dict()}
        if self.scheduler is None:
            return {"class": None, **driven}
        groups = self.scheduler.optimizer.param_groups
        return {
            **driven,
            "class": self.name,
            "scheduler": to_plain(self.scheduler.state_dict(), "state"),
            "groups": [to_plain({key: group[key] for key in _DRIVEN if key in group}, "group") for group in groups],
            "held_ticks": self._held_ticks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the schedules, the rates and the momenta back to where they were saved."""
        if state["class"] != self.name:
            raise CheckpointError(
                f"The checkpoint's learning-rate scheduler is {state['class']}, this run's is {self.name}. Set "
                "lr_scheduler back, or start a new run from the checkpoint's weights."
            )
        if self.scheduler is not None:
            self._load_rates(self.scheduler, state)
        saved = state.get("momentum")
        if (saved is None) != (self.momentum is None):
            raise CheckpointError(
                f"The checkpoint has {'no' if saved is None else 'a'} momentum schedule, this run has "
                f"{'none' if self.momentum is None else 'one'}. Set momentum_scheduler back, or start a new run from "
                "the checkpoint's weights."
            )
        if self.momentum is not None:
            self.momentum.load_state_dict(state["momentum"])

    def _load_rates(self, scheduler: LRScheduler, state: dict[str, Any]) -> None:
        groups = scheduler.optimizer.param_groups
        if len(state["groups"]) != len(groups):
            raise CheckpointError(
                f"The checkpoint's schedule drives {len(state['groups'])} parameter groups, this run's {len(groups)}. "
                "Build the optimizer with the groups that it had."
            )
        scheduler.load_state_dict(from_plain(state["scheduler"], scheduler.state_dict()))
        for group, saved in zip(groups, state["groups"], strict=True):
            _restore_group(group, saved)
        self._held_ticks = state["held_ticks"]

    def _pace_of(self, part: LRScheduler | MomentumSchedule | None) -> Pace | None:
        """Say what a part counts; without a period, ticks are epochs."""
        if part is None:
            return None
        if isinstance(part, ReduceLROnPlateau):
            return Pace.EVALUATION
        pace = part.curve.pace if isinstance(part, CurveLR | MomentumSchedule) else Pace.TICK
        return Pace.EPOCH if pace is Pace.TICK and self.period_updates is None else pace

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


def _check_momentum(
    momentum: MomentumSchedule | None, scheduler: LRScheduler | None, optimizer: Optimizer | None
) -> None:
    """Refuse two masters of one momentum, and a schedule that ticks in vain."""
    if momentum is None:
        return
    if optimizer is not None and momentum.optimizer is not optimizer:
        raise ConfigError("The momentum schedule was built over another optimizer than the one that trains.")
    if _cycles_momentum(scheduler):
        raise ConfigError(
            f"momentum_scheduler={momentum.curve.name!r}, but {type(scheduler).__name__} cycles the momentum itself. "
            "Leave momentum_scheduler out, or set cycle_momentum=False in lr_scheduler_kwargs."
        )


def _cycles_momentum(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "cycle_momentum", False) or any(_cycles_momentum(part) for part in parts)


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Write the saved values into a group; a rate that is a tensor stays the same tensor."""
    for key, plain in saved.items():
        value = from_plain(plain, group.get(key))
        if isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value
