from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from hezar_train.runtime import to_device

META = torch.device("meta")


class Pair(NamedTuple):
    inputs: Any
    labels: Any


def rows() -> torch.Tensor:
    return torch.ones(3)


def test_a_tensor_is_moved() -> None:
    assert to_device(rows(), META).device == META


@pytest.mark.parametrize("kind", [dict, OrderedDict, BatchEncoding])
def test_every_kind_of_mapping_becomes_a_dict_of_moved_tensors(kind: Any) -> None:
    moved = to_device(kind({"ids": rows(), "names": "abc", "missing": None}), META)
    assert type(moved) is dict
    assert moved["ids"].device == META
    assert (moved["names"], moved["missing"]) == ("abc", None)


def test_nested_structures_keep_their_shape() -> None:
    batch = {"a": [rows(), (rows(), "text", 3)], "b": Pair(rows(), {"c": [rows()]})}
    moved = to_device(batch, META)
    assert moved["a"][0].device == META
    assert type(moved["a"][1]) is tuple
    assert moved["a"][1][0].device == META
    assert moved["a"][1][1:] == ("text", 3)
    assert type(moved["b"]) is Pair
    assert moved["b"].inputs.device == META
    assert moved["b"].labels["c"][0].device == META


def test_a_packed_sequence_keeps_its_sizes_where_they_must_be() -> None:
    moved = to_device({"x": pack_sequence([rows(), rows()[:2]])}, META)["x"]
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_what_holds_no_tensor_is_handed_on_as_it_is() -> None:
    thing = object()
    assert to_device(thing, META) is thing
    assert to_device("abc", META) == "abc"


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = rows()
    assert to_device([tensor], torch.device("cpu"))[0] is tensor
