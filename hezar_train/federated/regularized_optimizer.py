"""An optimizer that is drawn to other parameters: weight * (p - reference) is added to each gradient before a step.

The optimizer itself stays the object it was, so schedules, scalers and the trainer's own steps keep working. The
reference belongs to the caller: no checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hezar_train.errors import ConfigError

__all__ = ["RegularizedOptimizer", "wrap_regularized_optimizer"]


class RegularizedOptimizer:
    """An optimizer with a reference; everything else is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, regular_weight: float) -> None:
        self.optimizer, self._weight = optimizer, regular_weight
        self._compared: list[list[torch.Tensor]] | None = None
        optimizer.register_step_pre_hook(lambda *_: self.regularize_by_para_diff())

    def set_compared_para_group(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Copy the parameters of groups, one for each of the optimizer's, as the reference."""
        compared = [[p.detach().clone() for p in group["params"]] for group in groups]
        shapes = [[p.shape for p in group] for group in compared]
        own = [[p.shape for p in group["params"]] for group in self.optimizer.param_groups]
        if shapes != own:
            raise ConfigError(f"the groups to compare with have the shapes {shapes}; the optimizer's are {own}")
        self._compared = compared

    def reset_compared_para_group(self) -> None:
        """Take the optimizer's own parameters, as they are now, as the reference."""
        self.set_compared_para_group(self.optimizer.param_groups)

    @torch.no_grad()
    def regularize_by_para_diff(self) -> None:
        """Add the difference from the reference to the gradients; without a reference nothing is added."""
        for group, compared in zip(self.optimizer.param_groups, self._compared or (), strict=False):
            for parameter, reference in zip(group["params"], compared, strict=True):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + self._weight * (parameter - reference.to(parameter.device))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, with the difference in its gradients."""
        return self.optimizer.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def wrap_regularized_optimizer(base_optimizer: Optimizer, regular_weight: float) -> RegularizedOptimizer:
    """Draw an optimizer's parameters to a reference, to be set on what is returned."""
    return RegularizedOptimizer(base_optimizer, regular_weight)
