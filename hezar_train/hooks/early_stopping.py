"""When a run stops before its planned end: a goal is reached, or evaluations no longer improve.

A verdict follows from the recorded results alone, in their order: a checkpoint holds the state from before its
evaluation, so a resumed run that is given the record again comes to the same verdict. An improvement is strict: a value
that is equal, or not finite, is none. Nothing here evaluates, stops or saves; the trainer asks after each evaluation.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from hezar_train.config import TrainerConfig
from hezar_train.config.fields import STOPPING_MODES, Goal
from hezar_train.errors import CheckpointError, ConfigError, DataError, choices, nearest, suggestion

__all__ = [
    "EarlyStopper",
    "Patience",
    "Stopping",
    "metric_key_of",
    "objective_of",
]

OBJECTIVES = ("maximize", "minimize")


class Patience:
    """Count evaluations without improvement over the best, the mean of the last ones, or the one so many before."""

    def __init__(self, patience: int, threshold: float = 0.0, mode: str = "best", objective: str = "maximize") -> None:
        """Bear `patience` evaluations (0: any number) that do not improve by at least `threshold`."""
        for name, given, known in (("mode", mode, STOPPING_MODES), ("objective", objective, OBJECTIVES)):
            if given not in known:
                raise ConfigError(f"{name}={given!r} is not known. Choose from: {choices(known)}.")
        if patience < 0 or not threshold >= 0:
            raise ConfigError(f"patience={patience!r}, threshold={threshold!r}: neither may be negative")
        self.patience, self.threshold, self.mode, self.objective = patience, threshold, mode, objective
        self.best: float | None = None
        self.num_stalled = 0
        self.recent: deque[float | None] = deque(maxlen=patience)

    def is_over_after(self, value: float) -> bool:
        """Take the next evaluation's value; tell whether it was one too many."""
        now = value if math.isfinite(value) else None
        if self.mode == "best":
            return self._stalls(now) and self.patience > 0
        is_full = len(self.recent) == self.patience
        improves = self._improves(now, self._reference())
        self.recent.append(now)
        return is_full and not improves and self.patience > 0

    def state_dict(self) -> dict[str, Any]:
        """Return what the next verdict depends on, in plain values."""
        return {"best": self.best, "num_stalled": self.num_stalled, "recent": list(self.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, also of a shorter or longer patience."""
        best, num_stalled, recent = state["best"], state["num_stalled"], state["recent"]
        is_counted = type(num_stalled) is int and num_stalled >= 0 and isinstance(recent, list)
        if not is_counted or not all(map(_is_result, [best, *recent])):
            raise CheckpointError(
                f"the checkpoint's early stopping counts {state!r:.200}, which is no count of results"
            )
        self.best, self.num_stalled = best, num_stalled
        self.recent = deque(recent, maxlen=self.patience)

    def __str__(self) -> str:
        """Say what was not improved on."""
        least = f" by {self.threshold:g}" if self.threshold else ""
        if self.mode == "window":
            return f"not improved{least} in {self.patience} evaluations"
        if self.mode == "mean":
            return f"not improved{least} on the mean of the {self.patience} evaluations before"
        best = "" if self.best is None else f" on {self.best:.6g}"
        return f"not improved{best}{least} in {self.num_stalled} evaluations"

    def _stalls(self, now: float | None) -> bool:
        if self._improves(now, self.best):
            self.best, self.num_stalled = now, 0
        else:
            self.num_stalled += 1
        return self.num_stalled >= self.patience

    def _reference(self) -> float | None:
        """Return what the next value must improve on; None if any finite one will do."""
        if self.mode == "window":
            return self.recent[0] if self.recent else None
        finite = [value for value in self.recent if value is not None]
        # exact: in floats the mean of equal values may be less than they are, and a plateau would improve on it
        return statistics.mean(finite) if finite else None

    def _improves(self, now: float | None, reference: float | None) -> bool:
        if now is None or reference is None:
            return now is not None
        sign = 1.0 if self.objective == "maximize" else -1.0
        return sign * now > sign * reference and sign * now >= sign * reference + self.threshold


class Stopping:
    """Judge each evaluation by the config's stopping fields."""

    def __init__(self, metric: str, patience: Patience, goal: Goal | None = None) -> None:
        """Watch `metric` with `patience`, and reach `goal`; both name their metrics in full ("evaluation.f1")."""
        self._metric, self._patience, self._goal = metric, patience, goal

    @classmethod
    def from_config(
        cls,
        config: TrainerConfig,
        set_names: Sequence[str],
        output_keys: Sequence[str] | None,
        objective: Callable[[str], str],
    ) -> Self:
        """Check the fields against the results there will be; `objective` tells a metric's by its bare name."""
        field = "metric_for_best_model" if config.early_stopping_metric is None else "early_stopping_metric"
        metric = metric_key_of(field, config[field], set_names, output_keys)
        patience = Patience(
            config.early_stopping_patience or 0,
            config.early_stopping_threshold,
            config.early_stopping_mode,
            objective_of(metric, set_names, objective),
        )
        if config.stop_when is None:
            return cls(metric, patience)
        goal = Goal.parse(config.stop_when)
        reached = metric_key_of("stop_when", goal.metric, set_names, output_keys)
        return cls(metric, patience, goal._replace(metric=reached))

    def judge(self, metrics: Mapping[str, float]) -> str | None:
        """Take an evaluation's results by full name; return why the run should stop, or None."""
        patience, goal = self._patience, self._goal
        value = _value_of(self._metric, metrics) if patience.patience else None
        is_over = value is not None and patience.is_over_after(value)
        reached = None if goal is None else _value_of(goal.metric, metrics)
        if goal is not None and reached is not None and goal.is_reached_by(reached):
            return f"stop_when: {goal.metric} is {reached:.6g} ({goal.comparison} {goal.value:g})"
        return f"early stopping: {self._metric} has {patience}" if is_over else None

    def state_dict(self) -> dict[str, Any]:
        """Return what the next verdict depends on, in plain values."""
        return {"metric": self._metric, "mode": self._patience.mode, **self._patience.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; what was counted of another metric, or in another way, is left."""
        if not isinstance(state, Mapping):
            raise CheckpointError(f"the checkpoint's early stopping is a {type(state).__name__}; expected its counts")
        if [state.get("metric"), state.get("mode")] == [self._metric, self._patience.mode]:
            self._patience.load_state_dict(state)


class EarlyStopper:
    """Tell from a growing list of results when to stop; `delta` is the least improvement, patience 0 never stops."""

    def __init__(
        self,
        patience: int = 5,
        delta: float = 0.0,
        improve_indicator_mode: str = "best",
        the_larger_the_better: bool = True,
    ) -> None:
        self._settings = (patience, delta, improve_indicator_mode, "maximize" if the_larger_the_better else "minimize")
        self._patience = Patience(*self._settings)
        self.early_stopped = False

    def track_and_check(self, history: Sequence[float]) -> bool:
        """Look at the last result of the history, and at those before it where the mode compares with them."""
        if not history:
            raise DataError(
                "track_and_check() was given an empty history; expected the results so far, the newest last"
            )
        if self._patience.mode != "best":
            self._patience = Patience(*self._settings)
            for value in history[-self._patience.patience - 1 : -1]:
                self._patience.is_over_after(value)
        self.early_stopped = self._patience.is_over_after(history[-1])
        return self.early_stopped


def _meant(given: str, known: Sequence[str]) -> str:
    """Suggest a result by the last part of its name: what all of them begin with makes any two alike."""
    ends = {name.rpartition(".")[2]: name for name in known}
    near = nearest(given.rpartition(".")[2], ends)
    return "" if near is None else f" Did you mean {ends[near]!r}?"


def metric_key_of(field: str, given: str, set_names: Sequence[str], output_keys: Sequence[str] | None) -> str:
    """Return a metric's full name, checked against the results that a run will have.

    `set_names` are those of the evaluation sets: none without evaluation, one empty name for a single set. What is
    written without a set's name is the first set's. `output_keys` None: they are not known before the first evaluation.
    """
    key = given if given.startswith(("train.", "evaluation.")) else f"{'evaluation' if set_names else 'train'}.{given}"
    bare = key.removeprefix("evaluation.")
    if key != bare and set_names and "" not in set_names and not bare.startswith(tuple(f"{n}." for n in set_names)):
        key = f"evaluation.{set_names[0]}.{bare}"
    if set_names and output_keys is None:
        return key
    outputs = ["loss", *(output_keys or [])]
    known = [
        "train.loss",
        *(".".join(filter(None, ("evaluation", name, one))) for name in set_names for one in outputs),
    ]
    if key not in known:
        remedy = _meant(given, known) or (
            " Name one of these, or have it computed: set task and metrics."
            if set_names
            else " Other results need evaluation data: pass eval_dataset."
        )
        raise ConfigError(f"{field}={given!r} is not a result of this run. There will be: {choices(known)}.{remedy}")
    return key


def objective_of(key: str, set_names: Sequence[str], objective: Callable[[str], str]) -> str:
    """Return whether a larger or a smaller value of a result is better, by its full name."""
    name = key.partition(".")[2]
    for one in filter(None, set_names):
        name = name.removeprefix(f"{one}.")
    return "minimize" if name == "loss" else objective(name)


def _is_result(value: Any) -> bool:
    """Tell whether a saved value is what an evaluation leaves: a finite number, or nothing."""
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)


def _value_of(key: str, metrics: Mapping[str, float]) -> float | None:
    """Return a result; None if the evaluation gave none at all, which is no verdict."""
    if key in metrics:
        return metrics[key]
    kind = f"{key.partition('.')[0]}."
    if not any(name.startswith(kind) for name in metrics):
        return None
    raise ConfigError(  # some handlers tell their outputs only by computing them
        f"the run is to be stopped by {key!r}, which the evaluation did not give. There are: {choices(metrics)}."
        f"{suggestion(key, metrics)}"
    )
