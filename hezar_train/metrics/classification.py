"""Metrics of decided classes: equal to scikit-learn's on the whole set, whatever the batches were.

Single-label metrics take class ids of any shape (samples, ...), or logits with one axis more; multi-label ones
(`multilabel=True`) take 0/1 or logits, (samples, labels). Targets below 0 (-100) are not counted. The options have
scikit-learn's names and meanings, and a falsy option is an option: `normalize=False` and `pos_label=0` are honoured.
Without a single counted target a metric is NaN.

Precision, recall, F1 and Matthews' coefficient all follow from three counts per class (`ClassCounts`): how often it was
predicted, how often it was the target, how often both. So a state is linear in the number of classes, and metrics that
are asked for together count once (`share_counts`). Only the confusion matrix is a square of counts. Metrics that rank a
model's scores are in `ranking`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.metrics.metric import DEVICES_WITHOUT_FLOAT64, AdditiveMetric, Metric, RowMetric, Table

__all__ = [
    "F1",
    "Accuracy",
    "AveragedRatio",
    "ClassCounts",
    "ClassMetric",
    "ConfusionMatrix",
    "Counts",
    "Matthews",
    "Precision",
    "Recall",
    "class_ids",
    "largest_class",
    "share_counts",
    "spread_weights",
]

AVERAGES = ("macro", "micro", "weighted", "binary")
MOST_CLASSES_OF_A_MATRIX = 5_000  # 200 MB


class Accuracy(AdditiveMetric):
    """Share of targets that were predicted; of samples whose labels are all right, if `multilabel`.

    `normalize=False` gives their number instead.
    """

    name = "accuracy"

    def __init__(self, normalize: bool = True, multilabel: bool = False) -> None:
        super().__init__()
        self.normalize = normalize
        self.multilabel = multilabel

    @property
    def output_keys(self) -> list[str]:
        return ["accuracy"]

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        predicted, target = class_ids(predictions, targets, multilabel=self.multilabel)
        predicted, target = predicted.reshape(len(target), -1), target.reshape(len(target), -1)
        counted = target >= 0
        if self.multilabel:
            any_counted = counted.any(1)
            wrong = ((predicted != (target > 0)) & counted).any(1)
            return torch.stack([any_counted & ~wrong, any_counted], dim=1)
        return torch.stack([((predicted == target) & counted).sum(1), counted.sum(1)], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        num_right, num_counted = sums
        if not num_counted:
            return {"accuracy": float("nan")}
        return {"accuracy": num_right / num_counted if self.normalize else num_right}


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


class AveragedRatio(ClassMetric):
    """Precision, recall and F1: a ratio of counts for each class, averaged.

    `average`: "macro" (over the classes that occur in targets or predictions), "micro" (of the summed counts),
    "weighted" (by the targets of each class), "binary" (the class `pos_label` of two), or None: each class on its own,
    as `f1.0` or by name, for the report of a run. `labels` names the classes to average over, present or not.
    `zero_division` is the ratio whose denominator is 0: 0.0, 1.0, or NaN, which averages leave out.
    """

    def __init__(
        self,
        average: str | None = "macro",
        pos_label: int = 1,
        zero_division: float | str = 0.0,
        labels: Sequence[int] | None = None,
        num_classes: int | None = None,
        multilabel: bool = False,
    ) -> None:
        super().__init__(num_classes, multilabel=multilabel)
        _check_average(self.name, average, multilabel)
        self.average = average
        self.pos_label = pos_label
        self.zero_division = 0.0 if zero_division == "warn" else float(zero_division)
        self.labels = None if labels is None else list(labels)

    @property
    def output_keys(self) -> list[str]:
        if self.average is not None:
            return [self.name]
        return [self._key(label) for label in self._labels(self.counts.num_classes or 0)]

    @abstractmethod
    def ratio(self, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numerator and denominator of the ratio."""

    def scores(self, counts: Counts) -> dict[str, torch.Tensor]:
        if self.average is None:
            labels = self._labels(counts.actual.shape[1])
            each = self._divide(_select(counts, labels))
            return {self._key(label): column for label, column in zip(labels, each.T, strict=True)}
        if self.average == "binary":
            self._check_two_classes(counts)
            return {self.name: self._of_all(counts, self._divide(_select(counts, [self.pos_label]))[:, 0])}
        chosen = counts if self.labels is None else _select(counts, self.labels)
        if self.average == "micro":
            return {self.name: self._of_all(counts, self._divide(Counts(*(part.sum(1) for part in chosen))))}
        return {self.name: self._of_all(counts, self._mean(chosen))}

    def _mean(self, counts: Counts) -> torch.Tensor:
        each = self._divide(counts)
        used = ~each.isnan()
        if self.labels is None and not self.counts.multilabel:
            used &= (counts.predicted + counts.actual) > 0
        weights = used * (counts.actual if self.average == "weighted" else 1.0)
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, used.double())
        return (each.nan_to_num(0.0) * weights).sum(1) / weights.sum(1)

    def _divide(self, counts: Counts) -> torch.Tensor:
        numerator, denominator = self.ratio(counts)
        return torch.where(denominator > 0, numerator / denominator, self.zero_division)

    def _of_all(self, counts: Counts, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, NaN for rows in which nothing was counted."""
        anything = self.counts.multilabel or (counts.predicted + counts.actual).sum(1) > 0
        return torch.where(torch.as_tensor(anything), scores, float("nan"))

    def _check_two_classes(self, counts: Counts) -> None:
        present = ((counts.predicted + counts.actual)[0] > 0).nonzero().flatten().tolist()
        if len(present) > 2 or (len(present) == 2 and self.pos_label not in present):
            raise ConfigError(
                f"{self.name} has average='binary' with pos_label={self.pos_label!r}, but the classes are {present}. "
                "Choose average='macro', 'micro' or 'weighted', or labels=[...] with one of them"
            )

    def _labels(self, num_classes: int) -> Sequence[int]:
        return range(num_classes) if self.labels is None else self.labels

    def _key(self, label: int) -> str:
        return f"{self.name}.{self.counts.name_of(label)}"


def _select(counts: Counts, labels: Sequence[int]) -> Counts:
    """Return the counts of some classes; those of a class that never appeared are 0."""
    missing = max(labels, default=-1) + 1 - counts.actual.shape[1]
    wide = counts if missing <= 0 else Counts(*(pad(part, (0, missing)) for part in counts))
    return Counts(*(part[:, list(labels)] for part in wide))


def _check_average(metric: str, average: str | None, multilabel: bool) -> None:
    allowed = [one for one in AVERAGES if not (multilabel and one == "binary")]
    if average is not None and average not in allowed:
        raise ConfigError(
            f"{metric} has average={average!r}. Choose one of {choices(allowed)}, or None for each class."
            f"{suggestion(str(average), allowed)}"
        )


class Precision(AveragedRatio):
    """Share of the predictions of a class that were right; the options are those of `AveragedRatio`."""

    name = "precision"

    def ratio(self, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        return counts.hits, counts.predicted


class Recall(AveragedRatio):
    """Share of the targets of a class that were predicted; the options are those of `AveragedRatio`."""

    name = "recall"

    def ratio(self, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        return counts.hits, counts.actual


class F1(AveragedRatio):
    """Harmonic mean of precision and recall; the options are those of `AveragedRatio`."""

    name = "f1"

    def ratio(self, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * counts.hits, counts.predicted + counts.actual


class Matthews(ClassMetric):
    """Matthews' correlation of predictions and targets, for any number of classes; 0 if either is constant."""

    name = "matthews"

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__(num_classes)

    @property
    def output_keys(self) -> list[str]:
        return ["matthews"]

    def scores(self, counts: Counts) -> dict[str, torch.Tensor]:
        hits, predicted, actual = counts
        total = actual.sum(1)
        together = hits.sum(1) * total - (predicted * actual).sum(1)
        spread = (total**2 - (predicted**2).sum(1)) * (total**2 - (actual**2).sum(1))
        value = torch.where(spread > 0, together / spread.sqrt(), 0.0)
        return {"matthews": torch.where(total > 0, value, float("nan"))}


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


class Counts(NamedTuple):
    """The three counts, each (rows of weights, classes), in float64 on the host."""

    hits: torch.Tensor
    predicted: torch.Tensor
    actual: torch.Tensor


def _grown(counts: torch.Tensor, num_places: int) -> torch.Tensor:
    missing = num_places - counts.shape[1]
    return pad(counts, (0, 0, 0, missing)) if missing > 0 else counts


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
