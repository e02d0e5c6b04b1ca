from __future__ import annotations

import torch

from hezar_train.checkpoint import SnapshotBuffers


def test_a_copy_does_not_follow_later_updates() -> None:
    buffers, weight = SnapshotBuffers(), torch.ones(3, requires_grad=True)
    copy = buffers.copy({"w": weight})["w"]
    with torch.no_grad():
        weight.add_(1)
    assert copy.tolist() == [1, 1, 1]
    assert not copy.requires_grad


def test_reserved_buffers_are_used_again_and_again() -> None:
    buffers, tensors = SnapshotBuffers(), {"w": torch.randn(4, 3).t(), "step": torch.tensor(2.0)}
    buffers.reserve(tensors)
    assert buffers.nbytes == 4 * 3 * 4 + 4
    first = {name: copy.data_ptr() for name, copy in buffers.copy(tensors).items()}
    copies = buffers.copy(tensors)
    assert {name: copy.data_ptr() for name, copy in copies.items()} == first
    assert all(torch.equal(copies[name], tensors[name]) and copies[name].is_contiguous() for name in tensors)


def test_a_stand_in_of_the_same_form_reserves_the_buffer() -> None:
    buffers, parameter = SnapshotBuffers(), torch.randn(5)
    buffers.reserve({"exp_avg": parameter})
    reserved = buffers._buffers["exp_avg"].data_ptr()
    assert buffers.copy({"exp_avg": torch.zeros(5)})["exp_avg"].data_ptr() == reserved


def test_a_changed_form_gets_a_new_buffer_and_a_vanished_name_frees_its_own() -> None:
    buffers = SnapshotBuffers()
    buffers.copy({"a": torch.ones(2), "b": torch.ones(2)})
    copies = buffers.copy({"a": torch.ones(3, dtype=torch.float64)})
    assert (copies["a"].shape, copies["a"].dtype) == ((3,), torch.float64)
    assert buffers.nbytes == 24


def test_all_kinds_of_dtypes_and_empty_tensors_are_copied() -> None:
    tensors = {
        str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int8)
    }
    tensors["empty"] = torch.empty(0, 2)
    copies = SnapshotBuffers().copy(tensors)
    assert all(torch.equal(copies[name].float(), tensor.float()) for name, tensor in tensors.items())
    assert SnapshotBuffers().copy({}) == {}
