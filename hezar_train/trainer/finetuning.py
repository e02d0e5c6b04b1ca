"""Finetuning: a learning routine of its own length, with an optimizer of its own, that no checkpoint knows of.

The train optimizer, the run's counters and its folder are left alone; only the weights change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.data import Source
from hezar_train.errors import ConfigError
from hezar_train.loop import HookSet
from hezar_train.optim import Schedule, build_optimizer, build_scheduler
from hezar_train.plan import End, Plan, make_plan
from hezar_train.runtime import Runtime
from hezar_train.state import TrainerState
from hezar_train.trainer.model_runner import Regularizer
from hezar_train.trainer.optimization import Updater
from hezar_train.trainer.train_step import TrainSteps, Verbs

__all__ = ["Finetuning", "only_trained"]


class Finetuning:
    """The default hooks of finetuning, and what each call makes anew."""

    def __init__(self, config: TrainerConfig, runtime: Runtime, model: nn.Module, verbs: Verbs, first: Updater) -> None:
        self._config, self._runtime, self._model = config, runtime, model
        self.state = TrainerState()
        self.schedule = Schedule(None)
        self.steps = TrainSteps(verbs, runtime, self.state, first, self.schedule, config.seed)
        self.optimizer: Optimizer | None = None

    def register(self, hooks: HookSet, regularizer: Regularizer | None) -> None:
        """Put the default behaviour into a hook set, under its names."""
        self.steps.register(hooks, regularizer, self._config.regularizer_mu)

    def plan(self, source: Source) -> Plan:
        """Work out a call's length."""
        config = copy.copy(self._config)
        config.local_update_steps, config.batch_or_epoch = config.finetune_steps, config.finetune_batch_or_epoch
        return make_plan(config, source.num_samples, self._runtime.num_processes, source.batch_size)

    def end(self, plan: Plan) -> End:
        """Return where a finetuning ends: with a global batch by samples, which are the same on all processes."""
        if self._config.global_batch_size is None:
            return End(plan.total_steps)
        return End(samples=plan.samples_of(0, plan.counted_steps))

    @contextmanager
    def begin(self, plan: Plan) -> Iterator[TrainerState]:
        """Train only what the config says, with a new optimizer and new counters, while the body runs."""
        with only_trained(self._model, self._config):
            if self._config.finetune_reinit:
                _reinitialise(self._model, self._config.finetune_param or [])
            self.state = TrainerState(total_epochs=plan.num_epochs)
            self.optimizer = self._build_optimizer()
            self.schedule = self._build_schedule(self.optimizer, plan)
            if self.steps.replicas is not None:
                self.steps.replicas.watch(self.optimizer)
            updater = Updater(self.optimizer, self._runtime.scaler, self._config)
            self.steps.rebind(self.state, updater, self.schedule)
            yield self.state

    def _build_optimizer(self) -> Optimizer:
        config = self._config
        asked = config.finetune_optimizer or config.optimizer_name
        decay = config.weight_decay if config.finetune_weight_decay is None else config.finetune_weight_decay
        rate = config.learning_rate if config.finetune_learning_rate is None else config.finetune_learning_rate
        is_other = config.finetune_optimizer is not None
        kwargs = config.finetune_optimizer_kwargs or ({} if is_other else config.optimizer_kwargs)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return build_optimizer(
            str(asked), trained, learning_rate=rate, weight_decay=decay, kwargs=kwargs, device=self._runtime.device,
            momentum=None if is_other or {"momentum", "betas"} & set(kwargs or {}) else config.momentum,
        )  # fmt: skip

    def _build_schedule(self, optimizer: Optimizer, plan: Plan) -> Schedule:
        config = self._config
        if config.finetune_lr_scheduler is None:
            return Schedule(None, 1, optimizer)
        scheduler = build_scheduler(
            str(config.finetune_lr_scheduler), optimizer, total_ticks=plan.total_updates,
            kwargs=dict(config.finetune_lr_scheduler_kwargs or {}), total_epochs=plan.num_epochs,
        )  # fmt: skip
        return Schedule(scheduler, 1, optimizer)


@contextmanager
def only_trained(model: nn.Module, config: TrainerConfig) -> Iterator[None]:
    """Freeze what finetuning leaves alone; put every parameter's own flag back afterwards."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    is_frozen = _frozen_by(config)
    for name, parameter in model.named_parameters():
        if is_frozen(name):
            parameter.requires_grad_(False)
    try:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"finetune_param={config.finetune_param} and finetune_freeze_param={config.finetune_freeze_param} "
                "leave no parameter to train"
            )
        yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def _frozen_by(config: TrainerConfig) -> Callable[[str], bool]:
    frozen, only = config.finetune_freeze_param or [], config.finetune_param

    def is_frozen(name: str) -> bool:
        return any(part in name for part in frozen) or (only is not None and not any(part in name for part in only))

    return is_frozen


def _reinitialise(model: nn.Module, parts: list[str]) -> None:
    """Give the innermost modules whose parameters have one of the parts in their names new weights."""
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(prefix, recurse=False)]
        if own and any(part in name for name in own for part in parts):
            if not hasattr(module, "reset_parameters"):
                raise ConfigError(f"finetune_reinit=True, but {prefix!r} ({type(module).__name__}) cannot be reset")
            module.reset_parameters()
