"""The learning rates that a run is going to have, told before it begins: where it would hardly learn, it is warned.

A schedule whose ticks are epochs but whose lengths are meant in updates, or the other way round, trains a good part of
the run at next to nothing, and nothing fails. `idle_part` finds it. Rates that follow evaluations, and those that a
user's own code works out, are not known in advance: of these nothing is told.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from hezar_train.config import TrainerConfig
from hezar_train.optim.curves import Pace
from hezar_train.optim.schedule import Schedule, is_known
from hezar_train.optim.schedulers import CurveLR
from hezar_train.plan import Plan

__all__ = ["Idle", "idle_part", "idle_warning", "shares_ahead"]

SAMPLED_UPDATES = 2000
WALKED_TICKS = 20_000  # of a scheduler that cannot be asked for a tick, but walks to it
IDLE = 0.01
"""Below this share of the rate, an update is idle."""
MOST = 0.05
"""So much of a run may be idle."""
END = 0.1
"""So much of it at its end, where decays fall to nothing: half a cosine has 6.4 % of the run below a hundredth."""


class Idle(NamedTuple):
    """The part of a run that trains at next to no rate."""

    first_update: int
    """The update at which it begins, counted from 1."""
    updates: int
    """How many there are."""
    of_run: float
    """Their share of the run."""


def idle_part(schedule: Schedule, plan: Plan) -> Idle | None:
    """Return what part of a run trains at under a hundredth of the rate, if that is an epoch or more than 5 %."""
    if schedule.scheduler is None and not plan.warmup_updates:
        return None
    shares = shares_ahead(schedule.first, plan)
    if not shares:
        return None
    found = list(_stretches(shares, plan.total_updates))
    total = sum(length for _, length in found)
    longest = max((length for _, length in found), default=0.0)
    epoch = plan.updates_in_epoch or math.inf
    if longest < epoch and total <= MOST * plan.total_updates:
        return None
    return Idle(found[0][0] + 1, round(total), total / plan.total_updates)


def idle_warning(idle: Idle, schedule: Schedule, config: TrainerConfig, plan: Plan) -> str:
    """Say what a run would do at next to no rate, why, and what to do about it."""
    told = (
        f"{idle.updates:,} of {plan.total_updates:,} updates ({idle.of_run:.0%}), the first of them number "
        f"{idle.first_update:,}, would train at less than 1 % of the learning rate"
    )
    named = f"lr_scheduler={str(config.lr_scheduler or schedule.name)!r}"
    if schedule.rate_pace is Pace.TICK:
        every = "update" if plan.schedule_updates == 1 else f"{plan.schedule_updates:,} updates"
        why = f"{named} ticks every {every}, {plan.total_ticks:,} times in the run"
        remedy = "Give its lengths in lr_scheduler_kwargs for so many ticks, or leave them out: then it spans the run"
    elif schedule.rate_pace is Pace.EPOCH:
        why = f"{named} ticks once an epoch, {plan.total_ticks:,} times in the run"
        remedy = "Set lr_scheduling_steps=1 for a tick after every update"
        if config.lr_scheduler_kwargs:
            remedy += f", and count in updates what lr_scheduler_kwargs={config.lr_scheduler_kwargs!r} counts in ticks"
    else:
        why, remedy = "the warm-up is as long", "Give fewer warmup_steps"
    beside = " A warm-up for any schedule is the field warmup_steps." if idle.first_update == 1 else ""
    return f"{told}: {why}. {remedy}.{beside}"


def _stretches(shares: Mapping[int, float], total: int) -> Iterator[tuple[int, float]]:
    """Yield where idle updates in a row begin and how many they are; a single one, and a decay's end, are none."""
    updates = list(shares)
    width = total / len(updates)
    for is_idle, group in groupby(range(len(updates)), lambda at: shares[updates[at]] < IDLE):
        places = list(group)
        is_end = places[-1] == len(updates) - 1 and len(places) <= END * len(updates)
        if is_idle and not is_end and len(places) * width > 1:
            yield updates[places[0]], len(places) * width


