"""Weights on their own: initial weights from any safetensors source, and the file a federated worker keeps.

`initial_weights` (`init_weights_from`) goes by name and shape and reports everything that did not fit; it takes a file,
an index of several files, a folder, a checkpoint or a run, and refuses pickles and a source of which nothing fits. The
one exception is the `model.pt` of a Hezar model, which is read without running anything of it (`hezar_weights`).

`save_round` and `load_round` keep a model's weights and the number of a round in one file. It is written whole or not
at all and is plain safetensors; a tensor of bytes holds the number and what modules keep beside tensors, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hezar_train.checkpoint.format import MOST_JSON_BYTES, StoredTensor, parse_json, read_tensors, tensor_file
from hezar_train.checkpoint.hezar_weights import HEZAR_MODEL_FILE, is_hezar_weights, read_hezar_weights
from hezar_train.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE, replace_file
from hezar_train.checkpoint.modules import check_meta, module_names, module_state, stored_state, tied_names, unwrap
from hezar_train.checkpoint.peft_adapters import adapter_tensors, has_adapters
from hezar_train.checkpoint.shard_files import local_part
from hezar_train.checkpoint.sharded import as_whole, load_whole, share_of
from hezar_train.checkpoint.store import Checkpoint, CheckpointStore
from hezar_train.checkpoint.trained_part import BaseRecord, base_differences, other_base
from hezar_train.config.files import load_json
from hezar_train.errors import CheckpointError, NoSuchCheckpointError
from hezar_train.run_folder import is_inside, read_file
from hezar_train.run_layout import ADAPTER_FILE, BASE_FILE, CHECKPOINTS_FOLDER, TRAINED_FILE

__all__ = [
    "WeightReport",
    "initial_weights",
    "load_round",
    "round_tensors",
    "save_round",
    "write_round",
]

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar"})
INDEX_SUFFIX = ".safetensors.index.json"  # of weights that transformers split over several files
PEFT_PREFIX = "base_model."
ROUND_NOTE = "hezar_train.note"  # the tensor of a round's file that is no weight

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightReport:
    """What became of each name: loaded, missing in the source, unexpected in it, or of another shape."""

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


def initial_weights(module: nn.Module, path: str | os.PathLike[str]) -> WeightReport:
    """Copy what fits by name and shape from a file, folder, checkpoint or run into the module; say what did not."""
    source = Path(path)
    tensors, base = _read(source)
    bare, names = unwrap(module), module_names(module)
    current = nn.Module.state_dict(bare)
    ours = {name: current[raw] for name, raw in names.items() if isinstance(current[raw], Tensor)}
    tensors = _by_own_names(bare, ours, tensors)
    fitting = {name for name in ours if name in tensors and ours[name].shape == tensors[name].shape}
    if not fitting:
        raise CheckpointError(
            f"init_weights_from={str(source)!r}: none of its {len(tensors)} tensors has the name and shape of one of "
            f"the model's {len(ours)}. It has {_some(tensors)}; the model has {_some(ours)}.{_advice(bare, tensors)}"
        )
    loadable = OrderedDict((names[name], share_of(ours[name], tensors[name])) for name in fitting)
    # Called on the class: a model's own `load_state_dict` may match by position.
    nn.Module.load_state_dict(bare, loadable, strict=False)
    if base is not None and (differences := base_differences(bare, base)):
        logger.warning("%s", other_base(source, base, differences))
    return _report(ours, tensors, fitting, () if base is None else base.tensors)


def _by_own_names(module: nn.Module, ours: Collection[str], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of an adapter's file, which has peft's names, by those of a model with adapters."""
    if not has_adapters(module) or all(name in ours for name in theirs):
        return theirs
    names: dict[str, str] = {}
    for one in adapter_tensors(module):
        names = one.names | names  # the first adapter's, where several have the same names
    return {name if name in ours else names.get(name, name): tensor for name, tensor in theirs.items()}


def _advice(module: nn.Module, theirs: Collection[str]) -> str:
    if has_adapters(module) or not any(name.startswith(PEFT_PREFIX) for name in theirs):
        return ""
    return " These are adapters of peft: add the same kind to the model first, get_peft_model(model, config)."


def _report(
    ours: dict[str, Any], theirs: dict[str, Tensor], fitting: set[str], left_out: Collection[str]
) -> WeightReport:
    ties = tied_names({name: local_part(tensor) for name, tensor in ours.items()})
    # A tied tensor is loaded once one of its names is: many files hold only one of them.
    loaded_memory = {ties.get(name, name) for name in fitting}
    loaded = [name for name in ours if ties.get(name, name) in loaded_memory]
    mismatched = [name for name in ours if name in theirs and name not in fitting]
    missing = [name for name in ours if name not in theirs and name not in loaded and name not in left_out]
    return WeightReport(loaded, missing, [name for name in theirs if name not in ours], mismatched)


