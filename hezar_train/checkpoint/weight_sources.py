"""Where initial weights lie: their names and shapes, and how any part of them is read.

`open_weights` takes a file, an index of several files, a folder, a checkpoint, a run, or what torch's distributed
checkpoints (DCP) hold in safetensors form. Nothing but headers is read before somebody asks for a box of a tensor, so a
process that has a share of a model reads that share. Refuses pickles, DCP's own format among them, with the command
that turns them into safetensors. The one exception is the `model.pt` of a Hezar model, which is read without running
anything of it (`hezar_weights`).

What torch writes with `HuggingFaceStorageWriter` says in each file's header where its pieces begin; how large a tensor
is follows from its pieces, which must be the cells of a grid.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hezar_train.checkpoint.format import (
    MOST_JSON_BYTES,
    read_parts,
    stored_note,
    stored_shapes,
    stored_tensors,
    tensor_names,
    unpack,
)
from hezar_train.checkpoint.hezar_weights import HEZAR_MODEL_FILE, is_hezar_weights, read_hezar_weights
from hezar_train.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE
from hezar_train.checkpoint.shard_files import Box, are_grid
from hezar_train.checkpoint.split_files import MODEL_INDEX_FILE
from hezar_train.checkpoint.store import Checkpoint, CheckpointStore
from hezar_train.checkpoint.trained_part import BaseRecord
from hezar_train.config.files import load_json
from hezar_train.errors import CheckpointError, NoSuchCheckpointError
from hezar_train.run_folder import is_inside, read_file
from hezar_train.run_layout import ADAPTER_FILE, BASE_FILE, CHECKPOINTS_FOLDER, TRAINED_FILE

__all__ = ["Weights", "open_weights"]

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar"})
INDEX_SUFFIX = ".safetensors.index.json"  # of weights that transformers split over several files
DCP_METADATA, DCP_SUFFIX = ".metadata", ".distcp"
DCP_NOTE = "DCP_SHARDING_INFO"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """The tensors of a source: their shapes by name, and how a box of each is read."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Mapping[str, Box]], dict[str, Tensor]]
    base: BaseRecord | None = None
    """What the source says of the base model, if it is a trained part."""

    @classmethod
    def held(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Return weights that are in memory."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, lambda wanted: {name: box.cut(tensors[name]).clone() for name, box in wanted.items()})


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a file."""

    path: Path
    box: Box


@dataclass(frozen=True)
class Pieces:
    """Tensors that lie in files, whole or in pieces."""

    of: dict[str, list[Piece]] = field(default_factory=dict)

    @classmethod
    def whole(cls, paths: Iterable[Path]) -> Pieces:
        """Find the tensors of files that hold each tensor whole; of one in several, the last counts."""
        found = {name: (path, shape) for path in paths for name, shape in stored_shapes(path).items()}
        return cls({name: [Piece(path, Box.whole(shape))] for name, (path, shape) in found.items()})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, put together of its pieces."""
        return {name: _extent([piece.box for piece in pieces]) for name, pieces in self.of.items()}

    def read(self, wanted: Mapping[str, Box]) -> dict[str, Tensor]:
        """Read a box of each wanted tensor out of the pieces that have some of it."""
        parts: dict[Path, dict[str, tuple[Box, Box]]] = {}
        for name, box in wanted.items():
            # Of an empty box, which has some of no piece, one tells the type.
            for piece in [one for one in self.of[name] if one.box.overlap(box).numel] or self.of[name][:1]:
                parts.setdefault(piece.path, {})[name] = (piece.box.overlap(box), piece.box)
        found: dict[str, Tensor] = {}
        for path, boxes in parts.items():
            cuts = {name: common.slices(origin) for name, (common, origin) in boxes.items()}
            for name, data in read_parts(path, cuts).items():
                self._put(found, name, data, boxes[name][0], wanted[name])
        return found

    def _put(self, found: dict[str, Tensor], name: str, data: Tensor, box: Box, wanted: Box) -> None:
        if len(self.of[name]) == 1:
            found[name] = data
            return
        if name not in found:
            found[name] = torch.empty(wanted.sizes, dtype=data.dtype)
        if found[name].dtype is not data.dtype:
            raise CheckpointError(f"the pieces of {name!r} are {found[name].dtype} and {data.dtype}; expected one type")
        if data.numel():
            found[name][box.slices(wanted)] = data

    def weights(self, base: BaseRecord | None = None) -> Weights:
        """Return what can be read here."""
        return Weights(self.shapes(), self.read, base)


def _extent(boxes: list[Box]) -> tuple[int, ...]:
    ends = ([start + size for start, size in zip(box.offsets, box.sizes, strict=True)] for box in boxes)
    return tuple(map(max, zip(*ends, strict=True)))


def open_weights(source: Path) -> Weights:
    """Find out what a source holds."""
    if not source.exists():
        raise NoSuchCheckpointError(
            f"init_weights_from={str(source)!r} does not exist. Expected the folder of a checkpoint or of a model, or "
            "a file of weights, on this machine, or a repository of the Hub as 'owner/name': correct it."
        )
    if source.is_file():
        return _of_file(source)
    found = _of_model_folder(source)
    return _of_other_folder(source) if found is None else found


def _of_model_folder(source: Path) -> Weights | None:
    """Find a checkpoint, or the files of a model for others; None where there is none."""
    if (source / MANIFEST_FILE).exists():
        return _of_checkpoint(CheckpointStore(source.parent).open(source))
    if (source / MODEL_FILE).exists():
        return Pieces.whole([source / MODEL_FILE]).weights()
    if parts := [source / name for name in (ADAPTER_FILE, TRAINED_FILE) if (source / name).exists()]:
        return Pieces.whole(parts).weights(_base_beside(parts[0]))
    return _of_index(source / MODEL_INDEX_FILE) if (source / MODEL_INDEX_FILE).exists() else None


def _of_other_folder(source: Path) -> Weights:
    for store in (CheckpointStore(source / CHECKPOINTS_FOLDER), CheckpointStore(source)):
        if store.steps():
            return _newest(store)
    if is_hezar_weights(source / HEZAR_MODEL_FILE):
        return _of_hezar(source / HEZAR_MODEL_FILE)
    return _of_torch(source)


def _of_file(source: Path) -> Weights:
    if is_hezar_weights(source):
        return _of_hezar(source)
    if source.suffix in PICKLE_SUFFIXES:
        raise _pickle_refused(source)
    if source.name == DCP_METADATA or source.suffix == DCP_SUFFIX:
        raise _dcp_refused(source.parent)
    if source.name.endswith(INDEX_SUFFIX):
        return _of_index(source)
    try:
        pieces = Pieces.whole([source])
    except CheckpointError as error:
        if source.suffix == Path(MODEL_FILE).suffix:
            raise
        raise NoSuchCheckpointError(
            f"init_weights_from={str(source)!r} is no file of weights ({error}). Expected one of safetensors, or the "
            "folder of a checkpoint or of a model: correct the path."
        ) from error
    return pieces.weights(_base_beside(source) if source.name in (ADAPTER_FILE, TRAINED_FILE) else None)


def _of_hezar(source: Path) -> Weights:
    tensors = read_hezar_weights(source)
    logger.info("%s is a pickle: its %d tensors were read, and nothing of it was run", source, len(tensors))
    return Weights.held(tensors)


def _of_index(index: Path) -> Weights:
    """Find weights that lie in several files beside their index."""
    try:
        files = sorted(set(load_json(read_file(index))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error}") from error
    for name in files:
        if not isinstance(name, str) or not is_inside(name) or "/" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}; expected safetensors files beside it")
    return Pieces.whole(index.parent / name for name in files).weights()


def _base_beside(file: Path) -> BaseRecord | None:
    """Return what a trained part's folder says of the base model; None if it does not say it."""
    record = file.with_name(BASE_FILE)
    return BaseRecord.read(read_file(record, MOST_JSON_BYTES)) if record.is_file() else None


def _newest(store: CheckpointStore) -> Weights:
    checkpoint, rejected = store.newest()
    for one in rejected:
        logger.warning("The checkpoint %s was passed over: %s", one.path, one.reason)
    if checkpoint is None:
        raise CheckpointError(f"the checkpoints of {store.root} vanished while they were being read")
    return _of_checkpoint(checkpoint)


def _of_checkpoint(checkpoint: Checkpoint) -> Weights:
    """Find a checkpoint's tensors, a tied one under each of its names, and those among what modules keep besides."""
    meta: Any = checkpoint.packed("model")
    index, packed = checkpoint.shards, meta["extra"]
    names_inside = tensor_names(packed)
    inner = unpack(packed, index.read_whole("model", names_inside) if names_inside else {})
    others = Weights.held({name: value for name, value in inner.items() if isinstance(value, Tensor)})
    shapes = {name: shape for name, shape in index.all_shapes("model").items() if name not in names_inside}
    stored: dict[str, str] = {name: name for name in shapes} | meta["aliases"]

    def read(wanted: Mapping[str, Box]) -> dict[str, Tensor]:
        mine = {name: box for name, box in wanted.items() if name in stored and name not in others.shapes}
        found = index.read_boxes("model", {stored[name]: box for name, box in mine.items()})
        rest = others.read({name: box for name, box in wanted.items() if name in others.shapes})
        return {name: found[stored[name]] for name in mine} | rest

    return Weights({name: shapes[one] for name, one in stored.items()} | dict(others.shapes), read, checkpoint.base)


def _of_torch(folder: Path) -> Weights:
    """Find what torch's distributed checkpoints wrote as safetensors; refuse the folder if there is none of it."""
    if (folder / DCP_METADATA).exists():
        raise _dcp_refused(folder)
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.stat().st_size]  # torch leaves empty ones
    places = {path: note for path in files if (note := stored_note(path, DCP_NOTE)) is not None}
    if places:
        return _of_pieces(places)
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise _pickle_refused(pickles[0])
    raise CheckpointError(
        f"init_weights_from={str(folder)!r} is a folder without {MODEL_FILE} or {MODEL_INDEX_FILE}, and neither a "
        "checkpoint nor a run"
    )


