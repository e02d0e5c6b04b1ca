"""The run in numbers: `make_plan` turns a config, the number of samples and the number of processes into a `Plan`.

A plan knows how an epoch is cut into windows (one update each) and steps, how long the run is, and after which updates
something is due: log, save, evaluate, a tick of the schedule. Lengths come first (of a window, an epoch, the run), in
steps and in updates; then every period of the config, which is written in steps, becomes one in updates. Where a config
and the data do not go together, `make_plan` raises. A plan stays the same from start to end and is kept in a file; it
never reads a config itself, and needs no torch.

What is asked of configs and plans besides:

- `with_ticks`: how often a schedule ticks, and how long the warm-up is. A schedule of which nothing is counted in ticks
  ticks after every update, all others at epoch ends, unless `lr_scheduling_steps` says otherwise.
- `schedules_over_the_run`: the schedules of which the run's length is a part. The names and their length keywords stand
  here; `optim` builds the schedules.
- `exactness_changes`: what keeps a resumed run from going on exactly, in plain words. What to do about a change is for
  the caller.
- `calculate_batch_epoch_num`: FederatedScope's arithmetic of batches and epochs, for those who ask by its name. No run
  is planned by it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hezar_train.config import TrainerConfig, optimizer_name, precision_name, read_mapping, scheduler_name, to_plain
from hezar_train.config.files import write_mapping
from hezar_train.config.names import is_dotted_path
from hezar_train.errors import ConfigError, DataError

__all__ = [
    "LAID_OUT_IN_EPOCHS",
    "UNLIMITED",
    "BatchAndEpochNumbers",
    "End",
    "EpochCount",
    "Plan",
    "TokenCounter",
    "WindowSpan",
    "calculate_batch_epoch_num",
    "exactness_changes",
    "is_due",
    "keeping_ticks",
    "make_plan",
    "one_pass",
    "refuse_schedule_of_one_call",
    "schedule_changes",
    "schedules_over_the_run",
    "steps_of",
    "with_ticks",
]

UNLIMITED = 1 << 62
"""Steps or samples without a limit."""
MOST_STORED = 1 << 80  # of a plan without an end, sums of such numbers
DIVISORS = frozenset({
    *("num_processes", "batch_size", "accumulation", "window_samples", "window_tokens", "step_tokens"),
    *("log_updates", "save_updates", "eval_updates", "schedule_updates", "total_updates", "total_ticks"),
})  # fmt: skip

_NAMES_BY_LENGTH_KEYWORDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("total_steps", "steps_per_epoch"): ("one_cycle", "OneCycleLR"),
    ("total_iters",): ("linear", "LinearLR", "polynomial", "PolynomialLR"),
    ("T_max",): ("cosine_annealing", "CosineAnnealingLR"),
    ("step_size_up",): ("cyclic", "CyclicLR"),
    (): ("sequential", "SequentialLR", "ChainedScheduler"),
    ("stepsize",): (
        "triangular", "inv_triangular", "triangular_exp", "triangular2", "triangular2_exp", "triangular_decay_when_acc",
        "warm_restarts",
    ),
    ("num_iters", "num_iter"): ("linear_decay", "log_decay"),
    ("decay_length",): ("decay_to_epoch",),
    ("max_iter", "total_steps"): (
        "warmup_cosine", "warmup_cosine_annealing", "warmup_polynomial", "warmup_linear", "warmup_multi_step",
        "cosine_with_restarts", "warmup_stable_decay",
    ),
    ("max_iter", "total_steps", "warmup_iter", "warmup_steps"): ("warmup_step", "warmup_exponential", "warmup_noam"),
}  # fmt: skip
"""Schedules that are laid out over the whole run unless one of these keywords gives their length."""

SCHEDULES = ("lr_scheduler", "momentum_scheduler")
"""The fields that name a schedule; the keywords of each are in the field of its name with `_kwargs`."""

_LENGTH_KEYWORDS = {name: set(keywords) for keywords, names in _NAMES_BY_LENGTH_KEYWORDS.items() for name in names}

LAID_OUT_IN_EPOCHS = frozenset({"decay_to_epoch"})
"""Schedules whose length is counted in epochs."""

_COUNT_NO_TICKS = frozenset(
    {
        "reduce_on_plateau", "ReduceLROnPlateau", "epoch_set", "decay_when_epoch", "decay_to_epoch",
        "decay_when_acc",
    }
)  # fmt: skip
"""Schedules that count epochs or evaluations, however often others tick."""

_BY_UPDATES = frozenset({"cosine_with_restarts", "inverse_sqrt", "warmup_stable_decay"})
"""Schedules that tick after every update, whatever their keywords are."""

_FORMS_OVER_THE_RUN = frozenset(
    {
        "triangular", "inv_triangular", "triangular2", "triangular_decay_when_acc", "warm_restarts", "linear_decay",
        "log_decay", "warmup_cosine", "warmup_cosine_annealing", "warmup_polynomial", "warmup_linear",
        "warmup_multi_step", "warmup_noam",
    }
)  # fmt: skip
"""Schedules that have the same form over the run however often they tick, if no keyword counts ticks."""

_COUNTED_IN_TICKS = frozenset(
    {
        "stepsize", "start_iter", "step_per_epoch", "num_iters", "num_iter", "max_iter", "total_steps", "warmup_iter",
        "warmup_steps",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The run in numbers; it stays the same from start to end."""

    num_samples: int | None
    """Samples in an epoch; None for a stream."""

    num_processes: int
    batch_size: int
    """Samples in one step on each process."""

    accumulation: int
    """Steps in a whole window."""

    num_epochs: int
    drop_last: bool
    window_samples: int
    """Samples in a whole window, over all processes."""

    steps_in_epoch: int | None
    updates_in_epoch: int | None
    total_steps: int
    total_updates: int
    log_updates: int | None
    """Updates between log entries; None: at epoch ends only."""

    save_updates: int | None
    """Updates between saves besides those at epoch ends; None: no others."""

    eval_updates: int | None
    """Updates between evaluations besides those at epoch ends; None: no others."""

    schedule_updates: int | None
    """Updates between ticks of the schedule; None: a tick at each epoch end."""

    total_ticks: int
    """Ticks of the schedule after the warm-up, or in the whole run if there is none; at least 1."""

    counted_steps: int = 0
    """Steps of the run, or of a call, as the config counts them: with `global_batch_size` those of one process."""

    last_samples: int | None = None
    """Samples after which the run ends, where steps and not epochs end it and their size depends on the processes."""

    warmup_updates: int = 0
    """Updates of the warm-up, before the schedule begins."""

    window_tokens: int | None = None
    """Tokens that a window holds at most, where these and not samples make one; `window_samples` is then their mean."""

    step_tokens: int | None = None
    """Tokens that a step holds at most on each process; the steps of a window then depend on its samples."""

    @property
    def ticks_of_the_run(self) -> int:
        """Ticks in the whole run, its warm-up included; at least 1."""
        return _num_ticks(self, self.schedule_updates, 0)

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens bound a window or a step: then what the config counts in steps is counted in updates."""
        return self.window_tokens is not None or self.step_tokens is not None

    @property
    def step_samples(self) -> int:
        """Samples in one step, over all processes."""
        return self.batch_size * self.num_processes

    def windows(self, position: int, steps_left: int, samples_left: int = UNLIMITED) -> Iterator[WindowSpan]:
        """Yield the rest of an epoch from any position, stopping (in a shortened window) when no more are left."""
        end, step_samples = self._end_of_epoch(position), self.step_samples
        while position < end and steps_left > 0 and samples_left > 0:
            count = int(min(self.window_samples, end - position, steps_left * step_samples, samples_left))
            num_steps = -(-count // step_samples)  # rounded up, as everywhere below
            yield WindowSpan(position, count, num_steps, ends_epoch=position + count == end)
            position += count
            steps_left -= num_steps
            samples_left -= count

    def samples_of(self, position: int, steps: int) -> int:
        """Return the samples that so many steps of one process take from a position on, over epoch ends."""
        rest = self._end_of_epoch(position) - position
        needed = self._steps_for(rest, self.batch_size)
        if steps <= needed:
            whole_windows, steps = divmod(steps, -(-self.window_samples // self.batch_size))
            in_last = min(steps * self.batch_size, self.window_samples)
            return int(min(rest, whole_windows * self.window_samples + in_last))
        in_epoch = int(self._end_of_epoch(0))
        epochs, steps = divmod(steps - int(needed), int(self._steps_for(in_epoch, self.batch_size)))
        return int(rest) + epochs * in_epoch + (self.samples_of(0, steps) if steps else 0)

    def spread_over(self, num_processes: int) -> Plan:
        """Return the same updates, each cut into steps for so many processes."""
        plan = dataclasses.replace(self, num_processes=num_processes)
        samples, in_epoch = self.samples_of(0, self.counted_steps), self._end_of_epoch(0)
        epochs, rest = divmod(samples, in_epoch)
        epoch_steps = plan._steps_for(in_epoch, plan.step_samples)
        whole_epochs_steps = epochs * epoch_steps if epochs else 0  # a stream's epoch is infinite, and never whole
        return dataclasses.replace(
            plan,
            accumulation=-(-self.window_samples // plan.step_samples),
            steps_in_epoch=None if self.num_samples is None else int(epoch_steps),
            total_steps=int(whole_epochs_steps + plan._steps_for(rest, plan.step_samples)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Build a plan from what `to_dict` gave; names it does not know are ignored."""
        fields = dataclasses.fields(cls)
        if missing := [one.name for one in fields if one.name not in values and one.default is dataclasses.MISSING]:
            raise ConfigError(f"the plan lacks {', '.join(missing)}")
        values = {"counted_steps": values["total_steps"], **values}  # which older plans do not have
        for one in fields:
            if one.name in values and not _fits(one.name, values[one.name], str(one.type)):
                raise ConfigError(f"the plan has {one.name}={ascii(values[one.name])[:80]}, which no plan has")
        return cls(**{one.name: values[one.name] for one in fields if one.name in values})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan atomically as JSON."""
        return write_mapping(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from the file that `save` wrote."""
        return cls.from_dict(read_mapping(path))

    def _steps_for(self, samples: float, step_samples: int) -> float:
        """Return the steps of `step_samples` each that samples take, from a window's start on."""
        if samples == math.inf:
            return math.inf
        whole_windows, rest = divmod(samples, self.window_samples)
        return whole_windows * -(-self.window_samples // step_samples) - (-rest // step_samples)

    def _end_of_epoch(self, position: int) -> float:
        """Return the position at which an epoch ends that goes on from this one; infinite for a stream."""
        if self.num_samples is None:
            return math.inf
        if not self.drop_last:
            return self.num_samples
        return self.num_samples - (self.num_samples - position) % self.window_samples


def _fits(name: str, value: Any, kind: str) -> bool:
    """Tell whether a stored value can be that of a plan; what is divided by is not 0."""
    if value is None:
        return kind.endswith("None")
    if kind == "bool":
        return type(value) is bool
    least = 1 if name in DIVISORS else 0
    return type(value) is int and least <= value <= MOST_STORED


class EpochCount(NamedTuple):
    """What an epoch, or a part of it from its start on, has."""

    updates: int
    samples: int
    steps: int


class TokenCounter(Protocol):
    """Data whose lengths are known, so that what an epoch has can be counted."""

    def count(self, plan: Plan, epoch: int, num_processes: int, most_updates: int = UNLIMITED) -> EpochCount:
        """Count an epoch, at most so many of its updates; the epoch's steps are those of so many processes."""
        ...


class WindowSpan(NamedTuple):
    """One update's share of an epoch's order."""

    first: int
    """Position of its first sample."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    """Samples in it, over all processes."""

    num_steps: int
    """Steps it takes."""

    ends_epoch: bool
    """Whether it is the epoch's last."""


@dataclass(frozen=True)
class End:
    """Where learning ends: after a step or a sample, or, with neither, with its epochs."""

    step: int = UNLIMITED
    samples: int = UNLIMITED

    def is_reached(self, step: int, samples: int) -> bool:
        """Tell whether a run that has come so far is at its end."""
        return step >= self.step or samples >= self.samples


def one_pass(num_samples: int | None, batch_size: int, num_processes: int = 1) -> Plan:
    """Return the plan of a single look at data: every step is a window."""
    step_samples = batch_size * num_processes
    steps = 0 if num_samples is None else -(-num_samples // step_samples)
    return Plan(
        num_samples=num_samples, num_processes=num_processes, batch_size=batch_size, accumulation=1, num_epochs=1,
        drop_last=False, window_samples=step_samples, steps_in_epoch=steps or None, updates_in_epoch=steps or None,
        total_steps=steps, total_updates=steps, log_updates=None, save_updates=None, eval_updates=None,
        schedule_updates=None, total_ticks=1, counted_steps=steps,
    )  # fmt: skip


def is_due(period: int | None, update_step: int) -> bool:
    """Say whether something with this period in updates happens after update `update_step`."""
    return period is not None and update_step > 0 and update_step % period == 0


def make_plan(
    config: TrainerConfig,
    num_samples: int | None,
    num_processes: int = 1,
    batch_size: int | None = None,
    counter: TokenCounter | None = None,
) -> Plan:
    """Work out a run; `num_samples` None is a stream, and `batch_size` overrides the config's.

    With `global_batch_size` it is the run of one process, cut for more of them: only the steps are others. Where tokens
    are counted, `counter` counts them.
    """
    batch_size = config.batch_size if batch_size is None else batch_size
    if config.counts_tokens:
        return _plan_by_tokens(config, num_samples, num_processes, batch_size, counter)
    if config.global_batch_size is None:
        return _plan_for(config, num_samples, num_processes, batch_size)
    plan = _plan_for(config, num_samples, 1, batch_size)
    if config.local_update_steps is None and (config.max_steps is not None or num_samples is None):
        plan = dataclasses.replace(plan, last_samples=plan.samples_of(0, plan.counted_steps))
    return plan if num_processes == 1 else plan.spread_over(num_processes)


def _plan_for(config: TrainerConfig, num_samples: int | None, num_processes: int, batch_size: int) -> Plan:
    step_samples = batch_size * num_processes
    accumulation, window_samples = _window(config, step_samples)
    epoch = _Epoch.cut(config, num_samples, step_samples, window_samples)
    total_steps = _total_steps(config, epoch)
    total_updates = _total_updates(total_steps, epoch, accumulation)
    refuse_schedule_of_one_call(config)
    plan = Plan(
        num_samples=num_samples,
        num_processes=num_processes,
        batch_size=batch_size,
        accumulation=accumulation,
        num_epochs=_num_epochs(config, epoch, total_steps),
        drop_last=config.drop_last,
        window_samples=window_samples,
        steps_in_epoch=epoch.num_steps if epoch else None,
        updates_in_epoch=epoch.num_updates if epoch else None,
        total_steps=total_steps,
        total_updates=total_updates,
        schedule_updates=None,
        total_ticks=1,
        counted_steps=total_steps,
        **_periods(config, total_steps, accumulation),
    )
    return with_ticks(plan, config)


def _plan_by_tokens(
    config: TrainerConfig, num_samples: int | None, num_processes: int, batch_size: int, counter: TokenCounter | None
) -> Plan:
    """Plan a run whose updates, or steps, are bounded by tokens: every epoch is counted, because its order decides.

    What the config counts in steps is counted in updates: those are the same on any number of processes.
    """
    if num_samples is None or counter is None:
        raise ConfigError(
            "global_batch_tokens and max_tokens_per_batch need data whose lengths are known: a dataset with __len__ "
            "and __getitem__. Pass one, or count samples (batch_size, global_batch_size)."
        )
    accumulation, window_samples = _window(config, batch_size * num_processes)
    _Epoch.cut(config, num_samples, batch_size * num_processes, window_samples)  # raises if there is no update in it
    plan = dataclasses.replace(
        one_pass(num_samples, batch_size, num_processes), num_epochs=config.num_epochs, drop_last=config.drop_last,
        accumulation=accumulation, window_samples=window_samples, window_tokens=config.global_batch_tokens,
        step_tokens=config.max_tokens_per_batch, steps_in_epoch=None, updates_in_epoch=None,
    )  # fmt: skip
    total = _count_run(config, plan, counter)
    counted: dict[str, Any] = {
        "window_samples": -(-total.samples // total.updates) if plan.window_tokens else window_samples,
        "total_steps": total.steps,
        "total_updates": total.updates,
        "counted_steps": total.updates,
        "last_samples": None if config.max_steps is None else total.samples,
    }
    return with_ticks(dataclasses.replace(plan, **counted | _periods(config, total.updates, 1)), config)


def _count_run(config: TrainerConfig, plan: Plan, counter: TokenCounter) -> EpochCount:
    """Count a run epoch by epoch, no further than `max_steps` lets it go."""
    limit = config.max_steps if isinstance(config.max_steps, int) else UNLIMITED
    counts = [*_counted_epochs(plan, counter, limit)]
    if isinstance(config.max_steps, float):
        limit = steps_of(config.max_steps, sum(one.updates for one in counts))
        counts = [*_counted_epochs(plan, counter, limit)]
    return EpochCount(*(sum(values) for values in zip(*counts, strict=True)))


def _counted_epochs(plan: Plan, counter: TokenCounter, limit: int) -> Iterator[EpochCount]:
    for epoch in range(1, plan.num_epochs + 1):
        if limit <= 0:
            return
        found = counter.count(plan, epoch, plan.num_processes, limit)
        limit -= found.updates
        yield found


def _window(config: TrainerConfig, step_samples: int) -> tuple[int, int]:
    """Return the steps and the samples of a whole window."""
    if config.global_batch_size is None:
        return config.gradient_accumulation_steps, step_samples * config.gradient_accumulation_steps
    return -(-config.global_batch_size // step_samples), config.global_batch_size


class _Epoch(NamedTuple):
    """An epoch of known size, cut into steps and updates."""

    num_steps: int
    num_updates: int

    @classmethod
    def cut(
        cls, config: TrainerConfig, num_samples: int | None, step_samples: int, window_samples: int
    ) -> _Epoch | None:
        """Count the steps and updates of an epoch; None for a stream."""
        if num_samples is None:
            return None
        if num_samples < 1:
            raise DataError(
                "The training data is empty: expected at least one sample. Look at what loads or filters it."
            )
        num_updates, rest = divmod(num_samples, window_samples)
        num_steps = num_updates * -(-window_samples // step_samples)
        if not config.drop_last:
            return cls(num_steps - (-rest // step_samples), num_updates + (rest > 0))
        if num_updates == 0:
            raise ConfigError(
                f"drop_last=True drops all of the training data: {num_samples} samples do not fill one update of "
                f"{window_samples} (batch_size x processes x gradient_accumulation_steps, or global_batch_size). Lower "
                "one of these, or set drop_last=False."
            )
        return cls(num_steps, num_updates)


def _total_steps(config: TrainerConfig, epoch: _Epoch | None) -> int:
    if config.local_update_steps is not None:
        return _steps_of_a_call(config, config.local_update_steps, epoch)
    if epoch is None:
        if not isinstance(config.max_steps, int):
            raise ConfigError(
                f"The length of the training data is unknown and max_steps={config.max_steps!r}: say where the run "
                "ends with a whole number of steps, for example max_steps=1000."
            )
        return config.max_steps
    whole = epoch.num_steps * config.num_epochs
    if config.max_steps is None:
        return whole
    return min(steps_of(config.max_steps, whole), whole)


def _steps_of_a_call(config: TrainerConfig, asked: int, epoch: _Epoch | None) -> int:
    if config.batch_or_epoch == "batch":
        return asked
    if epoch is None:
        raise ConfigError(
            f"local_update_steps={asked} counts epochs (batch_or_epoch='epoch'), but the length of the training data "
            "is unknown. Set batch_or_epoch='batch'."
        )
    return asked * epoch.num_steps


def steps_of(given: float, whole: int) -> int:
    """Return a count of steps as it is, and a share of the whole rounded up, as the decimal number that was written."""
    if isinstance(given, float):
        return max(1, math.ceil(Fraction(repr(float(given))) * whole))  # 0.7 * 10 in floats is more than 7
    return given


def _num_epochs(config: TrainerConfig, epoch: _Epoch | None, total_steps: int) -> int:
    """Return the epochs of the run, or those that a call of so many steps touches."""
    if config.local_update_steps is None:
        return config.num_epochs
    return 1 if epoch is None else -(-total_steps // epoch.num_steps)


def _total_updates(total_steps: int, epoch: _Epoch | None, accumulation: int) -> int:
    if epoch is None:
        return -(-total_steps // accumulation)
    whole_epochs, rest = divmod(total_steps, epoch.num_steps)
    return whole_epochs * epoch.num_updates - (-rest // accumulation)


def _periods(config: TrainerConfig, total_steps: int, accumulation: int) -> dict[str, Any]:
    """Return the plan's periods by their names, in updates."""

    def updates(steps: float | None) -> int | None:
        return -(-steps_of(steps, total_steps) // accumulation) if steps else None

    return {
        "log_updates": updates(config.log_steps),
        "save_updates": updates(config.save_steps) if config.save_enabled else None,
        "eval_updates": updates(config.eval_steps) if config.do_evaluate is not False else None,
    }


def with_ticks(plan: Plan, config: TrainerConfig) -> Plan:
    """Return the plan with the ticks and the warm-up that a config asks for; its lengths stay."""
    is_one = plan.counts_tokens or config.global_batch_size is None
    one = plan if is_one else plan.spread_over(1)  # as the config counts its steps: of one process, or updates
    in_update = 1 if plan.counts_tokens else one.accumulation

    def updates(steps: float | None) -> int | None:
        return -(-steps_of(steps, one.counted_steps) // in_update) if steps else None

    period = updates(config.lr_scheduling_steps)
    if period is None and _ticks_each_update(config.get):
        period = 1
    return _with_period(plan, period, updates(config.warmup_steps) or 0)


def _with_period(plan: Plan, period: int | None, warmup: int) -> Plan:
    ticks = _num_ticks(plan, period, warmup)
    return dataclasses.replace(plan, schedule_updates=period, warmup_updates=warmup, total_ticks=ticks)


def _num_ticks(plan: Plan, period: int | None, warmup: int) -> int:
    """Count the ticks after a warm-up: every so many updates, or at the ends of epochs."""
    if period is not None:
        return max(1, (plan.total_updates - warmup) // period)
    if plan.counts_tokens:  # whose epochs differ in their updates; a run that max_steps ends has its samples counted
        samples = plan.last_samples
        epochs = plan.num_epochs if samples is None else int(samples // plan._end_of_epoch(0))
        return max(1, epochs - warmup * epochs // plan.total_updates)
    if plan.steps_in_epoch is None or plan.updates_in_epoch is None:
        return plan.num_epochs
    return max(1, plan.total_steps // plan.steps_in_epoch - warmup // plan.updates_in_epoch)


def _ticks_each_update(setting: Callable[[str], Any]) -> bool:
    """Tell whether the schedules of a config that leaves it open tick after every update: neither counts ticks."""
    named = [(scheduler_name(setting(field)), setting(f"{field}_kwargs")) for field in SCHEDULES]
    ticking = [(name, kwargs) for name, kwargs in named if name is not None and name not in _COUNT_NO_TICKS]
    return bool(ticking) and not any(_counts_ticks(name, kwargs or {}) for name, kwargs in ticking)


def _counts_ticks(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a schedule would be another one if it ticked more often."""
    if name in _BY_UPDATES:
        return False
    milestones = kwargs.get("milestones")
    in_ticks = isinstance(milestones, list | tuple) and any(isinstance(one, int) for one in milestones)
    return name not in _FORMS_OVER_THE_RUN or in_ticks or not _COUNTED_IN_TICKS.isdisjoint(kwargs)


def keeping_ticks(plan: Plan, config: Mapping[str, Any], old_plan: Plan, old_config: Mapping[str, Any]) -> Plan:
    """Return the plan with the tick that a run began with, if the config leaves it open and names the same schedules.

    Runs of earlier versions tick at epoch ends where a new one would tick after every update.
    """
    fields = (*SCHEDULES, *(f"{field}_kwargs" for field in SCHEDULES), "lr_scheduling_steps")
    is_same = all(
        _NORMALISED[field](config.get(field)) == _NORMALISED[field](old_config.get(field)) for field in fields
    )
    if not is_same or config.get("lr_scheduling_steps") is not None:
        return plan
    return _with_period(plan, old_plan.schedule_updates, plan.warmup_updates)


def schedules_over_the_run(setting: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the name of each schedule that is laid out over the whole run; `setting` reads a config."""
    for field in SCHEDULES:
        name = scheduler_name(setting(field))
        if name is not None and _is_over_the_run(name, setting(f"{field}_kwargs")):
            yield field, name


def _is_over_the_run(name: str, kwargs: Mapping[str, Any] | None) -> bool:
    if is_dotted_path(name):
        return True
    lengths = _LENGTH_KEYWORDS.get(name)
    return lengths is not None and not lengths & (kwargs or {}).keys()


def refuse_schedule_of_one_call(config: TrainerConfig) -> None:
    """Raise if a schedule would be over after the first of many calls of train()."""
    if config.local_update_steps is None or config.fresh_optimizer:
        return
    for field, name in schedules_over_the_run(config.get):
        raise ConfigError(
            f"{field}={name!r} is laid out over one call of train(), of {config.local_update_steps} "
            f"{config.batch_or_epoch} steps, and would stay at its end in all later ones. Set fresh_optimizer=True "
            f"to begin it anew in each call, or give its length in {field}_kwargs."
        )


def _keywords(given: Mapping[str, Any] | None) -> Any:
    return to_plain(given or {})


def _of_text(fold: Callable[[str | None], Any]) -> Callable[[Any], Any]:
    """Return how to fold a name; what a checkpoint's config has in place of one is another value, whatever it is."""
    return lambda given: fold(given) if given is None or isinstance(given, str) else to_plain(given)


_NORMALISED: dict[str, Callable[[Any], Any]] = {
    "seed": to_plain,
    "dataloader_shuffle": to_plain,
    "reshuffle_each_epoch": to_plain,
    "drop_last": to_plain,
    "group_by_length": to_plain,
    "global_batch_tokens": to_plain,
    "max_tokens_per_batch": to_plain,
    "packing": to_plain,
    "optimizer": _of_text(optimizer_name),
    "optimizer_kwargs": _keywords,
    "learning_rate": to_plain,
    "momentum": to_plain,
    "weight_decay": to_plain,
    "weight_decay_norm": to_plain,
    "weight_decay_bias": to_plain,
    "max_grad_norm": to_plain,
    "lr_scheduler": _of_text(scheduler_name),
    "lr_scheduler_kwargs": _keywords,
    "lr_scheduling_steps": to_plain,
    "warmup_steps": lambda given: to_plain(given) or None,
    "momentum_scheduler": _of_text(scheduler_name),
    "momentum_scheduler_kwargs": _keywords,
    "mixed_precision": precision_name,
    "gradient_compression": to_plain,
    "loss_weight": to_plain,
    "criterion": to_plain,
    "regularizer": to_plain,
    "regularizer_mu": to_plain,
    "fresh_optimizer": to_plain,
    "sync_batchnorm": to_plain,
    "deterministic": to_plain,
}
"""Fields that change what an update does, each with how to make equal meanings equal."""

DECIDING_FIELDS = tuple(_NORMALISED)


def exactness_changes(old: Mapping[str, Any], new: Mapping[str, Any], old_plan: Plan, new_plan: Plan) -> list[str]:
    """List, in plain words, every change of config or data with which a run cannot go on exactly.

    `old` and `new` are configs as dicts (a missing field has its default). The number of processes is a
    change only where it changes the samples of an update: `global_batch_size` keeps them.
    """
    return [
        *_plan_changes(old_plan, new_plan),
        *_field_changes(old, new),
        *_compression_changes(new, old_plan, new_plan),
        *_pace_changes(old, new, old_plan, new_plan),
        *_length_changes(new, old_plan, new_plan),
    ]


def schedule_changes(old: Mapping[str, Any], new: Mapping[str, Any], old_plan: Plan, new_plan: Plan) -> list[str]:
    """List, in plain words, every change of the run's length that a schedule under way cannot follow."""
    return [*_pace_changes(old, new, old_plan, new_plan), *_length_changes(new, old_plan, new_plan)]


def _plan_changes(old: Plan, new: Plan) -> Iterator[str]:
    yield from _change("num_samples", old.num_samples, new.num_samples)
    if old.window_samples == new.window_samples and old.num_processes != new.num_processes:
        return  # the same updates, cut for another number of processes
    yield from _change("batch_size", old.batch_size, new.batch_size)
    yield from _change("gradient_accumulation_steps", old.accumulation, new.accumulation)
    if old.num_processes != new.num_processes:
        yield (
            f"samples in an update: {old.window_samples} on {old.num_processes} processes in the checkpoint, "
            f"{new.window_samples} on {new.num_processes} now (global_batch_size={old.window_samples} keeps them)"
        )


def _field_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    fields = TrainerConfig.fields()
    for name, normalised in _NORMALISED.items():
        default = fields[name].default
        yield from _change(name, normalised(old.get(name, default)), normalised(new.get(name, default)))


def _compression_changes(config: Mapping[str, Any], old: Plan, new: Plan) -> Iterator[str]:
    """Tell of another number of processes where the rounding of what they send depends on it."""
    if (compression := config.get("gradient_compression")) is not None and old.num_processes != new.num_processes:
        yield (
            f"number of processes: {old.num_processes} in the checkpoint, {new.num_processes} now "
            f"(gradient_compression={compression!r} rounds what they send)"
        )


def _pace_changes(old: Mapping[str, Any], new: Mapping[str, Any], old_plan: Plan, new_plan: Plan) -> Iterator[str]:
    """Tell of a pace or a warm-up in updates that is another one, though the config says the same."""
    for field, words, name in (
        ("lr_scheduling_steps", "updates between ticks of the schedule", "schedule_updates"),
        ("warmup_steps", "updates of the warm-up", "warmup_updates"),
    ):
        if (steps := new.get(field)) == old.get(field):
            yield from _change(f"{words} ({field}={steps!r})", getattr(old_plan, name), getattr(new_plan, name))


def _length_changes(config: Mapping[str, Any], old: Plan, new: Plan) -> Iterator[str]:
    """Tell of a run of another length where the schedule is laid out over the whole run."""
    for field, name in schedules_over_the_run(config.get):
        is_by_epochs = name in LAID_OUT_IN_EPOCHS
        before, now = (old.num_epochs, new.num_epochs) if is_by_epochs else (old.total_ticks, new.total_ticks)
        if before != now:
            yield (
                f"total steps: {old.total_steps} in the checkpoint, {new.total_steps} now (from num_epochs, max_steps "
                f"and the data; {field}={name!r} is laid out over the whole run)"
            )


def _change(name: str, before: Any, now: Any) -> Iterator[str]:
    if before != now:
        yield f"{name}: {before!r} in the checkpoint, {now!r} now"


class BatchAndEpochNumbers(NamedTuple):
    """How a number of batches or epochs is walked."""

    batches_per_epoch: int
    batches_in_last_epoch: int
    num_epochs: int
    total_batches: int


def calculate_batch_epoch_num(
    steps: int, batch_or_epoch: str, num_data: int, batch_size: int, drop_last: bool = False
) -> BatchAndEpochNumbers:
    """Turn a number of batches or epochs over `num_data` samples into epochs and the batches of each."""
    per_epoch = num_data // batch_size + (not drop_last and num_data % batch_size > 0)
    if per_epoch == 0:
        raise DataError(
            f"{num_data} samples give no batch of {batch_size} (drop_last={drop_last}): lower batch_size, or set "
            "drop_last=False"
        )
    if batch_or_epoch == "epoch":
        return BatchAndEpochNumbers(per_epoch, per_epoch, steps, steps * per_epoch)
    if batch_or_epoch != "batch":
        raise ConfigError(f"batch_or_epoch={batch_or_epoch!r} is not known. Choose from: batch, epoch.")
    per_epoch = min(per_epoch, steps)
    return BatchAndEpochNumbers(per_epoch, steps % per_epoch or per_epoch, -(-steps // per_epoch), steps)