def _read(source: Path) -> tuple[dict[str, Tensor], BaseRecord | None]:
    """Return the tensors of a source and, if they are a trained part, what it says of the base model."""
    if not source.exists():
        raise NoSuchCheckpointError(
            f"init_weights_from={str(source)!r} does not exist. Expected the folder of a checkpoint or of a model, or "
            "a file of weights, on this machine: correct the path."
        )
    if source.is_file():
        is_part = source.name in (ADAPTER_FILE, TRAINED_FILE)
        return _read_file(source), _base_beside(source) if is_part else None
    if (source / MANIFEST_FILE).exists():
        return _read_checkpoint(CheckpointStore(source.parent).open(source))
    if (source / MODEL_FILE).exists():
        return read_tensors(source / MODEL_FILE), None
    if parts := [source / name for name in (ADAPTER_FILE, TRAINED_FILE) if (source / name).exists()]:
        return {name: one for part in parts for name, one in read_tensors(part).items()}, _base_beside(parts[0])
    for store in (CheckpointStore(source / CHECKPOINTS_FOLDER), CheckpointStore(source)):
        if store.steps():
            return _read_newest(store)
    if is_hezar_weights(source / HEZAR_MODEL_FILE):
        return _read_hezar(source / HEZAR_MODEL_FILE), None
    pickles = sorted(path for path in source.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise _pickle_refused(pickles[0])
    raise CheckpointError(
        f"init_weights_from={str(source)!r} is a folder without {MODEL_FILE}, and neither a checkpoint nor a run"
    )


def _read_file(source: Path) -> dict[str, Tensor]:
    if is_hezar_weights(source):
        return _read_hezar(source)
    if source.suffix in PICKLE_SUFFIXES:
        raise _pickle_refused(source)
    if source.name.endswith(INDEX_SUFFIX):
        return _read_index(source)
    try:
        return read_tensors(source)
    except CheckpointError as error:
        if source.suffix == Path(MODEL_FILE).suffix:
            raise
        raise NoSuchCheckpointError(
            f"init_weights_from={str(source)!r} is no file of weights ({error}). Expected one of safetensors, or the "
            "folder of a checkpoint or of a model: correct the path."
        ) from error


def _read_hezar(source: Path) -> dict[str, Tensor]:
    tensors = read_hezar_weights(source)
    logger.info("%s is a pickle: its %d tensors were read, and nothing of it was run", source, len(tensors))
    return tensors


def _read_index(index: Path) -> dict[str, Tensor]:
    """Read weights that lie in several files beside their index."""
    try:
        files = sorted(set(load_json(read_file(index))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error}") from error
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not isinstance(name, str) or not is_inside(name) or "/" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}; expected safetensors files beside it")
        tensors |= read_tensors(index.parent / name)
    return tensors


def _base_beside(file: Path) -> BaseRecord | None:
    """Return what a trained part's folder says of the base model; None if it does not say it."""
    record = file.with_name(BASE_FILE)
    return BaseRecord.read(read_file(record, MOST_JSON_BYTES)) if record.is_file() else None


def _read_newest(store: CheckpointStore) -> tuple[dict[str, Tensor], BaseRecord | None]:
    checkpoint, rejected = store.newest()
    for one in rejected:
        logger.warning("The checkpoint %s was passed over: %s", one.path, one.reason)
    if checkpoint is None:
        raise CheckpointError(f"the checkpoints of {store.root} vanished while they were being read")
    return _read_checkpoint(checkpoint)


def _read_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], BaseRecord | None]:
    state = stored_state(*checkpoint.model())
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}, checkpoint.base


def _pickle_refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} looks like a pickle, and pickles are not read: loading one can run any code. Load it with the model's "
        "own library and pass the model to the trainer, or convert it to safetensors."
    )


def _some(names: dict[str, Any]) -> str:
    return ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")


def save_round(path: Path, model: nn.Module, number: int) -> None:
    """Write the weights and the round's number to `path`."""
    write_round(path, round_tensors(model, number))


def round_tensors(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Return what a round's file holds; if the model is sharded, all processes call this together."""
    with as_whole(model):
        tensors, meta = module_state(model)
    note = json.dumps({"cur_round": number, "model": meta}).encode()
    return {**tensors, ROUND_NOTE: torch.tensor(list(note), dtype=torch.uint8)}


def write_round(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a round's file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, tensor_file(tensors))


def load_round(path: Path, model: nn.Module) -> int:
    """Load what `save_round` wrote into a model; return the round's number."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: expected a file that save_model() wrote")
    tensors = read_tensors(path)
    if ROUND_NOTE not in tensors:
        raise CheckpointError(f"{path} was not written by save_model(). Load bare weights with init_weights_from.")
    meta, number = _round_note(tensors.pop(ROUND_NOTE), path)
    check_meta(meta, {name: StoredTensor("any", tuple(tensor.shape)) for name, tensor in tensors.items()})
    load_whole(model, tensors, meta)
    return number


def _round_note(stored: Tensor, path: Path) -> tuple[Any, int]:
    """Read what a round's file holds beside weights."""
    is_bytes = stored.dtype is torch.uint8 and stored.dim() == 1
    note = parse_json(stored.numpy().tobytes(), f"{path}: its note") if is_bytes else None
    if not isinstance(note, dict) or note.keys() != {"cur_round", "model"} or type(note["cur_round"]) is not int:
        raise CheckpointError(f"{path} was not written by save_model(): its note is not of the form that is saved")
    return note["model"], note["cur_round"]
