"""The samples a model was most wrong about: a bounded list, kept while an evaluation runs."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch.nn.functional import pad

from hezar_train.metrics import IGNORED_LABEL

__all__ = ["WorstSamples"]

KEPT = 16
MOST_PLACES_SHOWN = 256


class WorstSamples:
    """Keep the `KEPT` samples of the largest loss; numbers stay on the device until they are read."""

    def __init__(self) -> None:
        self._columns: list[torch.Tensor] = []  # losses, samples, predictions, targets
        self._listed: list[dict[str, Any]] | None = None
        self._rows: list[tuple[float, int, Any, Any]] = []  # the same on the host, of texts and lists

    def add(self, first: int, losses: torch.Tensor, predictions: Any, targets: Any) -> None:
        """Look at a batch whose first sample is number `first`."""
        if not (isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor)):
            self._add_on_host(first, losses.tolist(), _plain(predictions), _plain(targets))
            return
        numbers = torch.arange(first, first + len(losses), device=losses.device)
        columns = [losses.detach(), numbers, predictions, targets.to(losses.device)]
        if self._columns:
            columns = [_joined(*pair) for pair in zip(self._columns, columns, strict=True)]
        chosen = columns[0].topk(min(KEPT, len(columns[0]))).indices
        self._columns = [column[chosen] for column in columns]

    @classmethod
    def of(cls, listed: list[dict[str, Any]]) -> WorstSamples:
        """Choose the worst of what several processes listed."""
        merged = cls()
        merged._listed = heapq.nsmallest(KEPT, listed, key=lambda row: (-row["loss"], row["sample"]))
        return merged

    def listed(self) -> list[dict[str, Any]]:
        """Return the samples, worst first; of a sequence the places that count, so many at most."""
        if self._listed is not None:
            return self._listed
        rows = self._rows or zip(*(column.tolist() for column in self._columns), strict=True)
        return [
            {"sample": number, "loss": loss, **_shown(prediction, target)} for loss, number, prediction, target in rows
        ]

    def _add_on_host(self, first: int, losses: list[float], predictions: list[Any], targets: list[Any]) -> None:
        rows = zip(losses, range(first, first + len(losses)), predictions, targets, strict=True)
        self._rows = heapq.nlargest(KEPT, [*self._rows, *rows], key=lambda row: row[0])


def _joined(kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Put rows below rows; batches of sequences may differ in width."""
    if kept.ndim == 2 and kept.shape[1] != new.shape[1]:
        width = max(kept.shape[1], new.shape[1])
        kept, new = (pad(rows, (0, width - rows.shape[1]), value=IGNORED_LABEL) for rows in (kept, new))
    return torch.cat([kept, new])


def _plain(rows: Any) -> list[Any]:
    return rows.tolist() if hasattr(rows, "tolist") else list(rows)


def _shown(prediction: Any, target: Any) -> dict[str, Any]:
    if not (isinstance(target, list) and isinstance(prediction, list) and len(prediction) == len(target)):
        return {"prediction": prediction, "target": target}
    pairs = [pair for pair in zip(prediction, target, strict=True) if pair[1] != IGNORED_LABEL][:MOST_PLACES_SHOWN]
    return {"prediction": [guess for guess, _ in pairs], "target": [right for _, right in pairs]}
