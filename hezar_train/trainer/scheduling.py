"""What a config names, made: the optimizer, the schedules of rate and momentum, and when to stop early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.hooks import Stopping
from hezar_train.hooks.early_stopping import objective_of
from hezar_train.optim import Schedule, build_momentum_schedule, build_optimizer, build_scheduler, watches_metric
from hezar_train.trainer.checks import evaluation_sets, parameters_of
from hezar_train.trainer.parts import Parts

__all__ = ["Scheduling"]


class Scheduling(Parts):
    """From a config to the optimizer and what drives it."""

    def build_optimizer(self) -> Optimizer:
        """Make the optimizer that the config names; called if none was passed."""
        return self._optimizer_over(self.model)

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Make the schedule that the config names, over `self.optimizer`; called if none was passed."""
        return self._scheduler_over(self.optimizer)

    def _optimizer_over(self, model: nn.Module) -> Optimizer:
        config = self.config
        name = config.optimizer_name if config.optimizer is not None else self.default_optimizer
        return build_optimizer(
            name, parameters_of(model, config), learning_rate=config.learning_rate, weight_decay=config.weight_decay,
            kwargs=config.optimizer_kwargs, device=self.runtime.device, momentum=config.momentum,
        )  # fmt: skip

    def _scheduler_over(self, optimizer: Optimizer) -> LRScheduler | None:
        name = self.config.scheduler_name or self.default_lr_scheduler
        if name is None:
            return None
        kwargs = self._with_direction(name, self.config.lr_scheduler_kwargs)
        plan = self.plan
        return build_scheduler(
            name, optimizer, total_ticks=plan.total_ticks, kwargs=kwargs, total_epochs=plan.num_epochs
        )

    def _make_schedule(self, given: LRScheduler | None) -> Schedule:
        return self._schedule_over(self.optimizer, given or self.build_lr_scheduler())

    def _schedule_over(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> Schedule:
        name, plan, momentum = self.config.momentum_scheduler, self.plan, None
        if name is not None:
            kwargs = self._with_direction(name, self.config.momentum_scheduler_kwargs)
            momentum = build_momentum_schedule(
                name, optimizer, total_ticks=plan.total_ticks, kwargs=kwargs, total_epochs=plan.num_epochs
            )
        return Schedule(scheduler, plan.schedule_updates, optimizer, momentum=momentum)

    def _with_direction(self, name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Tell a schedule that watches the metric which way is better."""
        kwargs = dict(given or {})
        if watches_metric(name):
            kwargs.setdefault("mode", "max" if self._objective() == "maximize" else "min")
        return kwargs

    def _objective(self) -> str:
        return objective_of(self.best_key, self._set_names(), self.metrics_handler.objective)

    def _make_stopping(self) -> Stopping:
        handler = self.metrics_handler
        return Stopping.from_config(self.config, self._set_names(), handler.output_keys, handler.objective)

    def _set_names(self) -> list[str]:
        """Name the sets that the run evaluates on; a single one has the empty name."""
        return list(evaluation_sets(None, self.eval_dataset)) if self.evaluates else []
