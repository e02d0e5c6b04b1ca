"""The momentum of an optimizer: read, set, and driven along a curve.

`momentum` in a parameter group is it, or the first of its `betas`; an optimizer whose groups have neither is refused.
A momentum follows the same curves as a rate, by the same names, and its own range: `min` to `max`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, RMSprop

from hezar_train.config.names import scheduler_name
from hezar_train.errors import CheckpointError, ConfigError, choices, suggestion
from hezar_train.optim.curve_lr import set_rate
from hezar_train.optim.curve_settings import MOMENTUM, BoundCurve, Falls, bind_curve
from hezar_train.optim.curves import CURVES, Pace
from hezar_train.optim.plain_state import from_plain, to_plain

__all__ = ["MomentumSchedule", "build_momentum_schedule", "get_momentum", "set_learning_rate", "set_momentum"]

_SAMPLED_TICKS = 1000


def get_momentum(optimizer: Optimizer) -> float | None:
    """Return the momentum of the first group, or None for an optimizer without one."""
    group = optimizer.param_groups[0]
    return _momentum_of(group) if _has_momentum(group) else None


def set_momentum(optimizer: Optimizer, value: float) -> None:
    """Set the momentum of every group."""
    _refuse_without_momentum(optimizer, f"momentum={value!r}")
    if not 0 <= value < 1:
        raise ConfigError(f"momentum={value!r} cannot work. Expected a number from 0 to below 1.")
    if isinstance(optimizer, RMSprop) and optimizer.state and value > 0 and not get_momentum(optimizer):
        raise ConfigError(
            f"momentum={value!r}: RMSprop has trained without a momentum and cannot take one up. Build it with one."
        )
    for group in optimizer.param_groups:
        _put(group, value)


def set_learning_rate(optimizer: Optimizer, rate: float, group: int | None = None) -> None:
    """Set the learning rate of every group, or of the one with this number."""
    groups = optimizer.param_groups
    if group is not None and not -len(groups) <= group < len(groups):
        raise ConfigError(f"There is no parameter group {group}: the optimizer has {len(groups)}, counted from 0.")
    for one in groups if group is None else [groups[group]]:
        set_rate(one, rate)


class MomentumSchedule:
    """Drive the momentum of every group along a curve."""

    def __init__(self, optimizer: Optimizer, curve: BoundCurve) -> None:
        self.optimizer, self.curve = optimizer, curve
        self._first = [_momentum_of(group) for group in optimizer.param_groups]
        self._ticks = 0
        self._falls = Falls()
        for base in self._first:
            curve.check(base)

    def tick(self) -> None:
        """Go on by one tick."""
        self._ticks += 1
        self.refresh()

    def observe(self, value: float) -> None:
        """Take an evaluation into account."""
        self._falls = self.curve.judge(self._falls, value)
        self._ticks += self.curve.pace is Pace.EVALUATION
        self.refresh()

    def refresh(self) -> None:
        """Write the momenta of the present tick into the groups."""
        for group, base in zip(self.optimizer.param_groups, self._first, strict=True):
            _put(group, self.curve.value(self._ticks, base, self._falls.count))

    def state_dict(self) -> dict[str, Any]:
        """Return where the curve is, in plain values."""
        momenta = [_momentum_of(group) for group in self.optimizer.param_groups]
        falls = to_plain(dataclasses.asdict(self._falls), "momentum")
        return {"curve": self.curve.name, "ticks": self._ticks, "first": self._first, "falls": falls, "now": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a curve was saved."""
        if state["curve"] != self.curve.name or len(state["now"]) != len(self._first):
            raise CheckpointError(
                f"The checkpoint's momentum schedule is {state['curve']} over {len(state['now'])} parameter groups, "
                f"this run's {self.curve.name} over {len(self._first)}. Set momentum_scheduler back, or start a new "
                "run from the checkpoint's weights."
            )
        self._ticks, self._first = state["ticks"], list(state["first"])
        self._falls = Falls(**from_plain(state["falls"], {}))
        for group, value in zip(self.optimizer.param_groups, state["now"], strict=True):
            _put(group, value)


def build_momentum_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    total_ticks: int,
    kwargs: Mapping[str, Any] | None = None,
    total_epochs: int | None = None,
) -> MomentumSchedule:
    """Build the named schedule of an optimizer's momentum and set its first value."""
    short = scheduler_name(name)
    if short not in CURVES:
        raise ConfigError(
            f"momentum_scheduler={name!r} is not known. Known: {choices(CURVES)}.{suggestion(name, CURVES)}"
        )
    _refuse_without_momentum(optimizer, f"momentum_scheduler={name!r}")
    curve = bind_curve(short, MOMENTUM, kwargs, total_ticks=total_ticks, total_epochs=total_epochs)
    schedule = MomentumSchedule(optimizer, curve)
    _refuse_values(curve, optimizer, total_ticks)
    schedule.refresh()
    return schedule


def _refuse_without_momentum(optimizer: Optimizer, setting: str) -> None:
    if not all(_has_momentum(group) for group in optimizer.param_groups):
        raise ConfigError(
            f"{setting}, but {type(optimizer).__name__} has no momentum: neither 'momentum' nor 'betas' among its "
            "settings. Leave it out, or use an optimizer that has one, such as 'sgd' or 'adamw'."
        )


def _refuse_values(curve: BoundCurve, optimizer: Optimizer, total_ticks: int) -> None:
    """Refuse a curve that leaves the numbers a momentum can be, or that a group could not follow."""
    owner = f"momentum_scheduler={curve.name!r}"
    ticks = range(0, total_ticks + 1, max(1, total_ticks // _SAMPLED_TICKS))
    for base in {_momentum_of(group) for group in optimizer.param_groups}:
        values = [curve.value(tick, base) for tick in ticks]
        if not all(0 <= value < 1 for value in values):
            raise ConfigError(
                f"{owner} goes from {min(values):g} to {max(values):g}. Expected numbers from 0 to below 1."
            )
        if max(values) == 0:
            raise ConfigError(f"{owner}, but the optimizer's momentum is 0. Set the field 'momentum', or 'max'.")
        if values[0] == 0 and isinstance(optimizer, RMSprop):
            raise ConfigError(f"{owner} begins at 0, but RMSprop cannot take up a momentum later. Begin above 0.")


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return "momentum" in group or "betas" in group


def _momentum_of(group: Mapping[str, Any]) -> float:
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


def _put(group: dict[str, Any], value: float) -> None:
    """Write a momentum into a group; one that is a tensor stays the same tensor."""
    if "momentum" in group:
        group["momentum"] = value
        return
    first, *others = group["betas"]
    if isinstance(first, Tensor):
        first.fill_(value)
    else:
        group["betas"] = (value, *others)
