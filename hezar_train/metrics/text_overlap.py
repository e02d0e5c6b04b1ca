"""BLEU and chrF of generated text: sacrebleu's own statistics per sample, summed, and its score of the sum / 100.

sacrebleu belongs to the extra `metrics` and is imported when a metric is built. `signature` is what a paper or a model
card should quote beside the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hezar_train.errors import ConfigError, MissingDependencyError, choices, suggestion
from hezar_train.metrics.normalise import Normaliser
from hezar_train.metrics.text import TextMetric

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as Scorer

__all__ = ["Bleu", "ChrF"]


class _SacrebleuScore(TextMetric):
    """A metric that a sacrebleu scorer computes from sums."""

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
