from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import hezar_train
from hezar_train.checkpoint import read_tensors
from hezar_train.checkpoint.format import check_storable, tensor_file
from hezar_train.errors import CheckpointError

SAMPLES = {
    "float32": torch.randn(5, 3),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(3).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "uint64": torch.tensor([2**63 + 1], dtype=torch.uint64),
    "complex64": torch.randn(2, 2, dtype=torch.complex64),
    "zero dimensions": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "not contiguous": torch.randn(4, 6).t()[::2],
    "broadcast": torch.ones(1).expand(3, 2),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "requires grad": torch.randn(3, requires_grad=True),
    "not a number": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "نام": torch.arange(3),
}


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(b"".join(tensor_file(tensors)))
    return path


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path: Path) -> None:
    read = read_tensors(written(tmp_path, SAMPLES))
    assert set(read) == set(SAMPLES)
    for name, tensor in SAMPLES.items():
        assert (read[name].shape, read[name].dtype, raw(read[name])) == (tensor.shape, tensor.dtype, raw(tensor)), name
        assert read[name].data_ptr() % 64 == 0


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    dense = {
        name: tensor.detach().resolve_conj().contiguous() for name, tensor in SAMPLES.items() if name != "broadcast"
    }
    theirs = safetensors.torch.load(written(tmp_path, dense).read_bytes())
    safetensors.torch.save_file(dense, tmp_path / "y.safetensors")
    ours = read_tensors(tmp_path / "y.safetensors")
    assert {name: raw(tensor) for name, tensor in theirs.items()} == {name: raw(dense[name]) for name in dense}
    assert {name: raw(tensor) for name, tensor in ours.items()} == {name: raw(dense[name]) for name in dense}


def test_every_tensor_is_aligned_in_the_file() -> None:
    header = next(
        iter(tensor_file({"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(1), "c": torch.ones(1).double()}))
    )
    entries = json.loads(header[8:])
    assert len(header) % 8 == 0
    assert {name: entries[name]["data_offsets"][0] for name in "abc"} == {"c": 0, "b": 8, "a": 12}


def test_complex128_is_stored_although_the_format_lacks_it(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3, dtype=torch.complex128)
    read = read_tensors(written(tmp_path, {"z": tensor, "w": torch.ones(2)}))
    assert read["z"].dtype is torch.complex128
    assert torch.equal(read["z"], tensor)


def test_only_the_named_tensors_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)})
    assert list(read_tensors(path, {"b", "c"})) == ["b"]


def test_what_was_read_lives_on_when_the_file_is_cut_short(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": torch.ones(100_000)})
    tensor = read_tensors(path)["a"]
    os.truncate(path, 10)
    assert tensor.sum() == 100_000


def test_a_file_that_is_not_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read as safetensors"):
        read_tensors(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(2, device="meta"), "w is on the meta device"),
        (torch.eye(2).to_sparse(), "only dense tensors"),
        (torch.nn.UninitializedParameter(), "run one batch"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "cannot store"),
    ],
)
def test_a_tensor_without_storable_values_is_refused_by_name(tensor: Tensor, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        check_storable("w", tensor)


def test_only_this_module_imports_safetensors() -> None:
    package = Path(hezar_train.__file__ or "").parent
    importers = [
        path for path in package.rglob("*.py") if re.search(r"^(import|from) safetensors", path.read_text(), re.M)
    ]
    assert importers == [package / "checkpoint" / "format.py"]
