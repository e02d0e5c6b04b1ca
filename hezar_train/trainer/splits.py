"""The data of a trainer by split: what it trains on, what it evaluates on, and what a name stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from hezar_train.data import SPLITS, is_splits, parse_splits
from hezar_train.errors import DataError, choices, suggestion

__all__ = ["Splits"]


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
        entries[f"num_{split}_data"] = len(dataset) if hasattr(dataset, "__len__") else 0 if value is None else None
    return entries
