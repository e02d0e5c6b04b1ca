"""From the keywords of a config to a curve that is ready to be followed: spellings, lengths left out, and mistakes.

Other systems call one thing by several names (`max_iter`, `total_steps`), and a range is `lr_min` to `lr_max` for a
rate but `min` to `max` for a momentum: every spelling is taken, two of one thing are refused. All mistakes are told at
once, when the curve is bound. Nothing here knows an optimizer.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hezar_train.errors import ConfigError, choices
from hezar_train.optim.curves import CURVES, Curve, Pace
from hezar_train.optim.lookup import Keywords
from hezar_train.plan import steps_of

__all__ = ["MOMENTUM", "RATE", "BoundCurve", "Falls", "Quantity", "bind_curve"]

logger = logging.getLogger(__name__)


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
_OF_WATCHERS: dict[str, Any] = {"acc_thresh": 0.05, "mode": "max"}
_ABOVE_ZERO = {
    *("stepsize", "step_per_epoch", "num_iters", "decay_every", "num_epochs", "decay_length", "max_iter", "step_size"),
    *("decay", "gamma", "power"),
}
_WORDS = {"warmup_method": ("linear", "constant"), "mode": ("min", "max")}
_FLAGS = {"sets", "cycle"}
_LISTS = {"schedule", "milestones"}


@dataclass(frozen=True)
class Falls:
    """The best evaluation so far, and how many fell too far below it."""

    best: float | None = None
    count: int = 0


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


def bind_curve(
    name: str,
    quantity: Quantity,
    kwargs: Mapping[str, Any] | None = None,
    *,
    total_ticks: int,
    total_epochs: int | None = None,
) -> BoundCurve:
    """Check the keywords of a curve and fill in the lengths that they leave out."""
    curve, owner = CURVES[name], f"{quantity.setting}={name!r}"
    settings = _settings_of(curve, quantity, dict(kwargs or {}), owner)
    if problems := list(_problems(settings, quantity, owner)):
        raise ConfigError(problems)
    total = total_epochs if curve.pace is Pace.EPOCH and total_epochs is not None else total_ticks
    settings = _with_lengths(curve, settings, max(1, total), owner)
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
    _keywords(curve, quantity).check(names, owner=owner + _clash(owner, settings))
    return (dict(_OF_WATCHERS) if curve.watches else {}) | settings


def _clash(owner: str, settings: Mapping[str, Any]) -> str:
    is_other = "'warmup_step'" in owner and "step_size" not in settings
    return " (FederatedScope's schedule of this name is 'warmup_linear' here)" if is_other else ""


def _shown(name: str, quantity: Quantity) -> str:
    return quantity.spellings.get(name, name)


def _keywords(curve: Curve, quantity: Quantity) -> Keywords:
    parameters = {name: one for name, one in _parameters(curve).items() if name not in _NOT_THE_USERS}
    filled = {"low", *_FROM_THE_BASE, *curve.fill, "warmup_iter"}
    required = {name for name, one in parameters.items() if one.default is one.empty and name not in filled}
    accepted = {*parameters, *(_OF_WATCHERS if curve.watches else ())}
    if "warmup_iter" in parameters:
        accepted |= {"warmup_ratio", "max_iter"}
    return Keywords(
        frozenset(_shown(name, quantity) for name in accepted),
        frozenset(_shown(name, quantity) for name in required),
        takes_any=False,
    )


def _with_lengths(curve: Curve, settings: dict[str, Any], total: int, owner: str) -> dict[str, Any]:
    """Fill in what the length of the run says; shares become ticks."""
    filled = {name: fill(total, settings) for name, fill in curve.fill.items()} | settings
    length = filled.get("max_iter", total)
    if "warmup_iter" in _parameters(curve):
        filled["warmup_iter"] = _warmup(filled, length, owner)
        _judge_warmup(curve, filled["warmup_iter"], length, owner)
    if "milestones" in filled:
        filled["milestones"] = [steps_of(milestone, length) for milestone in filled["milestones"]]
    return filled


def _warmup(settings: Mapping[str, Any], length: int, owner: str) -> int:
    if "warmup_iter" in settings and "warmup_ratio" in settings:
        raise ConfigError(f"{owner}: warmup_iter and warmup_ratio say the same. Give one of them.")
    ratio = settings.get("warmup_ratio", 0)
    if ratio > 1:
        raise ConfigError(f"{owner}: warmup_ratio={ratio!r} is a share of the run. Expected a number from 0 to 1.")
    return int(settings.get("warmup_iter", steps_of(float(ratio), length) if ratio else 0))


def _judge_warmup(curve: Curve, warmup_iter: int, length: int, owner: str) -> None:
    needs_one = _parameters(curve)["warmup_iter"].default is inspect.Parameter.empty
    if needs_one and warmup_iter < 1:
        raise ConfigError(f"{owner} needs a warm-up: give warmup_iter (ticks) or warmup_ratio (a share of the run).")
    if warmup_iter == 0 and "warmup_factor" in _parameters(curve):
        logger.warning("%s has no warm-up: give warmup_iter (ticks) or warmup_ratio (a share of the run).", owner)
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
