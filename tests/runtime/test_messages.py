"""What processes send one another comes back as it was, and nothing in a message is run."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.runtime.messages import DTYPES, pack_message, unpack_message

CPU = torch.device("cpu")


def sent(value: Any) -> Any:
    return unpack_message(pack_message(value), CPU)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers(), max_size=1)  # larger ones have no order of their own to compare
        | st.frozensets(st.text(), max_size=1)
    ),
    max_leaves=20,
)


@given(values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = sent(value)
    assert back == value
    assert repr(back) == repr(value)  # 1 and True are equal, but not the same


def test_a_number_that_is_none_comes_back() -> None:
    assert math.isnan(sent(float("nan")))


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_tensors_of_every_type_come_back_bit_by_bit(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(DTYPES[name])
    back = sent({"state": [tensor]})["state"][0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_a_part_of_a_tensor_is_sent_alone_and_can_be_written_to() -> None:
    whole = torch.arange(1000.0).reshape(10, 100)
    message = pack_message(whole[:, 3])
    assert len(message) < 200
    back = unpack_message(message, CPU)
    back += 1
    assert torch.equal(back, whole[:, 3] + 1)


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.array(["سلام", "x"]), np.array(b"ab"), np.array([True]), np.zeros((0, 2)),
     np.array(["2024-01-01"], "datetime64[D]"), np.asfortranarray(np.arange(6.0).reshape(2, 3))],
)  # fmt: skip
def test_arrays_come_back_as_they_were(array: np.ndarray) -> None:
    back = sent((array, 1))[0]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize("number", [np.float64(0.1), np.float32(0.1), np.int64(2**60), np.bool_(True), np.str_("x")])
def test_a_number_of_numpy_keeps_its_type(number: Any) -> None:
    assert sent([number])[0] == number
    assert type(sent([number])[0]) is type(number)


class Thing:
    pass


@pytest.mark.parametrize("value", [Thing(), [Thing()], np.array([Thing()]), lambda: 0, torch.eye(2).to_sparse()])
def test_what_is_neither_plain_nor_numbers_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="cannot be sent from one process to another"):
        pack_message(value)


@pytest.mark.parametrize(
    "node", [["array", "|O", [1]], ["object", "os.system"], ["tuple", 3], ["tensor", "x"], {"a": 1}, ["bytes", "1"]]
)
def test_a_message_that_no_process_sends_is_refused(node: Any) -> None:
    text = json.dumps(node).encode()
    with pytest.raises(DataError, match="which no process sends"):
        unpack_message(len(text).to_bytes(8, "little") + text + b"12345678", CPU)


def test_a_pickle_is_no_message() -> None:
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        unpack_message(pickle.dumps([1, 2]), CPU)
