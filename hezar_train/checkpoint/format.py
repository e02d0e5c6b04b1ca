"""How values are stored: state dicts as JSON plus named tensors, named tensors as a safetensors file; no pickle.

This module owns both encodings and is the only one to import safetensors. `pack` takes a tree of plain values, tensors
and arrays apart, `unpack` puts the equal tree together, types included (a tuple stays a tuple, the key 0 stays an int).
`tensor_file` and `read_tensors` write and read the tensors. It refuses every type that it cannot give back exactly,
pickles, and tensors that have no dense values of a known type; it never names a class or a function to import.

Reading believes nothing: `unpack` and `needed_tensors` accept exactly what `pack` can have written, node by node, and
raise a `CheckpointError` for anything else. A dtype that a file names is held against the few kinds that are written
before numpy or torch see it: one that holds pointers would turn the file's bytes into addresses.

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
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, TensorSpec, safe_open
from torch import Tensor

from hezar_train.errors import CheckpointError
from hezar_train.run_folder import refuse_odd_file

__all__ = [
    "JSON",
    "TENSOR_DTYPES",
    "ArrayForm",
    "StoredTensor",
    "check_storable",
    "needed_tensors",
    "pack",
    "parse_json",
    "raw_bytes",
    "read_parts",
    "read_tensors",
    "refuse_large_json",
    "refuse_odd_bools",
    "stored_note",
    "stored_shapes",
    "stored_tensors",
    "tensor_file",
    "tensor_names",
    "unpack",
]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

ARRAY_KINDS = "biufcmMSU"  # numpy's letters for dtypes that a short text names in full: no objects, no records
SCALAR_KINDS = "biufcmM"
KEY_TYPES = (str, int, float, bool, bytes, tuple, type(None))
DICT_TAGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
DTYPE_NAME = re.compile(r"[<>|](?:[biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?)")
"""How numpy names the dtypes of those kinds; nothing else reaches `np.dtype`."""
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
LARGEST_CHARACTER = 0x10FFFF

DEEPEST_TREE = 100
"""Containers inside one another, when saving and when loading."""
MOST_JSON_BYTES = 256 << 20
MOST_JSON_NODES = 16_000_000
"""By brackets and commas: no more values than that. Larger things are tensors or arrays."""
MOST_DIMENSIONS = 32
MOST_ARRAY_BYTES = 1 << 48
MOST_SHOWN = 80
FEWEST_KEYS_CHECKED = 64
MOST_KEYS_OF_A_HASH = 8
TENSOR_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
}
"""What a tensor of a checkpoint may be made of, by name."""
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
        raise _too_deep(prefix) from None
    return packed, packer.tensors


def unpack(packed: JSON, tensors: Mapping[str, Tensor]) -> Any:
    """Put the tree together again; the tensors in it are those given. Whatever `pack` cannot have made is refused."""

    def find(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"the stored state needs the tensor {name!r}, which is not there")
        return tensors[name]

    return _Unpacker(find, lambda form: form.values(find(form.tensor))).tree(packed)


def needed_tensors(packed: JSON) -> dict[str, ArrayForm | None]:
    """Check a packed tree as `unpack` does, and return the names of the tensors that it needs.

    A name that an array's bytes are stored under comes with the array's form.
    """
    found: dict[str, ArrayForm | None] = {}

    def note(name: str) -> None:
        found.setdefault(name)

    def note_array(form: ArrayForm) -> None:
        found[form.tensor] = form

    _Unpacker(note, note_array).tree(packed)
    return found


def tensor_names(packed: JSON) -> set[str]:
    """Return the names of all tensors that a packed tree needs."""
    return set(needed_tensors(packed))


def parse_json(data: bytes, name: str) -> Any:
    """Read JSON as this package writes it, within the limits of `refuse_large_json`; `name` is for errors."""
    refuse_large_json(data, name)
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{name} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error


def refuse_large_json(data: bytes, name: str) -> None:
    """Raise if a JSON text is larger than any that is read again, told by its bytes before it is parsed."""
    if len(data) > MOST_JSON_BYTES or sum(map(data.count, (b",", b"[", b"{"))) > MOST_JSON_NODES:
        raise CheckpointError(
            f"{name} has {len(data):,} bytes of JSON; at most {MOST_JSON_BYTES:,} bytes and {MOST_JSON_NODES:,} values "
            "are saved and read. Keep large things as tensors or numpy arrays."
        )


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _too_deep(prefix: str) -> CheckpointError:
    return CheckpointError(f"{prefix or 'the state'} is nested too deeply to be saved, or contains itself")


class _Packer:
    def __init__(self, taken: Collection[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._taken = {*taken, RESERVED_TENSOR_NAME}
        self._depth = 0

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
        self._enter(path)
        items = [self.pack(value, _join(path, index)) for index, value in enumerate(values)]
        self._depth -= 1
        return items

    def _enter(self, path: str) -> None:
        self._depth += 1
        if self._depth > DEEPEST_TREE:
            raise _too_deep(path.partition(".")[0])

    def _mapping(self, mapping: dict[Any, Any], path: str) -> JSON:
        self._enter(path)
        pairs = [(self._key(key, path), self.pack(value, _join(path, key))) for key, value in mapping.items()]
        self._depth -= 1
        if type(mapping) is dict and all(type(key) is str and not key.startswith("$") for key in mapping):
            return {str(key): value for key, value in pairs}
        return {DICT_TAGS[type(mapping)]: [list(pair) for pair in pairs]}

    def _key(self, key: Any, path: str) -> JSON:
        if type(key) not in KEY_TYPES or (type(key) is tuple and not all(map(_is_key, key))):
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


def _is_key(part: Any) -> bool:
    """Tell whether a part of a tuple that is a key comes back equal, with an equal hash."""
    if type(part) is tuple:
        return all(map(_is_key, part))
    return type(part) in KEY_TYPES or isinstance(part, np.generic)


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


@dataclass(frozen=True)
class ArrayForm:
    """A numpy array without its values, and the name of the tensor that holds its bytes."""

    tensor: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, body: JSON) -> ArrayForm:
        """Read the body of an "$array"; refuse what numpy must not be asked for."""
        if not isinstance(body, dict) or body.keys() != {"tensor", "dtype", "shape"}:
            raise _malformed("$array", body)
        name, shape = body["tensor"], body["shape"]
        if not isinstance(name, str) or not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
            raise _malformed("$array", body)
        sizes = [size for size in shape if type(size) is int and size >= 0]
        dtype = _dtype(body["dtype"], ARRAY_KINDS)
        # Values without bytes are counted by nothing but the shape, so they have a limit of their own.
        if len(sizes) < len(shape) or math.prod(sizes) * max(dtype.itemsize, 1) > MOST_ARRAY_BYTES:
            raise _malformed("$array", body)
        return cls(name, dtype, tuple(sizes))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def values(self, stored: Tensor) -> Any:
        """Make the array of its bytes."""
        if stored.dtype is not torch.uint8 or stored.dim() != 1 or stored.numel() != self.nbytes:
            raise CheckpointError(
                f"the tensor {self.tensor!r} must be {self.nbytes} bytes for an array of {self.dtype} {self.shape}; it "
                f"is {stored.dtype} {list(stored.shape)}"
            )
        data = bytearray(stored.numpy().tobytes())
        _refuse_values(data, self.dtype)
        try:
            return np.ndarray(self.shape, dtype=self.dtype, buffer=data)
        except ValueError as error:
            raise CheckpointError(f"the array {self.tensor!r} of shape {self.shape} cannot be made: {error}") from error


def _dtype(name: JSON, kinds: str) -> np.dtype[Any]:
    """Return the dtype of a name that numpy itself gives to one of these kinds."""
    if not isinstance(name, str) or not DTYPE_NAME.fullmatch(name) or name[1] not in kinds:
        raise CheckpointError(f"the stored state names the dtype {name!r}, which no saved array has")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise CheckpointError(f"the stored state names the dtype {name!r}: {error}") from error
    if dtype.str != name or dtype.kind not in kinds or dtype.hasobject:
        raise CheckpointError(f"the stored state names the dtype {name!r}, which no saved array has")
    return dtype


def _refuse_values(data: bytes | bytearray, dtype: np.dtype[Any]) -> None:
    """Refuse bytes that stand for no value: compiled code counts on a bool being 0 or 1, and on real characters."""
    if not data:
        return
    if dtype.kind == "b" and max(data) > 1:
        raise CheckpointError("a stored array of bools has bytes that are neither 0 nor 1")
    if dtype.kind == "U" and np.frombuffer(data, f"{dtype.str[0]}u4").max() > LARGEST_CHARACTER:
        raise CheckpointError("a stored array of text has bytes that are no characters")


def _scalar(body: JSON) -> Any:
    if not isinstance(body, dict) or body.keys() != {"dtype", "hex"} or not isinstance(body["hex"], str):
        raise _malformed("$scalar", body)
    dtype = _dtype(body["dtype"], SCALAR_KINDS)
    try:
        data = bytes.fromhex(body["hex"])
    except ValueError:
        raise _malformed("$scalar", body) from None
    if len(data) != dtype.itemsize:
        raise _malformed("$scalar", body)
    _refuse_values(data, dtype)
    return np.frombuffer(data, dtype)[0]


class _Unpacker:
    """Put a tree together, node by node; tensors and arrays are made by the functions given."""

    def __init__(self, tensor: Callable[[str], Any], array: Callable[[ArrayForm], Any]) -> None:
        self._tensor, self._array = tensor, array
        self._depth = 0
        self._tags: dict[str, Callable[[Any], Any]] = {
            "$tensor": self._named_tensor,
            "$array": lambda body: self._array(ArrayForm.of(body)),
            "$scalar": _scalar,
            "$tuple": lambda body: tuple(self._items(body, "$tuple")),
            "$float": _float,
            "$bytes": _bytes,
            "$dict": lambda body: self._mapping(body, dict, "$dict"),
            "$ordered": lambda body: self._mapping(body, OrderedDict, "$ordered"),
            "$counter": lambda body: Counter(self._mapping(body, dict, "$counter")),
        }

    def tree(self, packed: JSON) -> Any:
        try:
            return self._value(packed)
        except RecursionError:
            raise CheckpointError("the stored state is nested too deeply") from None

    def _value(self, packed: JSON) -> Any:
        if isinstance(packed, list):
            return self._items(packed, "list")
        if not isinstance(packed, dict):
            return packed
        if tag := next((key for key in packed if key.startswith("$")), None):
            return self._tagged(tag, packed)
        self._enter()
        made = {key: self._value(value) for key, value in packed.items()}
        self._depth -= 1
        return made

    def _tagged(self, tag: str, packed: dict[str, JSON]) -> Any:
        if tag not in self._tags:
            raise CheckpointError(
                f"the stored state has the unknown tag {tag!r}: a newer version of hezar_train wrote it"
            )
        if len(packed) > 1:
            raise _malformed(tag, list(packed))
        return self._tags[tag](packed[tag])

    def _named_tensor(self, name: Any) -> Any:
        if not isinstance(name, str):
            raise _malformed("$tensor", name)
        return self._tensor(name)

    def _items(self, body: Any, tag: str) -> list[Any]:
        if not isinstance(body, list):
            raise _malformed(tag, body)
        self._enter()
        items = [self._value(item) for item in body]
        self._depth -= 1
        return items

    def _mapping(self, body: Any, kind: type[dict[Any, Any]], tag: str) -> dict[Any, Any]:
        if not isinstance(body, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in body):
            raise _malformed(tag, body)
        self._enter()
        keys = [self._key(key) for key, _ in body]
        if len(keys) > FEWEST_KEYS_CHECKED and len(keys) > MOST_KEYS_OF_A_HASH * len(set(map(hash, keys))):
            raise CheckpointError(
                "a stored dict has keys that were chosen to have one hash: it would take hours to make"
            )
        made = kind(zip(keys, [self._value(value) for _, value in body], strict=True))
        if len(made) < len(keys):
            raise CheckpointError("a stored dict has a key twice")
        self._depth -= 1
        return made

    def _key(self, packed: Any) -> Any:
        if packed is None or isinstance(packed, str | int | float):
            return packed
        if not isinstance(packed, dict) or len(packed) != 1 or not packed.keys() & {"$float", "$bytes", "$tuple"}:
            raise CheckpointError(f"a stored dict has the key {_shown(packed)}, which no saved dict has")
        if "$tuple" not in packed:
            return self._value(packed)
        return self._tuple_key(packed["$tuple"])

    def _tuple_key(self, parts: Any) -> tuple[Any, ...]:
        if not isinstance(parts, list):
            raise _malformed("$tuple", parts)
        self._enter()
        is_scalar = [isinstance(part, dict) and part.keys() == {"$scalar"} for part in parts]
        made = tuple(self._value(p) if number else self._key(p) for p, number in zip(parts, is_scalar, strict=True))
        self._depth -= 1
        return made

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST_TREE:
            raise CheckpointError(f"the stored state is nested more than {DEEPEST_TREE} times")


def _float(body: Any) -> float:
    if not isinstance(body, str) or body not in FLOATS:
        raise _malformed("$float", body)
    return FLOATS[body]


def _bytes(body: Any) -> bytes:
    try:
        if isinstance(body, str):
            return base64.b64decode(body, validate=True)
    except ValueError:  # binascii.Error, or a character beyond ASCII
        pass
    raise _malformed("$bytes", body)


def _malformed(tag: str, body: Any) -> CheckpointError:
    return CheckpointError(f"the stored state is malformed: {tag} with {_shown(body)}")


def _shown(value: Any) -> str:
    text = ascii(value) if not isinstance(value, list | dict) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def tensor_file(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, moving one tensor at a time to the host."""
    # Wide types first keeps every tensor aligned without padding, which the format does not allow.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield _header(ordered)
    for _, tensor in ordered:
        yield raw_bytes(tensor)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file without its values."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    def is_bytes(self, count: int) -> bool:
        """Tell whether it is a row of so many bytes."""
        return self.dtype == "U8" and self.shape == (count,)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return what a file holds, without reading any tensor."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return {name: StoredTensor(str(one.get_dtype()), tuple(one.get_shape())) for name, one in slices.items()}


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape that each tensor of a file has once it is read."""
    with _opened(path) as file:
        paired = _paired(file, path)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
        return {name: shape[:-1] if name in paired else shape for name, shape in shapes.items()}


def stored_note(path: Path, key: str) -> Any:
    """Return the JSON that a file's header holds under a key; None if it holds nothing there."""
    with _opened(path) as file:
        text = (file.metadata() or {}).get(key)
    return None if text is None else parse_json(text.encode(), f"{path}: {key}")


