"""Round numbers along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["round_ends", "round_ticks", "tick_words"]

LEAST_WIDTH = 1e-12
"""Of a range, in parts of its numbers: floats cannot count ticks in less."""

MOST_PLAIN = 7
"""Characters of a number without a power of ten."""


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many round numbers from `low` to `high`."""
    step = _round_step((high - low) / max(1, most - 1))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def round_ends(low: float, high: float, most: int) -> tuple[float, float]:
    """Widen a range to the round numbers around it, which are its ends then; one without width gets some."""
    if high - low <= LEAST_WIDTH * max(abs(low), abs(high), 1e-280):
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = _round_step((high - low) / max(1, most - 2))
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Return the numbers of an axis, all in one notation: plain ones, unless those are long and powers are not."""
    plain = [f"{tick:.12f}".rstrip("0").rstrip(".") for tick in ticks]
    powers = [_power(tick) for tick in ticks]
    is_exact = all(float(words) == tick for words, tick in zip(plain, ticks, strict=True))
    return plain if is_exact and _longest(plain) <= max(MOST_PLAIN, _longest(powers)) else powers


def _power(tick: float) -> str:
    if not tick:
        return "0"
    digits, power = f"{tick:.11e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _longest(words: Sequence[str]) -> int:
    return max((len(one.lstrip("-")) for one in words), default=0)


def _round_step(rough: float) -> float:
    """Return the least of 1, 2, 2.5 and 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
