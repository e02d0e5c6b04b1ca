"""The closed form of every schedule that is neither torch's nor a user's own, and the settings it is bound to.

A curve is a function of the tick `t` and of its settings alone, so a run resumed at any tick meets the values that an
unbroken one would have met. The same curves drive learning rates and momenta: `base` is the group's first value,
`high` and `initial` are it unless given, `low` is a share of `high` unless given, and `falls` counts the evaluations
that fell below the best so far. What is `_warmed` has the settings of a warm-up as well. Past its end a decay keeps its
last value.

`bind_curve` makes the keywords of a config a `BoundCurve`, ready to be followed: it knows the spellings, fills in the
lengths that were left out, and tells all mistakes at once. Other systems call one thing by several names (`max_iter`,
`total_steps`), and a range is `lr_min` to `lr_max` for a rate but `min` to `max` for a momentum: every spelling is
taken, two of one thing are refused. Nothing here knows an optimizer.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hezar_train.errors import ConfigError, choices
from hezar_train.optim.lookup import Keywords
from hezar_train.plan import steps_of

__all__ = [
    "CURVES",
    "MOMENTUM",
    "RATE",
    "BoundCurve",
    "Curve",
    "Falls",
    "Pace",
    "Quantity",
    "bind_curve",
]

logger = logging.getLogger(__name__)


class Pace(StrEnum):
    """What a curve counts."""

    TICK = "tick"
    EPOCH = "epoch"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Curve:
    """A closed form, what it counts, and what the length of the run says about settings that are left out."""

    value: Callable[..., float]
    pace: Pace = Pace.TICK
    fill: Mapping[str, Callable[[int, Mapping[str, Any]], int]] = field(default_factory=dict)

    watches: bool = False
    """Whether evaluations change it."""


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

    # What users may give is read off the signature, so it has to show the settings of both.
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


def warmup_stable_decay(
    t: float, *, base: float, max_iter: float, decay_iter: float, decay_method: str = "cosine", alpha: float = 0.0
) -> float:
    """Stay at the base, and fall to alpha times the base in the last `decay_iter` ticks."""
    share = min(max(0.0, t - (max_iter - decay_iter)) / decay_iter, 1)
    left = {"linear": 1 - share, "cosine": _half_cosine(share), "1-sqrt": 1 - math.sqrt(share)}[decay_method]
    return base * _between(alpha, 1, left)


def inverse_sqrt(t: float, *, base: float, timescale: float) -> float:
    """Fall with the square root of the ticks: to a half after three times `timescale`."""
    return base / math.sqrt((t + timescale) / timescale)


def cosine_with_restarts(
    t: float, *, base: float, max_iter: float, num_cycles: float = 1, eta_min: float = 0.0
) -> float:
    """Fall on half a cosine to `eta_min` so many times, each time from the base."""
    if t >= max_iter:
        return eta_min
    return _between(eta_min, base, _half_cosine((num_cycles * (t / max_iter)) % 1))


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
    "warmup_stable_decay": Curve(warmup_stable_decay, fill={"max_iter": _whole}),
    "inverse_sqrt": Curve(inverse_sqrt),
    "cosine_with_restarts": Curve(cosine_with_restarts, fill={"max_iter": _whole}),
}
"""Every curve by its short name."""


@dataclass(frozen=True)
class Quantity:
    """What a curve drives."""

    setting: str
    """The config's field that names the curve."""

    low_share: float
    """The lowest value as a share of the highest, where it is left out."""

    spellings: Mapping[str, str]
    """A curve's settings that have another name here."""


RATE = Quantity(
    "lr_scheduler",
    0.1,
    {
        "low": "lr_min",
        "high": "lr_max",
        "initial": "initial_lr",
        "final": "final_lr",
        "decay": "lr_decay",
        "decay_every": "lr_decay_every",
        "sets": "lr_value",
        "end": "end_learning_rate",
    },
)
MOMENTUM = Quantity("momentum_scheduler", 0.9, {"low": "min", "high": "max", "sets": "set_value"})

