"""FedProx: a proximal term keeps the weights near those that a call of `train()` began with.

The term mu / 2 * |w - w0|^2 has the gradient mu * (w - w0), which is added to the window's gradient as it stands: no
graph is built, and it does not matter into how many micro-batches the window was cut. The starting point w0 is saved
in every checkpoint of its call, so a call that was killed goes on towards the same point.

`RegularizedOptimizer` is the same term for any optimizer, towards a reference of the caller's: weight * (p - reference)
is added to each gradient before a step. The optimizer itself stays the object it was, so schedules, scalers and the
trainer's own steps keep working. Its `state_dict` holds the reference. An optimizer that is wrapped again has one term,
the last one's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hezar_train.checkpoint import unwrap
from hezar_train.checkpoint.optimizer_state import load_state
from hezar_train.errors import ConfigError
from hezar_train.federated.worker import refuse_several_models
from hezar_train.loop import Context, Hook
from hezar_train.trainer import Trainer
from hezar_train.types import Mode

__all__ = [
    "FedProx",
    "RegularizedOptimizer",
    "wrap_fedprox_trainer",
    "wrap_regularized_optimizer",
]

Weights = dict[str, torch.Tensor]


class FedProx(Hook):
    """Add the proximal term to each update; hooks see the weights that the routine began with as `ctx.weight_init`."""

    modes = frozenset({Mode.TRAIN, Mode.FINETUNE})

    def __init__(self, mu: float) -> None:
        if not isinstance(mu, int | float) or isinstance(mu, bool) or not 0 <= mu < math.inf:
            raise ConfigError(f"FedProx has mu={mu!r}: give a number of at least 0")
        self._mu = mu
        self._start: Weights = {}
        self._call_end: int | None = None

    def attach(self, trainer: Trainer) -> None:
        refuse_several_models(trainer, self.name)
        super().attach(trainer)

    def on_fit_start(self, ctx: Context) -> None:
        """Remember where the routine begins; a call that goes on has begun earlier."""
        if ctx.mode is Mode.FINETUNE:
            ctx.weight_init = _copies(ctx.model)
            return
        if not self._start or self._call_end != ctx.state.call_end:
            self._start, self._call_end = _copies(ctx.model), ctx.state.call_end
        ctx.weight_init = self._start

    def on_batch_forward(self, ctx: Context) -> None:
        """Show the term's value to hooks; like every regulariser it is not a part of the logged loss."""
        with torch.no_grad():
            far = sum((p - start).square().sum() for p, start in self._pairs(ctx))
        ctx.loss_regular = ctx.get("loss_regular", 0.0) + self._mu / 2 * far

    def on_batch_backward(self, ctx: Context) -> None:
        """Add the term's gradient to that of a whole window."""
        if not ctx.closes_window:
            return
        scaler = self.trainer.runtime.scaler
        # The gradients are still scaled by the loss scaler, which divides them, and this term, before the step.
        factor = self._mu if scaler is None else self._mu * scaler.get_scale()
        with torch.no_grad():
            for parameter, start in self._pairs(ctx):
                pull = (parameter - start) * factor
                parameter.grad = pull if parameter.grad is None else parameter.grad + pull

    def on_fit_end(self, ctx: Context) -> None:
        """Forget the starting point, unless the call failed and can go on."""
        if ctx.mode is Mode.TRAIN and ctx.failed is None:
            self._start = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the starting point of the call under way."""
        return {"call_end": self._call_end, "start": self._start} if self._start else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the starting point of a call that goes on."""
        self._call_end, self._start = state.get("call_end"), state.get("start", {})

    def _pairs(self, ctx: Context) -> list[tuple[nn.Parameter, torch.Tensor]]:
        start: Weights = ctx.weight_init
        trained = ((name, p) for name, p in unwrap(ctx.model).named_parameters() if p.requires_grad)
        return [(parameter, start[name].to(parameter.device)) for name, parameter in trained]


def wrap_fedprox_trainer(trainer: Trainer, mu: float) -> Trainer:
    """Add FedProx to a trainer; return the trainer."""
    trainer.register_hooks([FedProx(mu)])
    return trainer


def _copies(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in unwrap(model).named_parameters() if p.requires_grad}


_HANDLES: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


class RegularizedOptimizer:
    """An optimizer with a proximal term towards a reference; everything else is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, regular_weight: float) -> None:
        self.optimizer, self.regular_weight = optimizer, regular_weight
        self._compared: list[list[torch.Tensor]] | None = None
        if (before := _HANDLES.pop(optimizer, None)) is not None:  # else the term would be added once for each wrapping
            before.remove()
        _HANDLES[optimizer] = optimizer.register_step_pre_hook(lambda *_: self.regularize_by_para_diff())

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
                    parameter.grad = parameter.grad + self.regular_weight * (parameter - reference.to(parameter.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the reference."""
        return {"optimizer": self.optimizer.state_dict(), "compared": self._compared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        load_state(self.optimizer, dict(state["optimizer"]), "the optimizer")
        self._compared = state["compared"]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, with the difference in its gradients."""
        return self.optimizer.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def wrap_regularized_optimizer(base_optimizer: Optimizer, regular_weight: float) -> RegularizedOptimizer:
    """Give an optimizer a proximal term; its reference is set on what is returned."""
    return RegularizedOptimizer(base_optimizer, regular_weight)
