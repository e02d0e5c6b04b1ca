"""Several models in one run: named, each with its optimizer, schedule and hooks; one after another, or taking turns.

`interact="sequential"`: one model goes through its whole routine, then the next. `interact="parallel"`: at each moment
every model has its turn, on the same batch. A subclass with its own `training_step` calls `learn(name, loss)` for each
model. Whatever way, it is saved and resumed like a single model: bit by bit.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError, HookError, NonFiniteError, choices, suggestion
from hezar_train.loop import Alias, Context, Fixed, HookCall, HookSet, Moment, insert_hook, refuse_non_finite
from hezar_train.multi_model.optimizer_dict import OptimizerDict, ScheduleDict
from hezar_train.multi_model.session import MultiModelSession, MultiModelStatus
from hezar_train.multi_model.turns import MultiModelLoop, Turns
from hezar_train.optim import Schedule
from hezar_train.runtime import enable_gradient_checkpointing
from hezar_train.trainer import Given, Parts, RoutineResult, Trainer, assemble
from hezar_train.trainer.export import exchanged_names, give_parameters, take_parameters
from hezar_train.trainer.model_runner import ModelRunner, refuse_unused_criterion
from hezar_train.trainer.optimizer_setup import (
    optimizer_for,
    refuse_foreign_optimizer,
    schedule_for,
    scheduler_for,
)
from hezar_train.trainer.train_step import Optimization, TrainStep, read_both
from hezar_train.types import Mode

__all__ = ["INTERACTIONS", "ModelDict", "MultiModelTrainer"]

INTERACTIONS = ("sequential", "parallel")
OUTSIDE_BATCHES = frozenset({Moment.FIT_START, Moment.EPOCH_START, Moment.EPOCH_END, Moment.FIT_END})


class MultiModelTrainer(Trainer):
    """Train several models, given by name."""

    optimizer: OptimizerDict
    schedule: ScheduleDict

    def __init__(
        self,
        config: TrainerConfig,
        models: Mapping[str, nn.Module] | Sequence[nn.Module] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        interact: str = "sequential",
        eval_model: str | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        **others: Any,
    ) -> None:
        """Take what a Trainer takes; `eval_model` names the model that is evaluated, finetuned and predicts.

        If it is left out: while training one after another, the model that learns; else the first.
        """
        if interact not in INTERACTIONS:
            raise ConfigError(
                f"interact={interact!r} is not known. Choose from: {choices(INTERACTIONS)}."
                f"{suggestion(interact, INTERACTIONS)}"
            )
        self.config, self.interaction, self.eval_model = config, interact, eval_model
        self.models = named(self.init_multiple_models() if models is None else models)
        self.model_names = list(self.models)
        self._given_optimizers = dict(optimizers or {})
        refuse_misnamed(self.models, [*self._given_optimizers, *filter(None, [eval_model])])
        if others.get("optimizer") is not None:
            raise ConfigError("optimizer= is one model's; pass optimizers={name: optimizer} for several")
        self._turns, self._walks_by_moments = Turns(), False
        self.model_hooks = {name: HookSet() for name in self.model_names}
        if config.precision == "fp16":
            raise ConfigError("mixed_precision='fp16' scales the loss of one optimizer; use 'bf16' for several models")
        if config.counts_tokens:
            raise ConfigError(
                "global_batch_tokens and max_tokens_per_batch are planned for one model; several count samples. Set "
                "global_batch_size or batch_size (group_by_length goes with them)"
            )
        if config.sharding != "none":
            raise ConfigError("sharding='full' cuts one model; several are trained with sharding='none'")
        super().__init__(config, ModelDict(self.models), train_dataset, eval_dataset, **others)

    def init_multiple_models(self) -> Mapping[str, nn.Module] | Sequence[nn.Module]:
        """Make the models where none were passed, from `self.config`; the default has none to offer."""
        raise ConfigError("MultiModelTrainer needs models by name, such as {'generator': g, 'discriminator': d}")

    def init_multiple_model_hooks(self) -> None:
        """Give each model the hooks that make it learn, in a set of its own."""
        config, parts = self.config, self.parts
        for name, hooks in self.model_hooks.items():
            steps = TrainStep(parts.verbs, self.runtime, config.seed, self.state, self._optimizations[name])
            steps.register_model(hooks)
            hooks.register(partial(_put_loss, f"train.{name}.loss"), Moment.UPDATE, name="note_loss", after="guard")
            if parts.regularizer is not None:
                steps.register_regularizer(hooks, parts.regularizer, config.regularizer_mu)

    def register_multiple_model_hooks(self) -> None:
        """Add hooks to the models' sets when the trainer is built; the default adds none."""

    def learn(self, name: str, loss: torch.Tensor) -> None:
        """Step one model's optimizer on a loss; no other model gets a gradient. For a `training_step` of one's own."""
        optimization = self._optimizations[self._known(name)]
        if self.interaction == "sequential" and name != self.current:
            raise HookError(
                f"learn({name!r}, ...) while {self.current!r} has its turn: with interact='sequential' models learn "
                "one after another. Build the trainer with interact='parallel' to let several learn in a step."
            )
        self.ctx.step.is_weighed = True  # each micro-batch is an update of its own
        loss.backward(inputs=optimization.trained)  # type: ignore[no-untyped-call]
        norm_value, loss_value = read_both(optimization.gradient_norm(), loss)
        try:
            refuse_non_finite(loss_value, norm_value, self.state, self.ctx.step.window, whose=f" of {name!r}")
        except NonFiniteError:
            optimization.zero_grad()
            raise
        optimization.apply(norm_value)
        self.storage.put_scalar(f"train.{name}.loss", loss_value)

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Run forward and backward of every model whose turn it is; return the last one's outputs."""
        self._walks_by_moments = True
        return super().training_step(batch)

    def optimization_step(self) -> None:
        """Update every model whose turn it is; a `training_step` that does not call ours has done so already."""
        if self._walks_by_moments:
            super().optimization_step()
        if self.ctx.step.closes_window:
            self._walks_by_moments = False

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by model."""
        return self.optimizer.optimizers

    @property
    def hooks_in_train_multiple_models(self) -> list[HookSet]:
        """The hooks of each model."""
        return list(self.model_hooks.values())

    def register_hook_in_train(  # type: ignore[override]
        self, new_hook: HookCall, trigger: str | Moment, model_idx: int | str | None = 0,
        insert_pos: int | None = None, base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to one model's training, or with `model_idx=None` to what all models share."""
        hooks = self.hooks[Mode.TRAIN] if model_idx is None else self.model_hooks[self._known(model_idx)]
        insert_hook(hooks, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def get_model_para(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of the parameters that are exchanged, for each model."""
        return [give_parameters(model, exchanged_names(model, self.config)) for model in self.models.values()]

    def update(self, model_parameters: Any, strict: bool = False) -> None:
        """Take parameters over, for each model in order; all or nothing."""
        if not isinstance(model_parameters, list | tuple) or len(model_parameters) != len(self.models):
            is_list = isinstance(model_parameters, list | tuple)
            given = len(model_parameters) if is_list else type(model_parameters).__name__
            raise DataError(f"parameters of {len(self.models)} models are expected, as a list; given: {given}")
        pairs = list(zip(self.models, model_parameters, strict=True))
        names = [f"{name}.{key}" for name, model in self.models.items() for key in exchanged_names(model, self.config)]
        values = {f"{name}.{key}": value for name, given in pairs for key, value in given.items()}
        take_parameters(unwrap(self.model), values, names, strict=strict)

    def train(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train all models; the samples of the result are the mean over the models."""
        result = super().train(target_data_split_name, hooks_set)
        share = len(self.models) if self.interaction == "sequential" else 1
        return RoutineResult(result.num_samples // share, result.metrics, result.get_parameters)

    def finetune(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Finetune the model that is evaluated; the others stay as they are."""
        with self.turn_of(self._evaluated):
            return super().finetune(target_data_split_name, hooks_set)

    def find_lr(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a sweep follows one loss, and several models have no one rate."""
        raise ConfigError(
            f"find_lr() sweeps the rate of one model, and there are several: {choices(self.models)}. Sweep each by "
            "itself with a Trainer, and pass optimizers={name: optimizer} where their rates differ."
        )

    def build_optimizer(self) -> OptimizerDict:
        """Make an optimizer for each model, those passed in excepted."""
        given = self._given_optimizers
        for name, optimizer in given.items():
            refuse_foreign_optimizer(optimizer, self.models[name])
        return OptimizerDict({name: given.get(name) or self._optimizer_of(name) for name in self.models})

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Make the schedule of the model whose turn it is."""
        config, default = self.config, self.default_lr_scheduler
        return scheduler_for(self.optimizers[self.current], config, self.plan, self.setup.objective, default)

    def build_schedule(self, given: LRScheduler | None) -> ScheduleDict:
        """Make the schedules of all models, each by `build_lr_scheduler` in its turn."""
        if given is not None:
            raise ConfigError("lr_scheduler drives one optimizer; name a schedule in the config for several models")
        schedules = {}
        for name in self.model_names:
            with self.turn_of(name):
                made = self.build_lr_scheduler()
            optimizer = self.optimizers[name]
            schedules[name] = schedule_for(optimizer, made, self.config, self.plan, self.setup.objective)
        return ScheduleDict(schedules)

    def make_parts(self, given: Given) -> Parts:
        """Make the parts: with a loop on which models take turns, and a session that knows their phases."""
        if self.runtime.num_processes > 1:
            raise ConfigError(f"several models train on one process; {self.runtime.num_processes} were started")
        norm = self.config.max_grad_norm
        self._optimizations = {
            name: Optimization(one, Schedule(None), None, norm, own_steps=given.own_steps)
            for name, one in self.optimizers.items()
        }
        make_loop = partial(
            MultiModelLoop, model_hooks=self.model_hooks, turns=self._turns, interact=self._interaction_at
        )
        make_status = partial(
            MultiModelStatus, names=self.model_names, interaction=self.interaction, interacts=self._interacts,
            steps_in_call=self.steps_in_call,
        )  # fmt: skip
        make_session = partial(
            MultiModelSession, names=self.model_names, turns=self._turns, interaction=self.interaction,
            schedule=lambda: self.schedule,
        )  # fmt: skip
        parts = assemble(given, self, make_loop, make_status, make_session)
        self._runners = {name: ModelRunner(model, parts.criterion) for name, model in self.models.items()}
        if type(self).compute_loss is MultiModelTrainer.compute_loss:
            refuse_unused_criterion(self._runners.values(), resumes=bool(self.config.resume_from_checkpoint))
        parts.ctx.share(self._shared_names())
        return parts

    def register_training_hooks(self, hooks: HookSet) -> None:
        """Put what happens once for a batch into the shared set, and what happens to a model into its own."""
        self.parts.train_step.register_batch(hooks)
        self.parts.session.register(hooks)
        self.init_multiple_model_hooks()
        self.register_multiple_model_hooks()

    def run_facts(self) -> dict[str, Any]:
        """Return what decides a run of several models beside config, plan and data."""
        return {"models": ", ".join(self.model_names), "interact": self.interaction}

    def steps_in_call(self, name: str) -> int:  # noqa: ARG002 - an override may tell models apart
        """Return the steps that a call of train() trains a model for, where models learn one after another."""
        return self.plan.total_steps

    def interact(self, ctx: Context) -> None:
        """Let models act on one another: after each turn (parallel), or at the end of each routine (sequential).

        `ctx.moment` says at which moment. What is drawn at random follows from the step. It is not called after a
        failure, nor again for the start of a run or an epoch that a resume walks through a second time.
        """

    @property
    def current(self) -> str:
        """The name of the model whose turn it is."""
        return self.model_names[self._turns.index]

    @contextmanager
    def turn_of(self, name: str) -> Iterator[None]:
        """Give a model its turn while the body runs."""
        before = self._turns.index
        self._turns.take(self.model_names.index(name))
        try:
            yield
        finally:
            self._turns.take(before)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Call the model whose turn it is with what it takes of the batch; return its outputs as a dict."""
        return self._runners[self.current].forward(batch)

    def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the model whose turn it is, a mean over its units."""
        return self._runners[self.current].loss(model_outputs, labels, kwargs)

    def evaluate(
        self, eval_dataset: Any = None, hooks_set: HookSet | None = None, *, target_data_split_name: str | None = None
    ) -> dict[str, float]:
        """Evaluate the model that is evaluated (`eval_model`), as a Trainer does."""
        with self.turn_of(self._evaluated):
            return super().evaluate(eval_dataset, hooks_set, target_data_split_name=target_data_split_name)

    def predict(self, dataset: Any = None, path: str | os.PathLike[str] | None = None) -> list[Any] | Path:
        """Return the predictions of the model that is evaluated (`eval_model`), as a Trainer does."""
        with self.turn_of(self._evaluated):
            return super().predict(dataset, path)

    @property
    def _interacts(self) -> bool:
        return type(self).interact is not MultiModelTrainer.interact

    @property
    def _evaluated(self) -> str:
        return self.eval_model or (self.current if self.interaction == "sequential" else self.model_names[0])

    def _optimizer_of(self, name: str) -> Optimizer:
        return optimizer_for(self.models[name], self.config, self.runtime.device, self.default_optimizer)

    def _interaction_at(self, moment: Moment) -> HookCall | None:
        if not self._interacts or (self.interaction == "sequential" and moment is not Moment.FIT_END):
            return None
        return partial(self._interact_once if moment in OUTSIDE_BATCHES else self._interact_at, moment)

    def _interact_at(self, moment: Moment, ctx: Context) -> None:
        ctx.moment = moment
        self.interact(ctx)

    def _interact_once(self, moment: Moment, ctx: Context) -> None:
        """Interact where something begins or ends: a resume begins again what had begun."""
        status = self.parts.status
        assert isinstance(status, MultiModelStatus)
        had_begun = {Moment.FIT_START: self.state.global_step > status.first_step,
                     Moment.EPOCH_START: self.state.epoch_step > 0}  # fmt: skip
        if ctx.failed is None and not had_begun.get(moment, False):
            self.parts.train_step.seed(ctx)
            self._interact_at(moment, ctx)

    def _shared_names(self) -> dict[str, Any]:
        """Return the names of the context that follow the model whose turn it is."""
        weak = weakref.proxy(self)
        names = {
            "model": Alias(lambda _: weak.models[weak.current]),
            "models": Alias(lambda _: list(weak.models.values())),
            "optimizers": Alias(lambda _: list(weak.optimizers.values())),
            "optimizer": Alias(lambda _: weak.optimizers[weak.current]),
            "scheduler": Alias(lambda _: weak.schedule.schedules[weak.current].scheduler),
            "cur_model_idx": Alias(lambda _: weak.model_names.index(weak.current)),
        }
        way = "Pass models and optimizers to the MultiModelTrainer; turn_of(name) gives a model its turn."
        return {name: Fixed(alias, way) for name, alias in names.items()}

    def _switch_model_ctx(self, next_model_idx: int | None = None) -> None:
        """Give the next model its turn, or the one of a number."""
        count = len(self.model_names)
        index = (self._turns.index + 1) % count if next_model_idx is None else next_model_idx
        self._turns.take(self.model_names.index(self._known(index)), self.ctx if "mode" in self.ctx else None)

    def _known(self, model: int | str) -> str:
        if isinstance(model, int) and 0 <= model < len(self.model_names):
            return self.model_names[model]
        if model not in self.models:
            raise HookError(
                f"there is no model {model!r}. There are: {choices(self.models)}, numbered from 0."
                f"{suggestion(str(model), self.models)}"
            )
        return str(model)


def _put_loss(name: str, ctx: Context) -> None:
    """Put a model's loss down under its name, once it is known to be finite."""
    ctx.storage.put_scalar(name, ctx.step.loss_value)


class ModelDict(nn.ModuleDict):
    """Models by name; what is switched on for all is switched on in each, because each is called by itself."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each model in place."""
        for model in self.values():
            model.compile(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Switch gradient checkpointing on in each model."""
        for name, model in self.items():
            enable_gradient_checkpointing(model, f"the model {name!r} ({type(model).__name__})")


def named(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return models by name; those of a list are called model0, model1 and so on."""
    if isinstance(models, Mapping):
        return dict(models)
    return {f"model{number}": model for number, model in enumerate(models)}


def refuse_misnamed(models: Mapping[str, nn.Module], asked: Iterable[str]) -> None:
    """Raise if models cannot go by their names, or if a name that was asked for is none of theirs."""
    if not models or not all(isinstance(model, nn.Module) for model in models.values()):
        raise ConfigError(f"models must be torch modules by name, at least one; given: {models!r}")
    for name in models:
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
            raise ConfigError(
                f"a model is named {name!r}; expected a word without dots that is no method of torch's ModuleDict"
            )
    if strangers := [str(name) for name in asked if name not in models]:
        raise ConfigError(
            f"there is no model {choices(strangers)}. There are: {choices(models)}.{suggestion(strangers[0], models)}"
        )
