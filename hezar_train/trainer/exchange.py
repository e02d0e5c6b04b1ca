"""Weights that travel between trainers: copies out, copies in, and a filter for what stays.

Owns what may be given to `update`: tensors, lists and numbers. A text is refused: it would have to be unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import share_of, whole
from hezar_train.errors import DataError, choices, suggestion

__all__ = ["give_parameters", "shared_names", "take_parameters"]


def shared_names(model: nn.Module, local_parts: Iterable[str] | None, *, with_untrained: bool) -> list[str]:
    """Return the names that are exchanged: all but those that have a local part, and what is not trained."""
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    parts = list(local_parts or ())
    return [
        name
        for name in model.state_dict()
        if (with_untrained or name in trained) and not any(part in name for part in parts)
    ]


def give_parameters(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return independent copies on the CPU: training on does not change them."""
    state = model.state_dict()
    return {name: whole(state[name]).detach().to("cpu", copy=True) for name in names}


def take_parameters(model: nn.Module, given: Mapping[str, Any], names: Iterable[str], *, strict: bool) -> None:
    """Copy values into the model, those of the names that are exchanged; the caller's dict is left as it is."""
    if not isinstance(given, Mapping):
        raise DataError(f"parameters are a {type(given).__name__}; expected a dict of values by name")
    state, wanted = model.state_dict(), set(names)
    if unknown := [name for name in given if name not in state]:
        raise DataError(
            f"the model has no parameter {choices(unknown)}.{suggestion(unknown[0], state)} Nothing was changed."
        )
    if strict and (missing := [name for name in wanted if name not in given]):
        raise DataError(f"strict=True, but there is no value for: {choices(missing)}. Nothing was changed.")
    values = {name: _as_tensor(name, value, state[name]) for name, value in given.items() if name in wanted}
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(share_of(state[name], value))


def _as_tensor(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, str | bytes):
        raise DataError(f"{name!r} is given as text; expected a tensor, a list or a number (texts are never unpickled)")
    try:
        tensor = torch.as_tensor(value, dtype=like.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name!r} is a {type(value).__name__} that makes no tensor: {error}") from error
    if tensor.shape != like.shape:
        raise DataError(f"{name!r} has the shape {tuple(tensor.shape)}; expected {tuple(like.shape)}")
    return tensor
