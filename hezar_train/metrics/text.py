"""Metrics of texts: error rates (CER, WER), exact match, BLEU, chrF and ROUGE; a normaliser and a tokeniser for them.

A metric receives a text per sample and a reference, or several references, per sample. It keeps sums of counts, never
a text, and divides once. Texts are compared as they are, unless `normalise` says otherwise: it writes each group of
equivalent Persian spellings in one way. `tokenise` says what a word is in any script; it is ROUGE's default.

BLEU and chrF are sacrebleu's, which belongs to the extra `metrics` and is imported when such a metric is built; the
other metrics need no package but torch.
"""

from __future__ import annotations

import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices, suggestion
from hezar_train.metrics.metric import AdditiveMetric

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as Scorer

__all__ = [
    "Bleu",
    "CharacterErrorRate",
    "ChrF",
    "ExactMatch",
    "Normaliser",
    "Rouge",
    "TextMetric",
    "WordErrorRate",
    "edit_distance",
    "normalise",
    "normaliser_of",
    "plain_edit_distance",
    "tokenise",
]

Normaliser = Callable[[str], str]
Lines = list[list[str]]
Symbol = TypeVar("Symbol", str, int)

KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")  # of ROUGE

ZWNJ = "\u200c"
ZWJ = "\u200d"
ZWNJ_CHOICES = ("keep", "remove", "space")
# Behind these letters the next one starts anew in any case, so that a joiner changes nothing on the page.
NEVER_JOINS = frozenset("اآدذرزژوء")

_ZWNJ_RUN = re.compile(f"{ZWNJ}+")
_WIDE_SPACE = re.compile(r"\s\s+")


def normalise(text: str, zwnj: str = "keep") -> str:
    """Return the text with each group of equivalent Persian spellings written in one way; twice is the same as once.

    1. Arabic presentation forms (U+FB50.., U+FE70..) become the letters they show; then NFC.
    2. Yeh: ي ى ئ become ی. Kaf: ك ڪ become ک. Heh: ة ہ ھ ە ۀ ۂ ۃ become ه. Alef: أ إ ٱ become ا,
       and ؤ becomes و: Persian writes a hamza on a carrier or leaves it out (رئیس, رییس). آ and a hamza of its own (ء)
       stay, for they tell words apart.
    3. Arabic (٠١٢) and Persian (۰۱۲) digits become 012.
    4. Removed: tatweel, Arabic diacritics (also the hamza above a heh, خانهٔ), and what cannot be seen: byte order
       marks, bidirectional controls, soft hyphens, word joiners, zero-width joiners.
    5. The zero-width non-joiner (ZWNJ, U+200C) and the zero-width space, which looks the same, are one character. It is
       a joiner inside a word: a run of them is one, and one that does not stand between two letters or digits is
       dropped. What is left is, by `zwnj`: "keep" (all but those behind a letter that never joins, as in کار‌ها, which
       looks like کارها), "remove", or "space".
    6. Any whitespace becomes one space, none at the ends; NFC again.

    It does not correct spelling, split or join words, stem, change the case or touch punctuation.
    """
    _check_zwnj(zwnj)
    text = unicodedata.normalize("NFC", text.translate(_PRESENTATION_FORMS)).translate(_LETTERS)
    if ZWNJ in text:
        text = _ZWNJ_RUN.sub(partial(_joiner, zwnj=zwnj), text)
    return unicodedata.normalize("NFC", " ".join(text.split()))


def _joiner(run: re.Match[str], zwnj: str) -> str:
    text, start, end = run.string, run.start(), run.end()
    # Marks are passed over: whether one has a composed form with its letter must not matter.
    while start and (text[start - 1] == ZWNJ or unicodedata.category(text[start - 1]).startswith("M")):
        start -= 1
    if not start or not text[start - 1].isalnum() or not text[end : end + 1].isalnum():
        return ""
    if zwnj == "keep":
        return "" if text[start - 1] in NEVER_JOINS else ZWNJ
    return " " if zwnj == "space" else ""


def _characters(*ranges: tuple[int, int]) -> Iterable[int]:
    return (code for first, last in ranges for code in range(first, last + 1))