def _of_pieces(places: Mapping[Path, object]) -> Weights:
    """Put tensors together of the pieces that several files say they hold."""
    pieces: dict[str, list[Piece]] = {}
    for path, note in places.items():
        stored = stored_tensors(path)
        if not isinstance(note, dict) or note.keys() != stored.keys():
            raise CheckpointError(f"{path}: {DCP_NOTE} does not tell of the tensors in the file")
        for name, place in note.items():
            offsets = place.get("saved_offsets") if isinstance(place, dict) else None
            sizes = stored[name].shape
            starts: list[Any] = offsets if isinstance(offsets, list) else [None]
            if len(starts) != len(sizes) or any(type(start) is not int or not 0 <= start < 1 << 62 for start in starts):
                raise CheckpointError(f"{path}: {DCP_NOTE} does not say where the piece of {name!r} begins")
            pieces.setdefault(name, []).append(Piece(path, Box(tuple(starts), sizes)))
    found = Pieces({name: _distinct(those) for name, those in pieces.items()})
    shapes = found.shapes()
    torn = [name for name, those in found.of.items() if not are_grid([one.box for one in those], shapes[name])]
    if torn:
        raise CheckpointError(
            f"the files in {next(iter(places)).parent} do not make up {', '.join(map(ascii, torn[:3]))}: a file is "
            "missing, or two hold the same"
        )
    return found.weights()


def _distinct(pieces: list[Piece]) -> list[Piece]:
    """Leave out pieces without values, if others have some."""
    return [piece for piece in pieces if piece.box.numel] or pieces[:1]


def _pickle_refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} looks like a pickle, and pickles are not read: loading one can run any code. Load it with the model's "
        "own library and pass the model to the trainer, or convert it to safetensors."
    )


def _dcp_refused(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} is a checkpoint of torch.distributed.checkpoint whose {DCP_METADATA} is a pickle, and pickles are "
        f"not read: loading one can run any code. If you trust whoever made it, convert it:\n{conversion(folder)}"
    )


def conversion(folder: Path) -> str:
    """Return the commands that turn a checkpoint of torch.distributed.checkpoint into safetensors."""
    # What is in "model" of it, or else all of it; each tensor in memory of its own, as the format wants it.
    code = (
        "import torch, safetensors.torch as s; d = torch.load('weights.pt'); d = d.get('model', d); "
        f"s.save_file({{k: v.clone() for k, v in d.items() if torch.is_tensor(v)}}, '{MODEL_FILE}')"
    )
    torchs = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {shlex.quote(os.fspath(folder))} "
    return f'  {torchs}weights.pt\n  python -c "{code}"'
