"""Values as they are stored: trees as JSON and named tensors, tensors as safetensors files, to the last bit."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import hezar_train
from hezar_train.checkpoint import pack, read_tensors, unpack
from hezar_train.checkpoint.format import check_storable, tensor_file, tensor_names
from hezar_train.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911 - a kind of value each
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one), list(other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return bool(one == other)


def through_json(tree: Any) -> Any:
    packed, tensors = pack(tree)
    assert tensor_names(packed) == set(tensors)
    return unpack(json.loads(json.dumps(packed, allow_nan=False)), tensors)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
some_tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
arrays = hnp.arrays(
    hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes(), hnp.array_shapes(min_dims=0)
)
scalars = st.builds(lambda array: array.reshape(-1)[0], hnp.arrays(hnp.scalar_dtypes(), 1))
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text()) | st.just("$tuple")
trees = st.recursive(
    plain | some_tensors | arrays | scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_every_tree_comes_back_equal_with_all_its_types(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_plain_json_stands_for_itself() -> None:
    tree = {"lr": 0.1, "names": ["a", None, True], "deep": {"step": 3}}
    assert pack(tree) == (tree, {})


def test_tensor_names_are_paths() -> None:
    state = {
        "state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)}},
        "param_groups": [{"betas": (0.9, 0.99)}],
    }
    _, tensors = pack(state)
    assert list(tensors) == ["state.0.exp_avg", "state.0.step"]
    assert same(through_json(state), state)
    assert list(pack(state, prefix="extra", taken=["extra.state.0.step"])[1]) == [
        "extra.state.0.exp_avg",
        "extra.state.0.step~2",
    ]


def test_equal_paths_and_reserved_names_do_not_collide() -> None:
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 0: torch.full((1,), 2), "0": torch.full((1,), 3)}
    assert same(through_json(tree), tree)
    assert "__metadata__" not in pack({"__metadata__": torch.zeros(1)})[1]


def test_a_counter_keeps_its_type() -> None:
    assert same(through_json(Counter({30: 2, 80: 1})), Counter({30: 2, 80: 1}))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (len, "builtins.builtin_function_or_method"),
        (defaultdict(int), "collections.defaultdict"),
        (namedtuple("Point", "x")(1), "Point"),
        (np.array([object()]), "dtype object"),
        (torch.float32, "torch.dtype"),
    ],
)
def test_an_unknown_type_is_refused_with_its_place_and_name(value: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match="tensors and plain values") as caught:
        pack({"hooks": [{"state": value}]})
    assert "hooks.0.state" in str(caught.value)
    assert name in str(caught.value)


def test_a_key_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"key at hooks is a builtins\.frozenset"):
        pack({"hooks": {frozenset(): 1}})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="contains itself"):
        pack(tree)


@pytest.mark.parametrize("packed", [{"$pickle": "x"}, {"$tensor": "gone"}, {"$array": 3}, {"$bytes": "?"}])
def test_what_pack_did_not_write_is_refused(packed: Any) -> None:
    with pytest.raises(CheckpointError):
        unpack(packed, {})


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.PolynomialLR(o)],
        [2],
    ),
]


@pytest.mark.parametrize("build", SCHEDULERS)
def test_the_state_of_torch_schedulers_survives(build: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    state = build(optimizer).state_dict()
    assert same(through_json(state), state)


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
