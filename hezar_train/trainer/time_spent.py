"""Where the time of a call of `train()` goes, measured where it costs nothing: around waits, saves and evaluations.

What is left is the training itself. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

__all__ = ["DATA", "EVALUATION", "SAVING", "TRAINING", "TimeSpent"]

DATA, EVALUATION, SAVING, TRAINING = "data", "evaluation", "saving", "training"
T = TypeVar("T")


class TimeSpent:
    """Seconds since the start by what they went into."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin from zero."""
        self._begun = perf_counter()
        self._seconds = {DATA: 0.0, EVALUATION: 0.0, SAVING: 0.0}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the body's time as spent on `what`."""
        begun = perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += perf_counter() - begun

    def waiting_for(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and count the time it takes to get each as spent on data."""
        seconds, begun = self._seconds, perf_counter()
        for item in items:
            seconds[DATA] += perf_counter() - begun
            yield item
            begun = perf_counter()

    def split(self) -> dict[str, float]:
        """Return the seconds so far, with what is left of them as training."""
        rest = perf_counter() - self._begun - sum(self._seconds.values())
        return {TRAINING: max(0.0, rest), **self._seconds}
