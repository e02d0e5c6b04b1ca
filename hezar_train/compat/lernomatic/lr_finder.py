"""lernomatic's finder of learning rates, over `Trainer.find_lr`.

One sweep goes over an epoch, or `max_batches` updates; the trainer does not notice it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hezar_train.config.files import load_json, to_json, write_atomically
from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.runtime import logger
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.lr_finder import DEFAULT_STEPS, LRFinderResult, SweepSettings

__all__ = ["LRFinder", "LogFinder", "find_lr", "lr_finder_auto_load"]

FINDER = "finder"
"""What the settings stand under in a file, beside what was found."""

RESULT = [one.name for one in dataclasses.fields(LRFinderResult)]


def find_lr(trainer: PlainTrainer, settings: SweepSettings) -> LRFinderResult:
    """Sweep over the rates of a trainer, on the first updates of its first epoch; then everything is as it was."""
    return trainer.find_lr(**dataclasses.asdict(settings))


@dataclass(init=False)
class LRFinder:
    """What a finder of learning rates is told, and what it has found, under the names of lernomatic.

    One epoch leads from `lr_min` to `lr_max`, so that `num_epochs` is 1. Nothing reads `gamma`, `grad_thresh` and
    `expr_id`, as in lernomatic: they are a user's own notes.
    """

    trainer: PlainTrainer | None
    num_epochs: int = 1
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

    def __init__(self, trainer: PlainTrainer | None, **settings: Any) -> None:
        known = {one.name: one.default for one in dataclasses.fields(self) if one.name != "trainer"}
        for name, value in settings.items():
            if name not in known:
                told = f"Choose from: {choices(known)}.{suggestion(name, known)}"
                raise ConfigError(f"{name}={value!r} is no setting of {type(self).__name__}. {told}")
        vars(self).update(known | settings, trainer=trainer)

    @property
    def lr_mult(self) -> float:
        """The factor from one rate to the next; 0 before a sweep."""
        rates = [] if self.result is None else self.result.rates
        return rates[1] / rates[0] if len(rates) > 1 else 0.0

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
    def loss_grad_history(self) -> list[float]:
        """What each update but the first has added to the mean of the losses, which is not corrected for its start."""
        losses = [] if self.result is None else self.result.losses
        means = accumulate(losses, lambda mean, loss: self.beta * mean + (1 - self.beta) * loss, initial=0.0)
        return [after - before for before, after in pairwise(means)][1:]

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
        """Write what was found, with the settings, as JSON, whatever the file is called."""
        settings = {name: getattr(self, name) for name in self._settings()}
        return write_atomically(path, to_json({**dataclasses.asdict(self._found()), FINDER: settings}))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `save` wrote: what was found, and the settings."""
        found = _read(path)
        self.result = LRFinderResult(**{name: found[name] for name in RESULT})
        saved = {"lr_select_method": self.result.lr_select_method, **found.get(FINDER, {})}
        vars(self).update({name: saved[name] for name in self._settings() if name in saved})

    def _settings(self) -> list[str]:
        return [one.name for one in dataclasses.fields(self) if one.name not in {"trainer", "result"}]

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


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found = load_json(Path(path).read_bytes())
    except ValueError as error:
        raise DataError(f"{os.fspath(path)} is no file that a finder has saved here: {error}") from error
    if not isinstance(found, dict) or (missing := [name for name in RESULT if name not in found]):
        lacks = f": it lacks {choices(missing)}" if isinstance(found, dict) else ""
        raise DataError(f"{os.fspath(path)} is no file that a finder has saved here{lacks}")
    return found


class LogFinder(LRFinder):
    """Sweep over a trainer's learning rates, each a constant factor above the one before."""

    def find(self) -> tuple[float, float]:
        """Sweep; return the lowest and the highest rate to train with."""
        if self.trainer is None:
            raise DataError("this finder has no trainer: it was read from a file, and can only show what was found")
        if self.num_epochs > 1:
            logger.warning("num_epochs=%d: one epoch leads from lr_min to lr_max, and the sweep ends", self.num_epochs)
        num_steps = self.max_batches or self.trainer.plan.updates_in_epoch or DEFAULT_STEPS
        self.result = self.trainer.find_lr(
            self.lr_min, self.lr_max, num_steps, explode_thresh=self.explode_thresh, beta=self.beta,
            lr_select_method=self.lr_select_method, lr_min_factor=self.lr_min_factor, lr_max_scale=self.lr_max_scale,
            lr_trunc=self.lr_trunc, acc_test=self.acc_test, acc_batches=None,
            print_every=self.print_every if self.verbose else 0,
        )  # fmt: skip
        return self.get_lr_range()


def lr_finder_auto_load(path: str | os.PathLike[str]) -> LogFinder:
    """Return a finder without a trainer that shows what a saved one found."""
    finder = LogFinder(None)
    finder.load(path)
    return finder
