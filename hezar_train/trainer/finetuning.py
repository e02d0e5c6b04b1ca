"""Finetuning: a learning routine of its own length, with an optimizer of its own, that no checkpoint knows of.

The train optimizer, the run's counters and its folder are left alone; only the weights change. Here is also what
freezes parameters, for a finetuning or for good: what is frozen is left bit by bit as it is by every optimizer, because
it gets no gradient at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager

from torch import nn
from torch.optim import Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.data import Source, Window, preserved_randomness, seed_device, step_seed
from hezar_train.errors import ConfigError
from hezar_train.events import EventStorage
from hezar_train.loop import Context, Fit, HookSet, Loop, Routine, Verbs
from hezar_train.optim import Schedule, build_optimizer, build_scheduler
from hezar_train.plan import UNLIMITED, End, Plan, make_plan
from hezar_train.runtime import DataParallel, Runtime
from hezar_train.runtime.gradient_exchange import gradient_to_keep
from hezar_train.state import TrainerState
from hezar_train.trainer.model_runner import Regularizer
from hezar_train.trainer.own_code import OwnSteps
from hezar_train.trainer.train_step import Optimization, TrainStep
from hezar_train.types import Mode

__all__ = [
    "FROZEN",
    "Finetuning",
    "freeze_as_saved",
    "freeze_first",
    "freeze_named",
    "frozen_names",
    "only_trained",
    "unfreeze_first",
]

FROZEN = "frozen"
"""Where the state keeps the names of parameters that were frozen for good."""


class Finetuning:
    """The default hooks of finetuning, and what each call makes anew."""

    def __init__(
        self,
        config: TrainerConfig,
        runtime: Runtime,
        model: nn.Module,
        verbs: Verbs,
        optimization: Optimization,
        data_parallel: DataParallel,
        own_steps: OwnSteps | None = None,
    ) -> None:
        """Begin with the optimization of training; each call makes another."""
        self._own_steps = own_steps
        self._config, self._runtime, self._model, self._data_parallel = config, runtime, model, data_parallel
        self.optimization: Optimization | None = None
        """That of the last call."""
        self.steps = TrainStep(verbs, runtime, config.seed, TrainerState(), optimization)

    def follow(self, config: TrainerConfig) -> None:
        """Finetune by another config from the next call on."""
        self._config = config

    def register(self, hooks: HookSet, regularizer: Regularizer | None) -> None:
        """Put the default behaviour into a hook set, under its names."""
        self.steps.register(hooks, regularizer, self._config.regularizer_mu)

    def run(
        self, loop: Loop, ctx: Context, hooks: HookSet, split: str, source: Source, weigh: Callable[[Window], Window]
    ) -> Fit:
        """Finetune on data, outside of the run; return the walk that is done."""
        routine, plan, runtime = Routine(ctx, hooks, Mode.FINETUNE, split), self._plan(source), self._runtime
        with EventStorage(), preserved_randomness(), closing(source):
            seed_device(step_seed(self._config.seed, 0, runtime.rank), runtime.device)
            with self._begun(plan) as state:
                total = runtime.processes.total
                fit = Fit(routine, source, plan, state, self._end(plan), UNLIMITED, weigh, sum_loss=total)
                loop.fit(fit)
        return fit

    def _plan(self, source: Source) -> Plan:
        """Work out a call's length."""
        if self._config.counts_tokens:
            raise ConfigError(
                "finetune() counts finetune_steps in steps, and with global_batch_tokens or max_tokens_per_batch the "
                "steps of an update depend on its samples. Finetune with a Trainer whose config counts samples."
            )
        config = copy.copy(self._config)
        config.local_update_steps, config.batch_or_epoch = config.finetune_steps, config.finetune_batch_or_epoch
        return make_plan(config, source.num_samples, self._runtime.num_processes, source.batch_size)

    def _end(self, plan: Plan) -> End:
        """Return where a finetuning ends: with a global batch by samples, which are the same on all processes."""
        if self._config.global_batch_size is None:
            return End(plan.total_steps)
        return End(samples=plan.samples_of(0, plan.counted_steps))

    @contextmanager
    def _begun(self, plan: Plan) -> Iterator[TrainerState]:
        """Train only what the config says, with a new optimizer and new counters, while the body runs."""
        config = self._config
        with only_trained(self._model, config):
            if config.finetune_reinit:
                _reinitialise(self._model, config.finetune_param or [])
            state = TrainerState(total_epochs=plan.num_epochs)
            optimizer = self._build_optimizer()
            schedule = self._build_schedule(optimizer, plan)
            scaler, norm = self._runtime.scaler, config.max_grad_norm
            self.optimization = Optimization(optimizer, schedule, scaler, norm, self._data_parallel, self._own_steps)
            self.steps.begin(state, self.optimization)
            with gradients_set_aside(self._model):
                yield state

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
def gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Let the body begin without gradients, which an open or a failed window may have left; then put them back."""
    held = [(parameter, gradient_to_keep(parameter)) for parameter in model.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


MOST_NAMES = 8


def _some(names: list[str]) -> str:
    more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


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
                "leave no parameter to train; expected parts of the names of some. The model's parameters: "
                f"{_some([name for name, _ in model.named_parameters()])}."
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


def freeze_first(model: nn.Module, count: int) -> None:
    """Freeze the first `count` parameter tensors; the others stay as they are."""
    for parameter in _first(model, count).values():
        parameter.requires_grad_(False)
        parameter.grad = None  # one that is left would be applied by the next update


def unfreeze_first(model: nn.Module, count: int, optimizer: Optimizer) -> None:
    """Let the first `count` parameter tensors learn again; the others stay as they are."""
    first = _first(model, count)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if strangers := [name for name, parameter in first.items() if id(parameter) not in held]:
        raise ConfigError(
            f"the optimizer does not hold {', '.join(strangers)}, which did not require a gradient when the trainer "
            "was built. Build it with every parameter that will ever learn, then call freeze_to()."
        )
    for parameter in first.values():
        parameter.requires_grad_(True)


def freeze_as_saved(model: nn.Module, state: TrainerState) -> None:
    """Freeze what a restored state says, if anything was ever frozen for good."""
    if (frozen := state.hooks.get(FROZEN)) is not None:
        freeze_named(model, frozen)


def frozen_names(model: nn.Module) -> list[str]:
    """List what does not learn."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_named(model: nn.Module, frozen: Collection[str]) -> None:
    """Freeze what is named and let all others learn."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _first(model: nn.Module, count: int) -> dict[str, nn.Parameter]:
    named = list(model.named_parameters())
    if not 0 <= count <= len(named):
        raise ConfigError(f"{count} parameter tensors were asked for; expected 0 to {len(named)}, which the model has")
    return dict(named[:count])
