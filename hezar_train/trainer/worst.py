"""The samples a model was most wrong about: a bounded list, kept while an evaluation runs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from hezar_train.metrics import (
    IGNORED_LABEL,
    ClassificationHandler,
    LanguageModelingHandler,
    MetricsHandler,
    SequenceLabelingHandler,
)

__all__ = ["WorstSamples", "in_words"]

KEPT = 16
MOST_PLACES_SHOWN = 256

Row = dict[str, Any]
Decode = Callable[[list[list[int]]], list[str] | None]


class WorstSamples:
    """Keep the `KEPT` samples of the largest loss; numbers stay on the device until they are read."""

    def __init__(self) -> None:
        self._columns: list[torch.Tensor] = []  # losses, samples, predictions, targets
        self._listed: list[Row] | None = None
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
    def of(cls, listed: list[Row]) -> WorstSamples:
        """Choose the worst of what several processes listed."""
        merged = cls()
        merged._listed = heapq.nsmallest(KEPT, listed, key=lambda row: (-row["loss"], row["sample"]))
        return merged

    def listed(self) -> list[Row]:
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


def in_words(handler: MetricsHandler, names: Mapping[int, str] | None, decode: Decode) -> Callable[[Row], Row]:
    """Return how a row is told: classes by their names, tokens as text, all else as it is.

    `decode` makes texts of rows of ids, or returns None.
    """
    if isinstance(handler, LanguageModelingHandler):
        told: Callable[[Any], Any] = partial(_as_text, decode)
    elif names and isinstance(handler, SequenceLabelingHandler):
        told = partial(_by_name, names)
    elif names and isinstance(handler, ClassificationHandler):
        told = partial(_of_those_on, names)
    else:
        return lambda row: row
    return lambda row: row | {key: told(row[key]) for key in ("prediction", "target")}


def _as_text(decode: Decode, value: Any) -> Any:
    texts = decode([value]) if isinstance(value, list) else None
    return value if texts is None else texts[0]


def _by_name(names: Mapping[int, str], value: Any) -> Any:
    return [names.get(one, one) for one in value] if isinstance(value, list) else names.get(value, value)


def _of_those_on(names: Mapping[int, str], value: Any) -> Any:
    """Return a class by its name, or those of several labels that are on at once."""
    if not isinstance(value, list):
        return names.get(value, value)
    return [names.get(number, number) for number, is_on in enumerate(value) if is_on]


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
