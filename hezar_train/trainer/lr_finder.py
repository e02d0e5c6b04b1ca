"""The learning-rate finder: a few updates with geometrically growing rates show where the loss falls and explodes.

A sweep is a routine like any other: the same loop and default steps, with counters of its own and without logs, saves
and evaluations that are due; afterwards everything is as it was. `LRFinderResult` has the curves, which rate to take
from them, a picture and a JSON file; it reads everything in log10 space, in which the rates of a sweep are evenly
spaced.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.optim import Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.config.files import read_mapping, write_atomically, write_mapping
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, NonFiniteError, choices, suggestion
from hezar_train.events import EventStorage
from hezar_train.loop import Context, Fit, HookSet, Moment, Routine, Verbs
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import Schedule
from hezar_train.plan import UNLIMITED, End
from hezar_train.runtime import DataParallel, Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.data_setup import evaluation_sets
from hezar_train.trainer.model_runner import Regularizer
from hezar_train.trainer.own_code import OwnSteps
from hezar_train.trainer.rollback import untouched
from hezar_train.trainer.train_step import Optimization, TrainStep
from hezar_train.types import Mode

if TYPE_CHECKING:
    from hezar_train.trainer.assemble import Parts

__all__ = ["DEFAULT_STEPS", "SELECT_METHODS", "WHOLE_RANGE", "LRFinderResult", "SweepSettings", "find_lr"]

WHOLE_RANGE = "end of the range"


@dataclass(frozen=True)
class LRFinderResult:
    """The curves of a sweep, one entry per update, and the rate that a method selects from them."""

    rates: list[float]
    losses: list[float]
    """Loss of each update's window, before the update."""

    smoothed: list[float]
    """Exponential mean of the losses, corrected for its start."""

    accuracies: list[float] = field(default_factory=list)
    """What was measured after each update; empty if it was not asked for."""

    lr_select_method: str = "steepest"
    lr_min_factor: float = 2.0
    """Exponent of the low end of the range, as a multiple of the high end's."""

    lr_max_scale: float = 1.0
    """Factor on the exponent of the rate that is selected."""

    lr_trunc: int = 10
    """Rates before and after one that its slope is taken over, and at the start not counted; at most a tenth of all."""

    stopped_by: str = WHOLE_RANGE
    """Why no further rate was tried."""

    def __post_init__(self) -> None:
        if problems := list(problem_of_method(self.lr_select_method)):
            raise ConfigError(problems)
        lengths = {len(curve) for curve in (self.rates, self.losses, self.smoothed, self.accuracies or self.rates)}
        if len(lengths) != 1 or not self.rates or min(self.rates) <= 0:
            raise DataError(
                f"{len(self.rates)} rates, {len(self.losses)} losses, {len(self.smoothed)} smoothed losses and "
                f"{len(self.accuracies)} accuracies were given; expected curves of one length with positive rates"
            )

    @property
    def suggestion(self) -> float | None:
        """The rate that the method selects; None where the curve does not have what it looks for."""
        index = SELECT_METHODS[self.lr_select_method](self)
        return None if index is None else float(self.rates[index] ** self.lr_max_scale)  # a power scales the exponent

    def get_lr_range(self, lr_select_method: str | None = None) -> tuple[float, float]:
        """Return (low, high): high is the rate that the method selects, low has `lr_min_factor` times its exponent."""
        method = self.lr_select_method if lr_select_method is None else lr_select_method
        high = dataclasses.replace(self, lr_select_method=method).suggestion
        if high is None:
            raise DataError(
                f"{method!r} selects no rate: the loss did not fall over {len(self.rates)} updates between "
                f"{self.rates[0]:g} and {self.rates[-1]:g} (stopped by: {self.stopped_by}). Look at plot(), try more "
                "updates, or other rates."
            )
        low = high**self.lr_min_factor if high < 1 else high / 10  # from 1 on, the power would not be lower
        return min(max(low, self.rates[0]), high), high

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything as JSON; return the file's path."""
        return write_mapping(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        found = read_mapping(path)
        names = [one.name for one in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in found]:
            raise DataError(f"{os.fspath(path)} is no result of find_lr(): it lacks {choices(missing)}")
        return cls(**{name: found[name] for name in names})

    def plot(self, target: Any, title: str | None = None) -> Any:
        """Draw the curves and the selected range, into a file (return its path) or on given axes (return them)."""
        if not isinstance(target, str | os.PathLike):
            self._draw(target, title)
            return target
        figure = _matplotlib().figure.Figure(layout="constrained")
        self._draw(figure.add_subplot(), title)
        drawn, form = io.BytesIO(), Path(target).suffix.lstrip(".")
        figure.savefig(drawn, format=form or None)
        return write_atomically(target, drawn.getvalue())  # into a run's folder, where the name may be a link

    def _draw(self, axes: Any, title: str | None) -> None:
        axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed loss")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.set_title(title or f"Selected by {self.lr_select_method}")
        low, high = min(self.losses), max(self.smoothed)
        if low < high:  # one loss of a diverging end would flatten all others
            axes.set_ylim(low - 0.05 * (high - low), high + 0.2 * (high - low))
        if self.suggestion is not None:
            axes.axvspan(*self.get_lr_range(), alpha=0.1)
            axes.axvline(self.suggestion, linestyle="--", label=f"{self.suggestion:.2e}")
        if self.accuracies:
            beside = axes.twinx()
            beside.plot(self.rates, self.accuracies, color="C2", linestyle=":")
            beside.set_ylabel("accuracy (dotted)")
        axes.legend(loc="lower left")

    def __str__(self) -> str:
        found = "no rate" if self.suggestion is None else f"{self.suggestion:.3e}"
        tried = f"{len(self.rates)} rates from {self.rates[0]:.1e} to {self.rates[-1]:.1e}"
        return f"learning rate: {found} ({self.lr_select_method}; {tried}; stopped by: {self.stopped_by})"


def problem_of_method(name: str) -> Iterator[str]:
    """Yield a sentence with the nearest method, if there is none of that name."""
    if name not in SELECT_METHODS:
        known = choices(SELECT_METHODS)
        yield f"lr_select_method={name!r} is not known. Choose from: {known}.{suggestion(name, SELECT_METHODS)}"


def _matplotlib() -> Any:
    """Return matplotlib with its figures, without touching its global state."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plot", "Drawing the curves of find_lr()") from error
    return matplotlib


def _noisy_part(result: LRFinderResult) -> int:
    return min(result.lr_trunc, len(result.rates) // 10)


def _fall(result: LRFinderResult) -> tuple[int, int] | None:
    """Return where the curve counts from and where it is least; None if it does not fall in between."""
    first, least = _noisy_part(result), _min_loss(result)
    return (first, least) if least > first else None


def _min_loss(result: LRFinderResult) -> int:
    return int(np.argmin(result.smoothed))


def _steepest(result: LRFinderResult) -> int | None:
    """Find where the loss falls fastest before it is least, by lines through the losses around each rate.

    Not by the smoothed loss: that falls fastest where one loss is farthest below the mean of those before it, which is
    where the loss is least.
    """
    reach = max(1, _noisy_part(result))
    offsets = np.arange(-reach, reach + 1)
    if len(result.losses) < len(offsets):
        return None
    slopes = np.convolve(result.losses, offsets[::-1], "valid")[: max(0, _min_loss(result) - reach + 1)]
    return reach + int(np.argmin(slopes)) if len(slopes) and slopes.min() < 0 else None


def _sobel(result: LRFinderResult) -> int | None:
    """Find where the fall that holds the steepest point ends: there the slope of the smoothed loss changes its sign."""
    if (start := _steepest(result)) is None:
        return None
    rises = np.flatnonzero(np.gradient(np.asarray(result.smoothed))[start:] >= 0)
    end = start + int(rises[0]) if len(rises) else len(result.rates) - 1
    return min((end - 1, end), key=lambda index: result.smoothed[index])


def _laplace(result: LRFinderResult) -> int | None:
    """Find the sharpest bend in the lower half of the valley; a diverging end bends more, but higher up."""
    if (fall := _fall(result)) is None:
        return None
    smoothed = np.asarray(result.smoothed)
    bends = smoothed[:-2] - 2 * smoothed[1:-1] + smoothed[2:]
    is_low = smoothed[1:-1] <= (smoothed[fall[0]] + smoothed.min()) / 2
    is_low[: fall[0]] = False
    return 1 + int(np.argmax(np.where(is_low, bends, -np.inf))) if is_low.any() else None


def _max_acc(result: LRFinderResult) -> int | None:
    if not result.accuracies:
        raise DataError("lr_select_method='max_acc' needs accuracies: call find_lr(acc_test=True)")
    return None if np.isnan(result.accuracies).all() else int(np.nanargmax(result.accuracies))


SELECT_METHODS: dict[str, Callable[[LRFinderResult], int | None]] = {
    "steepest": _steepest,
    "min_loss": _min_loss,
    "max_acc": _max_acc,
    "max_range": lambda result: len(result.rates) - 1,
    "laplace": _laplace,
    "sobel": _sobel,
}
"""How a rate is selected: each returns the number of the update that had it."""


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
        self,
        settings: SweepSettings,
        verbs: Verbs,
        runtime: Runtime,
        optimizer: Optimizer,
        config: TrainerConfig,
        data_parallel: DataParallel | None = None,
        measure: Callable[[], float] | None = None,
        own_steps: OwnSteps | None = None,
    ) -> None:
        """`measure` returns the accuracy, where it is asked for."""
        self.state = TrainerState()
        self.curves = Curves(settings)
        self._measure = measure
        schedule = Schedule(None, 1, optimizer)
        optimization = Optimization(optimizer, schedule, runtime.scaler, config.max_grad_norm, data_parallel, own_steps)
        self._steps = TrainStep(verbs, runtime, config.seed, self.state, optimization)
        self._settings, self._groups, self._mu = settings, optimizer.param_groups, config.regularizer_mu
        first, *others = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._factors = [1.0, *(rate / first if first else 1.0 for rate in others)]

    def register(self, hooks: HookSet, regularizer: Regularizer | None = None) -> None:
        """Put the default steps and the sweep's own into a hook set."""
        self._steps.register(hooks, regularizer, self._mu)
        hooks.register(self.set_rate, Moment.BATCH_START, name="set_rate")
        hooks.register(self.note, Moment.BATCH_END, name="note")

    def set_rate(self, ctx: Context) -> None:
        """Give each window its rate; groups keep their ratio to the first one's."""
        if ctx.step.batch_in_window:
            return
        rate = self._settings.rate(len(self.curves.rates))
        for group, factor in zip(self._groups, self._factors, strict=True):
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.full_like(group["lr"], rate * factor) if is_tensor else rate * factor

    def note(self, ctx: Context) -> None:
        """Add a window's loss, and the accuracy after its update; end the sweep where there is a reason."""
        if not ctx.step.closes_window:
            return
        before = len(self.curves.rates)
        reason = self.curves.add(ctx.loss_value)
        self.state.stop_reason = self.state.stop_reason or reason
        if len(self.curves.rates) == before:
            return
        if self._measure is not None:
            self.curves.accuracies.append(self._measure())
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


def find_lr(parts: Parts, settings: SweepSettings) -> LRFinderResult:
    """Sweep over the rates of a trainer, on the first updates of its first epoch; then everything is as it was."""
    setup, runtime, optimization = parts.setup, parts.runtime, parts.optimization
    parts.status.refuse_to_train("train")
    sweep = RateSweep(
        settings, parts.verbs, runtime, optimization.optimizer, setup.config, parts.data_parallel,
        _accuracy(parts, settings), parts.own_steps,
    )  # fmt: skip
    sweep.register(hooks := HookSet(), parts.regularizer)
    kept = untouched(
        parts.model, optimization.optimizer, optimization.schedule, runtime.scaler, parts.state, setup.splits.train,
        runtime.device,
    )  # fmt: skip
    with EventStorage(), parts.hold.held(), kept, closing(parts.data.train_source(setup)) as source:
        routine = Routine(parts.ctx, hooks, Mode.TRAIN, "train")
        total = runtime.processes.total
        fit = Fit(routine, source, setup.plan, sweep.state, End(), UNLIMITED, parts.weigher.weigh, sum_loss=total)
        return sweep.run(lambda: parts.loop.fit(fit))


def _accuracy(parts: Parts, settings: SweepSettings) -> Callable[[], float] | None:
    """Return how to measure accuracy: with the default steps alone, so that no hook sees it."""
    if not settings.tests_accuracy:
        return None
    eval_dataset, evaluator = parts.setup.splits.for_evaluation, parts.evaluator
    refuse_accuracy(settings.acc_metric, parts.handler, eval_dataset)
    data = next(iter(evaluation_sets(None, eval_dataset).values()))
    hooks = evaluator.make_hooks()
    return lambda: evaluator.evaluate_set(data, "val", hooks, settings.acc_batches).metrics[settings.acc_metric]
