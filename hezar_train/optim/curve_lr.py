"""A torch scheduler that sets every group's rate to a point of a curve.

The rate follows from the tick, from the group's first rate and from how many evaluations fell, never from the rate
before: what is saved are these, and no code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.optim.curve_settings import BoundCurve, Falls
from hezar_train.optim.curves import Pace

__all__ = ["CurveLR", "set_rate"]


class CurveLR(LRScheduler):
    """Follow a curve: one value for each tick and group."""

    def __init__(self, optimizer: Optimizer, curve: BoundCurve) -> None:
        self.curve = curve
        self.falls = Falls()
        for group in optimizer.param_groups:
            curve.check(float(group.get("initial_lr", group["lr"])))
        super().__init__(optimizer)
        self.base_lrs = [float(rate) for rate in self.base_lrs]  # a tick then never reads from a device

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the present tick."""
        return [self.curve.value(self.last_epoch, float(base), self.falls.count) for base in self.base_lrs]

    def observe(self, value: float) -> None:
        """Take an evaluation into account."""
        self.falls = self.curve.judge(self.falls, value)
        if self.curve.pace is Pace.EVALUATION:
            self.last_epoch += 1
        self.refresh()

    def refresh(self) -> None:
        """Write the rates of the present tick into the groups once more."""
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            set_rate(group, float(rate))
        self._last_lr = rates

    def state_dict(self) -> dict[str, Any]:
        """Return where the curve is, in plain values."""
        state = {name: value for name, value in super().state_dict().items() if name != "curve"}
        return state | {"falls": dataclasses.asdict(self.falls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where a curve was saved."""
        super().load_state_dict(state_dict | {"falls": Falls(**state_dict["falls"])})


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Write a rate into a group; one that is a tensor stays the same tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
