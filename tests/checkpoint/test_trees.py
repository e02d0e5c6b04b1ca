from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from hezar_train.checkpoint import pack, unpack
from hezar_train.checkpoint.format import tensor_names
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
