"""Weights on their own: initial weights from any safetensors source, and the file a federated worker keeps.

`initial_weights` (`init_weights_from`) goes by name and shape and reports everything that did not fit; where weights
lie and what is refused there, `weight_sources` knows. A source of which nothing fits is refused.

`save_round` and `load_round` keep a model's weights and the number of a round in one file. It is written whole or not
at all and is plain safetensors; a tensor of bytes holds the number and what modules keep beside tensors, as JSON.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hezar_train.checkpoint.format import StoredTensor, parse_json, read_tensors, tensor_file
from hezar_train.checkpoint.manifest import replace_file
from hezar_train.checkpoint.modules import check_meta, module_names, module_state, tied_names, unwrap
from hezar_train.checkpoint.peft_adapters import adapter_tensors, has_adapters
from hezar_train.checkpoint.shard_files import local_part, place_of
from hezar_train.checkpoint.sharded import as_whole, held_box, load_whole, sharded_like
from hezar_train.checkpoint.trained_part import base_differences, other_base
from hezar_train.checkpoint.weight_sources import open_weights
from hezar_train.errors import CheckpointError

__all__ = [
    "WeightReport",
    "initial_weights",
    "load_round",
    "round_tensors",
    "save_round",
    "write_round",
]

MOST_BYTES_AT_ONCE = 16 << 20  # of a share that is loaded, beside the share itself
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


def initial_weights(module: nn.Module, path: str | os.PathLike[str], unset: Collection[str] = ()) -> WeightReport:
    """Copy what fits by name and shape from a file, folder, checkpoint or run into the module; say what did not.

    Of a model that is spread over processes each of them reads its own share, and nothing is sent. What is `unset`
    has no values before, so that all of it must come.
    """
    source = Path(path)
    weights = open_weights(source)
    bare, names = unwrap(module), module_names(module)
    current = nn.Module.state_dict(bare, keep_vars=True)
    ours = {name: current[raw] for name, raw in names.items() if isinstance(current[raw], Tensor)}
    theirs = _by_own_names(bare, ours, weights.shapes)
    fitting = [name for name in ours if name in theirs and tuple(ours[name].shape) == weights.shapes[theirs[name]]]
    if not fitting:
        raise CheckpointError(
            f"init_weights_from={str(source)!r}: none of its {len(theirs)} tensors has the name and shape of one of "
            f"the model's {len(ours)}. It has {_some(theirs)}; the model has {_some(ours)}.{_advice(bare, theirs)}"
        )
    left_out = () if weights.base is None else weights.base.tensors
    report = _report(ours, theirs, set(fitting), left_out)
    _refuse_unset(source, report, unset)
    for batch in _batches(fitting, ours):
        values = weights.read({theirs[name]: held_box(weights.shapes[theirs[name]], place_of(ours[name]))
                               for name in batch})  # fmt: skip
        loadable = OrderedDict((names[name], _in_form(ours[name], values[theirs[name]])) for name in batch)
        # Called on the class: a model's own `load_state_dict` may match by position.
        nn.Module.load_state_dict(bare, loadable, strict=False)
    if weights.base is not None and (differences := base_differences(bare, weights.base)):
        logger.warning("%s", other_base(source, weights.base, differences))
    return report


def _refuse_unset(source: Path, report: WeightReport, unset: Collection[str]) -> None:
    """Raise if something would keep no values at all."""
    if lacking := [name for name in (*report.missing, *report.mismatched) if name in unset]:
        raise CheckpointError(
            f"init_weights_from={str(source)!r} does not have all of the model, which was built without values: "
            f"{len(lacking)} of its {len(unset)} tensors would have none, such as {_some(lacking)}. Build the model "
            "with values, or name a source that has all of it."
        )


def _batches(names: list[str], ours: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names together, but those of a model in shares so many bytes at a time, a module's own never parted."""
    if not any(place_of(tensor) is not None for tensor in ours.values()):
        yield names
        return
    batch: list[str] = []
    size = 0
    for _, group in itertools.groupby(names, key=lambda name: name.rpartition(".")[0]):
        together = list(group)
        nbytes = sum(local_part(ours[name]).nbytes for name in together)
        if batch and size + nbytes > MOST_BYTES_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch, size = batch + together, size + nbytes
    yield batch


def _in_form(ours: Tensor, values: Tensor) -> Tensor:
    return values if place_of(ours) is None else sharded_like(ours, values)


def _by_own_names(module: nn.Module, ours: Collection[str], theirs: Iterable[str]) -> dict[str, str]:
    """Return a source's names by the model's own, which are peft's in an adapter's file of a model with adapters."""
    found = {name: name for name in theirs}
    if not has_adapters(module) or all(name in ours for name in found):
        return found
    names: dict[str, str] = {}
    for one in adapter_tensors(module):
        names = one.names | names  # the first adapter's, where several have the same names
    return {name if name in ours else names.get(name, name): name for name in found}


def _advice(module: nn.Module, theirs: Collection[str]) -> str:
    if has_adapters(module) or not any(name.startswith(PEFT_PREFIX) for name in theirs):
        return ""
    return " These are adapters of peft: add the same kind to the model first, get_peft_model(model, config)."


def _report(
    ours: dict[str, Any], theirs: Collection[str], fitting: set[str], left_out: Collection[str]
) -> WeightReport:
    # A tied tensor is one object here: of a share that is empty there is no memory to tell it by.
    first: dict[int, str] = {}
    same = tied_names({name: local_part(tensor).detach() for name, tensor in ours.items()})
    ties = {name: same.get(first.setdefault(id(tensor), name), first[id(tensor)]) for name, tensor in ours.items()}
    # A tied tensor is loaded once one of its names is: many files hold only one of them.
    loaded_memory = {ties[name] for name in fitting}
    loaded = [name for name in ours if ties[name] in loaded_memory]
    mismatched = [name for name in ours if name in theirs and name not in fitting]
    missing = [name for name in ours if name not in theirs and name not in loaded and name not in left_out]
    return WeightReport(loaded, missing, [name for name in theirs if name not in ours], mismatched)


def _some(names: Collection[str]) -> str:
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
