"""Nested values <-> JSON plus named tensors, without pickle.

This module owns the encoding of state dicts: `pack` takes a tree of plain values, tensors and arrays apart, `unpack`
puts the equal tree together, types included (a tuple stays a tuple, the key 0 stays an int). It refuses every type
that it cannot give back exactly, and it never names a class or a function to import.

Plain JSON stands for itself. Everything else is an object with one key that starts with "$":

    {"$tensor": "state.0.exp_avg"}                a tensor, stored under that name
    {"$array": {"tensor": ..., "dtype": ..., "shape": ...}}    a numpy array, its bytes in a uint8 tensor
    {"$scalar": {"dtype": ..., "hex": ...}}       a numpy scalar
    {"$tuple": [...]}  {"$float": "nan"}  {"$bytes": base64}
    {"$dict": [[key, value], ...]}                a dict with keys that are not strings, or that start with "$"
    {"$ordered": [[key, value], ...]}  {"$counter": [[key, value], ...]}    OrderedDict, Counter
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hezar_train.errors import CheckpointError

__all__ = ["JSON", "pack", "tensor_names", "unpack"]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

RESERVED_TENSOR_NAME = "__metadata__"  # the safetensors header keeps its own entry under this name
ARRAY_KINDS = "biufcmMSU"
SCALAR_KINDS = "biufcmM"
KEY_TYPES = (str, int, float, bool, bytes, tuple, type(None))
DICT_TAGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def pack(tree: Any, prefix: str = "", taken: Collection[str] = ()) -> tuple[JSON, dict[str, Tensor]]:
    """Take a tree apart; tensors are referred to, not copied, and named by their path unless the name is taken."""
    packer = _Packer(taken)
    try:
        packed = packer.pack(tree, prefix)
    except RecursionError:
        raise CheckpointError(f"{prefix or 'the state'} is nested too deeply to be saved, or contains itself") from None
    return packed, packer.tensors


def unpack(packed: JSON, tensors: dict[str, Tensor]) -> Any:
    """Put the tree together again; the tensors in it are those given."""
    try:
        return _unpack(packed, tensors)
    except (KeyError, TypeError, binascii.Error) as error:
        raise CheckpointError(f"the stored state is malformed: {error!r}") from error


def tensor_names(packed: JSON) -> set[str]:
    """Return the names of all tensors that a packed tree needs."""
    return set(_tensor_names(packed))


class _Packer:
    def __init__(self, taken: Collection[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._taken = {*taken, RESERVED_TENSOR_NAME}

    def pack(self, value: Any, path: str) -> JSON:
        kind = type(value)
        if value is None or kind in {bool, int, str}:
            return value  # type: ignore[no-any-return]
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if kind in DICT_TAGS:
            return self._mapping(value, path)
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: str) -> JSON:
        if isinstance(value, Tensor):
            return {"$tensor": self._store(value.detach(), path)}
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if type(value) is np.ndarray and value.dtype.kind in ARRAY_KINDS:
            name = self._store(_bytes_tensor(value.tobytes()), path)
            return {"$array": {"tensor": name, "dtype": value.dtype.str, "shape": list(value.shape)}}
        if isinstance(value, np.generic) and value.dtype.kind in SCALAR_KINDS:
            return {"$scalar": {"dtype": value.dtype.str, "hex": value.tobytes().hex()}}
        raise _unknown(value, path, "value")

    def _items(self, values: list[Any] | tuple[Any, ...], path: str) -> list[JSON]:
        return [self.pack(value, _join(path, index)) for index, value in enumerate(values)]

    def _mapping(self, mapping: dict[Any, Any], path: str) -> JSON:
        pairs = [(self._key(key, path), self.pack(value, _join(path, key))) for key, value in mapping.items()]
        if type(mapping) is dict and all(type(key) is str and not key.startswith("$") for key in mapping):
            return {str(key): value for key, value in pairs}
        return {DICT_TAGS[type(mapping)]: [list(pair) for pair in pairs]}

    def _key(self, key: Any, path: str) -> JSON:
        if type(key) not in KEY_TYPES:
            raise _unknown(key, path, "key")
        return self.pack(key, _join(path, "key"))

    def _store(self, tensor: Tensor, path: str) -> str:
        # Names are for the reader; the JSON says which tensor is meant, so any unique name does.
        readable = (path or "value").encode("utf-8", "replace").decode("utf-8")
        name, number = readable, 2
        while name in self._taken:
            name, number = f"{readable}~{number}", number + 1
        self._taken.add(name)
        self.tensors[name] = tensor
        return name


def _unpack(packed: JSON, tensors: dict[str, Tensor]) -> Any:
    if isinstance(packed, list):
        return [_unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    tag = next(iter(packed), "")
    if not tag.startswith("$"):
        return {key: _unpack(value, tensors) for key, value in packed.items()}
    if tag not in _UNPACKERS:
        raise CheckpointError(f"the stored state has the unknown tag {tag!r}: a newer version of hezar_train wrote it")
    return _UNPACKERS[tag](packed[tag], tensors)


def _tensor(name: Any, tensors: dict[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the stored state needs the tensor {name!r}, which is not there")
    return tensors[name]


def _array(body: Any, tensors: dict[str, Tensor]) -> Any:
    data = _tensor(body["tensor"], tensors).numpy().tobytes()
    return np.ndarray(body["shape"], dtype=body["dtype"], buffer=bytearray(data))


def _scalar(body: Any, _tensors: dict[str, Tensor]) -> Any:
    return np.frombuffer(bytes.fromhex(body["hex"]), dtype=body["dtype"])[0]


def _pairs(body: Any, tensors: dict[str, Tensor]) -> Iterator[tuple[Any, Any]]:
    return ((_unpack(key, tensors), _unpack(value, tensors)) for key, value in body)


_UNPACKERS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "$tensor": _tensor,
    "$array": _array,
    "$scalar": _scalar,
    "$tuple": lambda body, tensors: tuple(_unpack(item, tensors) for item in body),
    "$float": lambda body, _: float(body),
    "$bytes": lambda body, _: base64.b64decode(body, validate=True),
    "$dict": lambda body, tensors: dict(_pairs(body, tensors)),
    "$ordered": lambda body, tensors: OrderedDict(_pairs(body, tensors)),
    "$counter": lambda body, tensors: Counter(dict(_pairs(body, tensors))),
}


def _tensor_names(packed: JSON) -> Iterator[str]:
    if isinstance(packed, list):
        for item in packed:
            yield from _tensor_names(item)
    elif isinstance(packed, dict):
        for key, value in packed.items():
            if key == "$tensor":
                yield str(value)
            elif key == "$array" and isinstance(value, dict):
                yield str(value["tensor"])
            else:
                yield from _tensor_names(value)


def _bytes_tensor(data: bytes) -> Tensor:
    # `frombuffer` refuses an empty buffer.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _join(path: str, part: object) -> str:
    return f"{path}.{part}" if path else str(part)


def _unknown(value: Any, path: str, role: str) -> CheckpointError:
    kind = type(value)
    detail = f" of dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else ""
    return CheckpointError(
        f"the {role} at {path or 'the top'} is a {kind.__module__}.{kind.__qualname__}{detail}, which cannot be saved. "
        "State must be made of tensors and plain values: dict, list, tuple, str, int, float, bool, None, bytes, "
        "torch.Tensor, numpy arrays and numbers. Convert it in state_dict() and back in load_state_dict()."
    )
