"""What to compare with: summaries that need no learning, on the same held-out pairs.

python recipes/text_generation/baseline.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from recipe import read_pairs, split

from hezar_train.metrics import build_metric

NUM_FIRST_WORDS, NUM_KEY_WORDS = 12, 8
PREDICATE = re.compile(r"\b(?:is an?|is the|provides?|contains?|implements?|allows?)\b ", re.IGNORECASE)


def first_sentence(text: str) -> str:
    """Return what stands before the first full stop that a space follows."""
    return re.split(r"(?<=\.) ", text)[0]


def first_words(text: str) -> str:
    """Return the first words."""
    return " ".join(text.split()[:NUM_FIRST_WORDS])


def words_behind_the_verb(text: str) -> str:
    """Return the words behind the first "is a", "provides", ..., where summaries tend to stand."""
    found = PREDICATE.search(text)
    return " ".join(text[found.end() if found else 0 :].split()[:NUM_KEY_WORDS])


def scores(shorten: Callable[[str], str], held_out: list[tuple[str, str]]) -> dict[str, float]:
    """Compare what a rule makes of the sources with the targets."""
    found: dict[str, float] = {}
    for metric in (build_metric("rouge"), build_metric("chrf")):
        metric.update([shorten(source) for source, _ in held_out], [target for _, target in held_out])
        found.update(metric.compute())
    return found


if __name__ == "__main__":
    _, pairs = split(read_pairs())
    for rule in (first_sentence, first_words, words_behind_the_verb, str):
        listed = "  ".join(f"{name} {value:.3f}" for name, value in scores(rule, pairs).items())
        sys.stdout.write(f"{rule.__name__:22} {listed}\n")
