"""Fields of stopping early: when a run has reached enough, or no longer gets better."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hezar_train.config.checks import number, one_of, text, whole, wrong_type
from hezar_train.errors import ConfigError

__all__ = ["STOPPING_MODES", "Goal", "StoppingFields"]

STOPPING_MODES = ("best", "mean", "window")
"""What an evaluation is compared with: the best so far, the mean of the last ones, or the one so many before."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
GOAL = re.compile(rf"\s*(?P<metric>[^\s<>=]+)\s*(?P<comparison><=|>=)\s*(?P<value>{NUMBER})\s*", re.ASCII)
FORM_OF_GOAL = "text such as 'accuracy >= 0.9' or 'evaluation.loss <= 0.1'"


class Goal(NamedTuple):
    """A metric's value at which a run has reached enough."""

    metric: str
    comparison: str
    value: float

    def is_reached_by(self, value: float) -> bool:
        """Tell whether a value is there; NaN never is."""
        return value >= self.value if self.comparison == ">=" else value <= self.value

    @classmethod
    def parse(cls, given: str) -> Goal:
        """Read "metric >= number" or "metric <= number"."""
        match = GOAL.fullmatch(given)
        if match is None:
            raise ConfigError(f"stop_when={given!r} cannot be read: expected {FORM_OF_GOAL}")
        return cls(match["metric"], match["comparison"], float(match["value"]))


@dataclass(kw_only=True)
class StoppingFields:
    early_stopping_patience: int | None = None
    """Stop after so many evaluations without improvement. None or 0: never."""

    early_stopping_threshold: float = 0.0
    """Least improvement that counts; a value that is only equal is none."""

    early_stopping_mode: str = "best"
    """Improvement over what: "best" so far, "mean" of the last `patience` evaluations, or "window": `patience` ago."""

    early_stopping_metric: str | None = None
    """Metric that must improve: "f1", "evaluation.f1" or "train.loss". None: `metric_for_best_model`."""

    stop_when: str | None = None
    """Stop when an evaluation reaches this: "accuracy >= 0.9", "loss <= 0.1". None: never."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from whole("early_stopping_patience", self.early_stopping_patience, least=0, optional=True)
        yield from number("early_stopping_threshold", self.early_stopping_threshold)
        yield from one_of("early_stopping_mode", self.early_stopping_mode, STOPPING_MODES, optional=False)
        if self.early_stopping_metric is not None:
            yield from text("early_stopping_metric", self.early_stopping_metric)
        yield from self._problems_of_goal()

    def _problems_of_goal(self) -> Iterator[str]:
        if self.stop_when is None:
            return
        if not isinstance(self.stop_when, str):
            yield wrong_type("stop_when", self.stop_when, FORM_OF_GOAL)
            return
        try:
            Goal.parse(self.stop_when)
        except ConfigError as error:
            yield from error.problems
