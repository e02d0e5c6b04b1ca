"""How fast a run goes and how long it still takes, told by what it has done so far.

Evaluations and what is done `aside` do not count into samples/s. What is done aside counts into the time left by its
own mean, as often as it is still to come; all else counts by the step, from the end of the first one on, for what a
start or a resume takes does not come again. Nothing here is shown or logged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

__all__ = ["Pace", "mean_distance"]

_NUM_MARKS = 40  # that samples/s look back on: ten seconds, with a mark at each refresh of the bar
_NEVER = math.inf


class Pace:
    """Measure a run from now on, by marks that whoever walks it sets now and then."""

    def __init__(self, steps_between: Mapping[str, float] | None = None) -> None:
        """Say by `steps_between` after how many steps, on average, each kind of thing is done aside."""
        self._steps_between = {} if steps_between is None else steps_between
        self._sample_clock = _Clock()
        self._step_clock = _Clock()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_NUM_MARKS)  # seconds, samples
        self._first_mark: tuple[float, int] | None = None  # where the first step ended: seconds, step
        self._aside: dict[str, tuple[float, int]] = {}  # seconds and number of what was done

    def mark(self, step: int, samples: int) -> None:
        """Note that the run is at this step and has seen so many samples since it began."""
        self._marks.append((self._sample_clock.active_seconds(), samples))
        if self._first_mark is None:
            self._first_mark = (self._step_clock.active_seconds(), step)

    def pause_samples(self) -> None:
        """Leave what follows out of samples/s."""
        self._sample_clock.pause()

    def resume_samples(self) -> None:
        """Count into samples/s again."""
        self._sample_clock.resume()

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Leave the body's time out of samples/s, and know from it how long `what` takes; bodies may nest."""
        begun = perf_counter()
        self._sample_clock.pause()
        self._step_clock.pause()
        try:
            yield
        finally:
            self._sample_clock.resume()
            self._step_clock.resume()
            seconds, number = self._aside.get(what, (0.0, 0))
            self._aside[what] = (seconds + perf_counter() - begun, number + 1)

    def samples_per_second(self, samples: int) -> float | None:
        """Return the pace of the last seconds, given the samples seen by now."""
        now = (self._sample_clock.active_seconds(), samples)
        of_last_seconds = _rate(self._marks[0], now) if self._marks else None
        return _rate((0.0, 0), now) if of_last_seconds is None else of_last_seconds

    def seconds_left(self, step: int, total_steps: int | None) -> float | None:
        """Return how long the rest takes if it goes on as so far; None until a second step can tell."""
        if total_steps is None or self._first_mark is None or step <= self._first_mark[1]:
            return None
        first_seconds, first_step = self._first_mark
        num_left = max(0, total_steps - step)
        in_steps = (self._step_clock.active_seconds() - first_seconds) / (step - first_step) * num_left
        return in_steps + sum(self._seconds_aside(what, num_left) for what in self._aside)

    def _seconds_aside(self, what: str, num_steps: int) -> float:
        """Return how long what is done aside takes in so many steps, the last of which ends with it."""
        seconds, number = self._aside[what]
        return math.ceil(num_steps / self._steps_between.get(what, _NEVER)) * seconds / number


def mean_distance(periods: Sequence[int | None]) -> float:
    """Return how far apart the multiples of any of the periods are on average; what two have in common counts once."""
    given = {period for period in periods if period}
    counted = [period for period in given if not any(period % other == 0 for other in given - {period})]
    return 1 / sum(1 / period for period in counted) if counted else _NEVER


class _Clock:
    """Count seconds since it was made, without pauses, which may nest."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._paused_seconds = 0.0
        self._pause_start = 0.0
        self._depth = 0

    def pause(self) -> None:
        if self._depth == 0:
            self._pause_start = perf_counter()
        self._depth += 1

    def resume(self) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._paused_seconds += perf_counter() - self._pause_start

    def active_seconds(self) -> float:
        end = self._pause_start if self._depth else perf_counter()
        return end - self._start - self._paused_seconds


def _rate(before: tuple[float, int], now: tuple[float, int]) -> float | None:
    seconds = now[0] - before[0]
    return (now[1] - before[1]) / seconds if seconds > 0 and now[1] > before[1] else None
