"""How values are stored: state dicts as JSON plus named tensors, named tensors as a safetensors file; no pickle.

This module owns both encodings and is the only one to import safetensors. `pack` takes a tree of plain values, tensors
and arrays apart, `unpack` puts the equal tree together, types included (a tuple stays a tuple, the key 0 stays an int).
`tensor_file` and `read_tensors` write and read the tensors. It refuses every type that it cannot give back exactly,
pickles, and tensors that have no dense values of a known type; it never names a class or a function to import.

Plain JSON stands for itself. Everything else is an object with one key that starts with "$":

    {"$tensor": "state.0.exp_avg"}                a tensor, stored under that name
    {"$array": {"tensor": ..., "dtype": ..., "shape": ...}}    a numpy array, its bytes in a uint8 tensor
    {"$scalar": {"dtype": ..., "hex": ...}}       a numpy scalar
    {"$tuple": [...]}  {"$float": "nan"}  {"$bytes": base64}
    {"$dict": [[key, value], ...]}                a dict with keys that are not strings, or that start with "$"
    {"$ordered": [[key, value], ...]}  {"$counter": [[key, value], ...]}    OrderedDict, Counter

Tensor files are written here tensor by tensor, so a model on a GPU needs no second copy of itself in host memory and
every byte is hashed on its way out; they are read by the library, with `pread` and not through a memory map: a file
that shrinks under a map kills the process with SIGBUS.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, TensorSpec, safe_open
from torch import Tensor

from hezar_train.errors import CheckpointError

__all__ = [
    "JSON",
    "check_storable",
    "pack",
    "raw_bytes",
    "read_tensors",
    "tensor_file",
    "tensor_names",
    "unpack",
]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

ARRAY_KINDS = "biufcmMSU"  # numpy's letters for dtypes that a short text names in full: no objects, no records
SCALAR_KINDS = "biufcmM"
KEY_TYPES = (str, int, float, bool, bytes, tuple, type(None))
DICT_TAGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
RESERVED_TENSOR_NAME = "__metadata__"  # the safetensors header keeps its own entry under this name

HEADER_ALIGNMENT = 8
MEMORY_ALIGNMENT = 64  # what torch's own allocator gives; some kernels round differently on other addresses
COMPLEX_ENTRY = "complex128"  # a dtype that the format lacks: stored as pairs of float64, listed under this entry


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
        # By exact type: a subclass (IntEnum, a named tuple) would come back as something else.
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


def tensor_file(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, moving one tensor at a time to the host."""
    # Wide types first keeps every tensor aligned without padding, which the format does not allow.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield _header(ordered)
    for _, tensor in ordered:
        yield raw_bytes(tensor)


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read all tensors of a file, or those named, into memory of their own."""
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            paired = set(json.loads((file.metadata() or {}).get(COMPLEX_ENTRY, "[]")))
            wanted = [name for name in file.offset_keys() if names is None or name in names]
            return {name: _aligned(file.get_tensor(name), name in paired) for name in wanted}
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def check_storable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose values cannot be written."""
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"{name} is not initialised yet (a lazy module): run one batch through the model first")
    if hasattr(tensor, "device_mesh"):
        raise CheckpointError(f"{name} is sharded over processes: gather_shards can save it, Contents.gather cannot")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values to save")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is {tensor.layout} of {tensor.dtype}; only dense tensors can be saved")
    _spec(name, tensor)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's values as they are stored: on the host, dense, row by row."""
    # A conjugated or negated view has its sign in a flag, not in its bytes: it is resolved first.
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    paired = json.dumps([name for name, tensor in ordered if tensor.dtype is torch.complex128])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", COMPLEX_ENTRY: paired}}
    end = 0
    for name, tensor in ordered:
        spec, start, end = _spec(name, tensor), end, end + tensor.nbytes
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    is_paired = tensor.dtype is torch.complex128
    dtype = "float64" if is_paired else str(tensor.dtype).removeprefix("torch.")
    shape = [*tensor.shape, 2] if is_paired else list(tensor.shape)
    try:
        return TensorSpec(dtype=dtype, shape=shape, data_ptr=0, data_len=tensor.nbytes)
    except SafetensorError as error:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors cannot store: {error}") from error


def _aligned(tensor: Tensor, is_paired: bool) -> Tensor:
    """Return a tensor that was read, in memory aligned as torch aligns its own, complex again if it was."""
    own = tensor if tensor.data_ptr() % MEMORY_ALIGNMENT == 0 else tensor.clone()
    return torch.view_as_complex(own) if is_paired else own
