"""One file with a model's weights and the number of a round: what federated workers keep between rounds.

It is written whole or not at all and is plain safetensors; a tensor of bytes holds the number and what modules keep
beside tensors, as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from hezar_train.checkpoint.disk import replace_file
from hezar_train.checkpoint.modules import module_state
from hezar_train.checkpoint.sharded import load_whole
from hezar_train.checkpoint.sharded_modules import as_whole
from hezar_train.checkpoint.tensors import read_tensors, tensor_file
from hezar_train.errors import CheckpointError

__all__ = ["load_round", "round_tensors", "save_round", "write_round"]

NOTE = "hezar_train.note"


def save_round(path: Path, model: nn.Module, number: int) -> None:
    """Write the weights and the round's number to `path`."""
    write_round(path, round_tensors(model, number))


def round_tensors(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Return what a round's file holds; if the model is sharded, all processes call this together."""
    with as_whole(model):
        tensors, meta = module_state(model)
    note = json.dumps({"cur_round": number, "model": meta}).encode()
    return {**tensors, NOTE: torch.tensor(list(note), dtype=torch.uint8)}


def write_round(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a round's file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, tensor_file(tensors))


def load_round(path: Path, model: nn.Module) -> int:
    """Load what `save_round` wrote into a model; return the round's number."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: expected a file that save_model() wrote")
    tensors = read_tensors(path)
    if NOTE not in tensors:
        raise CheckpointError(f"{path} was not written by save_model(). Load bare weights with init_weights_from.")
    note = json.loads(bytes(tensors.pop(NOTE).tolist()))
    load_whole(model, tensors, note["model"])
    return int(note["cur_round"])
