"""When a run was at work: its starts, the pauses between them, and where the time went.

A start is known by its record, else by the TensorBoard file that each start opens. It lasts until the last row that was
logged before the next one, kept or taken back: what was lost between that row and a kill is not known.
"""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass

from hezar_train.events import Row
from hezar_train.report.records import RunRecord

__all__ = ["Clock", "Start", "TimeSplit", "starts_of", "time_split"]

SECONDS_NAME = re.compile(r"time\.(\w+)_seconds")
"""Rows may tell how many seconds since the row before went into something."""


@dataclass(frozen=True)
class Start:
    """One stretch of work, in wall-clock seconds and steps."""

    begun: float
    ended: float
    first_step: int
    last_step: int
    steps_done_again: int
    """Steps past the checkpoint that it resumed from, which had been done before."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.ended - self.begun


class Clock:
    """Turn a moment into seconds of work since the run began: pauses between starts do not count."""

    def __init__(self, starts: list[Start]) -> None:
        self._starts = starts
        self._begun = [start.begun for start in starts]

    def seconds(self, moment: float) -> float:
        """Return the seconds of work before a moment."""
        number = bisect.bisect_right(self._begun, moment) - 1
        if number < 0:
            return 0.0
        before = sum(start.seconds for start in self._starts[:number])
        start = self._starts[number]
        return before + min(moment, start.ended) - start.begun


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of work by what they went into."""

    seconds: dict[str, float]
    is_measured: bool
    """False: estimated from the moments at which rows were logged."""


def starts_of(run: RunRecord) -> list[Start]:
    """Return the starts of a run, oldest first; none if it logged nothing."""
    rows = sorted([*run.rows, *run.dropped_rows], key=lambda row: row.time)
    if not rows:
        return []
    begun = [moment for moment in run.start_times if moment <= rows[-1].time]
    if not begun or begun[0] > rows[0].time:
        begun.insert(0, rows[0].time)
    starts: list[Start] = []
    reached = 0
    for moment, following in zip(begun, [*begun[1:], math.inf], strict=True):
        during = [row for row in rows if moment <= row.time < following]
        first = _resumed_at(run, moment) if starts else 0
        ended, last = (during[-1].time, during[-1].step) if during else (moment, first)
        starts.append(Start(moment, ended, first, max(first, last), max(0, min(reached, last) - first)))
        reached = max(reached, last)
    return starts


def _resumed_at(run: RunRecord, moment: float) -> int:
    """Return the step that a start went on from: as recorded, else the last one logged before it and kept."""
    for start in run.starts:
        if start.get("time") == moment and isinstance(start.get("step"), int):
            return int(start["step"])
    return max((row.step for row in run.rows if row.time < moment), default=0)


def time_split(run: RunRecord, starts: list[Start]) -> TimeSplit:
    """Return where the time of a run went, as its rows tell it, or as far as their moments do."""
    total = sum(start.seconds for start in starts)
    rows = [*run.rows, *run.dropped_rows]
    measured: dict[str, float] = {}
    for row in rows:
        for name, value in row.values.items():
            if (match := SECONDS_NAME.fullmatch(name)) and math.isfinite(value):
                measured[match.group(1)] = measured.get(match.group(1), 0.0) + value
    if measured:
        rest = total - sum(measured.values())
        return TimeSplit(measured | ({"other": rest} if rest > 0 else {}), is_measured=True)
    looking = min(total, _seconds_before_evaluations(rows))
    return TimeSplit({"training": total - looking, "saving and evaluation": looking}, is_measured=False)


def _seconds_before_evaluations(rows: list[Row]) -> float:
    """Sum the time between a training row and the evaluation row of the same step."""
    total, before = 0.0, None
    for row in sorted(rows, key=lambda one: one.time):
        if not all(name.startswith("evaluation.") for name in row.values):
            before = row
        elif before is not None and before.step == row.step:
            total, before = total + row.time - before.time, None
    return total
