"""Checkpoints of a model whose parameters are sharded over processes (FSDP2), and of any optimizer on them.

This module owns who writes and loads what: every process gathers and writes its own shards, and loads the boxes that it
needs from a checkpoint of any number of processes, one or plain ones included. A plain model loads a sharded
checkpoint, a sharded model a plain one. Names, ties, strictness and the JSON are those of every checkpoint.

In the folder, `model.safetensors` and `optimizer.safetensors` hold what every process has whole (buffers, step
counters), written by the main process; `shards.py` tells of the files beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hezar_train.checkpoint.contents import Checkpoint, Parts
from hezar_train.checkpoint.disk import rename_durably, write_file_durably
from hezar_train.checkpoint.draft import Draft
from hezar_train.checkpoint.manifest import STATE_FILE
from hezar_train.checkpoint.modules import load_module_state
from hezar_train.checkpoint.sharded_modules import as_shards, places_of, seen_as
from hezar_train.checkpoint.sharded_source import ShardedSource, held_box
from hezar_train.checkpoint.shards import Place, ShardIndex, local_part, place_of, whole, write_shards
from hezar_train.checkpoint.store import TEMPORARY_PREFIX
from hezar_train.checkpoint.tensors import tensor_file
from hezar_train.checkpoint.trees import pack, tensor_names, unpack
from hezar_train.errors import CheckpointError

__all__ = ["ShardedParts", "export_model", "gather_shards", "gather_whole", "load_shards", "load_whole"]


@dataclass(frozen=True)
class ShardedParts(Parts):
    """What one process writes of a checkpoint: its shards and, if it is the main one, all that is whole."""

    places: Mapping[str, Mapping[str, Place]] = field(default_factory=lambda: {"model": {}, "optimizer": {}})
    """Where the sharded tensors of the "model" and the "optimizer" belong, by name."""
    rank: int = 0
    count: int = 1

    def write(self, draft: Draft) -> None:
        """Write this process's files."""
        if any(self.places.values()):
            shards = {
                "model": self._shards("model", self.model),
                "optimizer": self._shards("optimizer", self.optimizer),
            }
            write_shards(draft, f"{self.rank + 1:05d}-of-{self.count:05d}", shards)
        if self.rank == 0:
            model, optimizer = self._whole("model", self.model), self._whole("optimizer", self.optimizer)
            Parts(model, optimizer, self.files, self.folders).write(draft)

    def _shards(self, part: str, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Place]]:
        return {name: (tensors[name], place) for name, place in self.places[part].items() if name in tensors}

    def _whole(self, part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in self.places[part]}


def gather_shards(
    model: nn.Module,
    optimizer: Any,
    state: dict[str, Any],
    texts: Mapping[str, str],
    extra: Any = None,
    folders: Mapping[str, Callable[[Path], None]] | None = None,
    before_commit: Callable[[], None] | None = None,
    *,
    rank: int,
    count: int,
) -> ShardedParts:
    """Collect what this process writes of all that `Parts.gather` takes; nothing is sent between processes."""
    packed, tensors = pack(optimizer)
    local = unpack(packed, {name: local_part(tensor) for name, tensor in tensors.items()})
    with as_shards(model) as model_places:
        parts = Parts.gather(model, local, state, texts, extra, folders, before_commit)
    places = {"model": model_places, "optimizer": places_of(tensors)}
    return ShardedParts(
        _written(rank, parts.model, places["model"]),
        _written(rank, parts.optimizer, places["optimizer"]),
        parts.files,
        parts.folders,
        parts.before_commit,
        places,
        rank,
        count,
    )


def gather_whole(
    model: nn.Module,
    optimizer: Any,
    state: dict[str, Any],
    texts: Mapping[str, str],
    extra: Any = None,
    folders: Mapping[str, Callable[[Path], None]] | None = None,
    before_commit: Callable[[], None] | None = None,
    *,
    is_kept: bool,
) -> Parts:
    """Collect all that `Parts.gather` takes, put together of all processes' shards, where it `is_kept`.

    One tensor after another becomes whole, and goes to the host or is let go.
    """

    def settled(tensor: Tensor) -> Tensor:
        if place_of(tensor) is None:
            return tensor
        found = whole(tensor)
        return found.cpu() if is_kept else found.new_empty(0)

    packed, tensors = pack(optimizer)
    joined = unpack(packed, {name: settled(tensor) for name, tensor in tensors.items()})
    with seen_as(model, settled):
        return Parts.gather(model, joined, state, texts, extra, folders, before_commit)


def load_shards(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load what this process holds, of the model and the optimizer, from any checkpoint; nothing is sent."""
    sections = json.loads(checkpoint.text(STATE_FILE))
    source = ShardedSource(checkpoint)
    with as_shards(model) as places:
        load_module_state(model, source.model(places), sections["model"])
    if optimizer is None:
        return
    packed = sections["optimizer"]
    parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
    state = unpack(packed, source.optimizer(tensor_names(packed), parameters))
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(
            f"the optimizer state of {checkpoint.path} does not fit this optimizer: {error}"
        ) from error


def load_whole(model: nn.Module, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """Load whole tensors as `load_module_state` does, into a model of which this process may hold a part."""
    with as_shards(model) as places:
        boxes = {name: held_box(tuple(tensor.shape), places.get(name)) for name, tensor in tensors.items()}
        cut = {name: boxes[name].cut(tensor) for name, tensor in tensors.items()}
        load_module_state(model, cut, meta)


def export_model(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Path:
    """Write the model of a checkpoint as one plain safetensors file; one process does it, in its own memory."""
    target = Path(path)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{os.getpid()}")
    try:
        write_file_durably(temporary, tensor_file(ShardIndex(checkpoint.path).read_whole("model")))
        rename_durably(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _written(rank: int, tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Return what this process is the one to write; an empty shard is written by the main one, for its name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (places[name].is_first and (rank == 0 or tensor.numel() > 0) if name in places else rank == 0)
    }
