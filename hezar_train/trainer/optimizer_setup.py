"""The optimizer and the schedule that a config asks for, and the settings they began with.

How an optimizer is built from its name is in `optim/optimizers.py`; what steps it is `Optimization` in `train_step.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.config import TrainerConfig
from hezar_train.config.checks import doubled_warmup
from hezar_train.errors import ConfigError, a_kind
from hezar_train.optim import (
    Schedule,
    build_momentum_schedule,
    build_optimizer,
    build_scheduler,
    parameter_groups,
    watches_metric,
)
from hezar_train.plan import Plan
from hezar_train.runtime.sharding import is_sharded

__all__ = [
    "FirstSettings",
    "driven_settings",
    "optimizer_for",
    "parameters_of",
    "refuse_foreign_optimizer",
    "reset_driven",
    "schedule_for",
    "scheduler_for",
]

DRIVEN = ("lr", "momentum", "betas")
"""What a schedule drives in a parameter group."""

LEFT_BEHIND = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""What torch's schedulers leave in a group for themselves, and would take up from one another."""


class FirstSettings:
    """What an optimizer and its schedule began with, to which both may go back."""

    def __init__(
        self,
        optimizer: Optimizer,
        make_schedule: Callable[[LRScheduler | None], Schedule],
        given: LRScheduler | None = None,
    ) -> None:
        """Note the rates and momenta, then make the schedule, over the scheduler given, which may change them."""
        self._optimizer, self.given = optimizer, given
        self._driven = driven_settings(optimizer)
        self.schedule = make_schedule(given)
        self._states = copy.deepcopy((optimizer.state_dict(), self.schedule.state_dict()))

    def restore(self, schedule: Schedule) -> None:
        """Put optimizer and schedule back to where they began, for a call that is to start with fresh ones."""
        optimizer_state, schedule_state = copy.deepcopy(self._states)
        self._optimizer.load_state_dict(optimizer_state)
        schedule.load_state_dict(schedule_state)

    def reset_driven(self) -> None:
        """Put back what a schedule drives, for another schedule to begin with."""
        reset_driven(self._optimizer, self._driven)

    def note_settings(self) -> None:
        """Let an optimizer that is made fresh for each call (`fresh_optimizer`) begin with the settings of now."""
        first_optimizer, first_schedule = self._states
        self._states = (_with_groups(first_optimizer, copy.deepcopy(self._optimizer.state_dict())), first_schedule)

    def note_schedule(self, schedule: Schedule, given: LRScheduler | None) -> None:
        """Let fresh ones begin with another schedule, over the scheduler given, and the settings of now."""
        self.schedule, self.given = schedule, given
        self._states = (self._states[0], copy.deepcopy(schedule.state_dict()))
        self.note_settings()


def driven_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what a schedule is going to drive, as it is before."""
    names = (*DRIVEN, *LEFT_BEHIND)
    return [copy.deepcopy({key: group[key] for key in names if key in group}) for group in optimizer.param_groups]


def reset_driven(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Put back what `driven_settings` returned; a rate that is a tensor stays the same tensor."""
    for group, first in zip(optimizer.param_groups, settings, strict=True):
        for key in LEFT_BEHIND:
            group.pop(key, None)
        for key, value in first.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = copy.deepcopy(value)


def optimizer_for(model: nn.Module, config: TrainerConfig, device: torch.device, default: str) -> Optimizer:
    """Build the optimizer that a config names over a model's parameters."""
    return build_optimizer(
        config.optimizer_name if config.optimizer is not None else default,
        parameters_of(model, config),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        kwargs=config.optimizer_kwargs,
        device=device,
        momentum=config.momentum,
    )


