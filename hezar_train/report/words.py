"""Numbers as people read them: values, sizes, durations, moments."""

from __future__ import annotations

import math
import re
from datetime import datetime

__all__ = ["bytes_in_words", "capitalised", "count", "duration", "moment", "number", "spoken"]

WRITTEN = {
    **{name: name.upper() for name in ("auroc", "bleu", "cer", "f1", "lr", "mae", "mse", "rmse", "wer")},
    **{f"rouge{kind}": f"ROUGE-{kind}" for kind in ("1", "2", "L", "Lsum")},
    "chrf": "chrF",
    "r2": "R²",
}
"""Abbreviations as they are written."""


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
