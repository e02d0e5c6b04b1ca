"""What processes send one another: plain values, tensors and arrays as bytes, and back as they were, without a pickle.

A message is a text that says what the values are, and behind it the numbers of its tensors and arrays, as they lie in
memory. Tuples stay tuples, keys that are no text stay what they are, and a number of NumPy's keeps its type. Whoever
reads a message makes no object but these: no class is named in it, and none is looked up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hezar_train.errors import DataError

__all__ = ["pack_message", "unpack_message"]

SIZE_BYTES = 8  # of the number that says how long the text is
CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
}
PLAIN = (bool, int, float, str, type(None))
KINDS_OF_ARRAYS = "biufcUSMm"  # what NumPy calls numbers, texts and times: all that has no object in it
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
        *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        torch.complex128,
    )
}


def pack_message(value: Any) -> bytes:
    """Return a value as bytes; raise if something in it is neither plain nor a tensor or an array."""
    buffers: list[bytes] = []
    text = json.dumps(_packed(value, buffers)).encode()
    return b"".join([len(text).to_bytes(SIZE_BYTES, "little"), text, *buffers])


def unpack_message(data: bytes, device: torch.device) -> Any:
    """Return the value of a message; what was a tensor on the run's device is one on this process's `device`."""
    end = SIZE_BYTES + int.from_bytes(data[:SIZE_BYTES], "little")
    return _Reader(data, end, device).value(json.loads(data[SIZE_BYTES:end]))


def _packed(value: Any, buffers: list[bytes]) -> Any:
    """Return what JSON can hold of a value: itself, or a list of its kind and its parts."""
    if isinstance(value, PLAIN) and not isinstance(value, np.generic):  # NumPy's float64 is a float, too
        return value
    if isinstance(value, Mapping):
        return ["dict", [[_packed(key, buffers), _packed(one, buffers)] for key, one in value.items()]]
    if isinstance(value, tuple | list | set | frozenset):
        name = next(kind.__name__ for kind in (tuple, list, set, frozenset) if isinstance(value, kind))
        return [name, [_packed(one, buffers) for one in value]]
    return _packed_numbers(value, buffers)


def _packed_numbers(value: Any, buffers: list[bytes]) -> Any:
    """Put what lies in memory as it is into a buffer; return what it is."""
    if isinstance(value, torch.Tensor):
        return _packed_tensor(value, buffers)
    if isinstance(value, np.ndarray):
        return _packed_array(value, buffers)
    if isinstance(value, np.generic):
        return ["number", _packed_array(np.asarray(value), buffers)]
    if isinstance(value, bytes):
        buffers.append(value)
        return ["bytes", len(value)]
    raise DataError(
        f"a {type(value).__name__} cannot be sent from one process to another: expected numbers, texts, lists, tuples, "
        "dicts, tensors or arrays. Turn it into these (a prediction: where it is made)."
    )


def _packed_tensor(value: torch.Tensor, buffers: list[bytes]) -> Any:
    if value.layout != torch.strided or str(value.dtype) not in DTYPES:
        raise DataError(f"a tensor of {value.layout} and {value.dtype} cannot be sent from one process to another")
    plain = value.detach().cpu().contiguous()
    buffers.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return ["tensor", str(plain.dtype), list(plain.shape), value.device.type != "cpu"]


def _packed_array(value: np.ndarray, buffers: list[bytes]) -> Any:
    if value.dtype.kind not in KINDS_OF_ARRAYS or value.dtype.hasobject:
        raise DataError(
            f"an array of dtype {value.dtype} cannot be sent from one process to another: expected numbers, texts or "
            "times. Turn it into a list, or into such an array."
        )
    buffers.append(np.ascontiguousarray(value).tobytes())
    return ["array", value.dtype.str, list(value.shape)]


class _Reader:
    """Read the values of one message, and its buffers in the order in which they were written."""

    def __init__(self, data: bytes, place: int, device: torch.device) -> None:
        self._data, self._place, self._device = data, place, device

    def value(self, packed: Any) -> Any:
        """Return what a packed value was."""
        if isinstance(packed, PLAIN):
            return packed
        match packed:
            case ["dict", list(parts)]:
                return {self.value(key): self.value(one) for key, one in parts}
            case [("tuple" | "list" | "set" | "frozenset") as name, list(parts)]:
                return CONTAINERS[name](map(self.value, parts))
        return self._numbers(packed)

    def _numbers(self, packed: Any) -> Any:
        match packed:
            case ["tensor", str(dtype), list(shape), bool(is_on_device)]:
                return self._tensor(DTYPES[dtype], shape).to(self._device if is_on_device else "cpu")
            case ["array", str(dtype), list(shape)] if np.dtype(dtype).kind in KINDS_OF_ARRAYS:
                return self._array(np.dtype(dtype), shape)
            case ["number", ["array", str(), []] as array]:
                return self._numbers(array)[()]
            case ["bytes", int(size)]:
                return self._take(size)
        raise DataError(f"a message from another process holds {str(packed)[:80]}, which no process sends")

    def _take(self, size: int) -> bytes:
        self._place += size
        return self._data[self._place - size : self._place]

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self._take(size)), dtype=dtype).reshape(shape)

    def _array(self, dtype: np.dtype[Any], shape: list[int]) -> Any:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # a copy: what comes from bytes cannot be written to
        return np.frombuffer(self._take(size), dtype).reshape(shape).copy() if size else np.empty(shape, dtype)
