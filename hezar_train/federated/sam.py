"""Sharpness-aware minimisation (SAM, ASAM): each update uses the gradient at the worst weights nearby.

When a window's gradient is known, the weights are perturbed by `rho` along it, the whole window is run again from there
(a second forward and backward pass), and the weights come back, exactly. What stands before the hook at
`on_batch_backward` belongs to that gradient and runs twice; what stands after it runs once. The logged loss is that of
the first pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.errors import ConfigError
from hezar_train.federated.worker import refuse_several_models
from hezar_train.loop import Context, Hook, HookCall, Moment
from hezar_train.trainer import Trainer
from hezar_train.types import Mode

__all__ = [
    "ASAM",
    "SAM",
    "wrap_sam_trainer",
]

KEPT = ("batch", "outputs", "loss", "loss_regular", "window_loss")
"""What the second pass overwrites and hooks should not see."""
TINY = torch.finfo(torch.float32).tiny


class SAM(Hook):
    """Take each update's gradient at w + rho * g / |g|."""

    modes = frozenset({Mode.TRAIN, Mode.FINETUNE})

    def __init__(self, rho: float = 1.0) -> None:
        self._rho = _checked("rho", rho)
        self._batches: list[Any] = []

    def attach(self, trainer: Trainer) -> None:
        refuse_several_models(trainer, self.name)
        super().attach(trainer)

    def on_fit_start(self, ctx: Context) -> None:
        """Note what the second pass repeats."""
        hooks = self.trainer.hooks[ctx.mode]
        place = hooks.names(Moment.BATCH_BACKWARD).index(self.name)
        ctx.repeated = (*hooks.calls(Moment.BATCH_FORWARD), *hooks.calls(Moment.BATCH_BACKWARD)[:place])

    def on_batch_backward(self, ctx: Context) -> None:
        """Gather the window's batches; on the last one, run them again at the perturbed weights."""
        if ctx.batch_in_window == 0:
            self._batches = []
        self._batches.append(ctx.batch)
        if ctx.closes_window:
            with self._perturbed(unwrap(ctx.model)), _restored(ctx):
                self._second_pass(ctx, ctx.repeated)

    def stretch(self, name: str, parameter: nn.Parameter) -> torch.Tensor:  # noqa: ARG002 - for ASAM
        """Return how far the perturbation may go along each weight, relative to the others."""
        return torch.ones_like(parameter)

    def _second_pass(self, ctx: Context, calls: tuple[HookCall, ...]) -> None:
        step, last = ctx.step, len(self._batches) - 1
        for number, batch in enumerate(self._batches):
            step.batch, step.batch_in_window, step.closes_window = batch, number, number == last
            step.is_loss_noted = False  # hooks may change this loss, too
            if "loss_regular" in ctx:
                del ctx.loss_regular  # hooks add to it
            for call in calls:
                call(ctx)

    @contextmanager
    def _perturbed(self, model: nn.Module) -> Iterator[None]:
        """Have the weights where the loss is highest nearby, without gradients; put them back exactly."""
        gradients = {name: (p, p.grad) for name, p in model.named_parameters() if p.grad is not None}
        # Copies: taking the perturbation off again would leave its rounding in the weights.
        before = [(p, p.detach().clone()) for p, _ in gradients.values()]
        with torch.no_grad():
            stretched = [(p, self.stretch(name, p), gradient) for name, (p, gradient) in gradients.items()]
            norm = torch.nn.utils.get_total_norm([stretch * gradient for _, stretch, gradient in stretched])
            for p, stretch, gradient in stretched:
                p.add_(stretch.square() * gradient * (self._rho / norm.clamp_min(TINY)))
                p.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in before:
                    p.copy_(value)


class ASAM(SAM):
    """Take each update's gradient at w + rho * T^2 g / |T g|, where T = |w| + eta for what is called a weight."""

    def __init__(self, rho: float = 1.0, eta: float = 0.0) -> None:
        super().__init__(rho)
        self._eta = _checked("eta", eta)

    def stretch(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.abs() + self._eta if "weight" in name else torch.ones_like(parameter)


def wrap_sam_trainer(trainer: Trainer, rho: float = 1.0, eta: float = 0.0, adaptive: bool = False) -> Trainer:
    """Add SAM to a trainer, or ASAM if it is to be adaptive; return the trainer."""
    trainer.register_hooks([ASAM(rho, eta) if adaptive else SAM(rho)])
    return trainer


@contextmanager
def _restored(ctx: Context) -> Iterator[None]:
    kept = {name: ctx[name] for name in KEPT if name in ctx}
    try:
        yield
    finally:
        ctx.put(kept)


def _checked(name: str, value: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ConfigError(f"{name}={value!r} must be a number of at least 0")
    return value
