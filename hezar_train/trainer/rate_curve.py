"""What a sweep over learning rates found: the curves, which rate to take from them, a picture, a JSON file.

Everything is read in log10 space, in which the rates of a sweep are evenly spaced. Nothing here trains or needs torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from hezar_train.config.files import read_mapping, write_mapping
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices, suggestion

__all__ = ["SELECT_METHODS", "WHOLE_RANGE", "LRFinderResult", "problem_of_method"]

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
