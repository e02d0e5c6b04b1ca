"""The samples a model was most wrong about: a bounded list, kept while an evaluation runs."""

from __future__ import annotations

import heapq
from typing import Any

import torch

__all__ = ["WorstSamples"]

KEPT = 16


class WorstSamples:
    """Keep the `KEPT` samples of the largest loss; numbers stay on the device until they are read."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None  # loss, sample, prediction, target
        self._texts: list[tuple[float, int, str, str]] = []

    def add(self, first: int, losses: torch.Tensor, predictions: Any, targets: Any) -> None:
        """Look at a batch whose first sample is number `first`."""
        if isinstance(predictions, list):
            pairs = zip(losses.tolist(), range(first, first + len(predictions)), predictions, targets, strict=True)
            self._texts = heapq.nlargest(KEPT, [*self._texts, *pairs], key=lambda row: row[0])
            return
        numbers = torch.arange(first, first + len(losses), device=losses.device)
        rows = torch.stack([column.double() for column in (losses, numbers, predictions, targets)], dim=1)
        rows = rows if self._rows is None else torch.cat([self._rows, rows])
        self._rows = rows[rows[:, 0].topk(min(KEPT, len(rows))).indices]

    def listed(self) -> list[dict[str, Any]]:
        """Return the samples, worst first."""
        rows = self._texts or ([] if self._rows is None else self._rows.tolist())
        return [
            {"sample": int(number), "loss": loss, "prediction": _plain(prediction), "target": _plain(target)}
            for loss, number, prediction, target in rows
        ]


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
