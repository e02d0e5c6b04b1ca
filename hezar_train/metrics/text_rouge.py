"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum: mean F-measure over samples, for any script.

Of English text the values are those of rouge-score without its stemmer. Words come from `tokenise`, or from the
function given. A text without words, and for ROUGE-2 a text of one word, scores 0, even against itself. Of several
references the best counts, for each of the four by itself. Lines are the sentences of ROUGE-Lsum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from hezar_train.metrics.normalise import Normaliser, tokenise
from hezar_train.metrics.text import TextMetric

__all__ = ["Rouge"]

KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")

Lines = list[list[str]]


class Rouge(TextMetric):
    """ROUGE F-measures; `tokenize` is a function from a text to its words."""

    name = "rouge"
    num_counts = len(KEYS)

    def __init__(
        self,
        tokenize: Callable[[str], list[str]] = tokenise,
        normalise: bool | Mapping[str, Any] | Normaliser = False,
    ) -> None:
        super().__init__(normalise)
        self._tokenize = tokenize

    @property
    def output_keys(self) -> list[str]:
        return list(KEYS)

    def normalised(self, text: str) -> str:
        # A normaliser may take a line break for a space, but lines are sentences here.
        return "\n".join(map(super().normalised, text.split("\n")))

    def counts(self, prediction: str, references: list[str]) -> list[float]:
        predicted = self._lines(prediction)
        scores = [_f_measures(predicted, self._lines(reference)) for reference in references]
        return [max(values) for values in zip(*scores, strict=True)]

    def score(self, sums: list[float], num_samples: float) -> dict[str, float]:
        return {key: value / num_samples for key, value in zip(KEYS, sums, strict=True)}

    def _lines(self, text: str) -> Lines:
        return [self._tokenize(line) for line in text.split("\n") if line]


def _f_measures(prediction: Lines, reference: Lines) -> tuple[float, float, float, float]:
    predicted, expected = list(chain(*prediction)), list(chain(*reference))
    lengths = len(predicted), len(expected)
    pair_counts = Counter(pairwise(predicted)), Counter(pairwise(expected))
    return (
        _f_measure((Counter(predicted) & Counter(expected)).total(), *lengths),
        _f_measure((pair_counts[0] & pair_counts[1]).total(), pair_counts[0].total(), pair_counts[1].total()),
        _f_measure(_length_of_common(expected, predicted), *lengths),
        _f_measure(_hits_of_lines(prediction, reference), *lengths),
    )


def _f_measure(num_hits: int, num_predicted: int, num_expected: int) -> float:
    if not num_hits:
        return 0.0
    precision, recall = num_hits / num_predicted, num_hits / num_expected
    return 2 * precision * recall / (precision + recall)


def _hits_of_lines(prediction: Lines, reference: Lines) -> int:
    """Count the words of the reference's lines that lie on a common subsequence with any line of the prediction.

    A word counts at most as often as the prediction has it.
    """
    found: Counter[str] = Counter()
    for line in reference:
        positions = {place for other in prediction for place in _places_of_common(line, other)}
        found.update(line[place] for place in positions)
    return (found & Counter(chain(*prediction))).total()


def _steps(first: Sequence[str], second: Sequence[str]) -> Iterator[int]:
    """Yield the columns of the table of common subsequences, one for each prefix of the second, from the empty one on.

    Bit i of a column is 0 where the cell of the first i + 1 words is one more than that of the first i (Hyyrö's bit
    vectors), so that a column costs a few operations on ints.
    """
    places: dict[str, int] = {}
    for position, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << position
    full = (1 << len(first)) - 1
    column = full
    yield column
    for word in second:
        common = column & places.get(word, 0)
        column = (column + common | column - common) & full
        yield column


def _length_of_common(first: Sequence[str], second: Sequence[str]) -> int:
    *_, column = _steps(first, second)
    return len(first) - column.bit_count()


def _places_of_common(first: Sequence[str], second: Sequence[str]) -> Iterator[int]:
    """Yield the positions in the first of one longest common subsequence, the last first.

    Which one decides the score of ROUGE-Lsum: from the end, equal words are taken, else the second gives way if that
    loses nothing that the first could not keep, else the first.
    """
    columns = list(_steps(first, second))
    row, column = len(first), len(second)
    while row and column:
        if first[row - 1] == second[column - 1]:
            row, column = row - 1, column - 1
            yield row
        elif columns[column] >> (row - 1) & 1:
            row -= 1
        else:
            column -= 1
