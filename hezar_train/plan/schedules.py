"""Which schedules are laid out over the whole run, so that its length is a part of what they do.

Owns the names and their length keywords alone; `optim` builds the schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hezar_train.config import TrainerConfig, scheduler_name
from hezar_train.config.names import is_dotted_path
from hezar_train.errors import ConfigError

__all__ = ["LAID_OUT_IN_EPOCHS", "refuse_schedule_of_one_call", "schedules_over_the_run"]

_NAMES_BY_LENGTH_KEYWORDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("total_steps", "steps_per_epoch"): ("one_cycle", "OneCycleLR"),
    ("total_iters",): ("linear", "LinearLR", "polynomial", "PolynomialLR"),
    ("T_max",): ("cosine_annealing", "CosineAnnealingLR"),
    ("step_size_up",): ("cyclic", "CyclicLR"),
    (): ("sequential", "SequentialLR", "ChainedScheduler"),
    ("stepsize",): (
        "triangular", "inv_triangular", "triangular_exp", "triangular2", "triangular2_exp", "triangular_decay_when_acc",
        "warm_restarts",
    ),
    ("num_iters", "num_iter"): ("linear_decay", "log_decay"),
    ("decay_length",): ("decay_to_epoch",),
    ("max_iter", "total_steps"): (
        "warmup_cosine", "warmup_cosine_annealing", "warmup_polynomial", "warmup_linear", "warmup_multi_step",
    ),
    ("max_iter", "total_steps", "warmup_iter", "warmup_steps"): ("warmup_step", "warmup_exponential", "warmup_noam"),
}  # fmt: skip
"""Schedules that are laid out over the whole run unless one of these keywords gives their length."""

_LENGTH_KEYWORDS = {name: set(keywords) for keywords, names in _NAMES_BY_LENGTH_KEYWORDS.items() for name in names}

LAID_OUT_IN_EPOCHS = frozenset({"decay_to_epoch"})
"""Schedules whose length is counted in epochs."""


def schedules_over_the_run(setting: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the name of each schedule that is laid out over the whole run; `setting` reads a config."""
    for field in ("lr_scheduler", "momentum_scheduler"):
        name = scheduler_name(setting(field))
        if name is not None and _is_over_the_run(name, setting(f"{field}_kwargs")):
            yield field, name


def refuse_schedule_of_one_call(config: TrainerConfig) -> None:
    """Raise if a schedule would be over after the first of many calls of train()."""
    if config.local_update_steps is None or config.fresh_optimizer:
        return
    for field, name in schedules_over_the_run(config.get):
        raise ConfigError(
            f"{field}={name!r} is laid out over one call of train(), of {config.local_update_steps} "
            f"{config.batch_or_epoch} steps, and would stay at its end in all later ones. Set fresh_optimizer=True "
            f"to begin it anew in each call, or give its length in {field}_kwargs."
        )


def _is_over_the_run(name: str, kwargs: Mapping[str, Any] | None) -> bool:
    if is_dotted_path(name):
        return True
    lengths = _LENGTH_KEYWORDS.get(name)
    return lengths is not None and not lengths & (kwargs or {}).keys()
