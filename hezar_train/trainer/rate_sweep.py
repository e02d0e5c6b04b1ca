"""A sweep over learning rates: a few updates with geometrically growing rates show where the loss falls and explodes.

It is a routine like any other: the same loop and default steps, with counters of its own and without logs, saves and
evaluations that are due. This module owns the rates, the smoothing and when a sweep ends; `rate_curve` reads the
curves, and `trials` puts back what a sweep changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError, NonFiniteError, choices, suggestion
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import Schedule
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.rate_curve import WHOLE_RANGE, LRFinderResult, problem_of_method
from hezar_train.trainer.regularizers import Regularizer
from hezar_train.trainer.steps import TrainSteps, Verbs
from hezar_train.trainer.updates import Updater

__all__ = ["DEFAULT_STEPS", "RateSweep", "SweepSettings", "refuse_accuracy"]

DEFAULT_STEPS = 100
NOT_FINITE = "a loss that is not finite"


@dataclass(frozen=True)
class SweepSettings:
    """What to sweep over, when to stop, and how to select a rate."""

    lr_min: float = 1e-7
    lr_max: float = 10.0
    num_steps: int = DEFAULT_STEPS
    """Updates, one for each rate."""

    explode_thresh: float = 4.0
    """Stop when the smoothed loss is so many times the best."""

    beta: float = 0.98
    """Share of the past in the smoothed loss; 0 does not smooth."""

    lr_select_method: str = "steepest"
    lr_min_factor: float = 2.0
    lr_max_scale: float = 1.0
    lr_trunc: int = 10
    acc_test: bool = False
    """Measure `acc_metric` after each update; implied by lr_select_method='max_acc'."""

    acc_metric: str = "accuracy"
    acc_batches: int | None = 8
    """Batches of the evaluation data that each measurement takes; None: all."""

    print_every: int = 0
    """Updates between lines in the log; 0: none."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    @property
    def tests_accuracy(self) -> bool:
        """Tell whether accuracies are measured."""
        return self.acc_test or self.lr_select_method == "max_acc"

    def rate(self, number: int) -> float:
        """Return the rate of an update; the first has `lr_min`, the last `lr_max`."""
        return float(self.lr_min * (self.lr_max / self.lr_min) ** (number / (self.num_steps - 1)))

    def _problems(self) -> Iterator[str]:
        if not 0 < self.lr_min < self.lr_max < math.inf:
            yield f"lr_min={self.lr_min!r}, lr_max={self.lr_max!r}: expected positive rates, the first one lower"
        if self.num_steps < 2:
            yield f"num_steps={self.num_steps!r} must be at least 2"
        if not self.explode_thresh > 1:
            yield f"explode_thresh={self.explode_thresh!r} must be greater than 1"
        if not 0 <= self.beta < 1:
            yield f"beta={self.beta!r} must be at least 0 and less than 1"
        yield from problem_of_method(self.lr_select_method)


@dataclass
class Curves:
    """The curves as they grow."""

    settings: SweepSettings
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    average: float = 0.0

    def add(self, loss: float) -> str | None:
        """Take the loss of the next rate; return why the sweep should end, or None."""
        settings, number = self.settings, len(self.rates)
        if not math.isfinite(loss):
            return NOT_FINITE
        self.average = settings.beta * self.average + (1 - settings.beta) * loss
        self.rates.append(settings.rate(number))
        self.losses.append(loss)
        self.smoothed.append(self.average / (1 - settings.beta ** (number + 1)))
        best = min(self.smoothed)
        if self.smoothed[-1] > best + (settings.explode_thresh - 1) * abs(best):  # a loss may be negative
            return "divergence"
        return WHOLE_RANGE if len(self.rates) == settings.num_steps else None


class RateSweep:
    """The hooks of a sweep, with counters of their own, and the curves they gather."""

    def __init__(
        self, settings: SweepSettings, verbs: Verbs, runtime: Runtime, optimizer: Optimizer, config: TrainerConfig
    ) -> None:
        self.state = TrainerState()
        self.curves = Curves(settings)
        self.measure: Callable[[], float] | None = None
        """Returns the accuracy, where it is asked for."""

        updater = Updater(optimizer, runtime.scaler, config)
        self.steps = TrainSteps(verbs, runtime, self.state, updater, Schedule(None, 1, optimizer), config.seed)
        self._settings, self._groups, self._mu = settings, optimizer.param_groups, config.regularizer_mu
        first, *others = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._factors = [1.0, *(rate / first if first else 1.0 for rate in others)]

    def register(self, hooks: HookSet, regularizer: Regularizer | None = None) -> None:
        """Put the default steps and the sweep's own into a hook set."""
        self.steps.register(hooks, regularizer, self._mu)
        hooks.register(self.set_rate, Moment.BATCH_START, name="set_rate")
        hooks.register(self.note, Moment.BATCH_END, name="note")

    def set_rate(self, ctx: Context) -> None:
        """Give each window its rate; groups keep their ratio to the first one's."""
        if ctx.batch_in_window:
            return
        rate = self._settings.rate(len(self.curves.rates))
        for group, factor in zip(self._groups, self._factors, strict=True):
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.full_like(group["lr"], rate * factor) if is_tensor else rate * factor

    def note(self, ctx: Context) -> None:
        """Add a window's loss, and the accuracy after its update; end the sweep where there is a reason."""
        if not ctx.closes_window:
            return
        before = len(self.curves.rates)
        reason = self.curves.add(ctx.loss_value)
        self.state.stop_reason = self.state.stop_reason or reason
        if len(self.curves.rates) == before:
            return
        if self.measure is not None:
            self.curves.accuracies.append(self.measure())
        every, curves = self._settings.print_every, self.curves
        if every and before % every == 0:
            latest = (curves.rates[-1], curves.losses[-1], curves.smoothed[-1])
            logger.info("find_lr: rate %.3e, loss %.6g, smoothed %.6g", *latest)

    def run(self, learn: Callable[[], object]) -> LRFinderResult:
        """Let the loop walk; return what was found. A loss that is not finite ends a sweep, it does not fail it."""
        try:
            learn()
        except NonFiniteError:
            if not self.curves.rates:
                raise
            self.state.stop_reason = NOT_FINITE
        found, settings = self.curves, self._settings
        if not found.rates:
            raise DataError(f"no rate was tried: the sweep was stopped at once ({self.state.stop_reason})")
        return LRFinderResult(
            found.rates, found.losses, found.smoothed, found.accuracies, settings.lr_select_method,
            settings.lr_min_factor, settings.lr_max_scale, settings.lr_trunc, self.state.stop_reason or WHOLE_RANGE,
        )  # fmt: skip


def refuse_accuracy(name: str, handler: MetricsHandler, eval_dataset: Any) -> None:
    """Raise if an evaluation will not give this metric, or a larger value of it is no better."""
    if eval_dataset is None:
        raise DataError(
            "accuracies are measured on evaluation data, and there is none: pass eval_dataset to the Trainer, or set "
            "acc_test=False and another lr_select_method than 'max_acc'."
        )
    known = handler.output_keys
    if known is not None and name not in known:
        raise ConfigError(
            f"acc_metric={name!r} is not a result of this run's evaluations. There are: {choices(known) or 'none'}."
            f"{suggestion(name, known)}"
        )
    if handler.objective(name) != "maximize":
        raise ConfigError(f"acc_metric={name!r} is better when it is smaller; expected one that is better when larger")
