"""lernomatic's schedules: objects that are asked for the rate of an iteration, of an epoch or of an accuracy.

    trainer = Trainer(model, lr_scheduler=TriangularScheduler(stepsize=500, lr_min=1e-4, lr_max=1e-2), ...)

Rates are those of lernomatic, but for five that do not work there and here do what their names say: `LinearDecay`,
`LogDecay`, `DecayToEpoch`, `DecayWhenEpoch` and `TriangularDecayWhenAcc`. What an object counts is in every checkpoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hezar_train.errors import ConfigError, DataError, choices, suggestion

__all__ = [
    "DecayToEpoch",
    "DecayWhenAcc",
    "DecayWhenEpoch",
    "EpochSetScheduler",
    "ExponentialDecayScheduler",
    "InvTriangularScheduler",
    "LRScheduler",
    "LinearDecayScheduler",
    "LogDecayScheduler",
    "StepScheduler",
    "Triangular2ExpScheduler",
    "Triangular2Scheduler",
    "TriangularDecayWhenAcc",
    "TriangularExpScheduler",
    "TriangularScheduler",
    "WarmRestartScheduler",
    "is_schedule",
    "rate_of",
]

BY_EPOCH = frozenset({"EpochSetScheduler", "DecayWhenEpoch", "DecayToEpoch"})
BY_ACCURACY = frozenset({"DecayWhenAcc"})
BY_BOTH = frozenset({"TriangularDecayWhenAcc"})


class LRScheduler:
    """What every schedule takes: the least and the largest rate, the iterations from one to the other, a history."""

    options: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Settings of a kind of schedule, with their defaults."""

    def __init__(self, **settings: Any) -> None:
        shared = {"lr_min": 1e-4, "lr_max": 1.0, "stepsize": 1000, "start_iter": 0, "no_lr_history": False,
                  "lr_history_size": 0}  # fmt: skip
        known = shared | self.options
        for name, value in settings.items():
            if name not in known:
                told = f"Choose from: {choices(known)}.{suggestion(name, known)}"
                raise ConfigError(f"{name}={value!r} is no setting of {type(self).__name__}. {told}")
        vars(self).update(known | settings)
        self.lr_history_ptr = 0
        size = 0 if self.no_lr_history else self.lr_history_size
        self.lr_history = np.zeros(size) if size else None

    lr_min: float
    lr_max: float
    stepsize: int
    start_iter: int
    no_lr_history: bool
    lr_history_size: int

    def __repr__(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        return f"{type(self).__name__}: rates from {self.lr_min:.4f} to {self.lr_max:.4f}\n"

    def get_lr(self, *at: Any) -> float:
        """Return the rate at an iteration (or epoch, or accuracy)."""
        rate = float(self.rate(*at))
        if self.lr_history is not None:
            if self.lr_history_ptr == len(self.lr_history):
                raise DataError(f"lr_history_size={self.lr_history_size} is too small for another rate of {self!r}.")
            self.lr_history[self.lr_history_ptr] = rate
            self.lr_history_ptr += 1
        return rate

    def rate(self, cur_iter: float) -> float:
        """Say the rate; each kind of schedule has its own."""
        raise NotImplementedError(f"{type(self).__name__} has no rate(cur_iter), and no get_lr(cur_iter) of its own")

    def plot_history(self, ax: Any, title: str | None = None) -> None:
        """Draw the rates that were told."""
        if self.lr_history is None or self.lr_history_ptr == 0:
            raise DataError(f"{self!r} has no history: set lr_history_size, and train")
        ax.plot(np.arange(self.lr_history_ptr), self.lr_history[: self.lr_history_ptr])
        ax.set(xlabel="Iteration", ylabel="Learning rate", title=title or f"[{self!r}] learning rate history")

    def triangle(self, iteration: float) -> tuple[float, float]:
        """Return the height of the triangle at an iteration, from 0 to 1, and the number of its cycle."""
        cycle = np.floor(1 + iteration / (2 * self.stepsize))
        return max(0.0, 1.0 - abs(iteration / self.stepsize - 2 * cycle + 1)), float(cycle)

    def between(self, share: float) -> float:
        """Return a rate between the least and the largest."""
        return self.lr_min + (self.lr_max - self.lr_min) * share


class StepScheduler(LRScheduler):
    """Multiply by `lr_decay` at every multiple of `lr_decay_every`, the first iteration included."""

    options = {"lr_decay": 0.001, "lr_decay_every": 10000}  # noqa: RUF012
    lr_decay: float
    lr_decay_every: int

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cur_lr = self.lr_max

    def rate(self, cur_iter: float) -> float:
        self.cur_lr *= self.lr_decay if cur_iter % self.lr_decay_every == 0 else 1.0
        return self.cur_lr


class LinearDecayScheduler(LRScheduler):
    """Go in a line from the largest to the least rate, in `num_iters` iterations."""

    options = {"num_iters": 100000}  # noqa: RUF012
    num_iters: int

    def rate(self, cur_iter: float) -> float:
        return self.between(1.0 - min(1.0, cur_iter / self.num_iters))


class LogDecayScheduler(LRScheduler):
    """Go from the largest to the least rate in `num_iter` iterations, each by the same factor."""

    options = {"num_iter": 50000}  # noqa: RUF012
    num_iter: int

    def rate(self, cur_iter: float) -> float:
        return float(self.lr_max * (self.lr_min / self.lr_max) ** min(1.0, cur_iter / self.num_iter))


class ExponentialDecayScheduler(LRScheduler):
    """Decay from the largest rate as exp(-k * iteration)."""

    options = {"k": 0.001}  # noqa: RUF012
    k: float

    def rate(self, cur_iter: float) -> float:
        return self.lr_max * float(np.exp(-self.k * cur_iter))


class WarmRestartScheduler(LRScheduler):
    """Follow a cosine from the largest rate to the least and back, by the times it was asked."""

    options = {"step_per_epoch": 1000}  # noqa: RUF012
    step_per_epoch: int

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.batch_since_restart = 1

    def rate(self, cur_iter: float) -> float:
        done = 1.0 / self.step_per_epoch if cur_iter < 1 else self.batch_since_restart
        self.batch_since_restart += 1
        return self.between((1 + float(np.cos(np.pi * done / (2 * self.stepsize)))) / 2)


class TriangularScheduler(LRScheduler):
    """Go up and down between the two rates, `stepsize` iterations each way."""

    def rate(self, cur_iter: float) -> float:
        since = cur_iter - self.start_iter
        return self.lr_min if since < 1 else self.between(self.triangle(since)[0])


class InvTriangularScheduler(LRScheduler):
    """Go down from the largest rate and up again: what `TriangularScheduler` is short of it."""

    def rate(self, cur_iter: float) -> float:
        since = cur_iter - self.start_iter
        return self.lr_max if since < 1 else self.lr_max - self.between(self.triangle(since)[0])


class TriangularExpScheduler(LRScheduler):
    """A triangle that decays as exp(-k * iteration)."""

    options = {"k": 1e-4}  # noqa: RUF012
    k: float

    def rate(self, cur_iter: float) -> float:
        since = cur_iter - self.start_iter
        return self.lr_min if since <= 0 else self.between(self.triangle(since)[0]) * float(np.exp(-self.k * cur_iter))


class Triangular2Scheduler(LRScheduler):
    """A triangle whose slopes halve from cycle to cycle."""

    def rate(self, cur_iter: float) -> float:
        since = cur_iter - self.start_iter
        if since <= 0:
            return self.lr_min
        height, cycle = self.triangle(since)
        return self.between(min(1.0, max(0.0, 1.0 - (1.0 - height) / 2**cycle)))


class Triangular2ExpScheduler(Triangular2Scheduler):
    """`Triangular2Scheduler` that decays as exp(-k * iteration)."""

    options = {"k": 1e-4}  # noqa: RUF012
    k: float

    def rate(self, cur_iter: float) -> float:
        factor = float(np.exp(-self.k * cur_iter)) if cur_iter > self.start_iter else 1.0
        return super().rate(cur_iter) * factor


class EpochSetScheduler(LRScheduler):
    """Set the rate that a dict has for an epoch, from that epoch on; it has one for epoch 0."""

    def __init__(self, schedule: dict[int, float], lr_value: bool | None = None, **settings: Any) -> None:
        """`lr_value` is kept, and the values are rates: lernomatic's own default, False, does not multiply either."""
        if type(schedule) is not dict or 0 not in schedule or any(type(epoch) is not int for epoch in schedule):
            raise ConfigError(f"schedule={schedule!r}: expected a dict of epochs (0 among them) and their rates")
        if lr_value is not None and not lr_value:
            raise ConfigError("lr_value=False was given, to multiply the rate; the values are rates: leave it out.")
        super().__init__(**settings)
        self.schedule, self.lr_value, self.learning_rate = schedule, bool(lr_value), 0.0

    def rate(self, cur_epoch: float) -> float:
        self.learning_rate = self.schedule.get(int(cur_epoch), self.learning_rate)
        return self.learning_rate


class TriangularDecayWhenAcc(LRScheduler):
    """A triangle, `lr_decay` times as high while the accuracy is more than `acc_thresh` below the best one."""

    options = {"lr_decay": 0.9, "acc_thresh": 0.05}  # noqa: RUF012
    lr_decay: float
    acc_thresh: float
    best_acc = 0.0

    def rate(self, cur_iter: float, cur_acc: float = 0.0) -> float:
        self.best_acc = max(self.best_acc, cur_acc)
        since = cur_iter - self.start_iter
        if since <= 0:
            return self.lr_min
        is_worse = cur_acc < self.best_acc * (1.0 - self.acc_thresh)
        return self.between(self.triangle(since)[0]) * (self.lr_decay if is_worse else 1.0)


class DecayWhenAcc(LRScheduler):
    """Multiply by `lr_decay` whenever the accuracy is more than `acc_thresh` below the best one."""

    options = {"initial_lr": 0.01, "lr_decay": 0.9, "acc_thresh": 0.05}  # noqa: RUF012
    initial_lr: float
    lr_decay: float
    acc_thresh: float

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.best_acc, self.learning_rate = 0.0, self.initial_lr

    def rate(self, cur_acc: float) -> float:
        self.best_acc = max(self.best_acc, cur_acc)
        self.learning_rate *= self.lr_decay if cur_acc < self.best_acc * (1.0 - self.acc_thresh) else 1.0
        return self.learning_rate


class DecayWhenEpoch(LRScheduler):
    """Multiply the largest rate by `lr_decay` after every `num_epochs` epochs."""

    options = {"num_epochs": 8, "lr_decay": 0.9}  # noqa: RUF012
    num_epochs: int
    lr_decay: float

    def rate(self, cur_epoch: float) -> float:
        return float(self.lr_max * self.lr_decay ** (cur_epoch // self.num_epochs))


class DecayToEpoch(LRScheduler):
    """After `non_decay_time` epochs go in a line from `initial_lr` to `final_lr`, in `decay_length` epochs."""

    options = {"non_decay_time": 0, "initial_lr": 3e-4, "final_lr": 0.0, "decay_length": 40}  # noqa: RUF012
    non_decay_time: int
    initial_lr: float
    final_lr: float
    decay_length: int

    def rate(self, cur_epoch: float) -> float:
        done = min(1.0, max(0.0, (cur_epoch - self.non_decay_time) / self.decay_length))
        return self.initial_lr + (self.final_lr - self.initial_lr) * done


def is_schedule(given: Any) -> bool:
    """Tell whether an object is asked for rates as lernomatic asks; torch's schedulers are asked in another way."""
    return callable(getattr(given, "get_lr", None)) and not hasattr(given, "get_last_lr")


def rate_of(schedule: Any, *, cur_iter: int, cur_epoch: int, cur_acc: float) -> float:
    """Ask a schedule, also one of lernomatic's own classes, with what it counts by."""
    kinds = {kind.__name__ for kind in type(schedule).__mro__}
    if kinds & BY_EPOCH:
        return float(schedule.get_lr(cur_epoch))
    if kinds & BY_ACCURACY:
        return float(schedule.get_lr(cur_acc))
    return float(schedule.get_lr(cur_iter, cur_acc) if kinds & BY_BOTH else schedule.get_lr(cur_iter))
