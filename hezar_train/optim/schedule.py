"""When the schedules of learning rate and momentum tick, and how they are saved and restored.

`Schedule` holds a scheduler of the rate, a schedule of the momentum, or neither. It ticks after an applied update, when
the number of updates is a multiple of its period, or at the end of an epoch if it has no period or counts epochs; a
plateau ticks after evaluations instead. An update that was skipped ticks nothing but the end of its epoch.

A `WarmUp` leads to the rates of a scheduler: while it lasts the scheduler waits at its first tick (one that counts
epochs goes on counting), and sees no evaluation. The momentum has no warm-up, and does not wait.

The momentum of an optimizer is the `momentum` of its parameter groups, or the first of their `betas`; an optimizer
whose groups have neither is refused. A momentum follows the same curves as a rate, by the same names, in a range of its
own: `min` to `max`.

What is saved is the scheduler's state and what it drives in the optimizer's groups, as values that JSON can hold: no
code, and no extra step when it is restored. `to_plain` keeps None, bool, int, float, str, and lists and dicts of them;
it leaves out code and optimizers (they are built anew) and refuses the rest with a sentence. `from_plain` restores
tuples, counters and tensors in the form of the value that stands there at present.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import numbers
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import ReferenceType

from torch import Tensor, tensor
from torch.optim import Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR, OneCycleLR, ReduceLROnPlateau

from hezar_train.config.names import scheduler_name
from hezar_train.errors import CheckpointError, ConfigError, a_kind, choices, suggestion
from hezar_train.optim.curves import CURVES, MOMENTUM, BoundCurve, Falls, Pace, bind_curve
from hezar_train.optim.schedulers import CurveLR, set_rate

__all__ = [
    "MomentumSchedule",
    "Plain",
    "Schedule",
    "WarmUp",
    "build_momentum_schedule",
    "from_plain",
    "get_momentum",
    "is_known",
    "set_learning_rate",
    "set_momentum",
    "to_plain",
]

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

logger = logging.getLogger(__name__)

# Whatever torch's schedulers write into the groups; the rest of a group is the optimizer's alone.
_DRIVEN = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")

_SAMPLED_TICKS = 1000  # points of a curve that are tried when it is built

# JSON has neither keys that are not strings nor infinite numbers: such a dict is a list of pairs under the first key,
# such a number its spelling under the second.
_PAIRS = "__pairs__"
_NUMBER = "__number__"

_BEST = "best"  # of `Falls`, before the first evaluation None
_LARGEST = 1 << 53


class WarmUp:
    """Lead the rates of an optimizer on a straight line to where a schedule has them: update u of w has u/w of them."""

    def __init__(self, optimizer: Optimizer, num_updates: int) -> None:
        self.optimizer, self.num_updates, self.done = optimizer, num_updates, 0
        self.rates: list[float] = []
        self.lead()

    @property
    def is_over(self) -> bool:
        """Whether the rates are those of the schedule."""
        return self.done >= self.num_updates

    def lead(self) -> None:
        """Take the rates that stand in the groups for those of the schedule, and set those of the next update."""
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._set(min(self.done + 1, self.num_updates) / self.num_updates)

    def count(self) -> None:
        """Count an update, and set the rates of the next one."""
        self.done += 1
        self._set(min(self.done + 1, self.num_updates) / self.num_updates)

    def step_aside(self) -> None:
        """Put the rates of the schedule into the groups, for the schedule to go on from."""
        self._set(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return how far it has come, in plain values."""
        return {"updates": self.num_updates, "done": self.done, "rates": to_plain(self.rates, "warm-up")}

    def load_state_dict(self, state: Any) -> None:
        """Go to where it was saved; the rates of the groups are restored by others."""
        own = self.state_dict()
        if not _is_like(state, own) or not 0 <= state["done"] <= state["updates"] or state["updates"] < 1:
            raise CheckpointError(f"The checkpoint's warm-up is {state!r:.160}, here it is {own!r:.160}.")
        self.num_updates, self.done = int(state["updates"]), int(state["done"])
        self.rates = from_plain(state["rates"], [])

    def _set(self, share: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            set_rate(group, rate * share)


class Schedule:
    """A scheduler of the rate or none, a schedule of the momentum or none, the period at which they tick, a warm-up."""

    def __init__(
        self,
        scheduler: LRScheduler | None,
        period_updates: int | None = None,
        optimizer: Optimizer | None = None,
        *,
        momentum: MomentumSchedule | None = None,
        warmup_updates: int = 0,
    ) -> None:
        """Tick every `period_updates` updates, or every epoch; `optimizer` is the one that trains.

        With a warm-up of so many updates the ticks of the rate are counted from its end.
        """
        _check(scheduler, optimizer)
        self._optimizer = optimizer if scheduler is None else scheduler.optimizer
        _check_momentum(momentum, scheduler, self._optimizer)
        self.scheduler, self.momentum = scheduler, momentum
        self.period_updates = period_updates
        self.rate_pace = self._pace_of(scheduler)
        """What makes the rate tick; None without a scheduler."""
        self._momentum_pace = self._pace_of(momentum)
        self.is_plateau = scheduler is not None and self.rate_pace is Pace.EVALUATION
        self._held_ticks = 0
        self._told_of_the_end = False
        self._waits = not (isinstance(scheduler, CurveLR) and scheduler.curve.pace is Pace.EPOCH)
        self.warmup_updates = 0 if self._optimizer is None else warmup_updates
        """Updates of the warm-up; of a run that goes on, those that its config asks for."""
        is_led = self._optimizer is not None and warmup_updates > 0
        self._warmup = WarmUp(self._optimizer, warmup_updates) if is_led else None  # type: ignore[arg-type]
        self.state_dict()  # a state that cannot be saved is told now, not at the first save

    @property
    def name(self) -> str | None:
        """The short name of the curve that the rate follows, else the class of the scheduler."""
        if isinstance(self.scheduler, CurveLR):
            return self.scheduler.curve.name
        return None if self.scheduler is None else type(self.scheduler).__name__

    @property
    def first(self) -> Schedule:
        """The schedule itself; of several models, that of the first."""
        return self

    def after_update(self, update_step: int, ends_epoch: bool, applied: bool = True) -> None:
        """Tick what is due after an update; one that was not applied can only end an epoch."""
        is_tick = applied and self.period_updates is not None and update_step % self.period_updates == 0
        momentum_pace, rate_pace = self._momentum_pace, self.rate_pace
        if (is_tick and momentum_pace is Pace.TICK) or (ends_epoch and momentum_pace is Pace.EPOCH):
            self.tick_momentum()
        if self._warmup is not None:
            self._go_on_from_warmup(self._warmup, update_step, ends_epoch, applied)
        elif (is_tick and rate_pace is Pace.TICK) or (ends_epoch and rate_pace is Pace.EPOCH):
            self.tick_rate()

    def _go_on_from_warmup(self, warmup: WarmUp, update_step: int, ends_epoch: bool, applied: bool) -> None:
        """Go on with the warm-up, or tick what is due after it."""
        was_over, since = warmup.is_over, update_step - warmup.num_updates
        if applied and not was_over:
            warmup.count()
        is_tick = was_over and applied and self.period_updates is not None and since % self.period_updates == 0
        is_end = ends_epoch and (was_over or not self._waits)
        if is_tick if self.rate_pace is Pace.TICK else is_end and self.rate_pace is Pace.EPOCH:
            self.tick_rate()

    @property
    def is_warming(self) -> bool:
        """Whether the next update is one of the warm-up, so that the rates are not yet those of the schedule."""
        return self._warmup is not None and not self._warmup.is_over

    @contextmanager
    def own_rates(self) -> Iterator[None]:
        """Have the rates of the schedule in the groups while the body runs, which may change them."""
        if self._warmup is None or self._warmup.is_over:
            yield
            return
        self._warmup.step_aside()
        try:
            yield
        finally:
            self._warmup.lead()

    def end_warmup(self) -> None:
        """Put the rates of the schedule into the groups, for another schedule to begin with."""
        if self._warmup is not None and not self._warmup.is_over:
            self._warmup.step_aside()

    def tick_rate(self) -> None:
        """Go on by one tick of the learning rate, now."""
        if self.is_warming:
            with self.own_rates():
                self._tick_scheduler()
        else:
            self._tick_scheduler()

    def _tick_scheduler(self) -> None:
        if isinstance(self.scheduler, OneCycleLR):
            self._hold_at_the_end(self.scheduler)
        if self.scheduler is None or self.is_plateau:
            return
        try:
            self.scheduler.step()
        except (ArithmeticError, ValueError) as error:
            if not is_known(self.scheduler):  # a user's own
                raise
            raise ConfigError(
                f"The schedule {self.name} cannot go on after tick {self.scheduler.last_epoch}: {error}. Its settings, "
                "or those that came with a checkpoint, lead to rates that cannot be computed."
            ) from error

    def tick_momentum(self) -> None:
        """Go on by one tick of the momentum, now."""
        if self.momentum is not None and self._momentum_pace is not Pace.EVALUATION:
            self.momentum.tick()

    def after_evaluation(self, metric_value: float) -> None:
        """Tell what watches the metric its value; a scheduler that waits for the end of the warm-up is not told."""
        if isinstance(self.scheduler, ReduceLROnPlateau) and not self.is_warming:
            self.scheduler.step(metric_value)
        if isinstance(self.scheduler, CurveLR) and self.scheduler.curve.watches and not self.is_warming:
            self.scheduler.observe(metric_value)
        if self.momentum is not None and self.momentum.curve.watches:
            self.momentum.observe(metric_value)

    def rates(self) -> list[float]:
        """Return the learning rate of each group, as the next update will use it."""
        return [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]

    def scale_rates(self, factor: float) -> None:
        """Multiply every learning rate, also those that the scheduler starts from or aims at."""
        with self.own_rates():
            self._scale_rates(factor)

    def _scale_rates(self, factor: float) -> None:
        if self.scheduler is not None and hasattr(self.scheduler, "base_lrs"):
            self.scheduler.base_lrs = [rate * factor for rate in self.scheduler.base_lrs]
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                if name in group:
                    group[name] = group[name] * factor
        if isinstance(self.scheduler, CurveLR):
            self.scheduler.refresh()  # a curve between given rates stays where it is

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, as values that JSON can hold."""
        driven = {} if self.momentum is None else {"momentum": self.momentum.state_dict()}
        driven |= {} if self._warmup is None else {"warmup": self._warmup.state_dict()}
        if self.scheduler is None:
            return {"class": None, **driven}
        groups = self.scheduler.optimizer.param_groups
        return {
            **driven,
            "class": self.name,
            "scheduler": to_plain(self.scheduler.state_dict(), "state"),
            "groups": [to_plain({key: group[key] for key in _DRIVEN if key in group}, "group") for group in groups],
            "held_ticks": self._held_ticks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the schedules, the rates and the momenta back to where they were saved."""
        if state["class"] != self.name:
            raise CheckpointError(
                f"The checkpoint's learning-rate scheduler is {state['class']}, this run's is {self.name}. Set "
                "lr_scheduler back, or start a new run from the checkpoint's weights."
            )
        if self.scheduler is not None:
            self._load_rates(self.scheduler, state)
        self._load_warmup(state.get("warmup"))
        saved = state.get("momentum")
        if (saved is None) != (self.momentum is None):
            raise CheckpointError(
                f"The checkpoint has {'no' if saved is None else 'a'} momentum schedule, this run has "
                f"{'none' if self.momentum is None else 'one'}. Set momentum_scheduler back, or start a new run from "
                "the checkpoint's weights."
            )
        if self.momentum is not None:
            self.momentum.load_state_dict(state["momentum"])

    def _load_warmup(self, saved: Any) -> None:
        if (saved is None) != (self._warmup is None):
            raise CheckpointError(
                f"The checkpoint has {'no' if saved is None else 'a'} warm-up, this run has "
                f"{'none' if self._warmup is None else 'one'}. Set warmup_steps back, or start a new run from the "
                "checkpoint's weights."
            )
        if self._warmup is not None:
            self._warmup.load_state_dict(saved)

    def _load_rates(self, scheduler: LRScheduler, state: dict[str, Any]) -> None:
        groups = scheduler.optimizer.param_groups
        if len(state["groups"]) != len(groups):
            raise CheckpointError(
                f"The checkpoint's schedule drives {len(state['groups'])} parameter groups, this run's {len(groups)}. "
                "Build the optimizer with the groups that it had."
            )
        own = self.state_dict()
        _refuse_other_attributes(state["scheduler"], own["scheduler"], scheduler)
        for saved, present in zip(state["groups"], own["groups"], strict=True):
            _refuse_other_settings(saved, present)
        if type(state["held_ticks"]) is not int:
            raise CheckpointError(f"The checkpoint's schedule has held_ticks={state['held_ticks']!r:.80}.")
        scheduler.load_state_dict(from_plain(state["scheduler"], scheduler.state_dict()))
        for group, saved in zip(groups, state["groups"], strict=True):
            _restore_group(group, saved)
        self._held_ticks = state["held_ticks"]

    def _pace_of(self, part: LRScheduler | MomentumSchedule | None) -> Pace | None:
        """Say what a part counts; without a period, ticks are epochs."""
        if part is None:
            return None
        if isinstance(part, ReduceLROnPlateau):
            return Pace.EVALUATION
        pace = part.curve.pace if isinstance(part, CurveLR | MomentumSchedule) else Pace.TICK
        return Pace.EPOCH if pace is Pace.TICK and self.period_updates is None else pace

    def _hold_at_the_end(self, scheduler: OneCycleLR) -> None:
        """Keep a one-cycle schedule at its last rate, beyond which torch overshoots and then raises."""
        if scheduler.last_epoch < scheduler.total_steps - 1:
            return
        scheduler.last_epoch = scheduler.total_steps - 2  # so that the coming step computes the last rate once more
        self._held_ticks += 1
        # The first held tick follows the run's last update and is nobody's concern.
        if self._held_ticks > 1 and not self._told_of_the_end:
            self._told_of_the_end = True
            logger.warning(
                "The one-cycle schedule was made for %d ticks and has ended; its last learning rate %g is kept.",
                scheduler.total_steps,
                self.rates()[0],
            )


def _check(scheduler: Any, optimizer: Optimizer | None) -> None:
    """Refuse what cannot tick, and what ticks in vain."""
    if scheduler is None:
        return
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"lr_scheduler is {a_kind(scheduler)}. Expected an object of torch.optim.lr_scheduler.LRScheduler, built "
            "over the optimizer that is passed, too; a name goes to the config: lr_scheduler='warmup_cosine'."
        )
    if optimizer is not None and scheduler.optimizer is not optimizer:
        raise ConfigError(
            "lr_scheduler was built over another optimizer than the one that trains, so its rates would never be used. "
            "Build it over the optimizer that is passed to the trainer, and pass both."
        )


