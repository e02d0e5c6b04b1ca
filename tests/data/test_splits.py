from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hezar_train.data import SPLITS, is_splits, parse_splits
from hezar_train.data.splits import ArrayDataset
from hezar_train.errors import DataError

DATA = TensorDataset(torch.arange(7.0))


class Stream(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter(range(3))


def test_every_split_has_its_three_entries() -> None:
    parsed = parse_splits({"train": DATA})
    assert set(parsed) == {name for one in SPLITS for name in (f"{one}_data", f"{one}_loader", f"num_{one}_data")}
    assert (parsed["train_data"], parsed["train_loader"], parsed["num_train_data"]) == (DATA, None, 7)
    assert (parsed["val_data"], parsed["val_loader"], parsed["num_val_data"]) == (None, None, 0)


def test_a_loader_counts_the_samples_of_its_dataset() -> None:
    loader = DataLoader(DATA, batch_size=3)
    parsed = parse_splits({"test": loader})
    assert (parsed["test_data"], parsed["test_loader"], parsed["num_test_data"]) == (None, loader, 7)


def test_a_list_and_a_stream_are_datasets() -> None:
    parsed = parse_splits({"train": Stream(), "val": [1, 2]})
    assert (parsed["num_train_data"], parsed["num_val_data"]) == (None, 2)


@pytest.mark.parametrize("name", ["val", "validation", "valid"])
def test_the_validation_split_may_be_spelled_out(name: str) -> None:
    assert parse_splits({name: DATA})["val_data"] is DATA


def test_other_keys_are_passed_over_and_none_is_no_data() -> None:
    parsed = parse_splits({"train": DATA, "val": None, "extra": 3})
    assert (parsed["num_val_data"], "extra" in parsed) == (0, False)


@pytest.mark.parametrize(
    ("x", "y", "dtypes"),
    [
        (np.zeros((4, 2)), np.arange(4), (torch.float32, torch.int64)),
        ([[1.0], [2.0]], [0.5, 1.5], (torch.float32, torch.float32)),
        (torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, dtype=torch.int32), (torch.float32, torch.int32)),
    ],
)
def test_arrays_become_tensors_and_whole_numbers_stay_whole(x: Any, y: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    parsed = parse_splits({"train": {"x": x, "y": y}})
    first = parsed["train_data"][0]
    assert tuple(value.dtype for value in first) == dtypes
    assert parsed["num_train_data"] == len(y)


def test_arrays_of_unequal_length_are_refused() -> None:
    with pytest.raises(DataError, match="'x' has 3 samples and 'y' has 2"):
        ArrayDataset([1, 2, 3], [1, 2])


@pytest.mark.parametrize("data", [[DATA], DATA, None])
def test_what_is_no_dict_is_a_type_error(data: Any) -> None:
    with pytest.raises(TypeError, match="expected a dict of splits: test, train, val"):
        parse_splits(data)


@pytest.mark.parametrize("value", [3, "text", {"x": [1]}])
def test_a_split_of_another_kind_is_a_type_error_that_names_it(value: Any) -> None:
    with pytest.raises(TypeError, match=f"the split 'val' is an? {type(value).__name__}; expected a dataset.*Load it"):
        parse_splits({"train": DATA, "val": value})


def test_a_dict_is_one_of_splits_if_it_has_the_name_of_one() -> None:
    assert is_splits({"train": DATA})
    assert is_splits({"validation": DATA})
    assert not is_splits({"dev": DATA})
    assert not is_splits({0: "a", 1: "b"})
    assert not is_splits([DATA])