_SYNONYMS = {
    **{spelled: setting for quantity in (RATE, MOMENTUM) for setting, spelled in quantity.spellings.items()},
    "mtm_min": "low",
    "mtm_max": "high",
    "num_iter": "num_iters",
    "total_steps": "max_iter",
    "warmup_steps": "warmup_iter",
}
_FROM_THE_BASE = ("base", "high", "initial")
_NOT_THE_USERS = {"t", "_t", "base", "falls"}
_OF_WATCHERS: dict[str, Any] = {"acc_thresh": 0.05, "mode": "max"}  # which the closed form does not read
_ABOVE_ZERO = {
    *("stepsize", "step_per_epoch", "num_iters", "decay_every", "num_epochs", "decay_length", "max_iter", "step_size"),
    *("decay", "gamma", "power", "timescale", "num_cycles", "decay_iter"),
}
_WORDS = {
    "warmup_method": ("linear", "constant"),
    "decay_method": ("linear", "cosine", "1-sqrt"),
    "mode": ("min", "max"),
}
_DECAY_RATIO = 0.1  # of the run, where neither decay_iter nor decay_ratio is given
_FLAGS = {"sets", "cycle"}
_LISTS = {"schedule", "milestones"}


@dataclass(frozen=True)
class BoundCurve:
    """A curve with its settings; what follows from a group's first value is filled in when a value is asked for."""

    name: str
    curve: Curve
    settings: Mapping[str, Any]
    quantity: Quantity

    @property
    def pace(self) -> Pace:
        """What the curve counts."""
        return self.curve.pace

    @property
    def watches(self) -> bool:
        """Whether evaluations change the curve."""
        return self.curve.watches

    def value(self, tick: int, base: float, falls: int = 0) -> float:
        """Return the value at a tick for a group whose first value is `base`."""
        return self.curve.value(tick, **self.resolved(base, falls))

    def resolved(self, base: float, falls: int = 0) -> dict[str, Any]:
        """Return all arguments of the closed form."""
        wanted = _parameters(self.curve)
        filled = {name: base for name in _FROM_THE_BASE if name in wanted}
        filled |= {"falls": falls} if self.watches else {}
        filled |= {name: value for name, value in self.settings.items() if name in wanted}
        if "low" in wanted and wanted["low"].default is inspect.Parameter.empty:
            filled.setdefault("low", filled["high"] * self.quantity.low_share)
        return filled

    def check(self, base: float) -> None:
        """Refuse a range that is upside down for a group whose first value is `base`."""
        arguments = self.resolved(base)
        low, high = arguments.get("low", 0.0), arguments.get("high", math.inf)
        if low > high:
            names = [self.quantity.spellings[name] for name in ("low", "high")]
            raise ConfigError(
                f"{self.quantity.setting}={self.name!r}: {names[0]}={low!r} is above {names[1]}={high!r} (where it is "
                "left out, the first value of the parameter group). Give both, the lower one first."
            )

    def judge(self, falls: Falls, value: float) -> Falls:
        """Take an evaluation into account; a value that is not a number says nothing."""
        if math.isnan(value):
            return falls
        sign = 1 if self.settings["mode"] == "max" else -1
        best = sign * value if falls.best is None else max(sign * falls.best, sign * value)
        fell = sign * value < best - self.settings["acc_thresh"] * abs(best)
        return Falls(sign * best, falls.count + fell)


@dataclass(frozen=True)
class Falls:
    """The best evaluation so far, and how many fell too far below it."""

    best: float | None = None
    count: int = 0


