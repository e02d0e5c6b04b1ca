"""Models without values: built on torch's `meta` device, spread while they are there, and given memory for values.

A model that is too large for one process is built by `without_weights`: its parameters are names, shapes and types, and
everything else, buffers among it, is computed as ever. `give_memory` then makes room for what each process holds, which
`init_weights_from` or a checkpoint fills. Refuses what nobody could fill: a buffer on `meta` that no file holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from hezar_train.errors import ConfigError

__all__ = ["give_memory", "names_on_meta", "refuse_unknowable", "without_weights"]

P = ParamSpec("P")
Model = TypeVar("Model", bound=nn.Module)

COUNTERPART = "_hezar_train_without_values"


def without_weights(build: Callable[P, Model], *args: P.args, **kwargs: P.kwargs) -> Model:
    """Call a function or class that makes a model, keeping no parameter's values: each is on the device `meta`.

    Buffers have the values that the model computes for them, so that those which no file holds are right. One parameter
    at a time is made and let go, so the model may be larger than this process's memory.
    """
    hook = register_module_parameter_registration_hook(_without_values)  # type: ignore[arg-type]
    try:
        return build(*args, **kwargs)
    finally:
        hook.remove()


def _without_values(_module: nn.Module, _name: str, given: nn.Parameter | None) -> nn.Parameter | None:
    """Return what to register in a parameter's place; None if it is to stay."""
    if given is None or given.is_meta or isinstance(given, UninitializedParameter):
        return None
    known: nn.Parameter | None = getattr(given, COUNTERPART, None)  # a tied one comes twice
    if known is None:
        known = nn.Parameter(given.detach().to("meta"), given.requires_grad)
        known.__dict__.update(given.__dict__)
        setattr(given, COUNTERPART, known)
    return known


def names_on_meta(model: nn.Module) -> set[str]:
    """Return the names in the model's state that have no values."""
    state = nn.Module.state_dict(model, keep_vars=True)
    return {name for name, one in state.items() if isinstance(one, Tensor) and one.is_meta}


def refuse_unknowable(model: nn.Module) -> None:
    """Raise if a part of a model without values would never get any."""
    saved = nn.Module.state_dict(model, keep_vars=True).keys()
    lost = [name for name, one in model.named_buffers(remove_duplicate=False) if one.is_meta and name not in saved]
    if lost:
        raise ConfigError(
            f"the model has buffers on the device 'meta' that no file holds (persistent=False): {', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}. Their values cannot be known. Build the model with "
            "hezar_train.without_weights(function), which computes buffers."
        )
    parameters = dict(model.named_parameters())
    if real := [name for name, one in parameters.items() if not one.is_meta]:
        on_meta = next(name for name in parameters if name not in real)
        raise ConfigError(
            f"the model's {on_meta} is on the device 'meta' and {real[0]} is not: expected all parameters there, or "
            "none. Build the whole model with hezar_train.without_weights(function)."
        )


def give_memory(model: nn.Module, device: torch.device, *, shares_device: torch.device | None = None) -> None:
    """Give what is on `meta` memory on the device; what has values keeps them. Parameters may go to another device."""
    places = [(module, name, one) for module in model.modules() for name, one in module._buffers.items()]
    ties: dict[Any, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                ties.setdefault(parameter, []).append((module, name))
    model.to_empty(device=shares_device or device)
    for (first, first_name), *others in ties.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    for module, name, one in places:
        if one is not None and not one.is_meta:
            setattr(module, name, one.to(device))
        elif one is not None:
            setattr(module, name, getattr(module, name).to(device))
