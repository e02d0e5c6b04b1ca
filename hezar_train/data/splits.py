"""Data by split: what a trainer trains on, what it evaluates on, and what a name of a split stands for.

A dict of splits has for each a dataset, a DataLoader, arrays under "x" and "y", or nothing. This module owns the names
of the splits and what a value may be. It does not open anything: `loader.open_source` does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hezar_train.data.sources import is_stream
from hezar_train.errors import DataError, a_kind, choices, shown_path, suggestion

__all__ = [
    "SPLITS",
    "ArrayDataset",
    "Splits",
    "is_splits",
    "parse_splits",
]

SPLITS = ("train", "val", "test")
_SPELLINGS = {"validation": "val", "valid": "val"}


@dataclass(frozen=True)
class Splits:
    """Data by split; a split that is not there has no entry."""

    data: Mapping[str, Any]
    for_evaluation: Any = None
    """What the trainer evaluates on: a set, or several by name."""
    is_dict: bool = False
    """Whether the data was given as a dict of splits, in which one may be missing."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """`{split}_data`, `{split}_loader` and `num_{split}_data` of all splits."""

    @classmethod
    def of(cls, train: Any, evaluation: Any, parse: Callable[[Any], Mapping[str, Any]] | None = None) -> Splits:
        """Sort out what was given: a dict of splits as the training data, or a set for each purpose."""
        if isinstance(train, Splits):
            return train
        is_dict = train is not None and (parse is not None or is_splits(train))
        if is_dict:
            entries = dict((parse or parse_splits)(train))
            kinds = [(name, entries.get(f"{name}_{kind}")) for name in SPLITS for kind in ("data", "loader")]
            data = {name: value for name, value in kinds if value is not None}
        else:
            is_named = isinstance(evaluation, Mapping) and all(isinstance(name, str) for name in evaluation)
            data = {"train": train, "val": None if is_named else evaluation}
            data = {name: value for name, value in data.items() if value is not None}
            entries = _entries(data)
        return cls(data, data.get("val") if evaluation is None else evaluation, is_dict, entries)

    def replaced(self, name: str, value: Any) -> Splits:
        """Return the splits with other data for one of them; None takes it out."""
        data = {split: old for split, old in {**self.data, name: value}.items() if old is not None}
        for_evaluation = value if name == "val" else self.for_evaluation
        return Splits(data, for_evaluation, self.is_dict, {**self.entries, **_entries(data)})

    @property
    def train(self) -> Any:
        """Return what is trained on."""
        return self.data.get("train")

    def named(self, name: str) -> Any:
        """Return the data of a split."""
        if name not in self.data:
            raise DataError(
                f"there is no split {name!r}. There are: {choices(self.data) or 'none'}.{suggestion(name, self.data)}"
            )
        return self.data[name]


def _entries(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `parse_splits` would; what kind of data each is, is checked when it is opened."""
    entries: dict[str, Any] = {}
    for split in SPLITS:
        value: Any = data.get(split)
        is_loader = isinstance(value, DataLoader)
        dataset: Any = value.dataset if is_loader else value
        entries[f"{split}_data"], entries[f"{split}_loader"] = (None, value) if is_loader else (value, None)
        entries[f"num_{split}_data"] = 0 if value is None else _length(dataset)
    return entries


def is_splits(data: Any) -> bool:
    """Tell whether data is a dict of splits, and not one set."""
    if not isinstance(data, Mapping):
        return False
    return any(_SPELLINGS.get(name, name) in SPLITS for name in data if isinstance(name, str))


def parse_splits(data: Any) -> dict[str, Any]:
    """Return `{split}_data`, `{split}_loader` and `num_{split}_data` of every split; other keys are passed over."""
    if not isinstance(data, Mapping):
        raise DataFormError(f"data is {a_kind(data)}; expected a dict of splits: {choices(SPLITS)}")
    given = {_SPELLINGS.get(name, name): value for name, value in data.items()}
    parsed: dict[str, Any] = {}
    for split in SPLITS:
        dataset, loader, num_samples = _dataset_or_loader(split, given.get(split))
        parsed |= {f"{split}_data": dataset, f"{split}_loader": loader, f"num_{split}_data": num_samples}
    return parsed


def _dataset_or_loader(split: str, value: Any) -> tuple[Any, DataLoader[Any] | None, int | None]:
    """Return the dataset or the loader that a split is, and its samples where they are known."""
    if value is None:
        return None, None, 0
    if isinstance(value, DataLoader):
        return None, value, _length(value.dataset)
    if isinstance(value, Mapping) and {"x", "y"} <= value.keys():
        arrays = ArrayDataset(value["x"], value["y"])
        return arrays, None, len(arrays)
    is_indexed = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | Mapping)
    if is_indexed or is_stream(value):
        return value, None, _length(value)
    raise DataFormError(
        f"the split {split!r} is {a_kind(value)}; expected a dataset, a DataLoader, or arrays as "
        "{'x': ..., 'y': ...}. Load it first, and pass what was loaded."
    )


def _length(data: Any) -> int | None:
    if isinstance(data, type):
        name = data.__name__
        raise DataFormError(f"the data is the class {name}; expected a dataset. Make one: {name}(...)")
    try:
        return len(data) if hasattr(data, "__len__") else None
    except Exception as error:
        own = type(data).__len__
        if isinstance(error, TypeError | ValueError) and not _was_raised_in(own, error):
            raise DataError(
                f"the length of {type(data).__name__} cannot be used ({error}). Expected a whole number, 0 or more: "
                f"correct what its __len__ returns{_place_of(own)}."
            ) from error
        error.add_note(
            f"This was raised while the length of {type(data).__name__} was asked for; expected a whole "
            "number, 0 or more."
        )
        raise


def _was_raised_in(function: Any, error: BaseException) -> bool:
    """Tell whether an error came from inside of a function, not from what was made of its result."""
    code = getattr(function, "__code__", None)
    return code is not None and any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def _place_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({shown_path(code.co_filename)}, line {code.co_firstlineno})"


class ArrayDataset(Dataset[Any]):
    """Samples `(x, y)` of two arrays; whole numbers stay whole numbers."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = _as_tensor(x), _as_tensor(y)
        if len(self.x) != len(self.y):
            raise DataError(
                f"'x' has {len(self.x)} samples and 'y' has {len(self.y)}; expected as many of both. Give each x its y."
            )

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def _as_tensor(values: Any) -> torch.Tensor:
    tensor = torch.as_tensor(values)
    return tensor if not tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


class DataFormError(DataError, TypeError):
    """Data of a kind that is not supported."""
