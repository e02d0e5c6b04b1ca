"""Several models in one run: named, each with its optimizer, schedule and hooks; one after another, or taking turns.

`interact="sequential"`: one model goes through its whole routine, then the next. `interact="parallel"`: at each moment
every model has its turn, on the same batch. A subclass with its own `training_step` calls `learn(name, loss)` for each
model. Whatever way, it is saved and resumed like a single model: bit by bit.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError, HookError, NonFiniteError, choices, suggestion
from hezar_train.loop import Alias, Context, HookCall, HookSet, Moment, Routine
from hezar_train.multi_model.optimizers import OptimizerDict, ScheduleDict
from hezar_train.multi_model.phases import Phases
from hezar_train.multi_model.turns import Turns, TurnsRoutine
from hezar_train.plan import End
from hezar_train.trainer import RoutineResult, Trainer
from hezar_train.trainer.checks import refuse_stranger
from hezar_train.trainer.exchange import give_parameters, shared_names, take_parameters
from hezar_train.trainer.models import ModelCaller
from hezar_train.trainer.splits import Splits
from hezar_train.trainer.steps import TrainSteps, Verbs
from hezar_train.trainer.updates import Updater
from hezar_train.trainer.views.federated import register_at
from hezar_train.types import Mode

__all__ = ["INTERACTIONS", "GeneralMultiModelTrainer", "MultiModelTrainer"]

INTERACTIONS = ("sequential", "parallel")
OUTSIDE_BATCHES = frozenset({Moment.FIT_START, Moment.EPOCH_START, Moment.EPOCH_END, Moment.FIT_END})


class ModelDict(nn.ModuleDict):
    """Models by name; what is switched on for all is switched on in each, because each is called by itself."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each model in place."""
        for model in self.values():
            model.compile(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Switch gradient checkpointing on in each model."""
        for name, model in self.items():
            enable = getattr(model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise ConfigError(
                    f"gradient_checkpointing=True, but the model {name!r} ({type(model).__name__}) has no "
                    "gradient_checkpointing_enable() to switch it on. Give it one, or leave the field out."
                )
            enable()


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
        self.models = _named(self.init_multiple_models() if models is None else models)
        self.model_names = list(self.models)
        self._given_optimizers = dict(optimizers or {})
        self._refuse_misnamed()
        if others.get("optimizer") is not None:
            raise ConfigError("optimizer= is one model's; pass optimizers={name: optimizer} for several")
        self._callers: list[ModelCaller] = []
        self._turns = Turns(self._switch)
        self._interacts = type(self).interact is not MultiModelTrainer.interact
        self._has_ended = self._walks_by_moments = False
        if config.precision == "fp16":
            raise ConfigError("mixed_precision='fp16' scales the loss of one optimizer; use 'bf16' for several models")
        if config.sharding != "none":
            raise ConfigError("sharding='full' cuts one model; several are trained with sharding='none'")
        super().__init__(config, ModelDict(self.models), train_dataset, eval_dataset, **others)

    def init_multiple_models(self) -> Mapping[str, nn.Module] | Sequence[nn.Module]:
        """Make the models where none were passed, from `self.config`; the default has none to offer."""
        raise ConfigError("MultiModelTrainer needs models by name, such as {'generator': g, 'discriminator': d}")

    def init_multiple_model_hooks(self) -> None:
        """Give each model the hooks that make it learn, in a set of its own."""
        verbs = Verbs(self.prepare_input_batch, self._outputs_of, self.compute_loss)
        for name, hooks in self.model_hooks.items():
            steps = TrainSteps(verbs, self.runtime, self.state, self._updaters[name], self.schedule, self.config.seed)
            steps.register_model(hooks)
            hooks.register(partial(_note_loss, f"train.{name}.loss"), Moment.UPDATE, name="note_loss", after="guard")
            if self.regularizer is not None:
                steps.register_regularizer(hooks, self.regularizer, self.config.regularizer_mu)

    def register_multiple_model_hooks(self) -> None:
        """Add hooks to the models' sets when the trainer is built; the default adds none."""

    def interact(self, ctx: Context) -> None:
        """Let models act on one another: after each turn (parallel), or at the end of each routine (sequential).

        `ctx.moment` says at which moment. What is drawn at random follows from the step. It is not called after a
        failure, nor again for the start of a run or an epoch that a resume walks through a second time.
        """

    def learn(self, name: str, loss: torch.Tensor) -> None:
        """Step one model's optimizer on a loss; no other model gets a gradient. For a `training_step` of one's own."""
        updater = self._updaters[self._known(name)]
        if self.interaction == "sequential" and name != self.current:
            raise HookError(
                f"learn({name!r}, ...) while {self.current!r} has its turn: with interact='sequential' models learn "
                "one after another. Build the trainer with interact='parallel' to let several learn in a step."
            )
        loss.backward(inputs=updater.trained)  # type: ignore[no-untyped-call]
        norm = updater.gradient_norm()
        norm_value, loss_value = torch.stack([norm, loss.detach().to(norm)]).tolist()
        if not (math.isfinite(norm_value) and math.isfinite(loss_value)):
            updater.zero_grad()
            self._refuse_update(name, norm_value, loss_value)
        updater.clip(norm_value)
        updater.step()
        updater.zero_grad()
        self.storage.put_scalar(f"train.{name}.loss", loss_value)

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Run forward and backward of every model whose turn it is; return the last one's outputs."""
        self._walks_by_moments = True
        return super().training_step(batch)

    def optimization_step(self) -> None:
        """Update every model whose turn it is; a `training_step` that does not call ours has done so already."""
        if self._walks_by_moments:
            super().optimization_step()
        if self.ctx.closes_window:
            self._walks_by_moments = False

    def steps_in_call(self, name: str) -> int:  # noqa: ARG002 - an override may tell models apart
        """Return the steps that a call of train() trains a model for, where models learn one after another."""
        return self.plan.total_steps

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
        register_at(hooks, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def get_model_para(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of the parameters that are exchanged, for each model."""
        return [give_parameters(model, self._exchanged_of(model)) for model in self.models.values()]

    def update(self, model_parameters: Any, strict: bool = False) -> None:
        """Take parameters over, for each model in order; all or nothing."""
        if not isinstance(model_parameters, list | tuple) or len(model_parameters) != len(self.models):
            is_list = isinstance(model_parameters, list | tuple)
            given = len(model_parameters) if is_list else type(model_parameters).__name__
            raise DataError(f"parameters of {len(self.models)} models are expected, as a list; given: {given}")
        pairs = list(zip(self.models, model_parameters, strict=True))
        names = [f"{name}.{key}" for name, model in self.models.items() for key in self._exchanged_of(model)]
        values = {f"{name}.{key}": value for name, given in pairs for key, value in given.items()}
        take_parameters(unwrap(self.model), values, names, strict=strict)

    def train(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train all models; the samples of the result are the mean over the models."""
        result = super().train(target_data_split_name, hooks_set)
        share = len(self.models) if self.interaction == "sequential" else 1
        return RoutineResult(result.num_samples // share, result.metrics, result.get_parameters)

    def finetune(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Finetune the model that is evaluated; the others stay as they are."""
        with self._turn_of(self._evaluated):
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
            refuse_stranger(optimizer, self.models[name])
        return OptimizerDict({name: given.get(name) or self._optimizer_over(self.models[name]) for name in self.models})

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Make the schedule of the model whose turn it is."""
        return self._scheduler_over(self.optimizers[self.current])

    @property
    def current(self) -> str:
        """The name of the model whose turn it is."""
        return self.model_names[self._turns.index]

    # What follows assembles the parts; none of it is called by users.

    @property
    def _evaluated(self) -> str:
        return self.eval_model or (self.current if self.interaction == "sequential" else self.model_names[0])

    def _make_schedule(self, given: LRScheduler | None) -> ScheduleDict:
        if given is not None:
            raise ConfigError("lr_scheduler drives one optimizer; name a schedule in the config for several models")
        schedules = {}
        for name in self.model_names:
            with self._turn_of(name):
                made = self.build_lr_scheduler()
            schedules[name] = self._schedule_over(self.optimizers[name], made)
        return ScheduleDict(schedules)

    def _assemble_loop(self) -> None:
        if self.runtime.num_processes > 1:
            raise ConfigError(f"several models train on one process; {self.runtime.num_processes} were started")
        self.model_hooks = {name: HookSet() for name in self.model_names}
        self._updaters = {name: Updater(one, None, self.config) for name, one in self.optimizers.items()}
        self._phases = Phases(self.state, self.model_names, lambda: self._stopping)
        super()._assemble_loop()
        self._callers = [ModelCaller(model, model, self.criterion) for model in self.models.values()]
        self._switch(0)
        self._share_names()

    def _share_names(self) -> None:
        weak = weakref.proxy(self)
        self.ctx.share(
            {
                "model": Alias(lambda _: weak.models[weak.current]),
                "models": Alias(lambda _: list(weak.models.values())),
                "optimizers": Alias(lambda _: list(weak.optimizers.values())),
                "optimizer": Alias(lambda _: weak.optimizers[weak.current]),
                "scheduler": Alias(lambda _: weak.schedule.schedules[weak.current].scheduler),
                "cur_model_idx": Alias(lambda _: weak._turns.index),
            }
        )

    def _replan(self, config: TrainerConfig, splits: Splits | None = None) -> None:
        super()._replan(config, splits)
        self._share_names()

    def _register_train_hooks(self, hooks: HookSet) -> None:
        """Put what happens once for a batch into the shared set, and what happens to a model into its own."""
        self._steps.register_batch(hooks)
        self._register_run_hooks(hooks)
        self.init_multiple_model_hooks()
        self.register_multiple_model_hooks()

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "models": ", ".join(self.model_names), "interact": self.interaction}

    def _begin_call(self) -> None:
        before = self.state.call_end
        super()._begin_call()
        if self.interaction == "sequential" and self.state.call_end not in {None, before}:
            self.state.call_end = self.state.global_step + sum(map(self.steps_in_call, self.models))
            self._phases.enter(0)

    def _walk_run(self, hooks: HookSet, split: str) -> None:
        try:
            if self.interaction == "parallel":
                self._learn(self._course_of_the_run(self._routine_of(hooks, split, self.model_names)))
            else:
                self._walk_phases(hooks, split)
            self._has_ended = True
        finally:
            self._turns.take(0)

    def _walk_phases(self, hooks: HookSet, split: str) -> None:
        for index in range(self.state.model_index, len(self.model_names)):
            self._enter_phase(index)
            self._learn(self._course_of_the_run(self._routine_of(hooks, split, [self.model_names[index]])))
            if self.state.stop_reason is not None:
                return

    def _enter_phase(self, index: int) -> None:
        """Let a model begin, or go on where its last phase ended; one that a kill broke off goes on."""
        if index != self.state.model_index:
            self._phases.enter(index)
            self._source.restore(self._snapshot.cursor)  # a stream has been read ahead of what was trained on
        self._turns.take(index)
        self.schedule.learning, self.schedule.updates_of_others = [self.current], self._phases.updates_of_others
        self._due.end = self._end()

    def _active(self) -> Routine:
        return self._routine or self._routine_of(self.hooks[Mode.TRAIN], "train", [self.current])

    def _routine_of(self, hooks: HookSet, split: str, names: Sequence[str]) -> TurnsRoutine:
        models = {self.model_names.index(name): self.model_hooks[name] for name in names}
        return TurnsRoutine(self.ctx, hooks, models, self._turns, split, self._interaction_at)

    def _interaction_at(self, moment: Moment) -> HookCall | None:
        if not self._interacts or (self.interaction == "sequential" and moment is not Moment.FIT_END):
            return None
        return partial(self._interact_once if moment in OUTSIDE_BATCHES else self._interact_at, moment)

    def _interact_at(self, moment: Moment, ctx: Context) -> None:
        ctx.moment = moment
        self.interact(ctx)

    def _interact_once(self, moment: Moment, ctx: Context) -> None:
        """Interact where something begins or ends: a resume begins again what had begun."""
        had_begun = {Moment.FIT_START: self.state.global_step > self._first_step(),
                     Moment.EPOCH_START: self.state.epoch_step > 0}  # fmt: skip
        if ctx.failed is None and not had_begun.get(moment, False):
            self._steps.seed(ctx)
            self._interact_at(moment, ctx)

    def _first_step(self) -> int:
        """Return the step that the routine of this call began after, also if a kill broke it off."""
        if self.interaction == "sequential":
            return self._phases.first_step
        return 0 if self.state.call_end is None else self.state.call_end - self.plan.total_steps

    def _end(self) -> End:
        end = super()._end()
        if self.interaction == "parallel" or end == End():
            return end
        return End(self._phases.first_step + self.steps_in_call(self.model_names[self.state.model_index]))

    def _is_finished(self) -> bool:
        self._due.end = self._end()  # a checkpoint may be of a later phase
        if not super()._is_finished() or (self._interacts and not self._has_ended):
            return False  # what the last interaction did is in no checkpoint
        return self.interaction == "parallel" or self.state.model_index == len(self.models) - 1 or self._is_stopped()

    def _is_stopped(self) -> bool:
        reason = self.state.stop_reason or self.folder.recorded_stop_reason(self.state.global_step)
        return reason is not None and not self.config.accept_changes

    def _total_steps(self) -> int:
        is_whole = self.interaction == "sequential" and self.state.call_end is None
        return super()._total_steps() * (len(self.models) if is_whole else 1)

    def _look_through(self, *args: Any, **kwargs: Any) -> None:
        with self._turn_of(self._evaluated):
            super()._look_through(*args, **kwargs)

    def _switch(self, index: int) -> None:
        if self._callers:
            self._caller = self._callers[index]

    def _switch_model_ctx(self, next_model_idx: int | None = None) -> None:
        """Give the next model its turn, or the one of a number."""
        count = len(self.model_names)
        index = (self._turns.index + 1) % count if next_model_idx is None else next_model_idx
        self._turns.take(self.model_names.index(self._known(index)), self.ctx if "mode" in self.ctx else None)

    @contextmanager
    def _turn_of(self, name: str) -> Iterator[None]:
        before = self._turns.index
        self._turns.take(self.model_names.index(name))
        try:
            yield
        finally:
            self._turns.take(before)

    def _known(self, model: int | str) -> str:
        if isinstance(model, int) and 0 <= model < len(self.model_names):
            return self.model_names[model]
        if model not in self.models:
            raise HookError(
                f"there is no model {model!r}. There are: {choices(self.models)}, numbered from 0."
                f"{suggestion(str(model), self.models)}"
            )
        return str(model)

    def _exchanged_of(self, model: nn.Module) -> list[str]:
        config = self.config
        return shared_names(model, config.local_param, with_untrained=config.share_non_trainable_para)

    def _refuse_update(self, name: str, norm: float, loss: float) -> None:
        step = self.state.global_step + 1
        raise NonFiniteError(
            f"gradient norm {norm}, loss {loss} of {name!r} at step {step}; it was not applied. Lower its learning "
            "rate, or set max_grad_norm; the last checkpoint is intact.",
            step=step,
            samples=self.ctx.window.samples(),
        )

    def _refuse_misnamed(self) -> None:
        if not self.models or not all(isinstance(model, nn.Module) for model in self.models.values()):
            raise ConfigError(f"models must be torch modules by name, at least one; given: {self.models!r}")
        for name in self.models:
            if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
                raise ConfigError(
                    f"a model is named {name!r}; expected a word without dots that is no method of torch's ModuleDict"
                )
        asked = (*self._given_optimizers, *filter(None, [self.eval_model]))
        if strangers := [str(name) for name in asked if name not in self.models]:
            raise ConfigError(
                f"there is no model {choices(strangers)}. There are: {choices(self.models)}."
                f"{suggestion(strangers[0], self.models)}"
            )


class GeneralMultiModelTrainer(MultiModelTrainer):
    """FederatedScope's way to build it: a number of models alike, from one model or from a trainer.

    Of a trainer it takes the data, the collator, the preprocessor and copies of the model; the trainer stays as it is.
    """

    def __init__(
        self, model_nums: int, models_interact_mode: str = "sequential", model: nn.Module | None = None,
        data: Any = None, device: Any = None, config: TrainerConfig | None = None, base_trainer: Trainer | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        if not isinstance(model_nums, int) or isinstance(model_nums, bool) or model_nums < 1:
            raise ConfigError(f"model_nums={model_nums!r} must be a whole number of models, at least 1")
        if base_trainer is not None:
            model, config = copy.deepcopy(unwrap(base_trainer.model)), base_trainer.config
            data = dict(base_trainer.splits.data) if base_trainer.splits.is_dict else base_trainer.train_dataset
            kept = ("eval_dataset", "data_collator", "preprocessor")
            others = {name: getattr(base_trainer, name) for name in kept} | others
        makes_own = type(self).init_multiple_models is not GeneralMultiModelTrainer.init_multiple_models
        if (model is None and not makes_own) or config is None or data is None:
            raise ConfigError("give model, data and config, or a base_trainer that has them")
        del device  # the config says where
        self.model_nums, self._pattern = model_nums, model
        super().__init__(config, None, data, interact=models_interact_mode, **others)
        if len(self.models) != model_nums:
            raise ConfigError(f"model_nums={model_nums}, but init_multiple_models() made {len(self.models)} models")

    def init_multiple_models(self) -> Mapping[str, nn.Module] | Sequence[nn.Module]:
        """Make the models: the one given, and copies of it; an override may make different ones."""
        if self._pattern is None:
            raise ConfigError("give model, data and config, or a base_trainer that has them")
        return [copy.deepcopy(self._pattern) if number else self._pattern for number in range(self.model_nums)]


def _named(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    if isinstance(models, Mapping):
        return dict(models)
    return {f"model{number}": model for number, model in enumerate(models)}


def _note_loss(name: str, ctx: Context) -> None:
    """Put a model's loss down under its name, once it is known to be finite."""
    ctx.storage.put_scalar(name, ctx.loss_value)
