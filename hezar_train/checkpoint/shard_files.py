"""Shard files: the box of a tensor that each process holds, how it is written, and how any other box is read again.

This module owns the files in which processes keep their shards of a checkpoint. Process 2 of 3 writes

    model.shard-00002-of-00003.safetensors        its boxes of the model's tensors, by the tensors' names
    optimizer.shard-00002-of-00003.safetensors    the same for the optimizer
    shards-00002-of-00003.json                    {"model": {name: {"dtype", "shape", "offsets", "sizes"}}, ...}

so a reader with any number of processes finds the boxes that overlap its own, and reads no others. It refuses an index
that does not say what lies in its file, and a tensor whose boxes overlap or do not cover it. Nothing here talks to
another process, but for `whole`.

Torch's own sharded writer (`HuggingFaceStorageWriter`) is not used: its plan travels between the processes as a
pickle, it cannot store tied weights, and it neither hashes what it writes nor survives a file that shrinks.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hezar_train.checkpoint.format import (
    MOST_DIMENSIONS,
    MOST_JSON_BYTES,
    TENSOR_DTYPES,
    StoredTensor,
    parse_json,
    read_parts,
    read_tensors,
    stored_shapes,
    stored_tensors,
    tensor_file,
)
from hezar_train.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE, Draft, Manifest, read_manifest
from hezar_train.errors import CheckpointError
from hezar_train.run_folder import read_file

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "FILES",
    "INDEX_NAME",
    "SHARD_NAME",
    "Box",
    "Place",
    "ShardIndex",
    "are_grid",
    "local_part",
    "place_of",
    "whole",
    "write_shards",
]

FILES = {"model": MODEL_FILE, "optimizer": OPTIMIZER_FILE}
SHARD_NAME = re.compile(r"(?:model|optimizer)\.shard-\d{5,}-of-\d{5,}\.safetensors")
STORED_WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
                 "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
                 "I32": 4, "U32": 4, "F32": 4}  # fmt: skip
"""Bytes of a value by the name that safetensors has for its type, where it has fewer than eight."""
INDEX_NAME = re.compile(r"shards-(\d{5,}-of-\d{5,})\.json")


@dataclass(frozen=True, slots=True)  # there are as many as processes times tensors
class Box:
    """A box of a tensor: where it begins and how far it reaches in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box:
        """Return what two boxes have in common; it may be empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        return Box(starts, tuple(max(end - start, 0) for start, end in zip(starts, ends, strict=True)))

    def slices(self, origin: Box) -> tuple[slice, ...]:
        """Return how to cut this box out of the values of `origin`."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, origin.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @property
    def cuts(self) -> tuple[slice, ...]:
        """How to cut this box out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def is_in(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a tensor of a shape has all of this box."""
        return len(shape) == len(self.sizes) and all(map(int.__le__, self._ends(), shape))

    def cut(self, values: Tensor) -> Tensor:
        """Return this box of a whole tensor, in the same memory."""
        return values[self.cuts]

    def _ends(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Place:
    """Where the part of a tensor that this process holds belongs."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    is_first: bool
    """Whether no process before this one holds the same box."""


def place_of(tensor: Tensor) -> Place | None:
    """Return the place of a sharded tensor's local part; None for a plain tensor, which is whole."""
    if (sharded := _sharded(tensor)) is None:
        return None
    # What torch.distributed.checkpoint asks, for any mesh and placement.
    (chunk,) = sharded.__create_chunk_list__()  # type: ignore[no-untyped-call]
    numbers = zip(sharded.device_mesh.get_coordinate() or (), sharded.placements, strict=True)
    is_first = all(number == 0 for number, placement in numbers if not placement.is_shard())
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return Place(tuple(sharded.shape), box, is_first)


def local_part(tensor: Tensor) -> Tensor:
    """Return the values that this process holds, in the same memory."""
    sharded = _sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return all values of a tensor of which this process may hold a part; all processes call this together."""
    sharded = _sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def write_shards(draft: Draft, number: str, shards: Mapping[str, dict[str, tuple[Tensor, Place]]]) -> None:
    """Write one process's boxes; `number` says which process of how many it is."""
    index = {}
    for part, boxes in shards.items():
        draft.write(_shard_name(part, number), tensor_file({name: data for name, (data, _) in boxes.items()}))
        index[part] = {name: _entry(data, place) for name, (data, place) in boxes.items()}
    draft.write(f"shards-{number}.json", [json.dumps(index, indent=1).encode("utf-8")])


@dataclass(frozen=True, slots=True)  # there are as many as processes times tensors
class ShardEntry:
    """What an index says of one box in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box

    @classmethod
    def of(cls, entry: Any, place: str) -> ShardEntry:
        """Read an entry; `place` is for errors."""
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "offsets", "sizes"}:
            raise CheckpointError(f"{place} must have dtype, shape, offsets and sizes")
        dtype = TENSOR_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise CheckpointError(f"{place} is no tensor of a known type")
        shape, offsets, sizes = (_sizes(entry[name], place) for name in ("shape", "offsets", "sizes"))
        if len(offsets) != len(sizes):
            raise CheckpointError(f"{place} has a box of other dimensions than its tensor")
        if not (box := Box(offsets, sizes)).is_in(shape):
            raise CheckpointError(f"{place} has a box that is not inside its tensor")
        return cls(dtype, shape, box)

    def fits(self, stored: StoredTensor | None) -> bool:
        """Tell whether a stored tensor has the values of this box."""
        pair = (2,) if self.dtype is torch.complex128 else ()  # which the format lacks, so it is two float64
        return stored is not None and stored.shape == (*self.box.sizes, *pair)


def _sizes(value: Any, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in value):
        raise CheckpointError(f"{place} has shapes that are none")
    return tuple(value)


class ShardIndex:
    """What a checkpoint's files of tensors hold: those that are whole, and the boxes of those that are in shards."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self._folder = folder
        self._entries: dict[str, dict[str, dict[str, ShardEntry]]] = {part: {} for part in FILES}
        listed = (read_manifest(folder) if manifest is None else manifest).files
        for match in map(INDEX_NAME.fullmatch, sorted(listed)):
            if match is not None:
                self._add(match[0], match[1], listed)
        for part in FILES:
            self._refuse_torn(part)

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each sharded tensor of the "model" or the "optimizer"."""
        return {name: entry.shape for _, boxes in self._files(part) for name, entry in boxes.items()}

    def tensors(self, part: str) -> dict[str, StoredTensor]:
        """Return the tensors of the "model" or the "optimizer" without their values."""
        sharded = {name: StoredTensor("sharded", shape) for name, shape in self.shapes(part).items()}
        return stored_tensors(self._folder / FILES[part]) | sharded

    def read(self, part: str, wanted: Mapping[str, Box]) -> dict[str, Tensor]:
        """Read a box of each wanted tensor, whatever boxes it was stored in."""
        shapes = self.shapes(part)
        if torn := [name for name, box in wanted.items() if name in shapes and not box.is_in(shapes[name])]:
            raise CheckpointError(f"the shards in {self._folder} do not make up {', '.join(torn)}")
        found = {name: torch.empty(wanted[name].sizes, dtype=dtype) for name, dtype in self._dtypes(part, wanted)}
        for file, boxes in self._files(part):
            common = {name: boxes[name].box.overlap(wanted[name]) for name in boxes if name in wanted}
            common = {name: box for name, box in common.items() if box.numel}
            parts = {name: box.slices(boxes[name].box) for name, box in common.items()}
            for name, data in (read_parts(self._folder / file, parts) if parts else {}).items():
                if data.dtype is not found[name].dtype:
                    raise CheckpointError(f"{file} holds {name!r} as {data.dtype}; its index says {found[name].dtype}")
                found[name][common[name].slices(wanted[name])] = data
        return found

    def all_shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the "model" or the "optimizer", in shards or whole."""
        return stored_shapes(self._folder / FILES[part]) | self.shapes(part)

    def widths(self, part: str) -> dict[str, int]:
        """Return the bytes of one value of each tensor of the "model" or the "optimizer"."""
        stored, shapes = stored_tensors(self._folder / FILES[part]), self.all_shapes(part)
        pairs = {name: math.prod(one.shape) // max(math.prod(shapes[name]), 1) for name, one in stored.items()}
        whole_ones = {name: STORED_WIDTHS.get(one.dtype, 8) * pairs[name] for name, one in stored.items()}
        return whole_ones | {name: dtype.itemsize for name, dtype in self._dtypes(part, self.shapes(part))}

    def read_boxes(self, part: str, wanted: Mapping[str, Box]) -> dict[str, Tensor]:
        """Read a box of each wanted tensor, in shards or whole."""
        sharded = self.shapes(part).keys()
        parts = {name: box.cuts for name, box in wanted.items() if name not in sharded}
        found = read_parts(self._folder / FILES[part], parts) if parts else {}
        return found | self.read(part, {name: box for name, box in wanted.items() if name in sharded})

    def read_whole(self, part: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Read all tensors of the "model" or the "optimizer", or those named, each put together of its boxes."""
        shapes = self.shapes(part).items()
        wanted = {name: Box.whole(shape) for name, shape in shapes if names is None or name in names}
        return read_tensors(self._folder / FILES[part], names) | self.read(part, wanted)

    def _add(self, name: str, number: str, listed: Collection[str]) -> None:
        try:
            index = parse_json(read_file(self._folder / name, MOST_JSON_BYTES), name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        if not isinstance(index, dict) or not index.keys() <= FILES.keys():
            raise CheckpointError(f"{name} tells of other things than {' and '.join(FILES)}")
        for part, boxes in index.items():
            file = _shard_name(part, number)
            if not isinstance(boxes, dict) or file not in listed:
                raise CheckpointError(f"{name} tells of {file}, which the checkpoint does not hold")
            self._entries[part][file] = {key: ShardEntry.of(one, f"{name}: {key!r}") for key, one in boxes.items()}

    def _refuse_torn(self, part: str) -> None:
        """Raise unless the boxes of each tensor are those in the files, of one tensor, and make it up exactly."""
        boxes_of: dict[str, list[ShardEntry]] = {}
        for file, boxes in self._files(part):
            stored = stored_tensors(self._folder / file)
            for name, entry in boxes.items():
                if not entry.fits(stored.get(name)):
                    raise CheckpointError(f"{file} does not hold the box of {name!r} that its index tells of")
                boxes_of.setdefault(name, []).append(entry)
        if torn := [name for name, entries in boxes_of.items() if not _make_up(entries)]:
            raise CheckpointError(f"the shards in {self._folder} do not make up {', '.join(map(ascii, torn))}")

    def _files(self, part: str) -> list[tuple[str, dict[str, ShardEntry]]]:
        return list(self._entries[part].items())

    def _dtypes(self, part: str, wanted: Iterable[str]) -> Iterator[tuple[str, torch.dtype]]:
        named = {name: entry.dtype for _, boxes in self._files(part) for name, entry in boxes.items()}
        for name in wanted:
            if name not in named:
                raise CheckpointError(f"the shards in {self._folder} hold no tensor {name!r}")
            yield name, named[name]


def _make_up(entries: list[ShardEntry]) -> bool:
    """Tell whether boxes are of one tensor and hold each of its values once."""
    is_one = len({(entry.dtype, entry.shape) for entry in entries}) == 1
    return is_one and are_grid([entry.box for entry in entries], entries[0].shape)


def are_grid(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Tell whether boxes hold each value of a tensor once: whether they are the cells of a grid."""
    cells = {box for box in boxes if box.numel}
    if len(cells) < sum(1 for box in boxes if box.numel):
        return False
    if not math.prod(shape):
        return not cells
    stretches = [{(box.offsets[dim], box.sizes[dim]) for box in cells} for dim in range(len(shape))]
    is_whole = all(_are_in_line(one, end) for one, end in zip(stretches, shape, strict=True))
    return is_whole and len(cells) == math.prod(map(len, stretches))


def _are_in_line(stretches: set[tuple[int, int]], end: int) -> bool:
    """Tell whether stretches follow one another from 0 to the end."""
    reached = 0
    for offset, size in sorted(stretches):
        if offset != reached:
            return False
        reached += size
    return reached == end


def _shard_name(part: str, number: str) -> str:
    return f"{part}.shard-{number}.safetensors"


def _entry(data: Tensor, place: Place) -> dict[str, Any]:
    return {"dtype": str(data.dtype).removeprefix("torch."), "shape": place.shape, **asdict(place.box)}


def _sharded(tensor: Tensor) -> DTensor | None:
    """Return a sharded tensor without its history; None for a plain one."""
    # Looked up, not imported: the import takes seconds, and where nobody has done it there is no such tensor.
    module = sys.modules.get("torch.distributed.tensor")
    is_sharded = module is not None and isinstance(tensor, module.DTensor)
    return cast("DTensor", tensor.detach()) if is_sharded else None
