"""What all text metrics share: how predicted and reference texts come in, and how many samples were counted.

A metric receives a text per sample and a reference, or several references, per sample. It keeps sums of counts, never
a text. Texts are compared as they are, unless `normalise` says otherwise (see `normalise.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hezar_train.errors import DataError
from hezar_train.metrics.metric import AdditiveMetric
from hezar_train.metrics.normalise import Normaliser, normaliser_of

__all__ = ["TextMetric"]


class TextMetric(AdditiveMetric):
    """A metric of texts; the last statistic of a sample is 1, so that no sample at all is told from a score of 0."""

    num_counts: int
    """How many counts a sample has."""

    def __init__(self, normalise: bool | Mapping[str, Any] | Normaliser = False) -> None:
        super().__init__()
        self._normaliser = normaliser_of(normalise)

    @abstractmethod
    def counts(self, prediction: str, references: list[str]) -> list[float]:
        """Return the counts of one sample, which add up over samples."""

    @abstractmethod
    def score(self, sums: list[float], num_samples: float) -> dict[str, float]:
        """Return the outputs for the sums of the counts."""

    def normalised(self, text: str) -> str:
        """Return the text as it is compared."""
        return text if self._normaliser is None else self._normaliser(text)

    def statistics(self, predictions: Sequence[str], targets: Sequence[str | Sequence[str]]) -> torch.Tensor:
        rows = [[*self.counts(*sample), 1.0] for sample in self._samples(predictions, targets)]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), self.num_counts + 1)

    def result(self, sums: list[float]) -> dict[str, float]:
        *counts, num_samples = sums
        return self.score(counts, num_samples) if num_samples else self._undefined()

    def _samples(
        self, predictions: Sequence[str], targets: Sequence[str | Sequence[str]]
    ) -> list[tuple[str, list[str]]]:
        _check_texts(self.name, predictions, targets)
        references = [[target] if isinstance(target, str) else list(target) for target in targets]
        for prediction, group in zip(predictions, references, strict=True):
            _check_sample(self.name, prediction, group)
        return [
            (self.normalised(prediction), [self.normalised(reference) for reference in group])
            for prediction, group in zip(predictions, references, strict=True)
        ]


def _check_texts(metric: str, predictions: Any, targets: Any) -> None:
    for role, texts in (("predictions", predictions), ("references", targets)):
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise DataError(f"{metric} got {role} of type {type(texts).__name__}: give a list with a text per sample")
    if len(predictions) != len(targets):
        raise DataError(f"{metric} got {len(predictions)} predictions, {len(targets)} references: give one per sample")


def _check_sample(metric: str, prediction: Any, references: list[Any]) -> None:
    if not references:
        raise DataError(f"{metric} got a sample without a reference: give a text, or a list of at least one")
    for text in (prediction, *references):
        if not isinstance(text, str):
            raise DataError(f"{metric} compares texts and got {text!r} of type {type(text).__name__}: decode it first")
