"""Checkpoints of a model whose parameters are sharded over processes (FSDP2), and of any optimizer on them.

This module owns what is particular to sharded tensors: every process gathers and writes its own shards, and loads the
boxes that it needs from a checkpoint of any number of processes, one or plain ones included. A plain model loads a
sharded checkpoint, a sharded model a plain one. Names, ties, strictness and the JSON are those of every checkpoint:
seen through `as_shards`, a sharded module is a plain one whose parameters are its shards.

In the folder, `model.safetensors` and `optimizer.safetensors` hold what every process has whole (buffers, step
counters), written by the main process; `shards.py` tells of the files beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hezar_train.checkpoint.contents import Checkpoint, Parts
from hezar_train.checkpoint.disk import rename_durably, write_file_durably
from hezar_train.checkpoint.draft import Draft
from hezar_train.checkpoint.manifest import STATE_FILE
from hezar_train.checkpoint.modules import load_module_state, module_names, unwrap
from hezar_train.checkpoint.shards import (
    FILES,
    Box,
    Place,
    ShardIndex,
    local_part,
    place_of,
    stored_names,
    whole,
    write_shards,
)
from hezar_train.checkpoint.tensors import read_tensors, tensor_file
from hezar_train.checkpoint.trees import pack, tensor_names, unpack
from hezar_train.errors import CheckpointError

__all__ = [
    "ShardedParts",
    "as_shards",
    "as_whole",
    "export_model",
    "gather_shards",
    "gather_whole",
    "load_shards",
    "load_whole",
    "share_of",
]


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
    """Collect what this process writes, as `Parts.gather` does; nothing is sent between processes."""
    packed, tensors = pack(optimizer)
    local = unpack(packed, {name: local_part(tensor) for name, tensor in tensors.items()})
    with as_shards(model) as model_places:
        parts = Parts.gather(model, local, state, texts, extra, folders, before_commit)
    places = {"model": model_places, "optimizer": _places(tensors)}
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
    """Collect everything as `Parts.gather` does, put together of all processes' shards, where it `is_kept`.

    One tensor after another becomes whole, and goes to the host or is let go.
    """

    def settled(tensor: Tensor) -> Tensor:
        if place_of(tensor) is None:
            return tensor
        found = whole(tensor)
        return found.cpu() if is_kept else found.new_empty(0)

    packed, tensors = pack(optimizer)
    joined = unpack(packed, {name: settled(tensor) for name, tensor in tensors.items()})
    with _seen_as(model, settled):
        return Parts.gather(model, joined, state, texts, extra, folders, before_commit)


def load_shards(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load what this process holds, of the model and the optimizer, from any checkpoint; nothing is sent."""
    sections = json.loads(checkpoint.text(STATE_FILE))
    source = _Source(checkpoint)
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
        boxes = {name: _box(tuple(tensor.shape), places.get(name)) for name, tensor in tensors.items()}
        cut = {name: tensor[boxes[name].slices(Box.whole(tuple(tensor.shape)))] for name, tensor in tensors.items()}
        load_module_state(model, cut, meta)


