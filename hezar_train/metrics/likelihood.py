"""Metrics of likelihood: the mean loss and its interval, perplexity, the share of tokens guessed, losses per sample.

A loss is a mean over its units (tokens that count), so a batch contributes mean times units, and the perplexity is
that of the whole set however it was cut.

A model tells the loss of a batch only, so how wrong each sample is (for the list of the worst, and for the interval of
the mean loss) is computed a second time here, from logits and labels. That may be another loss than the model was
trained by (smoothed labels, weighted classes); such losses still rank samples, but give no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hezar_train.errors import DataError
from hezar_train.metrics.classification import Accuracy, class_ids
from hezar_train.metrics.metric import IGNORED_LABEL, AdditiveMetric, Inputs, Metric, in_float64, interval

__all__ = [
    "LossIntervals",
    "MeanLoss",
    "Perplexity",
    "TokenAccuracy",
    "num_counted",
    "of_classes",
    "of_labels",
    "of_tokens",
    "refuse_no_tokens",
]

SAME_LOSS = 1e-3  # relative: two computations of one loss differ by less, two losses by more


class MeanLoss(AdditiveMetric):
    """The mean loss per unit: `update(mean loss, units)`, of a batch or of each of its samples.

    Weights of samples apply to losses of samples; the loss of a batch as a whole has no interval.
    """

    name = "loss"
    minimized: ClassVar[frozenset[str]] = frozenset({"loss"})
    consumes: Inputs = "loss"

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        per_sample = weights is not None and torch.as_tensor(predictions).shape == weights.shape[1:]
        super().update(predictions, targets, weights if per_sample else None)

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        losses = in_float64(torch.as_tensor(predictions)).reshape(-1)
        units = torch.as_tensor(targets).to(losses).reshape(-1)
        # The mean over no unit is NaN, and NaN times 0 is still NaN.
        totals = torch.where(units > 0, losses * units, 0.0)
        return torch.stack([totals, units.expand_as(totals)], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        total, num_units = sums
        return {self.name: self.of_mean(total / num_units) if num_units else float("nan")}

    def of_mean(self, loss: float) -> float:
        """Return the output for the mean loss of the whole set."""
        return loss


class Perplexity(MeanLoss):
    """The exponential of the mean loss per unit."""

    name = "perplexity"
    minimized: ClassVar[frozenset[str]] = frozenset({"perplexity"})

    def of_mean(self, loss: float) -> float:
        try:
            return math.exp(loss)
        except OverflowError:
            return math.inf


class TokenAccuracy(Accuracy):
    """Share of tokens that were predicted, without those whose label is -100.

    `causal`: what is predicted at a place is the token after it, as causal language models do.
    """

    name = "token_accuracy"

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    @property
    def output_keys(self) -> list[str]:
        return ["token_accuracy"]

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        predicted, target = class_ids(predictions, targets)
        if self.causal:
            refuse_no_tokens(target)
            predicted, target = predicted[:, :-1], target[:, 1:]
        return super().statistics(predicted, target)

    def result(self, sums: list[float]) -> dict[str, float]:
        return {"token_accuracy": super().result(sums)["accuracy"]}


def refuse_no_tokens(labels: torch.Tensor) -> None:
    """Raise for labels without a place for each token, of which a causal model predicts the next."""
    if labels.dim() < 2:
        raise DataError(
            f"task='language_modeling' compares each token with the one after it, and the labels are of shape "
            f"{tuple(labels.shape)}; expected (samples, tokens), as the model's logits are (samples, tokens, classes). "
            "Give each sample a label for each token; or, for one class a sample, set task='text_classification'."
        )


class LossIntervals:
    """Intervals of the mean loss and of what follows from it, by the rows of a bootstrap."""

    def __init__(self) -> None:
        self._told, self._by_sample = MeanLoss(), MeanLoss()

    @property
    def parts(self) -> tuple[Metric, Metric]:
        """The sums behind the intervals."""
        return self._told, self._by_sample

    def reset(self) -> None:
        """Forget everything counted."""
        self._told.reset()
        self._by_sample.reset()

    def update(
        self,
        told: tuple[torch.Tensor, float],
        by_sample: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
    ) -> None:
        """Count a batch: the loss that was told and its units, and those of each sample."""
        self._told.update(*told)
        self._by_sample.update(*by_sample, weights)

    def compute(self, metrics: Iterable[Metric], level: float) -> dict[str, tuple[float, float]]:
        """Return the interval of the loss and of the metrics made of it; nothing if the samples had another loss."""
        rows = self._by_sample.compute_rows()
        losses = [row["loss"] for row in rows]
        if len(rows) < 2 or not math.isclose(losses[0], self._told.compute()["loss"], rel_tol=SAME_LOSS):
            return {}
        made = {one.name: one for one in (metric.unwrapped for metric in metrics) if isinstance(one, MeanLoss)}
        found = {"loss": interval(losses[1:], level)}
        return found | {name: interval([one.of_mean(loss) for loss in losses[1:]], level) for name, one in made.items()}


def of_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each sample, (samples, classes) against (samples,)."""
    return cross_entropy(logits.float(), labels.long(), reduction="none")


def of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the binary cross entropy of each sample, its mean over labels that count; both (samples, labels)."""
    is_counted = labels >= 0
    losses = binary_cross_entropy_with_logits(logits.float(), (labels > 0).float(), reduction="none")
    return (losses * is_counted).sum(1) / is_counted.sum(1).clamp(min=1)


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each sample, its mean over tokens that count; 0 where none does."""
    losses = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().long(), reduction="none", ignore_index=IGNORED_LABEL
    )
    return losses.view(labels.shape).sum(1) / num_counted(labels).clamp(min=1)


def num_counted(labels: torch.Tensor) -> torch.Tensor:
    """Return how many labels of each sample count."""
    return (labels != IGNORED_LABEL).sum(1)
