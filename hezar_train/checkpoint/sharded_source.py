"""The tensors of a checkpoint as one process needs them: of each the box that it holds, or all.

This module owns how what is read fits a sharded model and its optimizer, whatever number of processes wrote it, one
without shards included. Nothing is sent between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from torch import Tensor

from hezar_train.checkpoint.contents import Checkpoint
from hezar_train.checkpoint.sharded_modules import places_of, replicated_like, sharded_like
from hezar_train.checkpoint.shards import FILES, Box, Place, ShardIndex, stored_names
from hezar_train.checkpoint.tensors import read_tensors
from hezar_train.errors import CheckpointError

__all__ = ["ShardedSource", "held_box"]


class ShardedSource:
    """What this process needs of a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.path
        self._index = ShardIndex(checkpoint.path)

    def model(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """Return the model's tensors, those that have a place cut to it; refuse one of another shape."""
        names = self._index.shapes("model").keys() | stored_names(self._folder / FILES["model"])
        tensors, shapes = self._read("model", names, places)
        wrong = [name for name in places if shapes.get(name, places[name].shape) != places[name].shape]
        if wrong:
            lines = [f"{name} (model {list(places[name].shape)}, checkpoint {list(shapes[name])})" for name in wrong]
            raise CheckpointError(f"the checkpoint does not fit the model, of another form: {', '.join(lines)}")
        return tensors

    def optimizer(self, names: Set[str], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the named tensors of the optimizer, those of a sharded parameter in its form."""
        owners = {name: parameters[i] for name in names if (i := _parameter_number(name, len(parameters))) is not None}
        places = places_of(owners)
        tensors, shapes = self._read("optimizer", names, places)
        was_sharded = self._index.shapes("optimizer").keys()
        for name in tensors.keys() & places.keys():
            if shapes[name] == places[name].shape:
                tensors[name] = sharded_like(owners[name], tensors[name])
            elif name in was_sharded:  # of another form than its parameter: every process keeps all of it
                tensors[name] = replicated_like(owners[name], tensors[name])
        return tensors

    def _read(
        self, part: str, names: Set[str], places: Mapping[str, Place]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
        """Return a tensor for each name, cut to its place if the place is in a tensor of that shape; and all shapes."""
        shapes = {name: shape for name, shape in self._index.shapes(part).items() if name in names}
        boxes = {name: held_box(shape, places.get(name)) for name, shape in shapes.items()}
        tensors = self._index.read(part, boxes)
        for batch in _batches(names - shapes.keys(), one_by_one=set() if shapes else set(places)):
            for name, found in read_tensors(self._folder / FILES[part], batch).items():
                shapes[name] = shape = tuple(found.shape)
                box = held_box(shape, places.get(name))
                tensors[name] = found if box.sizes == shape else box.cut(found).clone()
        return tensors, shapes


def held_box(shape: tuple[int, ...], place: Place | None) -> Box:
    """Return the box that a place has of a tensor; of one of another shape than the place's, all of it."""
    return place.box if place is not None and place.shape == shape else Box.whole(shape)


def _batches(names: Set[str], one_by_one: Set[str]) -> Iterator[Set[str]]:
    """Yield the names together, but for those of which each may be too large to be held whole beside another."""
    yield names - one_by_one
    yield from ({name} for name in names & one_by_one)


def _parameter_number(name: str, count: int) -> int | None:
    """Return which parameter an optimizer's tensor belongs to: `pack` calls it "state.12.exp_avg"."""
    section, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    is_state = section == "state" and number.isascii() and number.isdigit() and int(number) < count
    return int(number) if is_state else None