def _letters() -> dict[int, str | None]:
    """Return what each Arabic letter, digit, mark and invisible character becomes; None is nothing."""
    marks = _characters((0x610, 0x61A), (0x64B, 0x65F), (0x6D6, 0x6DC), (0x6DF, 0x6E4), (0x6E7, 0x6E8), (0x6EA, 0x6ED))
    more_marks = _characters((0x898, 0x89F), (0x8CA, 0x8E1), (0x8E3, 0x8FF))
    invisible = _characters((0x200D, 0x200F), (0x202A, 0x202E), (0x2060, 0x2064), (0x2066, 0x2069))
    table: dict[int, str | None] = dict.fromkeys([*marks, *more_marks, *invisible])
    table |= dict.fromkeys([0x640, 0x670, 0xAD, 0x61C, 0xFEFF])
    for persian, others in {"ی": "يىئ", "ک": "كڪ", "ه": "ةہھەۀۂۃ", "ا": "أإٱ", "و": "ؤ", ZWNJ: "\u200b"}.items():
        table |= {ord(other): persian for other in others}
    return table | {first + value: str(value) for first in (0x660, 0x6F0) for value in range(10)}


def _presentation_forms() -> dict[int, str]:
    """Return the letters that each presentation form shows; a lone mark comes without the space it stands on."""
    codes = _characters((0xFB50, 0xFDFF), (0xFE70, 0xFEFC))
    return {code: unicodedata.normalize("NFKC", chr(code)).strip() for code in codes}


_LETTERS = _letters()
_PRESENTATION_FORMS = _presentation_forms()


def normaliser_of(option: bool | Mapping[str, Any] | Normaliser) -> Normaliser | None:
    """Return the normaliser that an option asks for: none, `normalise`, the same with keywords, or the user's own."""
    if isinstance(option, Mapping):
        if unknown := set(option) - {"zwnj"}:
            raise ConfigError(f"normalise has {choices(map(str, unknown))}, which it does not know. It has: zwnj.")
        _check_zwnj(option.get("zwnj", "keep"))
        return partial(normalise, **option)
    if isinstance(option, bool):
        return normalise if option else None
    if not callable(option):
        raise ConfigError(f"normalise={option!r} must be true, false, a mapping like {{'zwnj': 'space'}} or a function")
    return option


def _check_zwnj(given: Any) -> None:
    if given not in ZWNJ_CHOICES:
        known, hint = choices(ZWNJ_CHOICES), suggestion(str(given), ZWNJ_CHOICES)
        raise ConfigError(f"zwnj={given!r}: what to do with zero-width non-joiners is one of: {known}.{hint}")


def tokenise(text: str) -> list[str]:
    """Return the words in lower case: runs of letters, digits and their marks, with the joiners inside, in any script.

    Of an English text these are its runs of a-z and 0-9. Scripts that put no space between words come as whole phrases.
    """
    runs = (run.strip(ZWNJ + ZWJ) for run in text.lower().translate(_WORD_CHARACTERS).split())
    return [run for run in runs if run.isalnum() or any(map(str.isalnum, run))]


