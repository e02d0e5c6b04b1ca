"""Small functions around parameters and hooks that FederatedScope's users import."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.errors import DataError

__all__ = [
    "filter_by_specified_keywords",
    "format_log_hooks",
    "get_trainable_para_names",
    "merge_param_dict",
    "move_to",
    "param2tensor",
]


def get_trainable_para_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that learn."""
    return {name for name, one in model.named_parameters() if one.requires_grad}


def filter_by_specified_keywords(param_name: str, filter_keywords: Iterable[str]) -> bool:
    """Tell whether a parameter is exchanged: none of the keywords is in its name."""
    return not any(word in param_name for word in filter_keywords)


def param2tensor(param: Any) -> torch.Tensor:
    """Return a parameter as a tensor: a tensor, a number or a list of them; texts are never unpickled."""
    if isinstance(param, str | bytes):
        raise DataError(
            "a parameter is given as text; expected a tensor, a list or a number (texts are never unpickled)"
        )
    if isinstance(param, torch.Tensor):
        return param
    return torch.as_tensor(param, dtype=torch.float32 if isinstance(param, list) else None)


def merge_param_dict(raw_param: dict[str, Any], filtered_param: Mapping[str, Any]) -> dict[str, Any]:
    """Put the values of one dict of parameters into another, and return it."""
    raw_param.update(filtered_param)
    return raw_param


def move_to(obj: Any, device: Any) -> Any:
    """Bring tensors, also in dicts and lists, to a device."""
    if isinstance(obj, torch.Tensor):
        return obj.to(device)
    if isinstance(obj, Mapping):
        return {key: move_to(value, device) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [move_to(value, device) for value in obj]
    raise DataError(f"move_to was given a {type(obj).__name__}; expected tensors, or dicts and lists of them")


def format_log_hooks(hooks_set: Any) -> str:
    """Return the names of hooks by trigger as JSON."""
    each = hooks_set if isinstance(hooks_set, list) else [hooks_set]
    named = [{str(key): [getattr(one, "__name__", str(one)) for one in hooks[key]] for key in hooks} for hooks in each]
    return json.dumps(named if isinstance(hooks_set, list) else named[0], indent=2)
