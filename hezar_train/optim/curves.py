"""The closed form of every schedule that is neither torch's nor a user's own: a value for each tick, and no memory.

A curve is a function of the tick `t` and of its settings alone, so a run resumed at any tick meets the values that an
unbroken one would have met. The same curves drive learning rates and momenta: `base` is the group's first value,
`high` and `initial` are it unless given, `low` is a share of `high` unless given, and `falls` counts the evaluations
that fell below the best so far. What is `_warmed` has the settings of a warm-up as well. Past its end a decay keeps its
last value. Nothing here knows an optimizer.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["CURVES", "Curve", "Pace"]


class Pace(StrEnum):
    """What a curve counts."""

    TICK = "tick"
    EPOCH = "epoch"
    EVALUATION = "evaluation"


def _warmed(after: Callable[..., float]) -> Callable[..., float]:
    """Let a curve be gone to, from `warmup_factor` times the base, on a straight line or in one step."""

    @functools.wraps(after)
    def value(
        t: float, *, base: float, warmup_iter: float = 0, warmup_factor: float = 0.001, warmup_method: str = "linear",
        **settings: Any,
    ) -> float:  # fmt: skip
        if t >= warmup_iter:
            return after(t, base=base, **settings)
        start = base * warmup_factor
        if warmup_method == "constant":
            return start
        return _between(start, after(warmup_iter, base=base, **settings), t / warmup_iter)

    own = inspect.signature(value, follow_wrapped=False).parameters
    shown = {**inspect.signature(after).parameters, **own}
    del shown["settings"]
    value.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    return value


def triangular(t: float, *, low: float, high: float, stepsize: float, start_iter: float = 0) -> float:
    """Rise from low to high in `stepsize` ticks, fall back in as many, and begin again."""
    return _between(low, high, _triangle(t - start_iter, stepsize))


def inv_triangular(t: float, *, low: float, high: float, stepsize: float, start_iter: float = 0) -> float:
    """Mirror `triangular`: begin at high, reach low after `stepsize` ticks."""
    return _between(high, low, _triangle(t - start_iter, stepsize))


def triangular_exp(
    t: float, *, low: float, high: float, stepsize: float, start_iter: float = 0, k: float = 1e-4
) -> float:
    """Multiply `triangular` by exp(-k t)."""
    return triangular(t, low=low, high=high, stepsize=stepsize, start_iter=start_iter) * _fading(t - start_iter, k)


def triangular2(t: float, *, low: float, high: float, stepsize: float, start_iter: float = 0) -> float:
    """Halve the height of the triangle in every cycle."""
    s = t - start_iter
    return _between(low, high, math.ldexp(_triangle(s, stepsize), -max(0, int(s // (2 * stepsize)))))


def triangular2_exp(
    t: float, *, low: float, high: float, stepsize: float, start_iter: float = 0, k: float = 1e-4
) -> float:
    """Multiply `triangular2` by exp(-k t)."""
    return triangular2(t, low=low, high=high, stepsize=stepsize, start_iter=start_iter) * _fading(t - start_iter, k)


def warm_restarts(t: float, *, low: float, high: float, stepsize: float, step_per_epoch: float = 1) -> float:
    """Fall from high to low on half a cosine within 2 * stepsize * step_per_epoch ticks, and begin again."""
    period = 2 * stepsize * step_per_epoch
    return _between(low, high, _half_cosine((t % period) / period))


def linear_decay(t: float, *, low: float, high: float, num_iters: float) -> float:
    """Fall from high to low on a straight line."""
    return _between(high, low, min(t / num_iters, 1))


def log_decay(t: float, *, low: float, high: float, num_iters: float) -> float:
    """Fall from high to low by the same factor in every tick."""
    share = min(t / num_iters, 1)
    return math.pow(high, 1 - share) * math.pow(low, share)


def exponential_decay(t: float, *, high: float, low: float = 0.0, k: float = 0.001) -> float:
    """Fall as high * exp(-k t), not below low."""
    return max(low, high * math.exp(-k * t))


def step_decay(t: float, *, high: float, low: float = 0.0, decay: float = 0.001, decay_every: float = 10_000) -> float:
    """Multiply by `decay` after every `decay_every` ticks, not below low."""
    return max(low, high * math.pow(decay, t // decay_every))


def epoch_set(t: float, *, base: float, schedule: Sequence[tuple[int, float]], sets: bool = False) -> float:
    """Take the value of the last epoch that is listed, or multiply by the values of all that have come."""
    reached = [value for epoch, value in schedule if epoch <= t]
    return reached[-1] if sets else base * math.prod(reached)


def decay_when_epoch(t: float, *, initial: float, num_epochs: float = 8, decay: float = 0.9) -> float:
    """Multiply by `decay` after every `num_epochs` epochs."""
    return initial * math.pow(decay, t // num_epochs)


def decay_to_epoch(
    t: float, *, initial: float, decay_length: float, final: float = 0.0, non_decay_time: float = 0
) -> float:
    """Wait `non_decay_time` epochs, then go to `final` on a straight line."""
    return _between(initial, final, min(max(0, t - non_decay_time) / decay_length, 1))


def decay_when_acc(_t: float, *, initial: float, falls: int, decay: float = 0.9) -> float:
    """Multiply by `decay` at every fall."""
    return initial * math.pow(decay, falls)


def triangular_decay_when_acc(
    t: float, *, low: float, high: float, stepsize: float, falls: int, start_iter: float = 0, decay: float = 0.9
) -> float:
    """Multiply `triangular` by `decay` at every fall."""
    return triangular(t, low=low, high=high, stepsize=stepsize, start_iter=start_iter) * math.pow(decay, falls)


@_warmed
def warmup_cosine(t: float, *, base: float, max_iter: float, alpha: float = 0.01) -> float:
    """Fall on half a cosine to alpha times the base."""
    return base * _between(alpha, 1, _half_cosine(t / max_iter))


@_warmed
def warmup_cosine_annealing(t: float, *, base: float, max_iter: float, eta_min: float = 0.0) -> float:
    """Fall on half a cosine to `eta_min`."""
    return _between(eta_min, base, _half_cosine(t / max_iter))


@_warmed
def warmup_step(t: float, *, base: float, step_size: float, gamma: float = 0.1) -> float:
    """Multiply by `gamma` after every `step_size` ticks."""
    return base * math.pow(gamma, t // step_size)


@_warmed
def warmup_multi_step(t: float, *, base: float, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """Multiply by `gamma` at every milestone."""
    return base * gamma ** sum(milestone <= t for milestone in milestones)


@_warmed
def warmup_exponential(t: float, *, base: float, gamma: float) -> float:
    """Multiply by `gamma` in every tick."""
    return base * math.pow(gamma, t)


@_warmed
def warmup_polynomial(
    t: float, *, base: float, max_iter: float, end: float = 0.0, power: float = 1.0, cycle: bool = False
) -> float:
    """Fall to `end` as a power of what is left; with `cycle`, a run past the end is laid out over a longer one."""
    length = max_iter * max(1, math.ceil(t / max_iter)) if cycle else max_iter
    return _between(end, base, math.pow(1 - min(t / length, 1), power))


def warmup_linear(t: float, *, base: float, max_iter: float, warmup_iter: float = 0) -> float:
    """Rise from 0 to the base on a straight line, then fall to 0 on another."""
    if t < warmup_iter:
        return base * t / warmup_iter
    return base * max(0.0, (max_iter - t) / max(1, max_iter - warmup_iter))


def warmup_noam(t: float, *, base: float, warmup_iter: float) -> float:
    """Rise in proportion to the tick, then fall with its square root; the highest factor is 1 / sqrt(warmup_iter)."""
    s = max(1, t)
    return base * min(math.pow(s, -0.5), s * math.pow(warmup_iter, -1.5))


def _between(first: float, last: float, share: float) -> float:
    """Return the point at this share of the way; both ends are met exactly."""
    return first * (1 - share) + last * share


def _triangle(t: float, stepsize: float) -> float:
    """Return the height, 0 to 1, of a triangle that peaks at `stepsize`; before tick 1 it is 0."""
    if t < 1:
        return 0.0
    cycle = math.floor(1 + t / (2 * stepsize))
    return max(0.0, 1 - abs(t / stepsize - 2 * cycle + 1))


def _fading(t: float, k: float) -> float:
    return math.exp(-k * max(0, t))


def _half_cosine(share: float) -> float:
    return (1 + math.cos(math.pi * min(share, 1))) / 2


def _whole(total: int, _settings: Mapping[str, Any]) -> int:
    return total


def _half(total: int, _settings: Mapping[str, Any]) -> int:
    return max(1, total // 2)


def _rest(total: int, settings: Mapping[str, Any]) -> int:
    return max(1, total - int(settings.get("non_decay_time", 0)))


@dataclass(frozen=True)
class Curve:
    """A closed form, what it counts, and what the length of the run says about settings that are left out."""

    value: Callable[..., float]
    pace: Pace = Pace.TICK
    fill: Mapping[str, Callable[[int, Mapping[str, Any]], int]] = field(default_factory=dict)

    watches: bool = False
    """Whether evaluations change it."""


CURVES: dict[str, Curve] = {
    "triangular": Curve(triangular, fill={"stepsize": _half}),
    "inv_triangular": Curve(inv_triangular, fill={"stepsize": _half}),
    "triangular_exp": Curve(triangular_exp, fill={"stepsize": _half}),
    "triangular2": Curve(triangular2, fill={"stepsize": _half}),
    "triangular2_exp": Curve(triangular2_exp, fill={"stepsize": _half}),
    "warm_restarts": Curve(warm_restarts, fill={"stepsize": _half}),
    "linear_decay": Curve(linear_decay, fill={"num_iters": _whole}),
    "log_decay": Curve(log_decay, fill={"num_iters": _whole}),
    "exponential_decay": Curve(exponential_decay),
    "step_decay": Curve(step_decay),
    "epoch_set": Curve(epoch_set, Pace.EPOCH),
    "decay_to_epoch": Curve(decay_to_epoch, Pace.EPOCH, {"decay_length": _rest}),
    "decay_when_epoch": Curve(decay_when_epoch, Pace.EPOCH),
    "decay_when_acc": Curve(decay_when_acc, Pace.EVALUATION, watches=True),
    "triangular_decay_when_acc": Curve(triangular_decay_when_acc, fill={"stepsize": _half}, watches=True),
    "warmup_cosine": Curve(warmup_cosine, fill={"max_iter": _whole}),
    "warmup_cosine_annealing": Curve(warmup_cosine_annealing, fill={"max_iter": _whole}),
    "warmup_step": Curve(warmup_step),
    "warmup_multi_step": Curve(warmup_multi_step),
    "warmup_exponential": Curve(warmup_exponential),
    "warmup_polynomial": Curve(warmup_polynomial, fill={"max_iter": _whole}),
    "warmup_linear": Curve(warmup_linear, fill={"max_iter": _whole}),
    "warmup_noam": Curve(warmup_noam),
}
"""Every curve by its short name."""
