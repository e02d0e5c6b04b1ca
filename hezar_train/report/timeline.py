"""When a run was at work: its starts, the pauses between them, and where the time went.

A start is known by its record, else by the TensorBoard file that each start opens. It lasts until its recorded end; one
that was killed has none, and lasts until the last row that was logged before the next one, kept or taken back: what was
lost between that row and a kill is not known.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hezar_train.events import Row, end_of
from hezar_train.report.reading import is_moment, is_number
from hezar_train.report.records import RunRecord

__all__ = ["Clock", "Start", "TimeSplit", "starts_of", "time_split"]

SECONDS_NAME = re.compile(r"time\.(\w+)_seconds")
"""Rows may tell how many seconds since the row before went into something."""


LEAST_OTHER = 0.01
"""Of all time: opening files and the like."""


@dataclass(frozen=True)
class Start:
    """One stretch of work, in wall-clock seconds and steps."""

    begun: float
    ended: float
    first_step: int
    last_step: int
    steps_done_again: int
    """Steps past the checkpoint that it resumed from, which had been done before."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What the trainer wrote down of it."""

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
    """Return the starts of a run, oldest first; none if nothing was logged and no end was recorded."""
    rows = sorted([*run.rows, *run.dropped_rows], key=lambda row: row.time)
    records = {start.get("time"): start for start in run.starts if is_moment(start.get("time"))}
    last_row = rows[-1].time if rows else 0.0
    begun = [moment for moment in run.start_times if moment <= last_row or end_of(records.get(moment, {}))]
    if rows and (not begun or begun[0] > rows[0].time):
        begun.insert(0, rows[0].time)
    starts: list[Start] = []
    reached = 0
    for moment, following in zip(begun, [*begun[1:], math.inf], strict=False):
        during = [row for row in rows if moment <= row.time < following]
        record = records.get(moment, {})
        first = _resumed_at(run, moment, record) if starts else 0
        ended, last = _ended(record, *((during[-1].time, during[-1].step) if during else (moment, first)))
        starts.append(Start(moment, ended, first, max(first, last), max(0, min(reached, last) - first), record))
        reached = max(reached, last)
    return starts


def _resumed_at(run: RunRecord, moment: float, record: Mapping[str, Any]) -> int:
    """Return the step that a start went on from: as recorded, else the last one logged before it and kept."""
    if isinstance(record.get("step"), int):
        return int(record["step"])
    return max((row.step for row in run.rows if row.time < moment), default=0)


def _ended(record: Mapping[str, Any], moment: float, step: int) -> tuple[float, int]:
    """Return when and at which step a start ended: as recorded, but not before what it is known to have done."""
    end = end_of(record)
    told, last = end.get("time", 0.0), end.get("step", 0)
    return max(moment, told) if is_moment(told) else moment, max(step, last) if isinstance(last, int) else step


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
    if any(_seconds_of(start) for start in starts):
        return _recorded_split(rows, starts)
    looking = min(total, _seconds_before_evaluations(rows))
    return TimeSplit({"training": total - looking, "saving and evaluation": looking}, is_measured=False)


def _recorded_split(rows: list[Row], starts: list[Start]) -> TimeSplit:
    """Sum what the trainer wrote down of each start; what it did not, of one that was killed, was mostly training."""
    total = dict.fromkeys(("training", "data", "evaluation", "saving"), 0.0)
    for start in starts:
        seconds = _seconds_of(start)
        if not seconds:
            seconds["evaluation"] = _seconds_before_evaluations(
                [r for r in rows if start.begun <= r.time <= start.ended]
            )
        rest = start.seconds - sum(seconds.values())
        for name, value in [*seconds.items(), ("other" if end_of(start.record) else "training", max(0.0, rest))]:
            total[name] = total.get(name, 0.0) + value
    if total.get("other", 0.0) < LEAST_OTHER * sum(total.values()):
        total.pop("other", None)
    return TimeSplit(total, is_measured=all(map(_seconds_of, starts)))


def _seconds_of(start: Start) -> dict[str, float]:
    found = start.record.get("seconds")
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(name): float(value) for name, value in pairs if is_number(value) and 0 <= value < math.inf}


def _seconds_before_evaluations(rows: list[Row]) -> float:
    """Sum the time between a training row and the evaluation row of the same step."""
    total, before = 0.0, None
    for row in sorted(rows, key=lambda one: one.time):
        if not all(name.startswith("evaluation.") for name in row.values):
            before = row
        elif before is not None and before.step == row.step:
            total, before = total + row.time - before.time, None
    return total
