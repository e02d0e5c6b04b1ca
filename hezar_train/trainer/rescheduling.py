"""Another schedule for an optimizer that had one: what the first one drives is put back to where it began."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["driven_settings", "reset_driven"]

DRIVEN = ("lr", "momentum", "betas")
"""What a schedule drives in a parameter group."""

LEFT_BEHIND = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""What torch's schedulers leave in a group for themselves, and would take up from one another."""


def driven_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what a schedule is going to drive, as it is before."""
    names = (*DRIVEN, *LEFT_BEHIND)
    return [copy.deepcopy({key: group[key] for key in names if key in group}) for group in optimizer.param_groups]


def reset_driven(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Put back what `driven_settings` returned; a rate that is a tensor stays the same tensor."""
    for group, first in zip(optimizer.param_groups, settings, strict=True):
        for key in LEFT_BEHIND:
            group.pop(key, None)
        for key, value in first.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = copy.deepcopy(value)
