"""Metrics of classification: equal to scikit-learn's on the whole set, whatever the batches were.

Single-label metrics take class ids of any shape (samples, ...), or logits with one axis more; multi-label ones
(`multilabel=True`) take 0/1 or logits, (samples, labels). Targets below 0 (-100) are not counted. The options have
scikit-learn's names and meanings, and a falsy option is an option: `normalize=False` and `pos_label=0` are honoured.
Without a single counted target a metric is NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.metrics.class_counts import ClassMetric, Counts, class_ids
from hezar_train.metrics.metric import AdditiveMetric, Inputs

__all__ = ["F1", "Accuracy", "AveragedRatio", "Matthews", "Precision", "Recall", "TopKAccuracy"]

AVERAGES = ("macro", "micro", "weighted", "binary")


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


class TopKAccuracy(AdditiveMetric):
    """Share of targets among the `k` largest logits; of equal logits, that of the larger id counts as larger."""

    name = "top_k_accuracy"
    consumes: Inputs = "scores"

    def __init__(self, k: int = 5) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"top_k_accuracy has k={k!r}: give a whole number of at least 1")
        self.k = k

    @property
    def output_keys(self) -> list[str]:
        return ["top_k_accuracy"]

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        scores, target = torch.as_tensor(predictions), torch.as_tensor(targets)
        if scores.shape[:-1] != target.shape:
            shapes = f"{tuple(scores.shape)} for targets of shape {tuple(target.shape)}"
            raise DataError(f"top_k_accuracy got scores of shape {shapes}: give logits with one axis more")
        target = target.to(scores.device)
        num_classes = scores.shape[-1]
        counted = (target >= 0) & (target < num_classes)
        place = torch.where(counted, target, 0)[..., None]
        own = scores.gather(-1, place)
        # "not smaller or equal" instead of "larger": a NaN must not make a target rank first.
        before = ~(scores <= own) | ((scores == own) & (torch.arange(num_classes, device=scores.device) > place))
        right = counted & (before.sum(-1) < self.k)
        per_sample = (part.reshape(len(target), -1).sum(1) for part in (right, counted))
        return torch.stack(list(per_sample), dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        num_right, num_counted = sums
        return {"top_k_accuracy": num_right / num_counted if num_counted else float("nan")}


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