def shares_ahead(schedule: Schedule, plan: Plan) -> dict[int, float]:
    """Return, for updates of a run that is to begin (counted from 0), the share of the rate that each will have.

    Of several parameter groups it is the largest share. Nothing is returned where it cannot be known.
    """
    if not plan.total_updates:
        return {}
    count = min(plan.total_updates, SAMPLED_UPDATES)
    updates = [number * plan.total_updates // count for number in range(count)]
    ticks = {update: _tick_at(schedule, plan, update) for update in updates}
    if any(tick is None for tick in ticks.values()):
        return {}
    rates = _rates_at(schedule, sorted({tick for tick in ticks.values() if tick is not None}))
    if rates is None:
        return {}
    references = _references(schedule, rates)
    shares = {tick: max(map(_share, at, references), default=1.0) for tick, at in rates.items()}
    return {update: shares[tick or 0] * _warmed(plan, update) for update, tick in ticks.items()}


def _share(rate: float, reference: float) -> float:
    return rate / reference if reference > 0 else 0.0


def _warmed(plan: Plan, update: int) -> float:
    return min(1.0, (update + 1) / plan.warmup_updates) if plan.warmup_updates else 1.0


def _tick_at(schedule: Schedule, plan: Plan, update: int) -> int | None:
    """Return the tick at which a schedule is in an update; None if there is no telling when it ticks."""
    scheduler, warmup, epoch = schedule.scheduler, plan.warmup_updates, plan.updates_in_epoch
    pace = scheduler.curve.pace if isinstance(scheduler, CurveLR) else Pace.TICK
    if scheduler is None or pace is Pace.EVALUATION or isinstance(scheduler, ReduceLROnPlateau):
        return 0
    if pace is Pace.TICK and plan.schedule_updates is not None:
        return max(0, update - warmup) // plan.schedule_updates
    if epoch is None:
        return None
    return update // epoch if pace is Pace.EPOCH else max(0, update // epoch - warmup // epoch)


def _rates_at(schedule: Schedule, ticks: list[int]) -> dict[int, list[float]] | None:
    """Return the rates of all groups at ticks in rising order; then everything is as it was."""
    scheduler = schedule.scheduler
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        with schedule.own_rates():
            return dict.fromkeys(ticks, schedule.rates())
    if isinstance(scheduler, CurveLR):
        return {tick: [scheduler.curve.value(tick, float(base)) for base in scheduler.base_lrs] for tick in ticks}
    walks = isinstance(scheduler, SequentialLR | ChainedScheduler)
    if not is_known(scheduler) or (walks and ticks[-1] > WALKED_TICKS):
        return None
    kept = schedule.state_dict()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is stepped without its optimizer, and to ticks of our choice
            return dict(_walked(scheduler, schedule, ticks) if walks else _asked(scheduler, schedule, ticks))
    except (ArithmeticError, ValueError):  # the run will meet it, and tell at which tick
        return None
    finally:
        schedule.load_state_dict(kept)


def _asked(scheduler: LRScheduler, schedule: Schedule, ticks: list[int]) -> Iterator[tuple[int, list[float]]]:
    last = getattr(scheduler, "total_steps", None)  # beyond which a one-cycle schedule raises
    for tick in ticks:
        scheduler.step(tick if last is None else min(tick, last - 1))
        yield tick, schedule.rates()


def _walked(scheduler: LRScheduler, schedule: Schedule, ticks: list[int]) -> Iterator[tuple[int, list[float]]]:
    with schedule.own_rates():
        now, wanted = 0, iter(ticks)
        for tick in wanted:
            while now < tick:
                scheduler.step()
                now += 1
            yield tick, schedule.rates()


def _references(schedule: Schedule, rates: Mapping[int, list[float]]) -> list[float]:
    """Return the rate of each group: what it was made with, or the highest that the schedule comes to."""
    scheduler = schedule.scheduler
    highest = [max(column) for column in zip(*rates.values(), strict=True)]
    bases = [float(base) for base in getattr(scheduler, "base_lrs", highest)]
    if isinstance(scheduler, CurveLR) and scheduler.curve.name == "warmup_noam":  # which never comes to its base
        return [base / math.sqrt(scheduler.curve.settings["warmup_iter"]) for base in bases]
    return [max(pair) for pair in zip(highest, bases, strict=True)]
