"""How often each class was taken for each other: a square of counts, which no other metric of classification needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from hezar_train.errors import ConfigError
from hezar_train.metrics.class_counts import class_ids, largest_class
from hezar_train.metrics.metric import Metric, Table

__all__ = ["ConfusionMatrix"]

MOST_CLASSES_OF_A_MATRIX = 5_000  # 200 MB


class ConfusionMatrix(Metric):
    """How often each class (row) was predicted as each other (column): a table for reports, without outputs."""

    name = "confusion_matrix"

    def __init__(self, num_classes: int | None = None) -> None:
        self.num_classes = num_classes
        self.names: list[str] | None = None
        self._counts: torch.Tensor | None = None  # (1 + classes, 1 + classes): what is skipped falls into place 0

    @property
    def output_keys(self) -> list[str]:
        return []

    def expect_classes(self, num_classes: int, names: Sequence[str] | None = None) -> None:
        self.num_classes = num_classes
        self.names = None if names is None else [str(name) for name in names]

    def reset(self) -> None:
        self._counts = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:  # noqa: ARG002
        predicted, target = (ids.flatten() for ids in class_ids(predictions, targets))
        counts = self._room_for(self.num_classes or largest_class(predicted, target) + 1, target.device)
        num_places = len(counts)
        counted = (target >= 0) & (target < num_places - 1) & (predicted >= 0) & (predicted < num_places - 1)
        places = torch.where(counted, (target + 1) * num_places + predicted + 1, 0)
        counts.view(-1).index_add_(0, places, torch.ones_like(places))

    def compute(self) -> dict[str, float]:
        return {}

    def compute_rows(self) -> list[dict[str, float]]:
        return [{}]

    def table(self) -> Table | None:
        if self._counts is None:
            return None
        counts = self._counts[1:, 1:].tolist()
        names = [str(label) for label in range(len(counts))] if self.names is None else self.names
        return Table(name=self.name, rows=names, columns=names, values=counts)

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self._counts is None else {"counts": self._counts}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "counts" in state:
            other = state["counts"]
            counts = self._room_for(len(other) - 1, other.device)
            self._counts = counts + _grown_square(other.to(counts), len(counts))

    def _room_for(self, num_classes: int, device: torch.device) -> torch.Tensor:
        if num_classes > MOST_CLASSES_OF_A_MATRIX:
            raise ConfigError(
                f"confusion_matrix keeps the square of the number of classes, which is {num_classes}. "
                f"Leave it out above {MOST_CLASSES_OF_A_MATRIX}"
            )
        if self._counts is None:
            self._counts = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._counts = _grown_square(self._counts, 1 + num_classes)
        return self._counts


def _grown_square(counts: torch.Tensor, num_places: int) -> torch.Tensor:
    missing = num_places - len(counts)
    return pad(counts, (0, missing, 0, missing)) if missing > 0 else counts
