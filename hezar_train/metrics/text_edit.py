"""Error rates of recognised text: the edits between reference and prediction as a share of the reference's length.

Edits and lengths are summed over the whole set and divided once. An error rate is not bounded by 1: a prediction of ten
characters for a reference of one is a rate of 9 or 10. References that are all empty count as of length 1 together, so
an empty prediction has rate 0 and any other the number of its characters or words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Protocol, TypeVar

from hezar_train.errors import DataError
from hezar_train.metrics.text import TextMetric

__all__ = ["CharacterErrorRate", "WordErrorRate", "edit_distance", "plain_edit_distance"]

Symbol = TypeVar("Symbol", str, int)

_WIDE_SPACE = re.compile(r"\s\s+")


class EditDistance(Protocol):
    """Counts the edits between two sequences of characters or of numbers."""

    def __call__(self, first: Sequence[Symbol], second: Sequence[Symbol], /) -> int: ...


def plain_edit_distance(first: Sequence[Symbol], second: Sequence[Symbol]) -> int:
    """Return the Levenshtein distance; one pass over the second, a column of the table held in the bits of an int."""
    # Myers' bit vectors: bit i of `rises` says that the column's cell i + 1 is one more than cell i, `falls` one less.
    places: dict[Symbol, int] = {}
    for position, symbol in enumerate(first):
        places[symbol] = places.get(symbol, 0) | 1 << position
    full = (1 << len(first)) - 1
    last = len(first) - 1
    rises, falls, distance = full, 0, len(first)
    for symbol in second if first else ():
        equal = places.get(symbol, 0) | falls
        diagonal = (((equal & rises) + rises) ^ rises) | equal
        up = falls | (full & ~(diagonal | rises))
        down = rises & diagonal
        distance += (up >> last & 1) - (down >> last & 1)
        up = up << 1 | 1
        rises = (down << 1 | (full & ~(diagonal | up))) & full
        falls = up & diagonal & full
    return distance if first else len(second)


@cache
def _fastest() -> EditDistance:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        return plain_edit_distance
    return Levenshtein.distance


def edit_distance(first: Sequence[Symbol], second: Sequence[Symbol]) -> int:
    """Return the Levenshtein distance, by `rapidfuzz` where it is installed."""
    return _fastest()(first, second)


class _ErrorRate(TextMetric):
    """Sum of edits / sum of reference lengths."""

    num_counts = 2

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    def score(self, sums: list[float], num_samples: float) -> dict[str, float]:  # noqa: ARG002
        edits, length = sums
        return {self.name: edits / max(length, 1.0)}

    def _reference(self, references: list[str]) -> str:
        if len(references) > 1:
            raise DataError(f"{self.name} got {len(references)} references for a sample: an error rate has one")
        return references[0]


class CharacterErrorRate(_ErrorRate):
    """Character error rate (CER), spaces counted, those at the ends not."""

    name = "cer"
    minimized = frozenset({"cer"})

    def counts(self, prediction: str, references: list[str]) -> list[float]:
        reference = self._reference(references).strip()
        return [edit_distance(reference, prediction.strip()), len(reference)]


class WordErrorRate(_ErrorRate):
    """Word error rate (WER); words are what single spaces or wider gaps separate, as jiwer has it.

    A lone line break or tab is then part of a word; with `normalise` it is a space.
    """

    name = "wer"
    minimized = frozenset({"wer"})

    def counts(self, prediction: str, references: list[str]) -> list[float]:
        numbers: dict[str, int] = {}
        predicted, reference = (
            [numbers.setdefault(word, len(numbers)) for word in _spaced(text)]
            for text in (prediction, self._reference(references))
        )
        return [edit_distance(reference, predicted), len(reference)]


def _spaced(text: str) -> list[str]:
    return [word for word in _WIDE_SPACE.sub(" ", text).strip().split(" ") if word]
