"""Several optimizers and schedules behind the face of one, so that everything that handles one handles several.

Each stays its own: stepped by its own model's turn, saved and restored under its model's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from hezar_train.checkpoint.optimizer_state import fitted_state
from hezar_train.errors import CheckpointError, ConfigError, choices
from hezar_train.optim import Schedule

__all__ = ["OptimizerDict", "ScheduleDict"]


class OptimizerDict(Optimizer):
    """Named optimizers; the groups of all of them, in order, are its own."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        _refuse_shared(self.optimizers)
        super().__init__([{"params": group["params"]} for group in self._groups()], {})
        self.param_groups = self._groups()

    def __getitem__(self, name: str) -> Optimizer:
        return self.optimizers[name]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every optimizer."""
        for optimizer in self.optimizers.values():
            optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of all."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each under its name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each its state back."""
        _refuse_others("optimizers", self.optimizers, state_dict)
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(fitted_state(state_dict[name], optimizer))
        self.param_groups = self._groups()  # torch makes new ones

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]


class ScheduleDict(Schedule):
    """Named schedules; only those of the models that are learning tick, each counting its own model's updates."""

    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self.schedules = dict(schedules)
        self.learning: list[str] = list(schedules)
        self.updates_of_others = 0
        super().__init__(None, self.first.period_updates)
        self.scheduler, self.rate_pace = self.first.scheduler, self.first.rate_pace
        self.is_plateau = any(schedule.is_plateau for schedule in schedules.values())
        self.warmup_updates = self.first.warmup_updates

    @property
    def first(self) -> Schedule:
        return next(iter(self.schedules.values()))

    def let_learn(self, names: Iterable[str], updates_of_others: int = 0) -> None:
        """Let the schedules of some models tick alone; so many updates of the run were not theirs."""
        self.learning, self.updates_of_others = list(names), updates_of_others

    def after_update(self, update_step: int, ends_epoch: bool, applied: bool = True) -> None:
        for name in self.learning:
            self.schedules[name].after_update(update_step - self.updates_of_others, ends_epoch, applied)

    def after_evaluation(self, metric_value: float) -> None:
        for name in self.learning:
            self.schedules[name].after_evaluation(metric_value)

    def rates(self) -> list[float]:
        """Return the learning rates of all groups, those of the models that are learning first."""
        names = sorted(self.schedules, key=lambda name: name not in self.learning)
        return [rate for name in names for rate in self.schedules[name].rates()]

    @property
    def is_warming(self) -> bool:
        return any(schedule.is_warming for schedule in self.schedules.values())

    def end_warmup(self) -> None:
        for schedule in self.schedules.values():
            schedule.end_warmup()

    def scale_rates(self, factor: float) -> None:
        for schedule in self.schedules.values():
            schedule.scale_rates(factor)

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule.state_dict() for name, schedule in self.schedules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_others("schedules", self.schedules, state)
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state[name])


def _refuse_shared(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise if two optimizers would step the same parameter."""
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise ConfigError(
                        f"the optimizers of {owner!r} and {name!r} share parameters, which both would step. Pass "
                        "optimizers={name: optimizer} of which each parameter is in one only."
                    )


def _refuse_others(what: str, ours: Iterable[str], saved: Mapping[str, Any]) -> None:
    if set(ours) != set(saved):
        raise CheckpointError(
            f"the checkpoint has {what} of the models {choices(map(str, saved))}; this trainer's are {choices(ours)}"
        )
