"""One update: the norm of the gradients, clipping, the optimizer's step; the guard is in `steps`.

The plain optimizer and a cached parameter list are used: Accelerate's wrapper costs more than a small model's step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.runtime.sharding import gradient_norm, local_gradients

__all__ = [
    "Updater",
    "driven_settings",
    "reset_driven",
]

CLIP_MARGIN = 1e-6  # what torch adds to the norm before it divides


class Updater:
    """Apply the gradients of a window, once they are known to be finite."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, config: TrainerConfig) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self._max_norm = config.max_grad_norm
        self._parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._is_uniform = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self._is_shared_out = any(hasattr(p, "device_mesh") for p in self._parameters)
        self._step = optimizer.step  # after the scheduler was built: some schedulers wrap it

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters that learn."""
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    @property
    def skips_non_finite(self) -> bool:
        """Tell whether a scaler expects overflows and skips such updates by itself."""
        return self._scaler is not None

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm over all gradients, unscaled; it stays on the device."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._is_shared_out:
            return gradient_norm(self._parameters)
        gradients = self._gradients()
        if not gradients:
            return torch.zeros(())
        if not self._is_uniform or any(g.is_sparse for g in gradients):
            return torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
        norms = list(torch._foreach_norm(gradients))
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def clip(self, norm: float) -> None:
        """Scale the gradients down to `max_grad_norm`, if they are longer."""
        if self._max_norm is None or norm + CLIP_MARGIN <= self._max_norm:
            return
        factor = self._max_norm / (norm + CLIP_MARGIN)
        gradients = self._gradients()
        if self._is_uniform and not any(g.is_sparse for g in gradients):
            torch._foreach_mul_(gradients, factor)
            return
        for gradient in gradients:
            gradient.mul_(factor)

    def step(self) -> bool:
        """Step the optimizer; return False if the scaler skipped it."""
        if self._scaler is None:
            self._step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= before)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        """Return what this process holds of the gradients."""
        if self._is_shared_out:
            return local_gradients(self._parameters)
        return [p.grad for p in self._parameters if p.grad is not None]


# Another schedule for an optimizer that had one: what the first one drives is put back to where it began.

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
