"""Metrics of regression: equal to scikit-learn's and scipy's on the whole set, also far from zero.

Predictions and targets are (samples) or (samples, outputs); the metric of several outputs is the mean of theirs.
Squares are never summed about zero: at an offset of a million that would leave no digit of a variance. Moments are kept
about the running mean and joined by the exact formula for two sets (Chan, Golub and LeVeque). Only Spearman's
correlation keeps every value, on the device of the predictions: ranks are known when all values are there.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hezar_train.errors import DataError
from hezar_train.metrics.metric import AdditiveMetric, Blocks, RowMetric, in_float64

__all__ = [
    "R2",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Pearson",
    "RootMeanSquaredError",
    "Spearman",
    "paired_values",
]


class _MeanError(AdditiveMetric):
    """The mean of an error; the statistics are the error of each output, and 1."""

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    def error(self, difference: torch.Tensor) -> torch.Tensor:
        """Return the error of each difference."""
        return difference.square()

    def of_mean(self, mean: float) -> float:
        """Return the output's part for the mean error of one output."""
        return mean

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        predicted, target = paired_values(self.name, predictions, targets)
        return torch.cat([self.error(predicted - target), predicted.new_ones(len(predicted), 1)], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        *errors, num_samples = sums
        if not num_samples:
            return self._undefined()
        return {self.name: sum(self.of_mean(error / num_samples) for error in errors) / len(errors)}


class MeanSquaredError(_MeanError):
    """Mean of the squared errors."""

    name = "mse"
    minimized: ClassVar[frozenset[str]] = frozenset({"mse"})


class RootMeanSquaredError(_MeanError):
    """Root of the mean of the squared errors."""

    name = "rmse"
    minimized: ClassVar[frozenset[str]] = frozenset({"rmse"})

    def of_mean(self, mean: float) -> float:
        return math.sqrt(mean)


class MeanAbsoluteError(_MeanError):
    """Mean of the absolute errors."""

    name = "mae"
    minimized: ClassVar[frozenset[str]] = frozenset({"mae"})

    def error(self, difference: torch.Tensor) -> torch.Tensor:
        return difference.abs()


class _MomentMetric(RowMetric):
    """A metric of the joint moments of two values per sample."""

    def __init__(self) -> None:
        self._moments: torch.Tensor | None = None  # (rows, outputs, 6), see `_moments_of`

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    def pair(self, predicted: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two values whose moments are kept."""
        return predicted, target

    @abstractmethod
    def of_moments(self, moments: torch.Tensor) -> torch.Tensor:
        """Return the metric of each (row, output)."""

    def reset(self) -> None:
        self._moments = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        predicted, target = paired_values(self.name, predictions, targets)
        if not len(predicted):
            return
        rows = predicted.new_ones(1, len(predicted)) if weights is None else weights.to(predicted)
        self._join(_moments_of(*self.pair(predicted, target), rows))

    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        if self._moments is None:
            return [self._undefined()]
        return [{self.name: value} for value in self.of_moments(self._moments[:num_rows]).mean(1).tolist()]

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self._moments is None else {"moments": self._moments}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "moments" in state:
            self._join(state["moments"])

    def _join(self, moments: torch.Tensor) -> None:
        self._moments = moments if self._moments is None else _joined(self._moments, moments.to(self._moments))


class R2(_MomentMetric):
    """Coefficient of determination.

    Of constant targets it is 1 if all predictions are exact and else 0; of fewer than two samples it is NaN.
    """

    name = "r2"

    def pair(self, predicted: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return predicted - target, target

    def of_moments(self, moments: torch.Tensor) -> torch.Tensor:
        total, mean_error, _, spread_of_error, spread, _ = moments.unbind(-1)
        squares = spread_of_error + total * mean_error**2
        constant = torch.where(squares == 0, 1.0, 0.0).to(squares)
        value = torch.where(spread == 0, constant, 1.0 - squares / spread)
        return torch.where(total < 2, torch.nan, value)


class Pearson(_MomentMetric):
    """Pearson's correlation; NaN if predictions or targets are constant, or with fewer than two samples."""

    name = "pearson"

    def of_moments(self, moments: torch.Tensor) -> torch.Tensor:
        *_, spread_x, spread_y, together = moments.unbind(-1)
        # Of a constant this is 0 / 0, a NaN.
        return (together / spread_x.sqrt() / spread_y.sqrt()).clamp(-1.0, 1.0)


def _moments_of(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return weight, means, sums of squares about the means, and of products: (rows, outputs, 6)."""
    total = weights.sum(1)
    share = weights / torch.where(total > 0, total, 1.0)[:, None]
    mean_x, mean_y = _means(x, share), _means(y, share)
    from_x, from_y = x - mean_x[:, None], y - mean_y[:, None]  # (rows, samples, outputs)
    weighted_x, weighted_y = weights[..., None] * from_x, weights[..., None] * from_y
    sums = ((weighted_x * from_x).sum(1), (weighted_y * from_y).sum(1), (weighted_x * from_y).sum(1))
    return torch.stack([total[:, None].expand_as(mean_x), mean_x, mean_y, *sums], dim=-1)


def _means(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the weighted means, (rows, outputs); a second pass makes those of constants exact, so they spread by 0."""
    means = share @ values
    return means + (share[..., None] * (values - means[:, None])).sum(1)


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the moments of two sets together."""
    first_total, second_total = first[..., 0], second[..., 0]
    total = first_total + second_total
    share = second_total / torch.where(total > 0, total, 1.0)
    step_x, step_y = (second[..., 1:3] - first[..., 1:3]).unbind(-1)
    between = first_total * share
    return torch.stack(
        [
            total,
            first[..., 1] + step_x * share,
            first[..., 2] + step_y * share,
            first[..., 3] + second[..., 3] + step_x**2 * between,
            first[..., 4] + second[..., 4] + step_y**2 * between,
            first[..., 5] + second[..., 5] + step_x * step_y * between,
        ],
        dim=-1,
    )


class Spearman(RowMetric):
    """Spearman's rank correlation, ties by their average rank as scipy has them; NaN where Pearson's is.

    Ranks need all values at once: each sample keeps 8 bytes per output (prediction and target in float32, in which
    values closer than float32 can tell are ties), and a byte more per row of weights.
    """

    name = "spearman"

    def __init__(self) -> None:
        self._pairs: Blocks | None = None  # (samples, outputs * 2)
        self._weights: Blocks | None = None  # (samples, rows)

    @property
    def output_keys(self) -> list[str]:
        return ["spearman"]

    def reset(self) -> None:
        self._pairs = self._weights = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        predicted, target = paired_values(self.name, predictions, targets)
        pairs = torch.stack([predicted, target], dim=-1).flatten(1).float()
        self._append(pairs, None if weights is None else weights.to(pairs.device).T.to(torch.uint8))

    def _append(self, pairs: torch.Tensor, weights: torch.Tensor | None) -> None:
        if not len(pairs):
            return
        self._pairs = self._pairs or Blocks(pairs)
        self._pairs.append(pairs)
        if weights is not None:
            self._weights = self._weights or Blocks(weights)
            self._weights.append(weights)

    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        if self._pairs is None:
            return [self._undefined()]
        pairs = self._pairs.joined()
        weights = pairs.new_ones(len(pairs), 1) if self._weights is None else self._weights.joined()[:, :num_rows]
        outputs = [_rank_correlations(x, y, weights) for x, y in pairs.T.reshape(-1, 2, len(pairs))]
        return [{"spearman": value} for value in torch.stack(outputs).mean(0).tolist()]

    def state(self) -> dict[str, torch.Tensor]:
        blocks = {"pairs": self._pairs, "weights": self._weights}
        return {name: block.joined() for name, block in blocks.items() if block is not None}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "pairs" in state:
            self._append(state["pairs"], state.get("weights"))


def _rank_correlations(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the correlation of the ranks for each row of weights (samples, rows)."""
    if bool(x.isnan().any() | y.isnan().any()):
        return torch.full((weights.shape[1],), torch.nan, dtype=torch.float64)
    group_x, group_y = (torch.unique(values, return_inverse=True)[1] for values in (x, y))
    rows = [_rank_correlation(group_x, group_y, row) for row in in_float64(weights.T)]
    return torch.tensor(rows, dtype=torch.float64)


def _rank_correlation(group_x: torch.Tensor, group_y: torch.Tensor, weights: torch.Tensor) -> float:
    from_x, from_y = _centred_ranks(group_x, weights), _centred_ranks(group_y, weights)
    spread = math.sqrt((weights * from_x**2).sum()) * math.sqrt((weights * from_y**2).sum())
    return float((weights * from_x * from_y).sum()) / spread if spread else float("nan")


def _centred_ranks(group: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the average rank of each sample minus the mean of all ranks; `group` numbers the values in order."""
    sizes = weights.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add_(0, group, weights)
    last_ranks = sizes.cumsum(0)
    return (last_ranks - (sizes - 1) / 2)[group] - (weights.sum() + 1) / 2


def paired_values(metric: str, predictions: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predictions and targets in float64, (samples, outputs)."""
    predicted, target = in_float64(torch.as_tensor(predictions)), in_float64(torch.as_tensor(targets))
    if predicted.numel() != target.numel() or predicted.shape[:1] != target.shape[:1] or not target.dim():
        shapes = f"{tuple(predicted.shape)} for targets of shape {tuple(target.shape)}"
        raise DataError(
            f"{metric} got predictions of shape {shapes}; expected one shape: (samples) or (samples, outputs) for "
            f"both. Give the model one output for each target; or, for classes, take {metric} out of metrics."
        )
    num_samples = len(target)
    num_outputs = target.numel() // max(num_samples, 1)
    return predicted.reshape(num_samples, num_outputs), target.to(predicted.device).reshape(num_samples, num_outputs)
