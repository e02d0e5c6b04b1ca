"""Spearman's correlation, the one metric of ours that keeps every value: ranks are known only when all are there.

Values are kept in blocks on the device of the predictions. Equal to scipy's on the whole set, ties included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hezar_train.metrics.metric import RowMetric, in_float64
from hezar_train.metrics.regression import paired_values

__all__ = ["Spearman"]

BLOCK_SIZE = 65_536  # samples


class Spearman(RowMetric):
    """Spearman's rank correlation, ties by their average rank; NaN where Pearson's is.

    Ranks need all values at once: each sample keeps 8 bytes per output (prediction and target in float32, in which
    values closer than float32 can tell are ties), and a byte more per row of weights.
    """

    name = "spearman"

    def __init__(self) -> None:
        self._pairs: _Blocks | None = None  # (samples, outputs * 2)
        self._weights: _Blocks | None = None  # (samples, rows)

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
        self._pairs = self._pairs or _Blocks(pairs)
        self._pairs.append(pairs)
        if weights is not None:
            self._weights = self._weights or _Blocks(weights)
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


class _Blocks:
    """Rows appended into blocks of a fixed size: nothing is copied twice, and at most one block is not full."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like[:0]
        self._blocks: list[torch.Tensor] = []
        self._room = 0  # rows free in the last block

    def append(self, rows: torch.Tensor) -> None:
        """Add rows at the end."""
        while len(rows):
            if not self._room:
                self._blocks.append(self._like.new_empty(BLOCK_SIZE, rows.shape[1]))
                self._room = BLOCK_SIZE
            taken = min(self._room, len(rows))
            start = BLOCK_SIZE - self._room
            self._blocks[-1][start : start + taken] = rows[:taken]
            self._room -= taken
            rows = rows[taken:]

    def joined(self) -> torch.Tensor:
        """Return all rows."""
        joined = torch.cat([self._like, *self._blocks])
        return joined[: len(joined) - self._room]


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