def scheduler_for(
    optimizer: Optimizer, config: TrainerConfig, plan: Plan, objective: str, default: str | None
) -> LRScheduler | None:
    """Build the learning-rate scheduler that a config names, laid out over the plan; None if it names none."""
    if (name := config.scheduler_name or default) is None:
        if config.lr_scheduler_kwargs:
            raise ConfigError(
                f"lr_scheduler_kwargs={config.lr_scheduler_kwargs!r} would change nothing: no lr_scheduler is named, "
                "so that the rate stays as it is. Name the one that takes them (lr_scheduler='cosine_annealing'), or "
                "leave them out."
            )
        return None
    if problems := list(doubled_warmup(config.warmup_steps, name, config.lr_scheduler_kwargs)):
        raise ConfigError(problems)  # of the default, which the config did not know
    kwargs, warmup = _with_direction(name, config.lr_scheduler_kwargs, objective), plan.warmup_updates
    if name == "inverse_sqrt" and warmup:
        kwargs.setdefault("timescale", warmup / (plan.schedule_updates or warmup))
    return build_scheduler(
        name, optimizer, total_ticks=plan.total_ticks, kwargs=kwargs, total_epochs=plan.num_epochs,
        is_warmed=bool(config.warmup_steps),  # also without a run, of which a share is no update
    )  # fmt: skip


def schedule_for(
    optimizer: Optimizer, scheduler: LRScheduler | None, config: TrainerConfig, plan: Plan, objective: str
) -> Schedule:
    """Return what ticks a scheduler, and the schedule of the momentum that a config names."""
    name, momentum = config.momentum_scheduler, None
    if name is not None:
        kwargs = _with_direction(name, config.momentum_scheduler_kwargs, objective)
        momentum = build_momentum_schedule(
            name, optimizer, total_ticks=plan.ticks_of_the_run, kwargs=kwargs, total_epochs=plan.num_epochs
        )
    return Schedule(scheduler, plan.schedule_updates, optimizer, momentum=momentum, warmup_updates=plan.warmup_updates)


def _with_direction(name: str, given: Mapping[str, Any] | None, objective: str) -> dict[str, Any]:
    """Tell a schedule that watches the metric which way is better."""
    kwargs = dict(given or {})
    if watches_metric(name):
        kwargs.setdefault("mode", "max" if objective == "maximize" else "min")
    return kwargs


def parameters_of(model: nn.Module, config: TrainerConfig) -> Any:
    """Return what an optimizer is built over: all parameters, or groups with a weight decay of their own."""
    if config.weight_decay_norm is None and config.weight_decay_bias is None:
        return model.parameters()
    return parameter_groups(
        model, weight_decay=config.weight_decay, weight_decay_norm=config.weight_decay_norm,
        weight_decay_bias=config.weight_decay_bias,
    )  # fmt: skip


def refuse_foreign_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer that was passed in would leave the model as it is."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(
            f"the optimizer is {a_kind(optimizer)}; expected a torch.optim.Optimizer over model.parameters(), such as "
            "torch.optim.AdamW(model.parameters()). A name goes to the config: optimizer='AdamW'."
        )
    ours = {id(parameter) for parameter in model.parameters()}
    foreign = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in ours]
    if foreign and is_sharded(model):
        raise ConfigError(
            "the optimizer passed in was built over whole parameters, and sharding='full' has cut them since. Name it "
            "in the config (optimizer, optimizer_kwargs), or make it in an overridden build_optimizer()."
        )
    if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer passed in holds none of the model's parameters, so the model would stay as it is. Build it "
            "over model.parameters()."
        )
    if isinstance(optimizer, SparseAdam):
        _refuse_dense(model)


def _refuse_dense(model: nn.Module) -> None:
    """Raise if a model has layers of torch's whose gradients are not sparse, as SparseAdam needs them."""
    for name, module in model.named_modules():
        is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if is_trained and type(module).__module__.startswith("torch.nn") and not getattr(module, "sparse", False):
            raise ConfigError(
                f"optimizer='SparseAdam' takes sparse gradients alone, and those of {name or 'the model'} "
                f"({type(module).__name__}) are dense. Use 'AdamW', or train embeddings with sparse=True only."
            )


def _with_groups(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the first state of an optimizer, or of several by name, with the parameter groups of now."""
    if "param_groups" in now:
        return {**first, "param_groups": now["param_groups"]}
    return {name: _with_groups(first[name], now[name]) for name in now}
