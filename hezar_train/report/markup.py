"""HTML put together from elements, and numbers, sizes, durations and moments in the words of the page.

Whatever is not `Html` already is text, and is escaped. There is no other way into a page: a label, a path or a misread
text that looks like a tag is shown as it is.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime

__all__ = [
    "Content",
    "Html",
    "breakable",
    "bytes_in_words",
    "capitalised",
    "count",
    "duration",
    "element",
    "joined",
    "moment",
    "number",
    "of_user",
    "pairs",
    "spoken",
    "table",
]

VOID = frozenset({"br", "img", "input", "meta", "wbr"})
WRITTEN = {
    **{name: name.upper() for name in ("auroc", "bleu", "cer", "f1", "lr", "mae", "mse", "rmse", "wer")},
    **{f"rouge{kind}": f"ROUGE-{kind}" for kind in ("1", "2", "L", "Lsum")},
    "chrf": "chrF",
    "r2": "R²",
}
"""Abbreviations as they are written."""


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


Content = str | Html | None
"""What an element may hold; None is nothing."""


def element(name: str, *content: Content, **attributes: str | float | bool | None) -> Html:
    """Return an element; `class_` stands for `class`, `data_x` for `data-x`, and an attribute of None is left out."""
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def joined(parts: Iterable[Content]) -> Html:
    """Return the parts one after another."""
    return Html("".join(_escaped(part) for part in parts if part is not None))


def of_user(text: object, name: str = "span", **attributes: str | float | bool | None) -> Html:
    """Return text of unknown script: it runs in its own direction and does not turn its neighbours."""
    return element(name, str(text), dir="auto", **attributes)


def breakable(name: str) -> Html:
    """Return a name or a path with the places at which a narrow screen may break it; a number stays whole."""
    first, *rest = re.split(r"(?<=[._/])(?=[^\W\d_])", name)
    return joined([first, *(part for one in rest for part in (element("wbr"), one))])


def table(head: Iterable[Content], rows: Iterable[Iterable[Content]], class_: str | None = None) -> Html:
    """Return a table that scrolls sideways in its own box; the first cell of a row is its name."""
    cells = joined(element("th", one, scope="col") for one in head)
    lines = [[*row] for row in rows]
    body = joined(
        element("tr", element("th", first, scope="row"), *(element("td", one) for one in rest))
        for first, *rest in lines
    )
    return _in_box(element("table", element("thead", element("tr", cells)), element("tbody", body), class_=class_))


def pairs(groups: Mapping[str, Mapping[str, str]]) -> Html:
    """Return a table of names and values under the heading of each group; an empty heading is left out."""
    return _in_box(element("table", *(_group(*one) for one in groups.items() if one[1]), class_="pairs"))


def _group(heading: str, values: Mapping[str, str]) -> Html:
    title = element("tr", element("th", breakable(heading), colspan=2, scope="rowgroup"), class_="group")
    rows = (
        element("tr", element("th", breakable(name), scope="row"), element("td", breakable(value), dir="auto"))
        for name, value in values.items()
    )
    return element("tbody", title if heading else None, *rows)


def _in_box(inner: Html) -> Html:
    return element("div", inner, class_="scroll", tabindex="0", role="group", aria_label="table")


def _escaped(part: str) -> str:
    return part if isinstance(part, Html) else html.escape(part)


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def number(value: float) -> str:
    """Return four digits of a number."""
    try:
        value = float(value)
    except OverflowError:  # a whole number that no float holds
        return "∞"
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
    if value.is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}"


def count(value: float) -> str:
    """Return a whole number in groups of three digits."""
    return f"{round(value):,}"


def spoken(name: str) -> str:
    """Return a name in words, abbreviations as they are written."""
    words = re.sub(r"[^\W_]+", lambda word: WRITTEN.get(word[0], word[0]), name)
    return words.replace("_", " ").replace(".", " · ")


def capitalised(name: str) -> str:
    """Return a name in words that begin with a capital, unless an abbreviation is written otherwise."""
    words = spoken(name)
    return words if words.startswith(tuple(WRITTEN.values())) else words[:1].upper() + words[1:]


def bytes_in_words(size: float) -> str:
    """Return a size in the unit that suits it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration(seconds: float) -> str:
    """Return a span of time in its two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    parts = [(days, "d"), (hours, "h"), (rest // 60, "min"), (rest % 60, "s")]
    first = next((place for place, (amount, _) in enumerate(parts) if amount), len(parts) - 1)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def moment(seconds: float) -> str:
    """Return a moment in local time."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "an unknown time"
