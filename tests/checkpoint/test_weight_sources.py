"""Where initial weights lie: what torch's distributed checkpoints write, and what a file may not make us believe."""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hezar_train.checkpoint import initial_weights
from hezar_train.checkpoint.shard_files import Box
from hezar_train.checkpoint.weight_sources import open_weights
from hezar_train.errors import CheckpointError


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))


def piece_file(path: Path, tensors: dict[str, torch.Tensor], offsets: dict[str, Any]) -> None:
    """Write a file as torch's HuggingFaceStorageWriter does, one process's pieces."""
    note = {name: {"saved_offsets": place} for name, place in offsets.items()}
    safetensors.torch.save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(note)})


def in_pieces(folder: Path) -> nn.Sequential:
    """Write a network in pieces of two processes; return it."""
    torch.manual_seed(3)
    model, folder_of = network(), folder
    folder_of.mkdir(exist_ok=True)
    state = model.state_dict()
    for number, rows in ((1, slice(0, 3)), (2, slice(3, 5))):
        cut = {name: one[rows].clone() for name, one in state.items() if one[rows].numel()}
        begins = {name: [rows.start, *[0] * (one.dim() - 1)] for name, one in cut.items()}
        piece_file(folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", cut, begins)
    (folder / "shard-00003-model-00001-of-00001.safetensors").touch()  # of a process that had nothing
    return model


def test_pieces_of_several_processes_make_up_the_weights(tmp_path: Path) -> None:
    source, target = in_pieces(tmp_path / "dcp"), network()
    report = initial_weights(target, tmp_path / "dcp")
    assert (len(report.loaded), report.missing, report.unexpected, report.mismatched) == (4, [], [], [])
    for name, value in target.state_dict().items():
        assert torch.equal(value, source.state_dict()[name])


def test_any_box_is_read_out_of_the_pieces(tmp_path: Path) -> None:
    source = in_pieces(tmp_path / "dcp").state_dict()["0.weight"]
    weights = open_weights(tmp_path / "dcp")
    for begin in range(5):
        for end in range(begin, 6):
            found = weights.read({"0.weight": Box((begin, 1), (end - begin, 1))})["0.weight"]
            assert torch.equal(found, source[begin:end, 1:])


def write_header(path: Path, header: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def overlapping(folder: Path) -> None:
    piece_file(folder / "shard-00003-model-00001-of-00001.safetensors", {"0.bias": torch.ones(3)}, {"0.bias": [0]})


def missing(folder: Path) -> None:
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()


def noted_otherwise(note: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "shard-00003-model-00001-of-00001.safetensors"
        text = note if isinstance(note, str) else json.dumps(note)
        safetensors.torch.save_file({"w": torch.ones(3)}, path, {"DCP_SHARDING_INFO": text})

    return write


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "two hold the same": (overlapping, r"do not make up '0\.bias': a file is missing, or two hold the same"),
    "a file is missing": (missing, r"do not make up '0\.weight', '0\.bias': a file is missing"),
    "a note of other names": (noted_otherwise({"other": {"saved_offsets": [0]}}), "does not tell of the tensors in"),
    "a note that is a list": (noted_otherwise(["w"]), "does not tell of the tensors in"),
    "no offsets": (noted_otherwise({"w": {}}), "does not say where the piece of 'w' begins"),
    "other dimensions": (noted_otherwise({"w": {"saved_offsets": [0, 0]}}), "does not say where the piece of 'w'"),
    "a negative place": (noted_otherwise({"w": {"saved_offsets": [-1]}}), "does not say where the piece of 'w'"),
    "a place that is a bool": (noted_otherwise({"w": {"saved_offsets": [True]}}), "does not say where the piece of"),
    "a place far out": (noted_otherwise({"w": {"saved_offsets": [1 << 70]}}), "does not say where the piece of 'w'"),
    "a hole before it": (noted_otherwise({"w": {"saved_offsets": [1 << 61]}}), "do not make up 'w'"),
    "no JSON": (noted_otherwise("{"), "DCP_SHARDING_INFO cannot be read"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_pieces_that_make_up_nothing_are_refused(what: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[what]
    in_pieces(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        initial_weights(network(), tmp_path)


def test_pieces_of_several_types_are_refused(tmp_path: Path) -> None:
    in_pieces(tmp_path)
    state = network().half().state_dict()
    cut = {name: one[3:5].clone() for name, one in state.items() if one[3:5].numel()}
    begins = {name: [3, *[0] * (one.dim() - 1)] for name, one in cut.items()}
    piece_file(tmp_path / "shard-00002-model-00001-of-00001.safetensors", cut, begins)
    with pytest.raises(CheckpointError, match=r"the pieces of '0.\w+' are .*float.*expected one type"):
        initial_weights(network(), tmp_path)


def test_what_torch_writes_whole_is_read_too(tmp_path: Path) -> None:
    source, target = network(), network()
    names = {name: 1 + number % 2 for number, name in enumerate(source.state_dict())}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=names)
    dcp.save(source.state_dict(), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert initial_weights(target, tmp_path).missing == []
    assert torch.equal(target[1].weight, source[1].weight)


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_pickled_one_is_refused_with_the_commands_that_convert_it(is_nested: bool, tmp_path: Path) -> None:
    folder, source, target = tmp_path / "a run's", network(), network()
    state = {"model": source.state_dict(), "step": 3} if is_nested else source.state_dict()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    for given in (folder, folder / ".metadata", folder / "__0_0.distcp"):
        with pytest.raises(CheckpointError, match=r"\.metadata is a pickle, and pickles are not read") as caught:
            initial_weights(target, given)
    said = str(caught.value)
    assert shlex.quote(str(folder)) in said
    commands = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert len(commands) == 2
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=variables)
    assert initial_weights(target, tmp_path / "model.safetensors").missing == []
    assert torch.equal(target[1].weight, source[1].weight)


def test_an_index_in_a_folder_is_found(tmp_path: Path) -> None:
    source, target = network(), network()
    files = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(source.state_dict())
    }
    for file in set(files.values()):
        mine = {name: one for name, one in source.state_dict().items() if files[name] == file}
        safetensors.torch.save_file(mine, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert initial_weights(target, tmp_path).missing == []
    assert torch.equal(target[1].weight, source[1].weight)
