"""The run in numbers: its windows, its length, and after which updates something is due.

Holds what was worked out elsewhere (`making`), walks it, and keeps it in a file. Refuses to read a config.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hezar_train.config import read_mapping
from hezar_train.config.files import write_mapping
from hezar_train.errors import ConfigError

__all__ = ["UNLIMITED", "End", "Plan", "WindowSpan", "is_due", "one_pass"]

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class End:
    """Where learning ends: after a step or a sample, or, with neither, with its epochs."""

    step: int = UNLIMITED
    samples: int = UNLIMITED

    def is_reached(self, step: int, samples: int) -> bool:
        """Tell whether a run that has come so far is at its end."""
        return step >= self.step or samples >= self.samples


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
    """Ticks of the schedule in the whole run, at least 1."""

    counted_steps: int = 0
    """Steps of the run, or of a call, as the config counts them: with `global_batch_size` those of one process."""

    last_samples: int | None = None
    """Samples after which the run ends, where steps and not epochs end it and their size depends on the processes."""

    @property
    def step_samples(self) -> int:
        """Samples in one step, over all processes."""
        return self.batch_size * self.num_processes

    def windows(self, position: int, steps_left: int, samples_left: int = UNLIMITED) -> Iterator[WindowSpan]:
        """Yield the rest of an epoch from any position, stopping (in a shortened window) when no more are left."""
        end = self._end_of_epoch(position)
        while position < end and steps_left > 0 and samples_left > 0:
            count = int(min(self.window_samples, end - position, steps_left * self.step_samples, samples_left))
            num_steps = -(-count // self.step_samples)
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
