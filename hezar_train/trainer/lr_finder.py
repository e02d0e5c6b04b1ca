"""What a sweep over learning rates found: the curves, which rate to take from them, a picture, a JSON file.

Everything is read in log10 space, in which the rates of a sweep are evenly spaced. Nothing here trains or needs torch.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hezar_train.checkpoint import local_part
from hezar_train.config import TrainerConfig
from hezar_train.config.files import read_mapping, write_mapping
from hezar_train.data import preserved_randomness
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, NonFiniteError, choices, suggestion
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import Schedule
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.model_runner import Regularizer
from hezar_train.trainer.optimization import Updater
from hezar_train.trainer.train_step import TrainSteps, Verbs

if TYPE_CHECKING:
    from hezar_train.trainer import Trainer

__all__ = [
    "DEFAULT_STEPS",
    "SELECT_METHODS",
    "WHOLE_RANGE",
    "LRFinderResult",
    "LogFinder",
    "RateSweep",
    "SweepSettings",
    "find_lr",
    "lr_finder_auto_load",
    "problem_of_method",
    "refuse_accuracy",
    "untouched",
]

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
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path

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


# Let something train, and put everything back bit by bit, however it ends.
#
# Owns the list of what training changes: parameters, buffers (also those that no checkpoint holds), extra state,
# gradients and modes of the model; the optimizer's state and groups, the schedule, the scaler, the counters, the place
# of data that keeps one itself, the global generators and the device's. The very same tensors come back, with the
# values they had. It takes memory for a second copy of model and optimizer, and does not know of a module's plain
# attributes.

Restore = Callable[[], Any]
Memo = dict[int, Restore]


@contextmanager
def untouched(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    scaler: torch.amp.GradScaler | None,
    state: TrainerState,
    data: Any,
    device: torch.device,
) -> Iterator[None]:
    """Put everything back when the body ends, fails or is interrupted; it starts without gradients."""
    _refuse_what_cannot_come_back(model, data)
    memo: Memo = {}
    with ExitStack() as stack:  # what is kept last comes back first, and each comes back even if another fails
        stack.enter_context(preserved_randomness())
        stack.enter_context(_preserved_generator(device))
        for module in model.modules():
            stack.callback(_kept_module(module, memo))
        for container in (optimizer.param_groups, optimizer.state):
            stack.callback(_kept(container, memo))
        stack.callback(schedule.load_state_dict, copy.deepcopy(schedule.state_dict()))
        if scaler is not None:
            stack.callback(_kept_scaler(scaler))
        stack.callback(state.update, state.to_dict())
        for owner in _keepers_of(data):
            stack.callback(owner.load_state_dict, copy.deepcopy(owner.state_dict()))
        stack.callback(_kept_gradients(model.parameters()))
        yield


def _kept(value: Any, memo: Memo) -> Restore:
    """Return a function that gives back the same object with the same content."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        restore = _kept_tensor(value)
    elif isinstance(value, dict):
        restore = _kept_dict(value, memo)
    elif isinstance(value, list):
        restore = _kept_list(value, memo)
    else:
        saved = copy.deepcopy(value)
        return lambda: saved  # not noted: small values share their ids
    memo[id(value)] = restore
    return restore


def _kept_tensor(tensor: torch.Tensor) -> Restore:
    own = local_part(tensor)
    saved = own.detach().clone()
    # an expanded tensor has one value in many places, which may be written only once
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in own.stride())

    def restore() -> torch.Tensor:
        with torch.no_grad():
            own[once].copy_(saved[once])
        return tensor

    return restore


def _kept_dict(mapping: dict[Any, Any], memo: Memo) -> Restore:
    parts = {key: _kept(value, memo) for key, value in mapping.items()}

    def restore() -> dict[Any, Any]:
        mapping.clear()
        mapping.update({key: part() for key, part in parts.items()})
        return mapping

    return restore


def _kept_list(values: list[Any], memo: Memo) -> Restore:
    parts = [_kept(value, memo) for value in values]

    def restore() -> list[Any]:
        values[:] = [part() for part in parts]
        return values

    return restore


def _kept_module(module: nn.Module, memo: Memo) -> Restore:
    """Keep a module's own tensors, mode and extra state; its children are kept by themselves."""
    parameters, buffers, training = _kept(module._parameters, memo), _kept(module._buffers, memo), module.training
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    extra = copy.deepcopy(module.get_extra_state()) if has_extra else None

    def restore() -> None:
        parameters()
        buffers()
        module.training = training
        if has_extra:
            module.set_extra_state(extra)

    return restore


def _kept_gradients(parameters: Iterable[nn.Parameter]) -> Restore:
    """Set gradients aside."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in before.items():
            parameter.grad = gradient

    return restore


def _kept_scaler(scaler: torch.amp.GradScaler) -> Restore:
    saved = scaler.state_dict()

    def restore() -> None:
        scaler._per_optimizer_states.clear()  # an update that failed half way was unscaled and never stepped
        scaler.load_state_dict(saved)

    return restore


def _preserved_generator(device: torch.device) -> AbstractContextManager[None]:
    """Put back the generator of an accelerator; those of the CPU are kept apart."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "default_generators"):
        return nullcontext()
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _keepers_of(data: Any) -> list[Any]:
    """Return what keeps its own place in the data: a stream, a loader, a loader's sampler or dataset."""
    owners = [data, *(getattr(data, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    return [one for one in owners if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def _refuse_what_cannot_come_back(model: nn.Module, data: Any) -> None:
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise DataError(
            f"the parameters {', '.join(lazy)} have no shape before the first forward, to which they could not go "
            "back. Run the model once on a batch first."
        )
    if any(hasattr(one, "__next__") for one in (data, getattr(data, "dataset", None))):
        raise DataError(
            f"the training data is a {type(data).__name__} that can be read only once, so what is read now would be "
            "missing later. Pass a dataset, or an iterable that starts anew each time."
        )


# A sweep over learning rates: a few updates with geometrically growing rates show where the loss falls and explodes.
#
# It is a routine like any other: the same loop and default steps, with counters of its own and without logs, saves and
# evaluations that are due. This module owns the rates, the smoothing and when a sweep ends; `rate_curve` reads the
# curves, and `trials` puts back what a sweep changes.

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


# lernomatic's finder of learning rates: its names on `Trainer.find_lr`, and files that show a sweep again.
#
# Owns names, not behaviour: `rate_sweep` has the sweep, `rate_curve` what is read from it.


def find_lr(trainer: Trainer, settings: SweepSettings) -> LRFinderResult:
    """Sweep over the rates of a trainer, on the first updates of its first epoch; then everything is as it was."""
    return trainer._sweep(settings)


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
        num_steps = self.max_batches or self.trainer.plan.updates_in_epoch or DEFAULT_STEPS
        self.result = self.trainer.find_lr(
            self.lr_min, self.lr_max, num_steps, explode_thresh=self.explode_thresh, beta=self.beta,
            lr_select_method=self.lr_select_method, lr_min_factor=self.lr_min_factor, lr_max_scale=self.lr_max_scale,
            lr_trunc=self.lr_trunc, acc_test=self.acc_test, print_every=self.print_every if self.verbose else 0,
        )  # fmt: skip
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
