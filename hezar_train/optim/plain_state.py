"""Turn a scheduler's state into values that JSON can hold, and back.

`to_plain` keeps None, bool, int, float, str, and lists and dicts of them; it leaves out code and optimizers (they are
built anew, never saved) and refuses the rest with a sentence. `from_plain` restores tuples, counters and tensors in the
form of the value that stands there at present.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, TypeAlias
from weakref import ReferenceType

from torch import Tensor, tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.errors import ConfigError

__all__ = ["Plain", "from_plain", "to_plain"]

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

# JSON has neither keys that are not strings nor infinite numbers: such a dict is a list of pairs under the first key,
# such a number its spelling under the second.
_PAIRS = "__pairs__"
_NUMBER = "__number__"


def to_plain(value: Any, where: str) -> Plain:
    """Return a value as JSON can hold it; `where` names it in an error."""
    if isinstance(value, Tensor):
        return to_plain(value.tolist(), where)
    if isinstance(value, LRScheduler):
        return to_plain(value.state_dict(), where)
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, where)
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return _scalar_to_plain(value, where)


def _mapping_to_plain(value: Mapping[Any, Any], where: str) -> dict[str, Plain]:
    kept = [(key, to_plain(item, f"{where}[{key!r}]")) for key, item in value.items() if not _is_built_anew(item)]
    if all(isinstance(key, str) for key, _ in kept):
        return dict(kept)
    return {_PAIRS: [[_scalar_to_plain(key, where), item] for key, item in kept]}


def _scalar_to_plain(value: Any, where: str) -> Plain:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {_NUMBER: str(number)}
    raise ConfigError(
        f"The learning-rate scheduler's {where} is a {type(value).__name__}, which a checkpoint cannot hold. Expected "
        "numbers, strings, lists, dicts or tensors: give the scheduler a state_dict() and a load_state_dict() of these."
    )


def _is_built_anew(value: Any) -> bool:
    """Tell whether a value is code, or an optimizer, whose state is saved elsewhere."""
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_built_anew(item) for item in value)
    built_anew = isinstance(value, Optimizer | ReferenceType | functools.partial | types.ModuleType)
    return built_anew or inspect.isroutine(value) or inspect.isclass(value)


def from_plain(plain: Plain, present: Any) -> Any:
    """Return what `to_plain` was given, in the form of the value that is there at present."""
    if isinstance(plain, dict):
        return _mapping_from_plain(plain, present)
    if isinstance(present, Tensor) and plain is not None:
        return tensor(from_plain(plain, None), dtype=present.dtype, device=present.device)
    if not isinstance(plain, list):
        return plain
    siblings = list(present) if isinstance(present, list | tuple) else []
    siblings += [None] * (len(plain) - len(siblings))
    items = [from_plain(item, sibling) for item, sibling in zip(plain, siblings, strict=False)]
    return tuple(items) if isinstance(present, tuple) else items


def _mapping_from_plain(plain: dict[str, Any], present: Any) -> Any:
    if _NUMBER in plain:
        return float(plain[_NUMBER])
    if isinstance(present, LRScheduler):
        present.load_state_dict(from_plain(plain, present.state_dict()))
        return present
    there = present if isinstance(present, dict) else {}
    pairs = plain.get(_PAIRS, plain.items())
    return type(there)({key: from_plain(item, there.get(key)) for key, item in pairs})
