"""LiBai's schedules: a warm-up, then a curve over the run; an iteration is a tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.compat.libai.config import instantiate
from hezar_train.optim import build_scheduler

__all__ = [
    "WarmupCosineAnnealingLR",
    "WarmupCosineLR",
    "WarmupExponentialLR",
    "WarmupMultiStepLR",
    "WarmupPolynomialLR",
    "WarmupStepLR",
    "build_lr_scheduler",
]


def build_lr_scheduler(cfg: Any, optimizer: Optimizer) -> LRScheduler:
    """Make the schedule that a config describes, over an optimizer."""
    made: LRScheduler = instantiate(cfg, optimizer=optimizer)
    return made


def _warmed_up(name: str, optimizer: Optimizer, max_iter: int, **settings: Any) -> LRScheduler:
    return build_scheduler(name, optimizer, total_ticks=max_iter, kwargs={"max_iter": max_iter, **settings})


def WarmupCosineLR(  # noqa: N802 - LiBai's name
    optimizer: Optimizer, max_iter: int, warmup_factor: float, warmup_iter: int, alpha: float = 0.0,
    warmup_method: str = "linear",
) -> LRScheduler:  # fmt: skip
    """Fall along a cosine to `alpha` times the rate."""
    return _warmed_up(
        "warmup_cosine", optimizer, max_iter, warmup_factor=warmup_factor, warmup_iter=warmup_iter, alpha=alpha,
        warmup_method=warmup_method,
    )  # fmt: skip


def WarmupCosineAnnealingLR(  # noqa: N802
    optimizer: Optimizer, max_iter: int, warmup_factor: float, warmup_iter: int, eta_min: float = 0.0,
    warmup_method: str = "linear",
) -> LRScheduler:  # fmt: skip
    """Fall along a cosine to `eta_min`."""
    return _warmed_up(
        "warmup_cosine_annealing", optimizer, max_iter, warmup_factor=warmup_factor, warmup_iter=warmup_iter,
        eta_min=eta_min, warmup_method=warmup_method,
    )  # fmt: skip


def WarmupStepLR(  # noqa: N802
    optimizer: Optimizer, max_iter: int, warmup_factor: float, warmup_iter: int, step_size: int, gamma: float = 0.1,
    warmup_method: str = "linear",
) -> LRScheduler:  # fmt: skip
    """Multiply by `gamma` every `step_size` iterations."""
    return _warmed_up(
        "warmup_step", optimizer, max_iter, warmup_factor=warmup_factor, warmup_iter=warmup_iter, step_size=step_size,
        gamma=gamma, warmup_method=warmup_method,
    )  # fmt: skip


def WarmupMultiStepLR(  # noqa: N802
    optimizer: Optimizer, max_iter: int, warmup_factor: float, warmup_iter: int, milestones: Sequence[int],
    gamma: float = 0.1, warmup_method: str = "linear",
) -> LRScheduler:  # fmt: skip
    """Multiply by `gamma` at each milestone, an iteration."""
    return _warmed_up(
        "warmup_multi_step", optimizer, max_iter, warmup_factor=warmup_factor, warmup_iter=warmup_iter,
        milestones=[int(one) for one in milestones], gamma=gamma, warmup_method=warmup_method,
    )  # fmt: skip


def WarmupExponentialLR(  # noqa: N802
    optimizer: Optimizer, max_iter: int, gamma: float, warmup_factor: float, warmup_iter: int,
    warmup_method: str = "linear",
) -> LRScheduler:  # fmt: skip
    """Multiply by `gamma` every iteration."""
    return _warmed_up(
        "warmup_exponential", optimizer, max_iter, warmup_factor=warmup_factor, warmup_iter=warmup_iter, gamma=gamma,
        warmup_method=warmup_method,
    )  # fmt: skip


def WarmupPolynomialLR(  # noqa: N802
    optimizer: Optimizer, max_iter: int, warmup_factor: float, warmup_iter: int, end_learning_rate: float = 0.0001,
    power: float = 1.0, cycle: bool = False, warmup_method: str = "linear",
) -> LRScheduler:  # fmt: skip
    """Fall as a power of what is left, to `end_learning_rate`."""
    return _warmed_up(
        "warmup_polynomial", optimizer, max_iter, warmup_factor=warmup_factor, warmup_iter=warmup_iter,
        end_learning_rate=end_learning_rate, power=power, cycle=cycle, warmup_method=warmup_method,
    )  # fmt: skip