def read_parts(path: Path, parts: Mapping[str, tuple[slice, ...]]) -> dict[str, Tensor]:
    """Read a part of each named tensor into memory of its own; of the rest nothing is read."""
    with _opened(path) as file:
        paired = _paired(file, path)
        return {name: _read(file, name, name in paired, part) for name, part in parts.items()}


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read all tensors of a file, or those named, into memory of their own."""
    with _opened(path) as file:
        paired = _paired(file, path)
        wanted = [name for name in file.offset_keys() if names is None or name in names]
        return {name: _read(file, name, name in paired) for name in wanted}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    # The library checks the header against the size of the file; whatever it objects to is a damaged file.
    try:
        refuse_odd_file(path)
        with safe_open(path, framework="pt", backend="pread") as file:
            yield file
    except (SafetensorError, OSError, RuntimeError, AttributeError, TypeError) as error:  # the last: sizes of 64 bits
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _paired(file: Any, path: Path) -> set[str]:
    """Return the names of the tensors that are pairs of float64 and stand for complex numbers."""
    listed = parse_json((file.metadata() or {}).get(COMPLEX_ENTRY, "[]").encode(), f"{path}: {COMPLEX_ENTRY}")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"{path}: {COMPLEX_ENTRY} must be a list of names")
    return set(listed)


def _read(file: Any, name: str, is_paired: bool, part: tuple[slice, ...] | None = None) -> Tensor:
    tensor: Tensor = file.get_tensor(name) if part is None else _part(file.get_slice(name), part)
    if tensor.dtype not in TENSOR_DTYPES.values():
        raise CheckpointError(f"the tensor {name!r} has dtype {tensor.dtype}, which no saved tensor has")
    refuse_odd_bools(name, tensor)
    return _aligned(tensor, is_paired)


def _part(stored: Any, part: tuple[slice, ...]) -> Tensor:
    is_empty = any(one.start >= one.stop for one in part)
    # Of an empty part the library has no shape, so a value beside it tells the type.
    found: Tensor = stored[tuple(slice(0, 1) for _ in part) if is_empty else (part or ...)]
    if not is_empty:
        return found
    return found.new_empty([*(max(one.stop - one.start, 0) for one in part), *stored.get_shape()[len(part) :]])


def refuse_odd_bools(name: str, tensor: Tensor) -> None:
    """Raise if a tensor of bools that was read from a file has a byte that stands for none."""
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError(f"the tensor {name!r} of bools has bytes that are neither 0 nor 1")


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
