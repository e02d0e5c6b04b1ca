"""How long to wait before the Hub is tried again: back-off with jitter, and a breaker after many failures in a row."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Pace"]

_chance = random.SystemRandom()  # never the global generator: that is the training's


@dataclass(frozen=True)
class Pace:
    """The waits between attempts; a failure is one attempt that came to nothing."""

    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    breaker_failures: int = 5
    """Failures in a row after which the breaker opens."""
    breaker_seconds: float = 300.0
    """The wait while it is open; it doubles with each further failure, up to eight times."""
    closing_seconds: float = 5.0
    """The longest wait once the program is about to end."""
    attempt_seconds: float = 600.0
    """How long one attempt may last before it is given up, besides the time for its bytes."""
    least_bytes_per_second: float = 1e6

    def is_open(self, failures: int) -> bool:
        """Tell whether the breaker is open."""
        return failures >= self.breaker_failures

    def delay_seconds(self, failures: int, asked_seconds: float = 0.0) -> float:
        """Return the wait after so many failures in a row; at least what the server asked for."""
        if self.is_open(failures):
            wait = self.breaker_seconds * 2.0 ** min(failures - self.breaker_failures, 3)
        else:
            wait = min(self.first_seconds * 2.0 ** (failures - 1), self.longest_seconds)
        return max(wait * _chance.uniform(0.5, 1.0), min(asked_seconds, self.breaker_seconds))

    def attempt_limit_seconds(self, nbytes: int) -> float:
        """Return how long an attempt over so many bytes may last."""
        return self.attempt_seconds + nbytes / self.least_bytes_per_second
