"""Metrics of language models: perplexity from losses and their units, and the share of tokens guessed.

A loss is a mean over its units (tokens that count), so a batch contributes mean times units, and the perplexity is
that of the whole set however it was cut.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from hezar_train.metrics.class_counts import class_ids
from hezar_train.metrics.classification import Accuracy
from hezar_train.metrics.metric import AdditiveMetric, Inputs, in_float64

__all__ = ["MeanLoss", "Perplexity", "TokenAccuracy"]


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
            predicted, target = predicted[:, :-1], target[:, 1:]
        return super().statistics(predicted, target)

    def result(self, sums: list[float]) -> dict[str, float]:
        return {"token_accuracy": super().result(sums)["accuracy"]}
