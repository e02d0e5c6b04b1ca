"""Counts per class: how often it was predicted, how often it was the target, how often both.

Precision, recall, F1 and Matthews' coefficient all follow from these three, so a state is linear in the number of
classes (a confusion matrix is not), and metrics that are asked for together count once: `share_counts`. This module
also owns how class ids come in. It refuses to average; that is `classification.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics.metric import DEVICES_WITHOUT_FLOAT64, Metric, RowMetric, Table

__all__ = ["ClassCounts", "ClassMetric", "Counts", "class_ids", "largest_class", "share_counts", "spread_weights"]


class Counts(NamedTuple):
    """The three counts, each (rows of weights, classes), in float64 on the host."""

    hits: torch.Tensor
    predicted: torch.Tensor
    actual: torch.Tensor


class ClassCounts:
    """Counts of one task: `predictions` and `targets` are class ids, or 0/1 per label if `multilabel`.

    Negative targets (-100) are skipped, and so are those of `num_classes` and above; without `num_classes` the counts
    grow as classes appear, which reads the largest id of each batch from the device.
    """

    def __init__(self, num_classes: int | None = None, *, multilabel: bool = False) -> None:
        if num_classes is not None and num_classes < 1:
            raise ConfigError(f"num_classes={num_classes!r} must be at least 1; None: as many as appear")
        self.num_classes = num_classes
        self.multilabel = multilabel
        self.names: list[str] | None = None
        self._counts: torch.Tensor | None = None  # (3, 1 + classes, rows): what is skipped falls into place 0

    def reset(self) -> None:
        """Forget everything counted."""
        self._counts = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        """Count a batch of samples."""
        predicted, target = class_ids(predictions, targets, multilabel=self.multilabel)
        if self.multilabel:
            self._count_labels(predicted, target, weights)
        else:
            self._count_classes(predicted, target, weights)

    def _count_classes(self, predicted: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None) -> None:
        counts = self._room_for(self.num_classes or largest_class(predicted, target) + 1, target.device, weights)
        num_places = counts.shape[1]
        spread = spread_weights(weights, target, counts)
        target, predicted = target.flatten(), predicted.flatten()
        counted = (target >= 0) & (target < num_places - 1)
        predicted = torch.where(counted & (predicted >= 0) & (predicted < num_places - 1), predicted + 1, 0)
        target = torch.where(counted, target + 1, 0)
        hit = torch.where(predicted == target, target, 0)
        places = torch.cat([hit, predicted + num_places, target + 2 * num_places])
        counts.view(3 * num_places, -1).index_add_(0, places.to(counts.device), spread.repeat(3, 1))

    def _count_labels(self, predicted: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None) -> None:
        counts = self._room_for(target.shape[-1], target.device, weights)
        counted = target >= 0
        predicted, actual = predicted & counted, target > 0
        each = torch.stack([predicted & actual, predicted, actual], dim=1).to(counts)  # (samples, 3, labels)
        rows = torch.ones(1, len(each)).to(counts) if weights is None else weights.to(counts)
        counts[:, 1 : 1 + each.shape[2]] += torch.einsum("rs,spl->plr", rows, each)

    def _room_for(self, num_classes: int, device: torch.device, weights: torch.Tensor | None) -> torch.Tensor:
        if self._counts is None:
            shape = (3, 1 + num_classes, 1 if weights is None else len(weights))
            home = "cpu" if device.type in DEVICES_WITHOUT_FLOAT64 else device
            self._counts = torch.zeros(shape, dtype=torch.float64, device=home)
        self._counts = _grown(self._counts, 1 + num_classes)
        return self._counts

    def read(self, num_rows: int | None = None) -> Counts | None:
        """Return the counts of the first `num_rows` rows of weights (None: all), or None if nothing was counted."""
        if self._counts is None:
            return None
        hits, predicted, actual = self._counts[:, 1:, :num_rows].cpu().transpose(1, 2)
        return Counts(hits, predicted, actual)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the counts for another process to merge."""
        return {} if self._counts is None else {"counts": self._counts}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        """Add the counts of another process, which may have seen other classes."""
        if "counts" not in state:
            return
        other = state["counts"]
        if self._counts is None:
            self._counts = other.clone()
            return
        num_places = max(self._counts.shape[1], other.shape[1])
        self._counts = _grown(self._counts, num_places) + _grown(other.to(self._counts), num_places)

    def name_of(self, label: int) -> str:
        """Return what a class is called."""
        return self.names[label] if self.names is not None and label < len(self.names) else str(label)