def export_model(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Path:
    """Write the model of a checkpoint as one plain safetensors file; one process does it, in its own memory."""
    target = Path(path)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        write_file_durably(temporary, tensor_file(ShardIndex(checkpoint.path).read_whole("model")))
        rename_durably(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def share_of(sharded: Tensor, value: Tensor) -> Tensor:
    """Return the share of a whole value, cut as a tensor of its shape is; of a plain tensor, all of it."""
    place = place_of(sharded)
    return value if place is None else _like(sharded, value[place.box.slices(Box.whole(place.shape))].clone())


@contextlib.contextmanager
def as_shards(module: nn.Module) -> Iterator[dict[str, Place]]:
    """Let a module's state dict hold its shards instead of sharded tensors, both ways; yield their places by name."""
    bare = unwrap(module)
    names, sharded = module_names(bare), _sharded_state(bare)

    def join(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({name: _like(one, state[name]) for name, one in sharded.items()})

    joining = bare.register_load_state_dict_pre_hook(join)  # type: ignore[no-untyped-call]
    try:
        with _seen_as(bare, local_part):
            yield _places({clean: sharded[name] for clean, name in names.items() if name in sharded})
    finally:
        joining.remove()


def as_whole(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a module's state dict hold whole tensors, gathered by all processes together, instead of sharded ones."""
    return _seen_as(module, whole)


@contextlib.contextmanager
def _seen_as(module: nn.Module, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module's state dict hold another form of its sharded tensors, tied ones as one."""
    bare = unwrap(module)
    sharded = _sharded_state(bare)

    def replace(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        formed = {one: form(one) for one in dict.fromkeys(sharded.values())}
        state.update({name: formed[one] for name, one in sharded.items()})

    replacing = bare.register_state_dict_post_hook(replace)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        replacing.remove()


def _sharded_state(bare: nn.Module) -> dict[str, Tensor]:
    """Return the sharded parameters by the names of the state dict; a tied one is the same object under each."""
    state = nn.Module.state_dict(bare, keep_vars=True)
    return {name: one for name, one in state.items() if isinstance(one, Tensor) and place_of(one) is not None}


class _Source:
    """The tensors of a checkpoint as this process needs them: the box that it holds, or all."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.path
        self._index = ShardIndex(checkpoint.path)

    def model(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        names = self._index.shapes("model").keys() | stored_names(self._folder / FILES["model"])
        tensors, shapes = self._read("model", names, places)
        wrong = [name for name in places if shapes.get(name, places[name].shape) != places[name].shape]
        if wrong:
            lines = [f"{name} (model {list(places[name].shape)}, checkpoint {list(shapes[name])})" for name in wrong]
            raise CheckpointError(f"the checkpoint does not fit the model, of another form: {', '.join(lines)}")
        return tensors

    def optimizer(self, names: Set[str], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        owners = {name: parameters[i] for name in names if (i := _parameter_number(name, len(parameters))) is not None}
        owners = {name: owner for name, owner in owners.items() if place_of(owner) is not None}
        places = _places(owners)
        tensors, shapes = self._read("optimizer", names, places)
        was_sharded = self._index.shapes("optimizer").keys()
        for name in tensors.keys() & owners.keys():
            if shapes[name] == places[name].shape:
                tensors[name] = _like(owners[name], tensors[name])
            elif name in was_sharded:  # of another form than its parameter: every process keeps all of it
                tensors[name] = _replicated(owners[name], tensors[name])
        return tensors

    def _read(
        self, part: str, names: Set[str], places: Mapping[str, Place]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
        """Return a tensor for each name, cut to its place if the place is in a tensor of that shape; and all shapes."""
        shapes = {name: shape for name, shape in self._index.shapes(part).items() if name in names}
        boxes = {name: _box(shape, places.get(name)) for name, shape in shapes.items()}
        tensors = self._index.read(part, boxes)
        for batch in _batches(names - shapes.keys(), one_by_one=set() if shapes else set(places)):
            for name, found in read_tensors(self._folder / FILES[part], batch).items():
                shapes[name] = shape = tuple(found.shape)
                box = _box(shape, places.get(name))
                tensors[name] = found if box.sizes == shape else found[box.slices(Box.whole(shape))].clone()
        return tensors, shapes


def _batches(names: Set[str], one_by_one: Set[str]) -> Iterator[Set[str]]:
    """Yield the names together, but for those of which each may be too large to be held whole beside another."""
    yield names - one_by_one
    yield from ({name} for name in names & one_by_one)


def _box(shape: tuple[int, ...], place: Place | None) -> Box:
    return place.box if place is not None and place.shape == shape else Box.whole(shape)


def _parameter_number(name: str, count: int) -> int | None:
    """Return which parameter an optimizer's tensor belongs to: `pack` calls it "state.12.exp_avg"."""
    section, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    is_state = section == "state" and number.isascii() and number.isdigit() and int(number) < count
    return int(number) if is_state else None


def _like(sharded: Any, local: Tensor) -> Tensor:
    """Make a sharded tensor of this process's part, in the form of another one."""
    form = {"shape": sharded.shape, "stride": sharded.stride()}
    return _distributed(sharded, local, sharded.placements, **form)


def _replicated(sharded: Any, values: Tensor) -> Tensor:
    """Make a tensor of which every process has all, on the mesh of another one."""
    from torch.distributed.tensor import Replicate

    return _distributed(sharded, values, [Replicate()] * sharded.device_mesh.ndim)


def _distributed(sharded: Any, local: Tensor, placements: Any, **form: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    moved = local.to(sharded.to_local().device)
    return DTensor.from_local(moved, sharded.device_mesh, placements, run_check=False, **form)


def _places(tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    found = {name: place_of(tensor) for name, tensor in tensors.items()}
    return {name: place for name, place in found.items() if place is not None}


def _written(rank: int, tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Return what this process is the one to write; an empty shard is written by the main one, for its name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (places[name].is_first and (rank == 0 or tensor.numel() > 0) if name in places else rank == 0)
    }
