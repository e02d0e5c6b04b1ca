"""What a checkpoint's files may say: exactly what this package writes. Everything else is refused before it is used."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train import Trainer, TrainerConfig
from hezar_train.checkpoint import Checkpoint, CheckpointStore, pack, read_tensors, unpack
from hezar_train.checkpoint.format import stored_tensors, tensor_file, tensor_names
from hezar_train.checkpoint.trained_part import AdapterFile, BaseRecord, files_for_others
from hezar_train.errors import CheckpointError
from hezar_train.hub.pushed_files import SavedRun, stage
from tests.security.hostile import add_tensor, data, edit_state, make_trainer, newest, sealed

BYTES = torch.arange(64, dtype=torch.uint8)

REFUSED = {
    "objects are pointers": {"$array": {"tensor": "b", "dtype": "|O", "shape": [8]}},
    "objects by another name": {"$array": {"tensor": "b", "dtype": "O8", "shape": [8]}},
    "records that hold objects": {"$array": {"tensor": "b", "dtype": [["a", "|O"]], "shape": [8]}},
    "records in words": {"$array": {"tensor": "b", "dtype": "i4,O", "shape": [5]}},
    "a dtype as an object": {"$array": {"tensor": "b", "dtype": {"names": ["a"], "formats": ["O"]}, "shape": [8]}},
    "raw memory": {"$array": {"tensor": "b", "dtype": "|V8", "shape": [8]}},
    "more than the bytes": {"$array": {"tensor": "b", "dtype": "<f8", "shape": [9]}},
    "fewer than the bytes": {"$array": {"tensor": "b", "dtype": "<f8", "shape": [7]}},
    "a negative size": {"$array": {"tensor": "b", "dtype": "<f8", "shape": [-8]}},
    "two negative sizes": {"$array": {"tensor": "b", "dtype": "<f8", "shape": [-2, -4]}},
    "a size that is true": {"$array": {"tensor": "b", "dtype": "|u1", "shape": [64, True]}},
    "a huge size of nothing": {"$array": {"tensor": "e", "dtype": "|S0", "shape": [1 << 60]}},
    "sizes that overflow": {"$array": {"tensor": "e", "dtype": "<f8", "shape": [0, 1 << 62, 1 << 62]}},
    "many dimensions": {"$array": {"tensor": "b", "dtype": "|u1", "shape": [64, *[1] * 70]}},
    "more dimensions than torch likes": {"$array": {"tensor": "b", "dtype": "|u1", "shape": [64, *[1] * 40]}},
    "another tensor": {"$array": {"tensor": "f", "dtype": "<f4", "shape": [16]}},
    "a part more": {"$array": {"tensor": "b", "dtype": "|u1", "shape": [64], "order": "F"}},
    "no array": {"$array": [1, 2]},
    "bools that are none": {"$array": {"tensor": "b", "dtype": "|b1", "shape": [64]}},
    "characters that are none": {"$array": {"tensor": "h", "dtype": "<U4", "shape": [4]}},
    "an object scalar": {"$scalar": {"dtype": "|O", "hex": "4141414141414141"}},
    "a short scalar": {"$scalar": {"dtype": "<f8", "hex": "41"}},
    "a long scalar": {"$scalar": {"dtype": "<f4", "hex": "4141414141414141"}},
    "a scalar of text": {"$scalar": {"dtype": "<U2", "hex": "4141414141414141"}},
    "a scalar of readable text": {"$scalar": {"dtype": "<U2", "hex": "4100000042000000"}},
    "a scalar without hex": {"$scalar": {"dtype": "<f8", "hex": "zz"}},
    "a float in words": {"$float": "1e5"},
    "a float of another type": {"$float": [1]},
    "a long float": {"$float": "9" * 400},
    "bytes that are none": {"$bytes": "?"},
    "bytes of another type": {"$bytes": 3},
    "a tuple of text": {"$tuple": "abc"},
    "a tuple of a dict": {"$tuple": {"a": 1}},
    "a dict of text": {"$dict": ["ab", "cd"]},
    "a dict of triples": {"$dict": [[1, 2, 3]]},
    "a dict with a list as key": {"$dict": [[[1], 2]]},
    "a dict with a dict as key": {"$dict": [[{"a": 1}, 2]]},
    "a dict with a tensor as key": {"$dict": [[{"$tensor": "f"}, 2]]},
    "a dict with a list inside a key": {"$dict": [[{"$tuple": [[1]]}, 2]]},
    "a dict with a key twice": {"$dict": [[1, 2], [1, 3]]},
    "a dict with equal keys": {"$dict": [[1, 2], [True, 3]]},
    "keys of one hash": {"$dict": [[number * ((1 << 61) - 1), 0] for number in range(2000)]},
    "a tensor that is not there": {"$tensor": "gone"},
    "a tensor without a name": {"$tensor": 3},
    "a tensor with a list as name": {"$tensor": ["f"]},
    "an unknown tag": {"$pickle": "x"},
    "two tags": {"$tensor": "f", "$float": "nan"},
    "a tag and more": {"$tensor": "f", "more": 1},
    "a tag that is not first": {"more": 1, "$tensor": "f"},
}
TENSORS = {
    "b": BYTES,
    "e": torch.empty(0, dtype=torch.uint8),
    "f": torch.arange(16, dtype=torch.float32),
    "h": torch.full((64,), 255, dtype=torch.uint8),
}


@pytest.mark.parametrize("packed", REFUSED.values(), ids=REFUSED)
def test_a_node_that_pack_cannot_have_written_is_refused(packed: Any) -> None:
    with pytest.raises(CheckpointError):
        unpack({"extra": [packed]}, TENSORS)


def test_an_array_comes_back_as_it_was() -> None:
    kinds = ["<i2", ">f8", "|b1", "<U3", "|S2", "<M8[ns]", "<m8[25s]", "<c16", "|u1"]
    arrays = {kind: np.zeros((2, 3), kind) for kind in kinds} | {"empty": np.zeros((0, 3), "<f4"), "one": np.array(3.0)}
    packed, tensors = pack(arrays)
    found = unpack(json.loads(json.dumps(packed)), tensors)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in arrays.items()
    }


def test_a_tree_that_is_nested_too_deeply_is_refused_by_both_sides() -> None:
    tree: Any = 0
    for _ in range(150):
        tree = [tree]
    with pytest.raises(CheckpointError, match="nested"):
        pack(tree)
    with pytest.raises(CheckpointError, match="nested"):
        unpack(tree, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
TAGS = ["$tensor", "$array", "$scalar", "$tuple", "$float", "$bytes", "$dict", "$ordered", "$counter", "$other"]
DTYPES = ["|O", "<f8", "|b1", "<U4", "<M8[ns]", "<M8", "|S0", "O", "i4,O", "<f3", "<M8[zz]", "|V8", "<u8", ">i4"]
NODES = st.recursive(
    JSON | st.sampled_from(["b", "e", "f", "h", "nan", "4141414141414141", "QUFB"]),
    lambda inner: (
        st.builds(lambda tag, body: {tag: body}, st.sampled_from(TAGS), inner)
        | st.lists(inner, max_size=3)
        | st.builds(lambda one, other: {"$dict": [[one, other]]}, inner, inner)
        | st.builds(lambda dtype, text: {"$scalar": {"dtype": dtype, "hex": text}}, st.sampled_from(DTYPES), inner)
        | st.builds(
            lambda name, dtype, shape: {"$array": {"tensor": name, "dtype": dtype, "shape": shape}},
            st.sampled_from(["b", "e", "f", "h", "gone"]),
            st.sampled_from(DTYPES),
            st.lists(st.integers(-2, 64) | st.just(1 << 62), max_size=3),
        )
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=2000)
@given(NODES)
def test_no_tree_gets_another_answer_than_a_value_or_our_error(packed: Any) -> None:
    try:
        unpack(packed, TENSORS)
        tensor_names(packed)
    except CheckpointError:
        return


@settings(max_examples=200, deadline=2000)
@given(st.data())
def test_a_changed_byte_of_a_tensor_file_is_an_error_of_ours_or_other_values(data: st.DataObject) -> None:
    content = bytearray(
        b"".join(map(bytes, tensor_file({"a": torch.ones(3), "c": torch.ones(2, dtype=torch.complex128)})))
    )
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = Path(f"/dev/shm/hezar-train-fuzz-{id(content)}")
    path.write_bytes(content)
    try:
        read_tensors(path)
    except CheckpointError:
        pass
    finally:
        path.unlink()


@pytest.mark.parametrize("length", [1 << 30, 1 << 40, 1 << 62])
@pytest.mark.parametrize("size", [10, 1 << 42])
def test_a_tensor_file_is_not_read_as_far_as_it_says(tmp_path: Path, length: int, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    os.truncate(path, size)
    tracemalloc.start()
    try:
        for read in (stored_tensors, read_tensors):
            with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_bools_of_a_tensor_file_are_0_or_1(tmp_path: Path) -> None:
    content = b"".join(map(bytes, tensor_file({"a": torch.ones(3, dtype=torch.bool)})))
    (tmp_path / "model.safetensors").write_bytes(content[:-1] + b"\x02")
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        read_tensors(tmp_path / "model.safetensors")


def hostile_array(sections: dict[str, Any]) -> None:
    sections["extra"]["measured"] = {"$array": {"tensor": "evil", "dtype": "|O", "shape": [1]}}


@pytest.mark.parametrize("resume", [True, "last", "path"])
def test_a_checkpoint_of_pointers_is_passed_over_or_refused(
    run: Path, resume: Any, warnings_of: Callable[[], str]
) -> None:
    address = torch.tensor([0x41414141], dtype=torch.int64).view(torch.uint8)
    add_tensor(newest(run), "evil", address)
    edit_state(newest(run), hostile_array)
    if resume == "path":
        with pytest.raises(CheckpointError, match=r"dtype '\|O'"):
            make_trainer(run, resume_from_checkpoint=str(newest(run)))
        return
    trainer = make_trainer(run, resume_from_checkpoint=resume)
    assert trainer.state.global_step == 8
    assert "00000012 is damaged and was passed over" in warnings_of()


def test_a_file_without_end_in_json_is_refused_in_time(tmp_path: Path, run: Path) -> None:
    state = newest(run) / "trainer_state.json"
    state.write_bytes(b'{"state": ' + b"[" * 2_000_000)
    sealed(newest(run))
    begun = time.process_time()
    with pytest.raises(CheckpointError, match="nested"):
        Checkpoint(newest(run))
    assert time.process_time() - begun < 5


def test_the_checkpoint_before_is_taken_if_the_newest_is_sealed_and_says_nonsense(run: Path) -> None:
    edit_state(newest(run), lambda sections: sections.update(optimizer={"$tensor": "gone"}))
    found, rejected = CheckpointStore(run / "checkpoints").newest()
    assert found is not None
    assert found.step == 8
    assert [one.path.name for one in rejected] == ["00000012"]


def test_a_checkpoint_that_is_untouched_says_the_same_after_checking(run: Path) -> None:
    checkpoint = Checkpoint(newest(run))
    assert copy.deepcopy(checkpoint.state())["global_step"] == 12
    assert checkpoint.extra()["plan"]["total_steps"] == 12


@pytest.mark.parametrize("computed", [[], "text", {"": []}, {"": {"name": 5}}, {5: None}])
def test_tensors_of_adapters_that_are_none_are_refused(computed: Any) -> None:
    record = BaseRecord(None, None, "Model", {}, [AdapterFile("", {}, ["name"])], [])
    with pytest.raises(CheckpointError, match="in a form that is never saved"):
        files_for_others(record, {}, computed)


@pytest.mark.parametrize("extra", [[], "text", {"adapters": 5}, {"adapters": [5]}])
def test_a_trained_part_with_an_odd_state_is_pushed_as_it_can_be_or_refused(tmp_path: Path, extra: Any) -> None:
    run, model = tmp_path / "run", torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    Trainer(TrainerConfig(run, criterion="MSELoss", save_trained_only=True, trackers=[]), model, data()).train()
    assert (newest(run) / "base_model.json").is_file()
    edit_state(newest(run), lambda sections: sections.update(extra=extra))
    with contextlib.suppress(CheckpointError):
        stage(SavedRun(run), 12, "end")
