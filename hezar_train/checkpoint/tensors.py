"""Named tensors <-> a safetensors file.

This module owns the container and is the only one to import the library. It refuses pickles, and tensors that have no
dense values of a known type.

Files are written here tensor by tensor, so a model on a GPU needs no second copy of itself in host memory and every
byte is hashed on its way out; they are read by the library, with `pread` and not through a memory map: a file that
shrinks under a map kills the process with SIGBUS.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open
from torch import Tensor

from hezar_train.errors import CheckpointError

__all__ = ["check_storable", "raw_bytes", "read_tensors", "tensor_file"]

HEADER_ALIGNMENT = 8
MEMORY_ALIGNMENT = 64  # what torch's own allocator gives; some kernels round differently on other addresses
COMPLEX_ENTRY = "complex128"  # a dtype that the format lacks: stored as pairs of float64, listed under this entry


def check_storable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose values cannot be written."""
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"{name} is not initialised yet (a lazy module): run one batch through the model first")
    if hasattr(tensor, "device_mesh"):
        raise CheckpointError(f"{name} is sharded over processes: gather_shards can save it, Parts.gather cannot")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values to save")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is {tensor.layout} of {tensor.dtype}; only dense tensors can be saved")
    _spec(name, tensor)


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
            return {name: _settled(file.get_tensor(name), name in paired) for name in wanted}
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's values as they are stored: on the host, dense, row by row."""
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


def _settled(tensor: Tensor, is_paired: bool) -> Tensor:
    own = tensor if tensor.data_ptr() % MEMORY_ALIGNMENT == 0 else tensor.clone()
    return torch.view_as_complex(own) if is_paired else own
