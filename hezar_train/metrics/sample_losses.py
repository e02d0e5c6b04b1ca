"""How wrong each sample is, and how far the mean loss could have been off: losses per sample, from logits and labels.

A model tells the loss of a batch only, so it is computed a second time here, sample by sample. It may be another one
than the model was trained by (smoothed labels, weighted classes); such losses still rank samples, but give no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hezar_train.metrics.bootstrap import interval
from hezar_train.metrics.likelihood import MeanLoss
from hezar_train.metrics.metric import IGNORED_LABEL, Metric

__all__ = ["LossIntervals", "num_counted", "of_classes", "of_labels", "of_tokens"]

SAME_LOSS = 1e-3  # relative: two computations of one loss differ by less, two losses by more


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
