"""Several models in one run: named, each with its optimizer, schedule and hooks; one after another, or taking turns.

`interact="sequential"`: one model goes through its whole routine, then the next. `interact="parallel"`: at each moment
every model has its turn, on the same batch. A subclass with its own `training_step` calls `learn(name, loss)` for each
model. Whatever way, it is saved and resumed like a single model: bit by bit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data.splits import Splits
from hezar_train.errors import ConfigError, DataError, HookError, NonFiniteError, choices, suggestion
from hezar_train.loop import Alias, Context, HookCall, HookSet, Moment
from hezar_train.multi_model.calls import MultiModelCalls
from hezar_train.multi_model.models import ModelDict, named, refuse_misnamed
from hezar_train.multi_model.optimizers import OptimizerDict, ScheduleDict
from hezar_train.multi_model.phases import Phases
from hezar_train.multi_model.turns import Turns
from hezar_train.trainer import RoutineResult
from hezar_train.trainer.checks import refuse_stranger
from hezar_train.trainer.export import give_parameters, shared_names, take_parameters
from hezar_train.trainer.model_runner import ModelCaller
from hezar_train.trainer.optimization import Updater
from hezar_train.trainer.train_step import TrainSteps, Verbs
from hezar_train.trainer.views.federated import register_at
from hezar_train.types import Mode

__all__ = ["INTERACTIONS", "MultiModelTrainer"]

INTERACTIONS = ("sequential", "parallel")


class MultiModelTrainer(MultiModelCalls):
    """Train several models, given by name."""

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
            "rate, or set max_grad_norm; what was saved so far is intact.",
            step=step,
            samples=self.ctx.window.samples(),
        )


def _note_loss(name: str, ctx: Context) -> None:
    """Put a model's loss down under its name, once it is known to be finite."""
    ctx.storage.put_scalar(name, ctx.loss_value)
