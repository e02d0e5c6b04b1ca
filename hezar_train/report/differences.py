"""What differs between what is right and what was said, marked on both sides.

Texts of users run in their own direction, but a code such as a plate's is read in the order of its symbols, as it is
seen.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from hezar_train.report.markup import Content, Html, element, of_user

__all__ = ["compared", "in_order", "is_code"]

MOST_CHARACTERS_COMPARED = 400
MOST_SYMBOLS_OF_A_CODE = 24
LAM, ALEFS = "ل", ("ا", "أ", "إ", "آ")


def compared(target: str | list[str], prediction: str | list[str]) -> tuple[Html, Html]:
    """Mark what differs, on both sides."""
    if isinstance(target, list) or isinstance(prediction, list):
        lists = [[one] if isinstance(one, str) else one for one in (target, prediction)]
        return _marked_words(*lists), _marked_words(*reversed(lists))
    if max(len(target), len(prediction)) > MOST_CHARACTERS_COMPARED or min(len(target), len(prediction)) == 1:
        return of_user(target), of_user(prediction)
    blocks = difflib.SequenceMatcher(None, target, prediction, autojunk=False).get_opcodes()
    truth = [(target[first:last], kind == "equal") for kind, first, last, _, _ in blocks]
    said = [(prediction[first:last], kind == "equal") for kind, _, _, first, last in blocks]
    has_code = is_code(target)
    return _marked_text(truth, is_code=has_code), _marked_text(said, is_code=has_code)


def is_code(text: str) -> bool:
    """Tell whether a text is a code, such as a plate's: single letters of a right-to-left script among digits."""
    if len(text) > MOST_SYMBOLS_OF_A_CODE or not any(map(str.isdecimal, text)):
        return False
    is_letter = [unicodedata.bidirectional(symbol) in ("R", "AL") for symbol in text]
    return any(is_letter) and not any(one and other for one, other in pairwise(is_letter))


def in_order(*content: Content) -> Html:
    """Return a code with its symbols from left to right, whatever their script."""
    return element("bdo", *content, dir="ltr")


def _marked_words(words: Sequence[str], others: Sequence[str]) -> Html:
    pieces: list[Content] = []
    for place, word in enumerate(words):
        is_same = place < len(others) and others[place] == word
        pieces += [of_user(word, "span" if is_same else "mark"), " "]
    return element("span", *pieces, dir="auto", class_="words")


def _marked_text(pieces: Sequence[tuple[str, bool]], *, is_code: bool = False) -> Html:
    """Return text with a mark on each piece that is not the same; lam and alef are one letter form, marked as one."""
    content: list[Content] = []
    before = ""
    for text, is_same in pieces:
        joins = not (is_same or is_code) and text.startswith(ALEFS) and before.endswith(LAM)
        content.append(before[:-1] if joins else before)
        before = text if is_same else ""
        if text and not is_same:
            content.append(element("mark", LAM + text if joins else text))
    content.append(before)
    if not any(content):
        return element("span", "(nothing)", class_="muted")
    return in_order(*content) if is_code else element("span", *content, dir="auto")
