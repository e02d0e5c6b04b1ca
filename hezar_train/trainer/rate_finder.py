"""Find a learning rate: a few updates with geometrically growing rates show where the loss falls and explodes.

The sweep is a routine like any other: the same loop and default steps, with counters of its own and without logs,
saves and evaluations that are due. What it changes is put back by `untouched`. This module owns the rates, the
smoothing and when a sweep ends; `rate_curve` reads the curves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError, NonFiniteError, choices, suggestion
from hezar_train.events import EventStorage
from hezar_train.loop import Context, HookSet, Moment, Routine
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import Schedule
from hezar_train.plan import UNLIMITED, End
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.checks import evaluation_sets
from hezar_train.trainer.course import Course
from hezar_train.trainer.rate_curve import WHOLE_RANGE, LRFinderResult, problem_of_method
from hezar_train.trainer.regularizers import Regularizer
from hezar_train.trainer.steps import TrainSteps, Verbs
from hezar_train.trainer.untouched import untouched
from hezar_train.trainer.updates import Updater
from hezar_train.types import Mode

if TYPE_CHECKING:
    from hezar_train.trainer import Trainer

__all__ = ["LogFinder", "RateSweep", "SweepSettings", "find_lr", "lr_finder_auto_load"]

DEFAULT_STEPS = 100


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
            return "a loss that is not finite"
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
        self.steps.register(hooks)
        if regularizer is not None:
            self.steps.register_regularizer(hooks, regularizer, self._mu)
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
        every = self._settings.print_every
        if every and before % every == 0:
            rate, loss, smoothed = (
                curve[-1] for curve in (self.curves.rates, self.curves.losses, self.curves.smoothed)
            )
            logger.info("find_lr: rate %.3e, loss %.6g, smoothed %.6g", rate, loss, smoothed)

    def run(self, learn: Callable[[], object]) -> LRFinderResult:
        """Let the loop walk; return what was found. A loss that is not finite ends a sweep, it does not fail it."""
        try:
            learn()
        except NonFiniteError:
            if not self.curves.rates:
                raise
            self.state.stop_reason = "a loss that is not finite"
        found, settings = self.curves, self._settings
        if not found.rates:
            raise DataError(f"no rate was tried: the sweep was stopped at once ({self.state.stop_reason})")
        return LRFinderResult(
            found.rates, found.losses, found.smoothed, found.accuracies, settings.lr_select_method,
            settings.lr_min_factor, settings.lr_max_scale, settings.lr_trunc, self.state.stop_reason or WHOLE_RANGE,
        )  # fmt: skip


def find_lr(trainer: Trainer, settings: SweepSettings) -> LRFinderResult:
    """Sweep over the rates of a trainer, on the first updates of its first epoch; then everything is as it was."""
    trainer._refuse_to_train("train")
    verbs = Verbs(trainer.prepare_input_batch, trainer._outputs_of, trainer.compute_loss)
    sweep = RateSweep(settings, verbs, trainer.runtime, trainer.optimizer, trainer.config)
    sweep.measure = _measure_of(trainer, settings)
    sweep.steps.replicas, sweep.steps.agree = trainer._replicas, trainer._agree
    sweep.register(hooks := HookSet(), trainer.regularizer)
    routine = Routine(trainer.ctx, hooks, Mode.TRAIN, "train")
    kept = untouched(
        trainer.model, trainer.optimizer, trainer.schedule, trainer.runtime.scaler, trainer.state,
        trainer.train_dataset, trainer.runtime.device,
    )  # fmt: skip
    with EventStorage(), trainer._model_at_hand(), kept, closing(trainer._train_source()) as source:
        course = Course(
            routine, source, trainer.plan, sweep.state, End(), UNLIMITED, trainer._weigh, agree=trainer._agree
        )
        return sweep.run(lambda: trainer._learn(course))


def _measure_of(trainer: Trainer, settings: SweepSettings) -> Callable[[], float] | None:
    """Return how to measure accuracy: with the default steps alone, so that no hook sees it."""
    if not settings.tests_accuracy:
        return None
    _refuse_accuracy(settings.acc_metric, trainer.metrics_handler, trainer.eval_dataset)
    data = next(iter(evaluation_sets(None, trainer.eval_dataset).values()))
    hooks = HookSet()
    hooks.register(trainer._steps.seed_looking, Moment.BATCH_START, name="seed")
    trainer._evaluation.register(hooks)

    def measure() -> float:
        trainer._look_through(data, Routine(trainer.ctx, hooks, Mode.VAL, "val"), settings.acc_batches)
        return trainer._evaluation.report().metrics[settings.acc_metric]

    return measure


def _refuse_accuracy(name: str, handler: MetricsHandler, eval_dataset: Any) -> None:
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


@dataclass
class LogFinder:
    """Sweep over a trainer's learning rates, under the names of lernomatic.

    `num_epochs`, `gamma`, `grad_thresh` and `expr_id` have no effect: one epoch leads from `lr_min` to `lr_max`.
    """

    trainer: Trainer | None
    num_epochs: int = 8
    lr_min: float = 1e-6
    lr_max: float = 1.0
    explode_thresh: float = 4.0
    beta: float = 0.999
    gamma: float = 0.999995
    lr_min_factor: float = 2.0
    lr_max_scale: float = 1.0
    lr_select_method: str = "max_acc"
    lr_trunc: int = 10
    max_batches: int = 0
    """Updates of the sweep; 0: those of an epoch."""

    grad_thresh: float = 0.002
    acc_test: bool = True
    print_every: int = 20
    verbose: bool = False
    expr_id: str | None = None
    result: LRFinderResult | None = field(default=None, repr=False)

    def find(self) -> tuple[float, float]:
        """Sweep; return the lowest and the highest rate to train with."""
        if self.trainer is None:
            raise DataError("this finder has no trainer: it was read from a file, and can only show what was found")
        settings = SweepSettings(
            self.lr_min, self.lr_max, self.max_batches or self.trainer.plan.updates_in_epoch or DEFAULT_STEPS,
            self.explode_thresh, self.beta, self.lr_select_method, self.lr_min_factor, self.lr_max_scale,
            self.lr_trunc, self.acc_test, print_every=self.print_every if self.verbose else 0,
        )  # fmt: skip
        self.result = find_lr(self.trainer, settings)
        return self.get_lr_range()

    def get_lr_range(self) -> tuple[float, float]:
        """Return the lowest and the highest rate to train with, by `lr_select_method`."""
        return self._found().get_lr_range(self.lr_select_method)

    def get_lr_history(self) -> list[float] | None:
        """Return log10 of each rate that was tried; None before a sweep."""
        return self.log_lr_history or None

    @property
    def log_lr_history(self) -> list[float]:
        return [] if self.result is None else [math.log10(rate) for rate in self.result.rates]

    @property
    def smooth_loss_history(self) -> list[float]:
        return [] if self.result is None else self.result.smoothed

    @property
    def acc_history(self) -> list[float]:
        return [] if self.result is None else self.result.accuracies

    def plot_lr_vs_loss(self, ax: Any, title: str | None = None, log: bool = False) -> None:
        """Draw the smoothed loss over the rate, or over its log10, with the range."""
        self._draw(ax, self.smooth_loss_history, "smoothed loss", title, log)

    def plot_lr_vs_acc(self, ax: Any, title: str | None = None, log: bool = False) -> None:
        """Draw the accuracy over the rate, or over its log10, with the range."""
        if not self.acc_history:
            raise DataError("no accuracies were measured: set acc_test=True and call find()")
        self._draw(ax, self.acc_history, "accuracy", title, log)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write what was found as JSON."""
        return self._found().save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `save` wrote, with the way it selected."""
        self.result = LRFinderResult.load(path)
        self.lr_select_method = self.result.lr_select_method

    def _draw(self, ax: Any, curve: list[float], name: str, title: str | None, log: bool) -> None:
        rates = self.log_lr_history if log else self._found().rates
        ax.plot(rates, curve)
        for rate in self.get_lr_range():
            ax.axvline(math.log10(rate) if log else rate, color="r")
        what = "log10 of the learning rate" if log else "learning rate"
        ax.set(xlabel=what, ylabel=name, title=title or f"Selected by {self.lr_select_method}")

    def _found(self) -> LRFinderResult:
        if self.result is None:
            raise DataError("nothing was found yet: call find() or load(path) first")
        return self.result


def lr_finder_auto_load(path: str | os.PathLike[str]) -> LogFinder:
    """Return a finder without a trainer that shows what a saved one found."""
    finder = LogFinder(None)
    finder.load(path)
    return finder