class ClassMetric(RowMetric):
    """A metric that reads class counts, its own or those of another metric."""

    def __init__(self, num_classes: int | None = None, *, multilabel: bool = False) -> None:
        self.counts = ClassCounts(num_classes, multilabel=multilabel)
        self._counts_itself = True

    @abstractmethod
    def scores(self, counts: Counts) -> dict[str, torch.Tensor]:
        """Return each output as a column, one value per row of weights."""

    def read_from(self, other: ClassMetric) -> None:
        """Read another metric's counts from now on, and leave the counting to it."""
        self.counts = other.counts
        self._counts_itself = False

    def expect_classes(self, num_classes: int, names: Sequence[str] | None = None) -> None:
        self.counts.num_classes = num_classes
        self.counts.names = None if names is None else [str(name) for name in names]

    def reset(self) -> None:
        if self._counts_itself:
            self.counts.reset()

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        if self._counts_itself:
            self.counts.update(predictions, targets, weights)

    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        counts = self.counts.read(num_rows)
        if counts is None:
            return [self._undefined()]
        columns = {key: column.tolist() for key, column in self.scores(counts).items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def table(self) -> Table | None:
        counts = self.counts.read(1)
        return None if counts is None or not self._counts_itself else _table_per_class(counts, self.counts.name_of)

    def state(self) -> dict[str, torch.Tensor]:
        return self.counts.state() if self._counts_itself else {}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._counts_itself:
            self.counts.merge(state)


def share_counts(metrics: Iterable[Metric]) -> None:
    """Let metrics that keep the same class counts keep them once: the first counts, the others read.

    They must then all be updated, or none: a reader's own `update` does nothing.
    """
    counting: dict[tuple[bool, int | None], ClassMetric] = {}
    for metric in (metric.unwrapped for metric in metrics):
        if isinstance(metric, ClassMetric):
            first = counting.setdefault((metric.counts.multilabel, metric.counts.num_classes), metric)
            if first is not metric:
                metric.read_from(first)


def class_ids(predictions: Any, targets: Any, *, multilabel: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and target classes of one shape; logits are decided, by the largest or by the sign."""
    predicted, target = torch.as_tensor(predictions), torch.as_tensor(targets)
    if multilabel:
        predicted = predicted > 0
    elif predicted.dim() == target.dim() + 1 and predicted.is_floating_point() and predicted.shape[-1] > 1:
        predicted = predicted.argmax(dim=-1)
    if predicted.shape != target.shape or target.dim() < (2 if multilabel else 1):
        expected = "0/1 or logits, (samples, labels) both" if multilabel else "class ids, or logits with one axis more"
        shapes = f"{tuple(predicted.shape)} for targets of shape {tuple(target.shape)}"
        raise DataError(f"predictions of shape {shapes} do not fit: give {expected}")
    return predicted, target.to(predicted.device)


def largest_class(predicted: torch.Tensor, target: torch.Tensor) -> int:
    """Return the largest id among those that count, -1 if there is none."""
    largest = torch.where(target >= 0, torch.maximum(predicted, target), -1)
    return int(largest.max()) if largest.numel() else -1


def spread_weights(weights: torch.Tensor | None, target: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the weights of each element of the targets, (elements, rows): those of the sample it belongs to."""
    if weights is None:
        return torch.ones(target.numel(), 1, dtype=like.dtype, device=like.device)
    num_per_sample = target[0].numel() if len(target) else 0
    return weights.to(like).T.repeat_interleave(num_per_sample, dim=0)


def _grown(counts: torch.Tensor, num_places: int) -> torch.Tensor:
    missing = num_places - counts.shape[1]
    return pad(counts, (0, 0, 0, missing)) if missing > 0 else counts


def _table_per_class(counts: Counts, name_of: Callable[[int], str]) -> Table:
    hits, predicted, actual = (row[0] for row in counts)
    scores = torch.stack([hits / predicted, hits / actual, 2 * hits / (predicted + actual)], dim=1)
    return Table(
        name="per_class",
        rows=[name_of(label) for label in range(len(hits))],
        columns=["precision", "recall", "f1", "support"],
        # A class that never occurs scores 0: a report is JSON, which has no NaN.
        values=torch.cat([scores.nan_to_num(0.0), actual[:, None]], dim=1).tolist(),
    )
