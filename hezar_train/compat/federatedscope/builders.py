"""FederatedScope's builders by name: optimizers, schedulers, criteria, regularisers, each from torch or registered.

A registered function is called with what the builder is given and returns None where the name is not its own. A config
of an installed FederatedScope is built from by its own builders, which know what is registered with it.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.trainer.model_runner import register_regularizer as register_own_regularizer

__all__ = [
    "WARMUPS",
    "DummyRegularizer",
    "ProximalRegularizer",
    "builder_for",
    "get_criterion",
    "get_optimizer",
    "get_regularizer",
    "get_scheduler",
    "register_criterion",
    "register_optimizer",
    "register_regularizer",
    "register_scheduler",
]

Found = Callable[..., Any]
_OPTIMIZERS: dict[str, Found] = {}
_SCHEDULERS: dict[str, Found] = {}
_CRITERIA: dict[str, Found] = {}
_REGULARIZERS: dict[str, Found] = {}
PROXIMAL = "proximal_regularizer"
BESIDE_THE_ARGUMENTS = ("__help_info__", "__cfg_check_funcs__", "is_ready_for_run")
WARMUPS = ("warmup_step", "warmup_noam")


def register_optimizer(key: str, module: Found) -> None:
    """Make an optimizer known: a function of the model, a type, a rate and arguments."""
    _OPTIMIZERS[key] = module


def register_scheduler(key: str, module: Found) -> None:
    """Make a schedule known: a function of the optimizer, a type and arguments."""
    _SCHEDULERS[key] = module


def register_criterion(key: str, module: Found) -> None:
    """Make a loss known: a function of a type and a device."""
    _CRITERIA[key] = module


def register_regularizer(key: str, module: Found) -> None:
    """Make a regulariser known: a function of a type that returns a class, or a function of the context."""
    _REGULARIZERS[key] = module
    register_own_regularizer(key, module)


def builder_for(cfg: Any, name: str) -> Found:
    """Return a builder by name: the one of the FederatedScope that a config is of, or ours."""
    package, is_of_core, _ = type(cfg).__module__.partition(".core.")
    path = f"{package}.core.auxiliaries.{name.removeprefix('get_')}_builder"
    if is_of_core and importlib.util.find_spec(path) is not None:
        return getattr(importlib.import_module(path), name)  # type: ignore[no-any-return]
    return globals()[name]  # type: ignore[no-any-return]


def get_optimizer(model: nn.Module | Iterable[Any], type: str, lr: float, **kwargs: Any) -> Optimizer:
    """Build an optimizer of a model, or of parameters, by its name in `torch.optim`."""
    arguments = _arguments(kwargs)
    for made in (make(model, type, lr, **arguments) for make in _OPTIMIZERS.values()):
        if made is not None:
            return made  # type: ignore[no-any-return]
    kind = _in_torch(torch.optim, type, "train.optimizer.type", Optimizer)
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return kind(parameters, lr=lr, **arguments)  # type: ignore[no-any-return]


def get_scheduler(optimizer: Optimizer, type: str, **kwargs: Any) -> LRScheduler | None:
    """Build a schedule by its name in `torch.optim.lr_scheduler`; None for the empty name."""
    arguments = _arguments(kwargs)
    arguments.pop("warmup_ratio", None)
    warmup_steps, total_steps = arguments.pop("warmup_steps", None), arguments.pop("total_steps", None)
    for made in (make(optimizer, type, **arguments) for make in _SCHEDULERS.values()):
        if made is not None:
            return made  # type: ignore[no-any-return]
    if not type:
        return None
    if type in WARMUPS:
        return LambdaLR(optimizer, _warmup(type, warmup_steps, total_steps))
    given = {"total_steps": total_steps} if total_steps is not None else {}
    found = _in_torch(torch.optim.lr_scheduler, type, "train.scheduler.type", LRScheduler)
    return found(optimizer, **given, **arguments)  # type: ignore[no-any-return]


def get_criterion(criterion_type: str, device: Any = None) -> Any:
    """Build a loss by its name in `torch.nn`."""
    for made in (make(criterion_type, device) for make in _CRITERIA.values()):
        if made is not None:
            return made
    return _in_torch(nn, criterion_type, "criterion.type", nn.Module)()


def get_regularizer(reg_type: str | None) -> Any:
    """Build a regulariser by name; one that adds nothing for the empty name."""
    if not reg_type:
        return DummyRegularizer()
    if reg_type == PROXIMAL:
        return ProximalRegularizer()
    for key, made in _REGULARIZERS.items():
        if (found := _regularizer_of(key, made, reg_type)) is not None:
            return found
    known = [PROXIMAL, *_REGULARIZERS]
    raise ConfigError(
        f"regularizer.type={reg_type!r} is not registered.{suggestion(reg_type, known)} Registered: {choices(known)}."
    )


def _regularizer_of(key: str, made: Found, asked: str) -> Any:
    """Return what a registered function gives for a name: its class built, or the function of the context itself."""
    if isinstance(made, type):
        return made() if key == asked else None
    try:
        found = made(asked)
    except (AttributeError, TypeError):  # it expects a context, not a name
        return made if key == asked else None
    return found() if isinstance(found, type) else found


class DummyRegularizer(nn.Module):
    """Adds nothing."""

    def forward(self, ctx: Any) -> float:  # noqa: ARG002 - as every regulariser is called
        return 0.0


class ProximalRegularizer(nn.Module):
    """Half the squared distance from `ctx.weight_init`, a list with a value for each parameter."""

    def forward(self, ctx: Any, p: int = 2) -> Any:
        pairs = zip(ctx.weight_init, ctx.model.parameters(), strict=True)
        distances = [torch.norm(w - start.to(w.device), p) ** p for start, w in pairs]
        return sum(distances) / float(p)


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in kwargs.items() if key not in BESIDE_THE_ARGUMENTS}


def _in_torch(module: Any, name: Any, key: str, kind: type) -> Any:
    if not isinstance(name, str):
        raise ConfigError(f"{key} is a {type(name).__name__}; expected a name")
    known = [
        one for one in dir(module) if isinstance(getattr(module, one), type) and issubclass(getattr(module, one), kind)
    ]
    if name not in known:
        raise ConfigError(f"{key}={name!r} is not in {module.__name__}.{suggestion(name, known)}")
    return getattr(module, name)


def _warmup(name: str, warmup_steps: int | None, total_steps: int | None) -> Callable[[int], float]:
    if warmup_steps is None or (name == "warmup_step" and total_steps is None):
        raise ConfigError(f"train.scheduler.type={name!r} needs warmup_steps, and total_steps for 'warmup_step'")
    if name == "warmup_noam":
        return lambda step: min(max(1, step) ** -0.5, max(1, step) * warmup_steps**-1.5)

    def linear(step: int) -> float:
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, ((total_steps or 0) - step) / max(1, (total_steps or 0) - warmup_steps))

    return linear