def _check_momentum(
    momentum: MomentumSchedule | None, scheduler: LRScheduler | None, optimizer: Optimizer | None
) -> None:
    """Refuse two masters of one momentum, and a schedule that ticks in vain."""
    if momentum is None:
        return
    if optimizer is not None and momentum.optimizer is not optimizer:
        raise ConfigError("The momentum schedule was built over another optimizer than the one that trains.")
    if _cycles_momentum(scheduler):
        raise ConfigError(
            f"momentum_scheduler={momentum.curve.name!r}, but {type(scheduler).__name__} cycles the momentum itself. "
            "Leave momentum_scheduler out, or set cycle_momentum=False in lr_scheduler_kwargs."
        )


def _cycles_momentum(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "cycle_momentum", False) or any(_cycles_momentum(part) for part in parts)


def is_known(scheduler: LRScheduler) -> bool:
    """Tell whether a scheduler is torch's or this package's, with no code of a user in it."""
    kinds = (LambdaLR, MultiplicativeLR)
    parts = (scheduler, *getattr(scheduler, "_schedulers", ()))
    is_ours = type(scheduler).__module__.startswith(("torch.", "hezar_train."))
    return is_ours and not any(isinstance(part, kinds) for part in parts)


def _refuse_other_attributes(saved: Any, present: Any, scheduler: LRScheduler) -> None:
    """Raise if a saved state would put something else in the place of a scheduler's methods, parts or numbers.

    Torch makes every name of a state an attribute. A user's own scheduler may keep whatever it likes under names that
    it does not have at its start.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"The checkpoint's schedule is a {type(saved).__name__}; expected names with values.")
    for name, value in saved.items():
        is_new = name not in present
        if hasattr(scheduler, name) if is_new else is_known(scheduler) and not _is_like(value, present[name]):
            here = "not saved" if is_new else f"{present[name]!r:.80}"
            raise CheckpointError(f"The checkpoint's schedule has {name}={value!r:.80}, which is {here} here.")


def _refuse_other_settings(saved: Any, present: Any) -> None:
    """Raise if a saved group has other things than the numbers that a scheduler drives."""
    names = saved.keys() if isinstance(saved, dict) else {""}
    if names - set(_DRIVEN) or not all(_is_like(saved[name], present.get(name, 0.0)) for name in names):
        raise CheckpointError(f"The checkpoint's schedule drives {saved!r:.160}, here {present!r:.160}.")


def _is_like(saved: Plain, present: Plain, name: str = "") -> bool:
    """Tell whether a saved value has the form of the one that stands there: its kind, its names, its length."""
    if _is_number(present):
        return _is_number(saved) or (saved is None and name == _BEST)
    if present is None:
        return saved is None or _is_number(saved)
    if isinstance(present, list):
        return isinstance(saved, list) and len(saved) == len(present) and all(map(_is_like, saved, present))
    if isinstance(present, dict) and _PAIRS in present:
        return isinstance(saved, dict) and saved.keys() == {_PAIRS} and _are_counts(saved[_PAIRS])
    if isinstance(present, dict):
        is_same = isinstance(saved, dict) and saved.keys() == present.keys()
        return is_same and all(_is_like(saved[key], present[key], key) for key in present)  # type: ignore[index, call-overload]
    return saved == present if isinstance(present, str) else type(saved) is type(present)


def _is_number(value: Plain) -> bool:
    if isinstance(value, dict):
        return value.keys() == {_NUMBER} and value[_NUMBER] in ("inf", "-inf", "nan")
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _are_counts(pairs: Plain) -> bool:
    """Tell whether pairs are those of a counter of ticks."""
    if not isinstance(pairs, list):
        return False
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs)


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Write the saved values into a group; a rate that is a tensor stays the same tensor."""
    for key, plain in saved.items():
        value = from_plain(plain, group.get(key))
        if isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


