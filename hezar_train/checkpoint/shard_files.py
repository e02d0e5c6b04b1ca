"""Shard files: the box of a tensor that each process holds, how it is written, and how any other box is read again.

This module owns the files in which processes keep their shards of a checkpoint. Process 2 of 3 writes

    model.shard-00002-of-00003.safetensors        its boxes of the model's tensors, by the tensors' names
    optimizer.shard-00002-of-00003.safetensors    the same for the optimizer
    shards-00002-of-00003.json                    {"model": {name: {"dtype", "shape", "offsets", "sizes"}}, ...}

so a reader with any number of processes finds the boxes that overlap its own, and reads no others. It refuses to
hand out a box that the files do not cover. Nothing here talks to another process, but for `whole`.

Torch's own sharded writer (`HuggingFaceStorageWriter`) is not used: its plan travels between the processes as a
pickle, it cannot store tied weights, and it neither hashes what it writes nor survives a file that shrinks.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hezar_train.checkpoint.format import read_tensors, tensor_file
from hezar_train.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE, Draft, read_manifest
from hezar_train.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["FILES", "Box", "Place", "ShardIndex", "local_part", "place_of", "stored_names", "whole", "write_shards"]

FILES = {"model": MODEL_FILE, "optimizer": OPTIMIZER_FILE}
INDEX_NAME = re.compile(r"shards-(\d{5,}-of-\d{5,})\.json")


@dataclass(frozen=True)
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

    def cut(self, values: Tensor) -> Tensor:
        """Return this box of a whole tensor, in the same memory."""
        return values[self.slices(Box.whole(tuple(values.shape)))]

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


def stored_names(path: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file without reading any."""
    with path.open("rb") as file:
        # The format begins with the length of its JSON header.
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return set(header) - {"__metadata__"}


class ShardIndex:
    """What the shard files of a checkpoint hold; empty for a checkpoint without any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, dict[str, dict[str, Any]]] = {}
        for match in map(INDEX_NAME.fullmatch, sorted(read_manifest(folder).files)):
            if match is not None:
                self._add(match[0], match[1])

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each sharded tensor of the "model" or the "optimizer"."""
        files = self._files(part)
        return {name: tuple(entry["shape"]) for _, boxes in files for name, entry in boxes.items()}

    def read(self, part: str, wanted: Mapping[str, Box]) -> dict[str, Tensor]:
        """Read a box of each wanted tensor, whatever boxes it was stored in."""
        found = {name: torch.empty(wanted[name].sizes, dtype=dtype) for name, dtype in self._dtypes(part, wanted)}
        covered = dict.fromkeys(wanted, 0)
        for file, boxes in self._files(part):
            stored = {name: Box(tuple(boxes[name]["offsets"]), tuple(boxes[name]["sizes"])) for name in boxes}
            common = {name: stored[name].overlap(wanted[name]) for name in stored if name in wanted}
            common = {name: box for name, box in common.items() if box.numel}
            for name, data in (read_tensors(self._folder / file, common) if common else {}).items():
                found[name][common[name].slices(wanted[name])] = data[common[name].slices(stored[name])]
                covered[name] += common[name].numel  # boxes never overlap, so a sum tells whether all is there
        if torn := [name for name, box in wanted.items() if covered[name] != box.numel]:
            raise CheckpointError(f"the shards in {self._folder} do not make up {', '.join(torn)}")
        return found

    def read_whole(self, part: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Read all tensors of the "model" or the "optimizer", or those named, each put together of its boxes."""
        shapes = self.shapes(part).items()
        wanted = {name: Box.whole(shape) for name, shape in shapes if names is None or name in names}
        return read_tensors(self._folder / FILES[part], names) | self.read(part, wanted)

    def _add(self, name: str, number: str) -> None:
        try:
            index = json.loads((self._folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        for part, boxes in index.items():
            self._entries.setdefault(part, {})[_shard_name(part, number)] = boxes

    def _files(self, part: str) -> list[tuple[str, dict[str, Any]]]:
        return list(self._entries.get(part, {}).items())

    def _dtypes(self, part: str, wanted: Mapping[str, Box]) -> Iterator[tuple[str, torch.dtype]]:
        named = {name: entry["dtype"] for _, boxes in self._files(part) for name, entry in boxes.items()}
        for name in wanted:
            dtype = getattr(torch, named.get(name, ""), None)
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"the shards in {self._folder} hold no tensor {name!r} of a known type")
            yield name, dtype


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
