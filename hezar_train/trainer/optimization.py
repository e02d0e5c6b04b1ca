"""Optimization: gradients joined and unscaled, gradient norm and clipping, the optimizer's step, the schedule's tick.

The plain optimizer and a cached parameter list are used: Accelerate's wrapper costs more than a small model's step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.optim import (
    Schedule,
    build_momentum_schedule,
    build_optimizer,
    build_scheduler,
    parameter_groups,
    watches_metric,
)
from hezar_train.plan import Plan
from hezar_train.runtime import DataParallel
from hezar_train.runtime.sharding import gradient_norm, is_sharded, local_gradients
from hezar_train.trainer.own_code import OwnSteps

__all__ = [
    "FirstSettings",
    "Optimization",
    "optimizer_for",
    "parameters_of",
    "refuse_foreign_optimizer",
    "schedule_for",
    "scheduler_for",
]

CLIP_MARGIN = 1e-6  # what torch adds to the norm before it divides

DRIVEN = ("lr", "momentum", "betas")
"""What a schedule drives in a parameter group."""

LEFT_BEHIND = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""What torch's schedulers leave in a group for themselves, and would take up from one another."""


class Optimization:
    """Apply the gradients of a window, once they are known to be finite, and drive the schedule."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        data_parallel: DataParallel | None = None,
        own_steps: OwnSteps | None = None,
    ) -> None:
        """`data_parallel` joins the gradients of several processes; None where there is only this one.

        `own_steps` sees what others than this class do with the optimizer.
        """
        self.optimizer, self.schedule = optimizer, schedule
        self._scaler, self._data_parallel = scaler, data_parallel
        self.max_grad_norm = max_grad_norm
        """What the norm of the gradients is limited to; None: nothing."""
        self._list_parameters()
        self._step = optimizer.step  # after the scheduler was built: some schedulers wrap it
        self._gathered: object = None
        self._own_steps = OwnSteps() if own_steps is None else own_steps
        gather = weakref.WeakMethod(self._gather_own)  # an optimizer may outlive the trainer that it was passed to
        # before the data-parallel part sees a step: it joins what is weighed here
        self._own_steps.watch(optimizer, partial(_call_weak, gather), is_scaled=scaler is not None)
        if data_parallel is not None:
            data_parallel.watch(optimizer)

    def _list_parameters(self) -> None:
        """List what the optimizer steps; listing it in every update would cost as much as a small model's step."""
        groups = self.optimizer.param_groups
        self._num_groups = len(groups)
        self._parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self._is_uniform = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self._is_sharded = any(hasattr(p, "device_mesh") for p in self._parameters)

    def _gather_own(self, update: object, factor: float) -> None:
        """Weigh gradients of a plain backward, then gather them."""
        if factor != 1.0:
            for gradient in self._gradients():
                gradient.mul_(factor)
        self.gather_gradients(update)

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that learn."""
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    @property
    def skips_non_finite(self) -> bool:
        """Tell whether a scaler expects overflows and skips such updates by itself."""
        return self._scaler is not None

    def gather_gradients(self, update: object) -> None:
        """Sum the gradients over all processes and unscale them, once for an update, as which its window counts."""
        if self._gathered is update:  # no flag: whoever frees the gradients instead of `zero_grad` would leave it set
            return
        self._gathered = update
        if len(self.optimizer.param_groups) != self._num_groups:  # add_param_group(): it is normed and clipped, too
            self._list_parameters()
        if self._data_parallel is not None:
            self._data_parallel.join_gradients()
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)

    def gradient_norm(self) -> Tensor:
        """Return the norm over all gradients; it stays on the device."""
        if self._is_sharded:
            return gradient_norm(self._parameters)
        gradients = self._gradients()
        if not gradients:
            return torch.zeros(())
        if not self._is_uniform or any(g.is_sparse for g in gradients):
            return torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
        norms = list(torch._foreach_norm(gradients))
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def clip(self, norm: float) -> None:
        """Scale the gradients down to `max_grad_norm`, if they are longer."""
        if self.max_grad_norm is None or norm + CLIP_MARGIN <= self.max_grad_norm:
            return
        factor = self.max_grad_norm / (norm + CLIP_MARGIN)
        gradients = self._gradients()
        if self._is_uniform and not any(g.is_sparse for g in gradients):
            torch._foreach_mul_(gradients, factor)
            return
        for gradient in gradients:
            gradient.mul_(factor)

    def step(self) -> bool:
        """Step the optimizer; return False if the scaler skipped it."""
        self._own_steps.is_ours = True
        try:
            if self._scaler is None:
                self._step()
                return True
            before = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            return bool(self._scaler.get_scale() >= before)
        except (AttributeError, LookupError, TypeError) as error:
            if not _is_raised_by_torch_optim(error):  # but by a user's own optimizer, or a hook on it
                raise
            raise ConfigError(
                f"{type(self.optimizer).__name__} cannot step: {type(error).__name__}: {str(error)[:300]}. Its "
                "settings, or the state that came with a checkpoint, do not fit the parameters."
            ) from error
        finally:
            self._own_steps.is_ours = False

    def apply(self, norm: float) -> bool:
        """Do an update of a finite norm: clip, step, free the gradients; return False if the scaler skipped it."""
        self.clip(norm)
        is_applied = self.step()
        self.zero_grad()
        return is_applied

    def zero_grad(self) -> None:
        """Free the gradients; what comes next belongs to another update."""
        for parameter in self._parameters:
            parameter.grad = None
        self._gathered = None
        if self._data_parallel is not None:
            self._data_parallel.forget()

    def follow(self, schedule: Schedule) -> None:
        """Drive another schedule from now on."""
        self.schedule, self._step = schedule, self.optimizer.step

    def _gradients(self) -> list[Tensor]:
        """Return what this process holds of the gradients."""
        if self._is_sharded:
            return local_gradients(self._parameters)
        return [p.grad for p in self._parameters if p.grad is not None]


def _is_raised_by_torch_optim(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("torch.optim.")


def _call_weak(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    if (found := method()) is not None:
        found(*arguments)


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
        return None
    kwargs = _with_direction(name, config.lr_scheduler_kwargs, objective)
    return build_scheduler(name, optimizer, total_ticks=plan.total_ticks, kwargs=kwargs, total_epochs=plan.num_epochs)


def schedule_for(
    optimizer: Optimizer, scheduler: LRScheduler | None, config: TrainerConfig, plan: Plan, objective: str
) -> Schedule:
    """Return what ticks a scheduler, and the schedule of the momentum that a config names."""
    name, momentum = config.momentum_scheduler, None
    if name is not None:
        kwargs = _with_direction(name, config.momentum_scheduler_kwargs, objective)
        momentum = build_momentum_schedule(
            name, optimizer, total_ticks=plan.total_ticks, kwargs=kwargs, total_epochs=plan.num_epochs
        )
    return Schedule(scheduler, plan.schedule_updates, optimizer, momentum=momentum)


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


def _with_groups(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the first state of an optimizer, or of several by name, with the parameter groups of now."""
    if "param_groups" in now:
        return {**first, "param_groups": now["param_groups"]}
    return {name: _with_groups(first[name], now[name]) for name in now}