class MomentumSchedule:
    """Drive the momentum of every group along a curve."""

    def __init__(self, optimizer: Optimizer, curve: BoundCurve) -> None:
        self.optimizer, self.curve = optimizer, curve
        self._first = [_momentum_of(group) for group in optimizer.param_groups]
        self._ticks = 0
        self._falls = Falls()
        for base in self._first:
            curve.check(base)

    def tick(self) -> None:
        """Go on by one tick."""
        self._ticks += 1
        self.refresh()

    def observe(self, value: float) -> None:
        """Take an evaluation into account."""
        self._falls = self.curve.judge(self._falls, value)
        self._ticks += self.curve.pace is Pace.EVALUATION
        self.refresh()

    def refresh(self) -> None:
        """Write the momenta of the present tick into the groups."""
        for group, base in zip(self.optimizer.param_groups, self._first, strict=True):
            _put(group, self.curve.value(self._ticks, base, self._falls.count))

    def state_dict(self) -> dict[str, Any]:
        """Return where the curve is, in plain values."""
        momenta = [_momentum_of(group) for group in self.optimizer.param_groups]
        falls = to_plain(dataclasses.asdict(self._falls), "momentum")
        return {"curve": self.curve.name, "ticks": self._ticks, "first": self._first, "falls": falls, "now": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a curve was saved."""
        if state["curve"] != self.curve.name or len(state["now"]) != len(self._first):
            raise CheckpointError(
                f"The checkpoint's momentum schedule is {state['curve']} over {len(state['now'])} parameter groups, "
                f"this run's {self.curve.name} over {len(self._first)}. Set momentum_scheduler back, or start a new "
                "run from the checkpoint's weights."
            )
        own = self.state_dict()
        if odd := [name for name in own if not _is_like(state[name], own[name])]:
            raise CheckpointError(f"The checkpoint's momentum schedule has {odd[0]}={state[odd[0]]!r:.80}.")
        self._ticks, self._first = state["ticks"], list(state["first"])
        self._falls = Falls(**from_plain(state["falls"], {}))
        for group, value in zip(self.optimizer.param_groups, state["now"], strict=True):
            _put(group, value)


def build_momentum_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    total_ticks: int,
    kwargs: Mapping[str, Any] | None = None,
    total_epochs: int | None = None,
) -> MomentumSchedule:
    """Build the named schedule of an optimizer's momentum and set its first value."""
    short = scheduler_name(name)
    if short not in CURVES:
        raise ConfigError(
            f"momentum_scheduler={name!r} is not known. Known: {choices(CURVES)}.{suggestion(name, CURVES)}"
        )
    _refuse_without_momentum(optimizer, f"momentum_scheduler={name!r}")
    curve = bind_curve(short, MOMENTUM, kwargs, total_ticks=total_ticks, total_epochs=total_epochs)
    schedule = MomentumSchedule(optimizer, curve)
    _refuse_values(curve, optimizer, total_ticks)
    schedule.refresh()
    return schedule


def _refuse_values(curve: BoundCurve, optimizer: Optimizer, total_ticks: int) -> None:
    """Refuse a curve that leaves the numbers a momentum can be, or that a group could not follow."""
    owner = f"momentum_scheduler={curve.name!r}"
    ticks = range(0, total_ticks + 1, max(1, total_ticks // _SAMPLED_TICKS))
    for base in {_momentum_of(group) for group in optimizer.param_groups}:
        values = [curve.value(tick, base) for tick in ticks]
        if not all(0 <= value < 1 for value in values):
            raise ConfigError(
                f"{owner} goes from {min(values):g} to {max(values):g}. Expected numbers from 0 to below 1."
            )
        if max(values) == 0:
            raise ConfigError(f"{owner}, but the optimizer's momentum is 0. Set the field 'momentum', or 'max'.")
        if values[0] == 0 and isinstance(optimizer, RMSprop):
            raise ConfigError(f"{owner} begins at 0, but RMSprop cannot take up a momentum later. Begin above 0.")


def get_momentum(optimizer: Optimizer) -> float | None:
    """Return the momentum of the first group, or None for an optimizer without one."""
    group = optimizer.param_groups[0]
    return _momentum_of(group) if _has_momentum(group) else None


def set_momentum(optimizer: Optimizer, value: float) -> None:
    """Set the momentum of every group."""
    _refuse_without_momentum(optimizer, f"momentum={value!r}")
    if not 0 <= value < 1:
        raise ConfigError(f"momentum={value!r} cannot work. Expected a number from 0 to below 1.")
    if isinstance(optimizer, RMSprop) and optimizer.state and value > 0 and not get_momentum(optimizer):
        raise ConfigError(
            f"momentum={value!r}: RMSprop has trained without a momentum and cannot take one up. Build it with one."
        )
    for group in optimizer.param_groups:
        _put(group, value)


def _refuse_without_momentum(optimizer: Optimizer, setting: str) -> None:
    if not all(_has_momentum(group) for group in optimizer.param_groups):
        raise ConfigError(
            f"{setting}, but {type(optimizer).__name__} has no momentum: neither 'momentum' nor 'betas' among its "
            "settings. Leave it out, or use an optimizer that has one, such as 'sgd' or 'adamw'."
        )


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return "momentum" in group or "betas" in group


def _momentum_of(group: Mapping[str, Any]) -> float:
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


def _put(group: dict[str, Any], value: float) -> None:
    """Write a momentum into a group; one that is a tensor stays the same tensor."""
    if "momentum" in group:
        group["momentum"] = value
        return
    first, *others = group["betas"]
    if isinstance(first, Tensor):
        first.fill_(value)
    else:
        group["betas"] = (value, *others)


def set_learning_rate(optimizer: Optimizer, rate: float, group: int | None = None) -> None:
    """Set the learning rate of every group, or of the one with this number."""
    groups = optimizer.param_groups
    if group is not None and not -len(groups) <= group < len(groups):
        raise ConfigError(f"There is no parameter group {group}: the optimizer has {len(groups)}, counted from 0.")
    for one in groups if group is None else [groups[group]]:
        set_rate(one, rate)


def to_plain(value: Any, where: str) -> Plain:
    """Return a value as JSON can hold it; `where` names it in an error."""
    if isinstance(value, Tensor):
        return to_plain(value.tolist(), where)
    if isinstance(value, LRScheduler):
        return to_plain(value.state_dict(), where)
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, where)
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return _scalar_to_plain(value, where)


def _mapping_to_plain(value: Mapping[Any, Any], where: str) -> dict[str, Plain]:
    kept = [(key, to_plain(item, f"{where}[{key!r}]")) for key, item in value.items() if not _is_built_anew(item)]
    if all(isinstance(key, str) for key, _ in kept):
        return dict(kept)
    return {_PAIRS: [[_scalar_to_plain(key, where), item] for key, item in kept]}


def _scalar_to_plain(value: Any, where: str) -> Plain:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {_NUMBER: str(number)}
    raise ConfigError(
        f"The learning-rate scheduler's {where} is a {type(value).__name__}, which a checkpoint cannot hold. Expected "
        "numbers, strings, lists, dicts or tensors: give the scheduler a state_dict() and a load_state_dict() of these."
    )


def _is_built_anew(value: Any) -> bool:
    """Tell whether a value is code, or an optimizer, whose state is saved elsewhere."""
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_built_anew(item) for item in value)
    built_anew = isinstance(value, Optimizer | ReferenceType | functools.partial | types.ModuleType)
    return built_anew or inspect.isroutine(value) or inspect.isclass(value)


def from_plain(plain: Plain, present: Any) -> Any:
    """Return what `to_plain` was given, in the form of the value that is there at present."""
    if isinstance(plain, dict):
        return _mapping_from_plain(plain, present)
    if isinstance(present, Tensor) and plain is not None:
        return tensor(from_plain(plain, None), dtype=present.dtype, device=present.device)
    if not isinstance(plain, list):
        return plain
    siblings = list(present) if isinstance(present, list | tuple) else []
    siblings += [None] * (len(plain) - len(siblings))
    items = [from_plain(item, sibling) for item, sibling in zip(plain, siblings, strict=False)]
    return tuple(items) if isinstance(present, tuple) else items


def _mapping_from_plain(plain: dict[str, Any], present: Any) -> Any:
    if _NUMBER in plain:
        return float(plain[_NUMBER])
    if isinstance(present, LRScheduler):
        present.load_state_dict(from_plain(plain, present.state_dict()))
        return present
    there = present if isinstance(present, dict) else {}
    pairs = plain.get(_PAIRS, plain.items())
    return type(there)({key: from_plain(item, there.get(key)) for key, item in pairs})
