"""What two spellings of one Persian text have in common, and what a word is in any script.

This module owns the normaliser that text metrics apply when asked (they do not by default) and the tokeniser of ROUGE.
It needs nothing but the standard library. It does not correct spelling, split or join words, stem, change the case or
touch punctuation. `normalise` does this, in order:

1. Arabic presentation forms (U+FB50.., U+FE70..) become the letters they show; then NFC.
2. Yeh: ي ى ئ become ی. Kaf: ك ڪ become ک. Heh: ة ہ ھ ە ۀ ۂ ۃ become ه. Alef: أ إ ٱ become ا,
   and ؤ becomes و: Persian writes a hamza on a carrier or leaves it out (رئیس, رییس). آ and a hamza of its own (ء)
   stay, for they tell words apart.
3. Arabic (٠١٢) and Persian (۰۱۲) digits become 012.
4. Removed: tatweel, Arabic diacritics (also the hamza above a heh, خانهٔ), and what cannot be seen: byte order marks,
   bidirectional controls, soft hyphens, word joiners, zero-width joiners.
5. The zero-width non-joiner (ZWNJ, U+200C) and the zero-width space, which looks the same, are one character. It is a
   joiner inside a word: a run of them is one, and one that does not stand between two letters or digits is dropped.
   What is left is, by `zwnj`: "keep" (all but those behind a letter that never joins, as in کار‌ها, which looks like
   کارها), "remove", or "space".
6. Any whitespace becomes one space, none at the ends; NFC again.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hezar_train.errors import ConfigError, choices, suggestion

__all__ = ["Normaliser", "normalise", "normaliser_of", "tokenise"]

Normaliser = Callable[[str], str]

ZWNJ = "\u200c"
ZWJ = "\u200d"
ZWNJ_CHOICES = ("keep", "remove", "space")
# Behind these letters the next one starts anew in any case, so that a joiner changes nothing on the page.
NEVER_JOINS = frozenset("اآدذرزژوء")

_ZWNJ_RUN = re.compile(f"{ZWNJ}+")


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


def normalise(text: str, zwnj: str = "keep") -> str:
    """Return the text with each group of equivalent Persian spellings written in one way; twice is the same as once."""
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


class _WordCharacters(dict[int, str]):
    """A table for `str.translate` that keeps letters, digits, marks and joiners and makes the rest a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_kept = unicodedata.category(character)[0] in "LNM" or character in (ZWNJ, ZWJ)
        return self.setdefault(code, character if is_kept else " ")


_WORD_CHARACTERS = _WordCharacters()


def tokenise(text: str) -> list[str]:
    """Return the words in lower case: runs of letters, digits and their marks, with the joiners inside, in any script.

    Of an English text these are its runs of a-z and 0-9. Scripts that put no space between words come as whole phrases.
    """
    runs = (run.strip(ZWNJ + ZWJ) for run in text.lower().translate(_WORD_CHARACTERS).split())
    return [run for run in runs if run.isalnum() or any(map(str.isalnum, run))]