class _WordCharacters(dict[int, str]):
    """A table for `str.translate` that keeps letters, digits, marks and joiners and makes the rest a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_kept = unicodedata.category(character)[0] in "LNM" or character in (ZWNJ, ZWJ)
        return self.setdefault(code, character if is_kept else " ")


_WORD_CHARACTERS = _WordCharacters()


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


class _ErrorRate(TextMetric):
    """The edits between references and predictions as a share of the references' length, over the whole set.

    It is not bounded by 1: a prediction of ten characters for a reference of one is a rate of 9 or 10. References that
    are all empty count as of length 1 together, so an empty prediction has rate 0 and any other the number of its
    characters or words.
    """

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


class ExactMatch(TextMetric):
    """The share of texts that are a reference of theirs, character by character, spaces at the ends left out."""

    name = "exact_match"
    num_counts = 1

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    def counts(self, prediction: str, references: list[str]) -> list[float]:
        return [float(prediction.strip() in {reference.strip() for reference in references})]

    def score(self, sums: list[float], num_samples: float) -> dict[str, float]:
        return {self.name: sums[0] / num_samples}


def _spaced(text: str) -> list[str]:
    return [word for word in _WIDE_SPACE.sub(" ", text).strip().split(" ") if word]


class EditDistance(Protocol):
    """Counts the edits between two sequences of characters or of numbers."""

    def __call__(self, first: Sequence[Symbol], second: Sequence[Symbol], /) -> int: ...


def edit_distance(first: Sequence[Symbol], second: Sequence[Symbol]) -> int:
    """Return the Levenshtein distance, by `rapidfuzz` where it is installed."""
    return _fastest()(first, second)


@cache
def _fastest() -> EditDistance:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        return plain_edit_distance
    return Levenshtein.distance


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


class _SacrebleuScore(TextMetric):
    """sacrebleu's own statistics per sample, summed, and its score of the sum / 100.

    `signature` is what a paper or a model card should quote beside the score.
    """

    _scorer: Scorer

    def __init__(self, normalise: bool | Mapping[str, Any] | Normaliser = False) -> None:
        super().__init__(normalise)
        self._nums_references: set[int] = set()

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    @property
    def signature(self) -> str:
        """Return sacrebleu's signature of the score: number of references, tokeniser, smoothing, version."""
        self._scorer.num_refs = next(iter(self._nums_references)) if len(self._nums_references) == 1 else -1
        return str(self._scorer.get_signature())

    def reset(self) -> None:
        super().reset()
        self._nums_references.clear()

    def counts(self, prediction: str, references: list[str]) -> list[float]:
        self._nums_references.add(len(references))
        (counts,) = self._scorer._extract_corpus_statistics([prediction], [[reference] for reference in references])
        return [float(count) for count in counts]

    def score(self, sums: list[float], num_samples: float) -> dict[str, float]:  # noqa: ARG002
        # Logarithms may leave a perfect score a hair above 100.
        return {self.name: min(self._scorer._compute_score_from_stats(sums).score / 100, 1.0)}


class Bleu(_SacrebleuScore):
    """Corpus BLEU.

    `tokenize` names sacrebleu's tokeniser: "13a" is the usual one, which splits off ASCII punctuation only; "intl" also
    knows the Persian comma, question mark and quotes. With `effective_order` orders for which no prediction is long
    enough are left out, else a set whose texts all have fewer than four words scores 0, even against itself; where one
    has four words the option changes nothing.
    """

    name = "bleu"

    def __init__(
        self,
        tokenize: str = "13a",
        lowercase: bool = False,
        smooth_method: str = "exp",
        smooth_value: float | None = None,
        max_ngram_order: int = 4,
        effective_order: bool = True,
        normalise: bool | Mapping[str, Any] | Normaliser = False,
    ) -> None:
        super().__init__(normalise)
        BLEU = _sacrebleu("BLEU")  # noqa: N806
        _check_choice("tokenize", tokenize, BLEU.TOKENIZERS)
        _check_choice("smooth_method", smooth_method, BLEU.SMOOTH_DEFAULTS)
        self.tokenize = tokenize
        self.num_counts = 2 + 2 * max_ngram_order
        self._scorer = BLEU(
            tokenize=tokenize,
            lowercase=lowercase,
            smooth_method=smooth_method,
            smooth_value=smooth_value,
            max_ngram_order=max_ngram_order,
            effective_order=effective_order,
            force=True,  # only silences a warning about tokenised text, which counts lines of one call
        )


class ChrF(_SacrebleuScore):
    """Corpus chrF: character n-grams, no tokeniser; `word_order=2` makes it chrF++."""

    name = "chrf"

    def __init__(
        self,
        char_order: int = 6,
        word_order: int = 0,
        beta: int = 2,
        lowercase: bool = False,
        normalise: bool | Mapping[str, Any] | Normaliser = False,
    ) -> None:
        super().__init__(normalise)
        self.num_counts = 3 * (char_order + word_order)
        self._scorer = _sacrebleu("CHRF")(char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase)


def _sacrebleu(name: str) -> Any:
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise MissingDependencyError("sacrebleu", "metrics", f"the metric {name.lower()!r}") from error
    return getattr(sacrebleu.metrics, name)


def _check_choice(option: str, given: str, known: Any) -> None:
    if given not in known:
        hint = suggestion(str(given), known)
        raise ConfigError(f"bleu has {option}={given!r}. sacrebleu has: {choices(known)}.{hint}")


class Rouge(TextMetric):
    """ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum: mean F-measure over samples, for any script.

    Of English text the values are those of rouge-score without its stemmer. `tokenize` is a function from a text to its
    words. A text without words, and for ROUGE-2 a text of one word, scores 0, even against itself. Of several
    references the best counts, for each of the four by itself. Lines are the sentences of ROUGE-Lsum.
    """

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