def bind_curve(
    name: str,
    quantity: Quantity,
    kwargs: Mapping[str, Any] | None = None,
    *,
    total_ticks: int,
    total_epochs: int | None = None,
    is_warmed: bool = False,
) -> BoundCurve:
    """Check the keywords of a curve and fill in the lengths that they leave out; `is_warmed`: a warm-up leads to it."""
    curve, owner = CURVES[name], f"{quantity.setting}={name!r}"
    settings = _settings_of(curve, quantity, dict(kwargs or {}), owner)
    if problems := list(_problems(settings, quantity, owner)):
        raise ConfigError(problems)
    total = total_epochs if curve.pace is Pace.EPOCH and total_epochs is not None else total_ticks
    settings = _with_lengths(curve, settings, max(1, total), owner, is_warmed)
    if "schedule" in settings:
        settings["schedule"] = _epochs(settings["schedule"], owner)
    return BoundCurve(name, curve, settings, quantity)


def _parameters(curve: Curve) -> Mapping[str, inspect.Parameter]:
    return _signature(curve.value)


@functools.cache
def _signature(function: Callable[..., float]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _settings_of(curve: Curve, quantity: Quantity, given: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the keywords under the curve's own names; refuse unknown, missing and doubled ones."""
    settings: dict[str, Any] = {}
    for spelled, value in given.items():
        name = _SYNONYMS.get(spelled, spelled)
        if name in settings:
            raise ConfigError(f"{owner}: {spelled!r} is given twice, in two spellings. Give one of them.")
        settings[name] = value
    names = {_shown(name, quantity): value for name, value in settings.items()}
    _keywords(curve, quantity).check(names, owner=owner + _hint(curve, settings))
    return (dict(_OF_WATCHERS) if curve.watches else {}) | settings


def _hint(curve: Curve, settings: Mapping[str, Any]) -> str:
    """Say what may have been meant where keywords do not fit."""
    if curve.value is warmup_step and "step_size" not in settings:
        return " (FederatedScope's schedule of this name is 'warmup_linear' here)"
    if curve.value is inverse_sqrt and "timescale" not in settings:
        return " (with the field warmup_steps, the ticks of the warm-up are its timescale)"
    is_led = "warmup_iter" not in _parameters(curve) and not {"warmup_iter", "warmup_ratio"}.isdisjoint(settings)
    return " (a warm-up for any schedule is the field warmup_steps)" if is_led else ""


def _shown(name: str, quantity: Quantity) -> str:
    return quantity.spellings.get(name, name)


def _keywords(curve: Curve, quantity: Quantity) -> Keywords:
    parameters = {name: one for name, one in _parameters(curve).items() if name not in _NOT_THE_USERS}
    filled = {"low", *_FROM_THE_BASE, *curve.fill, "warmup_iter", "decay_iter"}
    required = {name for name, one in parameters.items() if one.default is one.empty and name not in filled}
    accepted = {*parameters, *(_OF_WATCHERS if curve.watches else ())}
    if "warmup_iter" in parameters:
        accepted |= {"warmup_ratio", "max_iter"}
    if "decay_iter" in parameters:
        accepted |= {"decay_ratio"}
    return Keywords(
        frozenset(_shown(name, quantity) for name in accepted),
        frozenset(_shown(name, quantity) for name in required),
        takes_any=False,
    )


def _with_lengths(
    curve: Curve, settings: dict[str, Any], total: int, owner: str, is_warmed: bool = False
) -> dict[str, Any]:
    """Fill in what the length of the run says; shares become ticks."""
    filled = {name: fill(total, settings) for name, fill in curve.fill.items()} | settings
    length = filled.get("max_iter", total)
    if "warmup_iter" in _parameters(curve):
        filled["warmup_iter"] = _share_in_ticks("warmup", filled, length, owner, 0)
        _judge_warmup(curve, filled["warmup_iter"], length, owner, is_warmed)
    if "decay_iter" in _parameters(curve):
        filled["decay_iter"] = max(1, _share_in_ticks("decay", filled, length, owner, _DECAY_RATIO))
    if "milestones" in filled:
        filled["milestones"] = [steps_of(milestone, length) for milestone in filled["milestones"]]
    return filled


def _share_in_ticks(what: str, settings: Mapping[str, Any], length: int, owner: str, default: float) -> int:
    """Return a length that is given in ticks or as a share of the run."""
    in_ticks, as_share = f"{what}_iter", f"{what}_ratio"
    if in_ticks in settings and as_share in settings:
        raise ConfigError(f"{owner}: {in_ticks} and {as_share} say the same. Give one of them.")
    ratio = settings.get(as_share, default)
    if ratio > 1:
        raise ConfigError(f"{owner}: {as_share}={ratio!r} is a share of the run. Expected a number from 0 to 1.")
    return int(settings.get(in_ticks, steps_of(float(ratio), length) if ratio else 0))


def _judge_warmup(curve: Curve, warmup_iter: int, length: int, owner: str, is_warmed: bool) -> None:
    needs_one = _parameters(curve)["warmup_iter"].default is inspect.Parameter.empty
    if needs_one and warmup_iter < 1:
        raise ConfigError(f"{owner} needs a warm-up: give warmup_iter (ticks) or warmup_ratio (a share of the run).")
    if warmup_iter == 0 and not is_warmed and "warmup_factor" in _parameters(curve):
        logger.warning(
            "%s has no warm-up: set the field warmup_steps, or give warmup_ratio (a share of the run).", owner
        )
    if warmup_iter > length:
        logger.warning("%s warms up for %d ticks, but ends after %d.", owner, warmup_iter, length)


def _problems(settings: Mapping[str, Any], quantity: Quantity, owner: str) -> Iterator[str]:
    for name, value in settings.items():
        if name == "schedule":
            continue
        check: Callable[[str, Any], str | None] = _wrong_number
        if name in _WORDS:
            check = _wrong_word
        elif name in _FLAGS:
            check = _wrong_flag
        elif name in _LISTS:
            check = _wrong_list
        if expected := check(name, value):
            yield f"{owner}: {_shown(name, quantity)}={value!r}. Expected {expected}."


def _wrong_number(name: str, value: Any) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name in _ABOVE_ZERO:
        return None if is_number and value > 0 else "a number above 0"
    return None if is_number and value >= 0 else "a number that is not negative"


def _wrong_word(name: str, value: Any) -> str | None:
    return None if value in _WORDS[name] else f"one of {choices(_WORDS[name])}"


def _wrong_flag(_name: str, value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _wrong_list(_name: str, value: Any) -> str | None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    fits = is_list and all(_is_tick(item) for item in value) and list(value) == sorted(value)
    return None if fits else "a list of ticks (whole numbers), or of shares of the run between 0 and 1, in rising order"


def _is_tick(value: Any) -> bool:
    if isinstance(value, float):
        return 0 < value < 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _epochs(schedule: Any, owner: str) -> tuple[tuple[int, float], ...]:
    """Read a mapping from epoch to value; a file holds the epochs as text."""
    if not isinstance(schedule, Mapping):
        raise ConfigError(
            f"{owner}: schedule={schedule!r}. Expected a mapping from epoch to value, such as {{0: 1.0}}."
        )
    problems = []
    listed: dict[int, float] = {}
    for epoch, value in schedule.items():
        is_whole = isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 0
        if not is_whole and not (isinstance(epoch, str) and epoch.isdecimal()):
            problems.append(f"{owner}: the epoch {epoch!r} of the schedule. Expected a whole number from 0 on.")
        elif expected := _wrong_number("", value):
            problems.append(f"{owner}: schedule[{epoch!r}]={value!r}. Expected {expected}.")
        else:
            listed[int(epoch)] = value
    if not problems and 0 not in listed:
        problems.append(f"{owner}: the schedule {dict(schedule)} says nothing of epoch 0. Add it: {{0: ...}}.")
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(listed.items()))
