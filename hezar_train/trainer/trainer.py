"""The Trainer: it owns the parts and offers the verbs; each part does its own job elsewhere (`assemble`)."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.config.names import tells_unknown_arguments, tells_unknown_keywords
from hezar_train.data import Source, Splits, batch_length, length_of_sample, seed_device
from hezar_train.errors import ConfigError, DataError, HookError, HookTypeError, a_kind, choices
from hezar_train.events import EventStorage, EventWriter, is_same_number, load_csv
from hezar_train.hooks.periodic import Checkpointed
from hezar_train.hub import PushNames, PushOutcome
from hezar_train.loop import (
    Context,
    Hook,
    HookCall,
    HookSet,
    Moment,
    Verbs,
    as_hooks,
    insert_hook,
    note_loss,
    refuse_uncalled,
    replace_hook,
    reset_hook,
)
from hezar_train.metrics import MetricsHandler, settle_handler
from hezar_train.optim import Schedule
from hezar_train.plan import Plan
from hezar_train.run_layout import CONFIG_FILE, CSV_FILE, HEZAR_CONFIG_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE
from hezar_train.runtime import Runtime, build_runtime, names_on_meta, prepare_model, prepare_with_plugin
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress, print_facts
from hezar_train.terminal.display import facts_of
from hezar_train.trainer import export
from hezar_train.trainer.assemble import (
    Given,
    Parts,
    as_module,
    assemble,
    in_order,
    preprocessor_for,
    refuse_missing,
    refused_on_meta,
)
from hezar_train.trainer.checkpointing import choose_checkpoint, going_on
from hezar_train.trainer.data_setup import LengthFinder, RunSetup, ScheduleDefaults, TrainData, size_of
from hezar_train.trainer.door_names import door_of, refuse_methods_of_doors, refuse_methods_of_others
from hezar_train.trainer.evaluator import EvaluationReport
from hezar_train.trainer.generation import decoder_of, label_names_of
from hezar_train.trainer.invariance import InvarianceReport, verify_invariance
from hezar_train.trainer.loss_refusals import refuse_needy_criterion
from hezar_train.trainer.lr_finder import DEFAULT_STEPS, LRFinderResult, SweepSettings, find_lr
from hezar_train.trainer.model_runner import Regularizer, refuse_unused_criterion
from hezar_train.trainer.optimizer_setup import (
    FirstSettings,
    optimizer_for,
    refuse_foreign_optimizer,
    schedule_for,
    scheduler_for,
)
from hezar_train.trainer.own_code import OwnSteps, kept_attributes
from hezar_train.trainer.reconfigure import (
    RESCHEDULED,
    reconfigure,
    refuse_assignment,
    refuse_built_in,
    refuse_lost,
    refuse_while_learning,
    reschedule,
)
from hezar_train.trainer.report_samples import Drawn
from hezar_train.trainer.run_files import RunFolder, append_row
from hezar_train.trainer.run_status import RoutineResult
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["RoutineResult", "Trainer"]


@tells_unknown_arguments
class Trainer:
    """Train a model from a config; kill it anywhere and get the same model.

    The walk, with the moments at which hooks run and the methods that may be overridden:

        train()                         FIT_START
          for epoch                     EPOCH_START
            inner_training_loop(epoch)
              for batch                 BATCH_START        prepare_input_batch
                run_step()
                  training_step()       BATCH_FORWARD      forward, compute_loss
                                        BATCH_BACKWARD
                  optimization_step()   GRADIENTS, UPDATE  on the window's last micro-batch; then no gradients
              when run_step() is done:  BATCH_END          count, schedule, your hooks, what is due: log, save, evaluate
                                        EPOCH_END
                                        FIT_END            also after a failure
    """

    trainer_subfolder: ClassVar[str] = "train"
    trainer_config_file: ClassVar[str] = CONFIG_FILE
    trainer_csv_log_file: ClassVar[str] = CSV_FILE
    dataset_config_file: ClassVar[str] = "dataset_config.yaml"
    trainer_state_file: ClassVar[str] = STATE_FILE
    optimizer_file: ClassVar[str] = OPTIMIZER_FILE
    lr_scheduler_file: ClassVar[str] = "lr_scheduler.json"
    model_file: ClassVar[str] = MODEL_FILE
    default_optimizer: ClassVar[str] = "adam"
    default_lr_scheduler: ClassVar[str | None] = None
    default_lr_scheduling_steps: ClassVar[int | None] = None

    config: TrainerConfig
    parts: Parts
    """What the trainer is made of; each part's public methods may be called."""
    setup: RunSetup
    """What the run is about: config, data, plan and what follows from them."""
    plan: Plan
    state: TrainerState
    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    """What ticks the learning-rate scheduler and the momentum's."""
    splits: Splits
    train_dataset: Any
    eval_dataset: Any
    metrics_handler: MetricsHandler
    preprocessor: Any
    storage: EventStorage
    """Everything measured."""
    ctx: Context
    hooks: Mapping[Mode, HookSet]
    """The hooks of each mode."""
    runtime: Runtime
    accelerator: Accelerator
    folder: RunFolder
    data: TrainData
    """What opens datasets as sources of batches."""
    data_collator: Callable[[list[Any]], Any] | None
    progress: Progress
    lr_scheduler: LRScheduler | None
    criterion: Callable[..., torch.Tensor] | None
    regularizer: Regularizer | None
    only_for_eval: bool
    """Whether there is nothing to train on."""
    evaluates: bool
    """Whether the run evaluates while it trains."""
    best_key: str
    """The full name of the metric that tells the best model."""
    _written: Mapping[str, float] = MappingProxyType({})
    """What the run has written itself, while it calls the user's own `log` with it."""

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        preprocessor: Any = None,
        metrics_handler: MetricsHandler | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        accelerator: Accelerator | None = None,
        hooks: Iterable[Hook | None] = (),
    ) -> None:
        passed, early = dict(locals()), dict(vars(self))
        refuse_methods_of_doors(type(self))
        refuse_methods_of_others(type(self))
        self.config, model = in_order(config, model)
        self._use_splits(Splits.of(train_dataset, eval_dataset))
        model = self._model_or_built(model)
        self.config.validate()  # a field may have been assigned since it was built
        self.config = copy.deepcopy(self.config)
        self.ctx = Context()
        self.folder, self.data_collator = RunFolder.of(self.config), data_collator
        self.runtime = build_runtime(self.config, accelerator)
        self.accelerator = self.runtime.accelerator
        seed_device(self.config.seed, self.runtime.device)
        unset = names_on_meta(as_module(model, self.config))
        self.model = prepare_model(model, self.config, self.runtime)
        self._prepare_metrics(metrics_handler, preprocessor)
        # What follows may be overridden, and an override may read every attribute that is set before it.
        self.state = TrainerState()
        named = ScheduleDefaults(self.default_lr_scheduler, self.default_lr_scheduling_steps, lr_scheduler is not None)
        self.data = TrainData(
            self.runtime, data_collator, self.create_train_dataloader, self.create_eval_dataloader, named,
            LengthFinder(self.runtime.processes, self.folder.lengths, self._own_sample_length),
            opens_eval=type(self).create_eval_dataloader is Trainer.create_eval_dataloader,
        )  # fmt: skip
        self.setup = self.data.setup(self.config, self.splits, self.metrics_handler)
        found = choose_checkpoint(self.config, self.folder, self.runtime.processes)
        self.setup = self.setup if found is None else going_on(self.setup, found)
        self.plan = self.setup.plan
        self._prepare_optimizer(optimizer)
        first = FirstSettings(self.optimizer, self.build_schedule, lr_scheduler)
        self._show(self.make_parts(self._given(first)))
        if early:
            refuse_lost(early, vars(self), passed)
        if type(self).compute_loss is Trainer.compute_loss:
            refuse_unused_criterion([self.parts.model_runner], resumes=found is not None)
            refuse_needy_criterion(self.config.criterion, self.criterion)
        self.register_default_hooks()
        self.register_hooks(as_hooks("build_hooks() returned", self.build_hooks()) + as_hooks("hooks is", hooks))
        if found is not None and self.setup.only_for_eval:
            self.parts.checkpointing.load_weights(found)
        elif found is not None:
            self.parts.session.restore(found)
        elif self.config.init_weights_from is not None:
            self.parts.checkpointing.load_initial_weights(self.config.init_weights_from, unset)
        elif unset:  # there was nothing to resume
            raise refused_on_meta(min(unset))

    @property
    def _own_sample_length(self) -> Callable[[Any], int] | None:
        """The user's own `sample_length`; None: there is none."""
        return None if type(self).sample_length is Trainer.sample_length else self.sample_length

    def _use_splits(self, splits: Splits) -> None:
        self.splits, self.train_dataset, self.eval_dataset = splits, splits.train, splits.for_evaluation

    def _model_or_built(self, given: Any) -> Any:
        """Return the model passed, or else what `build_model` makes; raise if it, the config or the data is missing."""
        if given is None and isinstance(self.config, TrainerConfig):
            seed_device(self.config.seed, torch.device("cpu"))  # the same config makes the same model
        model = self.build_model() if given is None else given
        has_data = self.eval_dataset is not None or self.splits.data
        refuse_missing(
            config=self.config, model=model, train_dataset=self.train_dataset,
            needs_data=given is not None and not has_data,
        )  # fmt: skip
        return model

    def _prepare_metrics(self, handler: MetricsHandler | None, preprocessor: Any) -> None:
        """Set `metrics_handler`, which learns of label names and texts, and `preprocessor`."""
        self.metrics_handler = settle_handler(handler, self.config.task, self.config.metrics)
        self.preprocessor = preprocessor_for(self.model, preprocessor)
        bare = unwrap(self.model)
        self.metrics_handler.attach(self)
        reads_text = self.metrics_handler.reads_text
        self.metrics_handler.expect(label_names_of(bare), decoder_of(bare, self.preprocessor) if reads_text else None)

    def _prepare_optimizer(self, given: Optimizer | None) -> None:
        """Set `optimizer`: the one passed, else what `build_optimizer` makes."""
        only_for_eval = self.setup.only_for_eval
        if given is None and only_for_eval and not any(one.requires_grad for one in self.model.parameters()):
            given = torch.optim.SGD([torch.zeros(0)])  # nothing will ever be stepped
        self.optimizer = given or self.build_optimizer()
        self.model, self.optimizer = prepare_with_plugin(self.model, self.optimizer, self.runtime.accelerator)
        if not only_for_eval:
            refuse_foreign_optimizer(self.optimizer, self.model)

    def _given(self, first: FirstSettings) -> Given:
        """Gather what the parts are made from."""
        kind = type(self)
        verbs = Verbs(
            inner_training_loop=self.inner_training_loop,
            run_step=self.run_step,
            prepare_input_batch=self.prepare_input_batch,
            forward=self.forward,
            compute_loss=self.compute_loss,
            evaluation_step=self.evaluation_step,
            evaluate_while_training=self.evaluate_while_training,
            pictures=self.pictures,
            finetune=self.finetune,
            build_writers=self.build_writers,
            log=None if kind.log is Trainer.log else self._log_what_was_found,
            save=None if kind.save is Trainer.save else self.save,
        )
        return Given(
            self.setup, self.runtime, self.folder, self.data, self.model, self.optimizer, first, self.metrics_handler,
            self.preprocessor, verbs,
            batch_weight=None if kind.batch_weight is Trainer.batch_weight else self.batch_weight,
            facts=self.run_facts(),
            csv_file=self.trainer_csv_log_file,
            config_file=self.trainer_config_file,
            ctx=self.ctx,
            state=self.state,
            own_steps=OwnSteps(self.ctx, self.runtime.num_processes),
            shows_samples=kind.create_eval_dataloader is Trainer.create_eval_dataloader,
        )  # fmt: skip

    def _show(self, parts: Parts) -> None:
        """Show what the parts hold under the names that users know."""
        self._is_built = False
        self.parts, self.setup, self.config, self.plan = parts, parts.setup, parts.setup.config, parts.setup.plan
        self._use_splits(parts.setup.splits)
        self.state, self.storage, self.ctx = parts.state, parts.storage, parts.ctx
        self.hooks = MappingProxyType(parts.hooks)  # another set in the place of one would run nowhere
        self.schedule, self.progress = parts.optimization.schedule, parts.session.progress
        self.lr_scheduler, self.criterion = self.schedule.scheduler, parts.criterion
        self.regularizer = parts.regularizer
        self.only_for_eval, self.evaluates = parts.setup.only_for_eval, parts.setup.evaluates
        self.best_key = parts.setup.best_key
        self.config.freeze()
        self._is_built = True

    def make_parts(self, given: Given) -> Parts:
        """Make the parts; a trainer of another kind makes others."""
        return assemble(given, self)

    def register_default_hooks(self) -> None:
        """Put what a step and a run do by themselves into the hook sets of training and of finetuning."""
        if not self.setup.only_for_eval:
            self.register_training_hooks(self.hooks[Mode.TRAIN])
        self.parts.finetuning.register(self.hooks[Mode.FINETUNE], self.parts.regularizer)

    def register_training_hooks(self, hooks: HookSet) -> None:
        """Put the default hooks of a training step and of a run into a hook set."""
        parts = self.parts
        parts.train_step.register(hooks, parts.regularizer, self.config.regularizer_mu)
        parts.session.register(hooks)

    def run_facts(self) -> dict[str, Any]:
        """Return what decides a run beside config, plan and data, in plain values: changing it is another run."""
        return {}

    @tells_unknown_keywords
    def train(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train to the end of the plan (or of this call's part of it), from where the last call or a checkpoint ended.

        With a `hooks_set`, its hooks run instead of the trainer's own.
        """
        if self.parts.loop.current is not None:
            raise HookError(
                "train() was called in the middle of training; expected one call at a time. Take the call out of the "
                "hook or the method that makes it, and call train() again after the first has returned."
            )
        session, status, state = self.parts.session, self.parts.status, self.state
        status.refuse_to_train(target_data_split_name)
        self._keep_own_optimizers()
        status.begin_call()
        if session.is_finished():
            return session.result_when_finished(self.get_model_para)
        self.data.refuse_unusable_beforehand(self.setup)
        before = status.first_samples
        with session.locked():
            self.print_info()
            with session.training(), session.measured_around(self.evaluate) as around:
                session.walk(hooks_set, target_data_split_name)
        session.finish_pushes()
        why = "" if state.stop_reason is None else f" Stopped: {state.stop_reason}"
        session.progress.say(f"Training done!{why}")
        return RoutineResult(state.samples_seen - before, self.parts.actions.last_metrics | around, self.get_model_para)

    def _keep_own_optimizers(self) -> None:
        """Keep the optimizers that a user has made as attributes, and the modules that only they train."""
        known = [hook.kept for hook in self.parts.checkpointing.hooks if isinstance(hook, Checkpointed)]
        found = kept_attributes(self, self.optimizer)
        found = {name: one for name, one in found.items() if not any(one is other for other in known)}
        if found and self.runtime.num_processes > 1:
            raise ConfigError(
                f"{choices(found)} of the trainer would see the gradients of one process alone, and "
                f"{self.runtime.num_processes} were started. Train on one, or let one optimizer have all parameters."
            )
        for name, one in found.items():
            self.register_for_checkpointing(f"attribute.{name}", one)

    @tells_unknown_keywords
    def evaluate(
        self, eval_dataset: Any = None, hooks_set: HookSet | None = None, *, target_data_split_name: str | None = None
    ) -> dict[str, float]:
        """Evaluate; return loss and metrics, under the set's name where there are several. Nothing is logged.

        On the evaluation data, on a split or one of its named sets ("val", "dev"), or on data given, also several by
        name. `last_evaluation` then has the tables and the worst samples of each set.
        """
        asked = eval_dataset if target_data_split_name is None else target_data_split_name
        return self.parts.evaluator.evaluate(asked, hooks_set)

    @tells_unknown_keywords
    def predict(self, dataset: Any = None, path: str | os.PathLike[str] | None = None) -> list[Any] | Path:
        """Return the prediction for each sample in order; with a path, write them there as JSON lines or Parquet."""
        return self.parts.evaluator.predict(dataset, path)

    @tells_unknown_keywords
    def finetune(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train for `finetune_steps` with an optimizer of its own; counters, folder and train optimizer stay."""
        parts, data = self.parts, self.splits.named(target_data_split_name)
        hooks = self.hooks[Mode.FINETUNE] if hooks_set is None else hooks_set
        source = self.data.open(self.config, data)
        with parts.hold.held():
            fit = parts.finetuning.run(parts.loop, self.ctx, hooks, target_data_split_name, source, parts.weigher.weigh)
        return RoutineResult(fit.num_samples, fit.state.mean_loss(), self.get_model_para)

    def find_lr(
        self, lr_min: float = 1e-7, lr_max: float = 10.0, num_steps: int = DEFAULT_STEPS, **settings: Any
    ) -> LRFinderResult:
        """Train a few updates with growing learning rates to find one; then everything is as it was.

        `settings` are those of `SweepSettings`.
        """
        return find_lr(self.parts, SweepSettings(lr_min, lr_max, num_steps, **settings))

    def verify_invariance(self, num_samples: int = 24, tolerance: float = 1e-5) -> InvarianceReport:
        """Check that cutting a batch of the training data in any way gives the same gradient and loss."""
        return verify_invariance(self.parts, num_samples, tolerance)

    def update(self, model_parameters: Mapping[str, Any], strict: bool = False) -> None:
        """Take parameters over, as tensors, lists or numbers; only those that are exchanged (`local_param`)."""
        model = unwrap(self.model)
        export.take_parameters(model, model_parameters, export.exchanged_names(model, self.config), strict=strict)

    def get_model_para(self) -> Any:
        """Return copies, on the CPU, of the parameters that are exchanged."""
        model = unwrap(self.model)
        return export.give_parameters(model, export.exchanged_names(model, self.config))

    def inner_training_loop(self, epoch_num: int) -> Mapping[str, float]:
        """Train on the rest of an epoch; return the mean loss since the start of the whole training."""
        return self.parts.loop.run_epoch(epoch_num)

    def run_step(self) -> Any:
        """Do one step: forward and backward, and the update if the window closes.

        An override may do all of it in its own way; it returns the loss, or outputs that hold it.
        """
        step = self.ctx.step
        outputs = self.training_step(step.batch)
        if not step.is_loss_noted:  # an override, or another hook for the backward, that goes its own way
            has_loss = not isinstance(outputs, Mapping) or "loss" in outputs
            note_loss(self.ctx, outputs if has_loss else self.ctx.get("loss", outputs), "training_step")
        if step.closes_window:
            self.optimization_step()
        return outputs

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Run forward and backward on a batch; return the outputs, the loss in them detached. No update happens here.

        An override that does its own backward returns the loss, or a mapping that has it under "loss" (of one without
        it, `ctx.loss` is taken). One that returns nothing is refused.
        """
        return self.parts.loop.run_model(batch)

    def optimization_step(self) -> None:
        """Update the weights and free the gradients, on the last micro-batch of a window; else it is not called.

        An override that does not call this one frees the gradients itself.
        """
        self.parts.loop.run_update()

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """Run the model and its loss on a batch, without gradients."""
        return self.parts.evaluator.step(batch)

    def evaluate_while_training(self) -> dict[str, float]:
        """Evaluate when that falls due in a training; return metrics by name, none where there are none."""
        return self.evaluate()

    def prepare_input_batch(self, batch: Any) -> Any:
        """Change a batch before the model sees it; the default returns it as it is."""
        return batch

    def forward(self, batch: Any) -> dict[str, Any]:
        """Call the model with what it takes of the batch; return its outputs as a dict."""
        return self.parts.model_runner.forward(batch)

    def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss, a mean over its units: the model's own, the criterion's, or `outputs["loss"]`."""
        return self.parts.model_runner.loss(model_outputs, labels, kwargs)

    def batch_weight(self, batch: Any) -> float:
        """Count the units that a batch's loss is the mean of; sees the batch as it was collated, on the CPU."""
        count = self.parts.count_labels
        return float(batch_length(batch)) if count is None else count(batch)

    def sample_length(self, sample: Any) -> int:
        """Return how many tokens a sample has, for batches by length; called once for each, when the data is opened."""
        return length_of_sample(sample, self.config.length_column)

    def note_loss(self, loss: Any) -> None:
        """Tell the loss of the batch under way, for a step that is not done by the trainer's own methods."""
        note_loss(self.ctx, loss, "note_loss")

    def pictures(self) -> Iterable[Drawn]:
        """Return what the report is to show of a model that draws: pictures, each with words by name.

        A picture holds values from 0 to 1: rows and columns, or 1 or 3 channels before them. Called after each
        evaluation of a training, on every process, in evaluation mode, without gradients; draws follow from the step.
        """
        return ()

    def build_model(self) -> nn.Module | None:
        """Make the model where none was passed, from `self.config`; the default has none to offer."""
        return None

    def build_optimizer(self) -> Optimizer:
        """Make the optimizer that the config names; called if none was passed."""
        return optimizer_for(self.model, self.config, self.runtime.device, self.default_optimizer)

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Make the schedule that the config names, over `self.optimizer`; called if none was passed."""
        return scheduler_for(self.optimizer, self.config, self.plan, self.setup.objective, self.default_lr_scheduler)

    def build_schedule(self, given: LRScheduler | None) -> Schedule:
        """Make what ticks the scheduler given, or else that of `build_lr_scheduler`, and the momentum's schedule."""
        scheduler = given or self.build_lr_scheduler()
        return schedule_for(self.optimizer, scheduler, self.config, self.plan, self.setup.objective)

    def build_hooks(self) -> list[Hook | None]:
        """Make the hooks that every trainer of a class has; the default adds none."""
        return []

    def build_writers(self) -> list[EventWriter]:
        """Make writers that get every logged row, beside the default ones; called when a run begins."""
        return []

    def create_train_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where training batches come from; an override may return any DataLoader.

        Called when the trainer is built or gets other data or another config (the plan and the schedule follow from
        what it returns), and by `find_lr`.
        """
        return self.data.open(self.config, dataset)

    def create_eval_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where evaluation batches come from, in order; an override may return any DataLoader.

        Called for each set by each evaluation; an override also once when `train()` begins, so that it fails early.
        """
        return self.data.open(self.config, dataset, training=False)

    def register_hooks(self, hooks: Iterable[Hook | None]) -> None:
        """Add hook objects; each runs at the moments whose methods it has, and gets back the state that was saved."""
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, Hook):
                remedy = "A function goes to one moment: trainer.hooks[Mode.TRAIN].register(function, 'on_batch_end')."
                if isinstance(hook, type):
                    remedy = f"Make one: {hook.__name__}(...)"
                raise HookTypeError(f"hooks holds {a_kind(hook)}; expected Hook objects. {remedy}")
            refuse_uncalled(hook)
            hook.attach(self)
            calls, sets = list(hook.calls()), {id(self.hooks[mode]): self.hooks[mode] for mode in hook.modes}.values()
            for hook_set in sets if calls else ():
                hook_set.refuse_while_running()  # before its state is kept
            self.parts.checkpointing.add_hook(hook)
            for hook_set in sets:
                for moment, call in calls:
                    hook_set.register(call, moment, name=hook.name)

    def register_for_checkpointing(self, name: str, kept: Any) -> None:
        """Keep an object with `state_dict` and `load_state_dict` in every checkpoint, and give it back its state now.

        It is kept among the states of hooks, as `checkpointed.{name}`.
        """
        hook = Checkpointed(name, kept)
        if any(other.name == hook.name for other in self.parts.checkpointing.hooks):
            raise HookError(f"an object is already kept in checkpoints under the name {name!r}; choose another one")
        self.register_hooks([hook])

    @property
    def hooks_in_train(self) -> HookSet:
        """The hooks of training."""
        return self.hooks[Mode.TRAIN]

    @property
    def hooks_in_eval(self) -> HookSet:
        """The hooks of evaluation, of whatever split."""
        return self.hooks[Mode.VAL]

    @property
    def hooks_in_ft(self) -> HookSet:
        """The hooks of finetuning."""
        return self.hooks[Mode.FINETUNE]

    @property
    def hooks_in_predict(self) -> HookSet:
        """The hooks of prediction."""
        return self.parts.evaluator.hooks_in_predict

    def register_hook_in_train(
        self, new_hook: HookCall, trigger: str | Moment, insert_pos: int | None = None,
        base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to training: at a position (-1: the end), or before or after another one, else at the end."""
        insert_hook(self.hooks_in_train, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def register_hook_in_eval(
        self, new_hook: HookCall, trigger: str | Moment, insert_pos: int | None = None,
        base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to evaluation, as `register_hook_in_train` does to training."""
        insert_hook(self.hooks_in_eval, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def register_hook_in_ft(
        self, new_hook: HookCall, trigger: str | Moment, insert_pos: int | None = None,
        base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to finetuning, as `register_hook_in_train` does to training."""
        insert_hook(self.hooks_in_ft, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def reset_hook_in_train(self, target_trigger: str | Moment, target_hook_name: str | None = None) -> int:
        """Take a hook out of training and return its position; without a name, all but the required ones: -1."""
        return reset_hook(self.hooks_in_train, target_trigger, target_hook_name)

    def reset_hook_in_eval(self, target_trigger: str | Moment, target_hook_name: str | None = None) -> int:
        """Take a hook out of evaluation and return its position; without a name, all but the required ones: -1."""
        return reset_hook(self.hooks_in_eval, target_trigger, target_hook_name)

    def reset_hook_in_ft(self, target_trigger: str | Moment, target_hook_name: str | None = None) -> int:
        """Take a hook out of finetuning and return its position; without a name, all but the required ones: -1."""
        return reset_hook(self.hooks_in_ft, target_trigger, target_hook_name)

    def replace_hook_in_train(
        self, new_hook: HookCall, target_trigger: str | Moment, target_hook_name: str | None
    ) -> None:
        """Put a hook in the place of another one of training; without a name, of all but those that are required."""
        replace_hook(self.hooks_in_train, new_hook, target_trigger, target_hook_name)

    def replace_hook_in_eval(
        self, new_hook: HookCall, target_trigger: str | Moment, target_hook_name: str | None
    ) -> None:
        """Put a hook in the place of another one of evaluation; without a name, of all but those that are required."""
        replace_hook(self.hooks_in_eval, new_hook, target_trigger, target_hook_name)

    def replace_hook_in_ft(
        self, new_hook: HookCall, target_trigger: str | Moment, target_hook_name: str | None
    ) -> None:
        """Put a hook in the place of another one of finetuning; without a name, of all but those that are required."""
        replace_hook(self.hooks_in_ft, new_hook, target_trigger, target_hook_name)

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this update.

        Inside an epoch a request waits over an update that the scaler skips; the end of an epoch or of the run is saved
        in any case.
        """
        self.parts.session.request_save()

    def request_stop(self, reason: str) -> None:
        """Ask to end the run after this update, as if it were the last one."""
        fit = self.parts.loop.current
        (self.state if fit is None else fit.state).stop_reason = reason

    @property
    def reached_end(self) -> bool:
        """Whether no further step will follow: the plan is done, or somebody asked to stop."""
        return (self.parts.loop.current or self.parts.session.make_fit()).is_over

    @property
    def call_is_open(self) -> bool:
        """Whether a call of `train()` that does a part of the run was broken off, so that the next one finishes it."""
        return self.parts.status.call_is_open

    @property
    def last_evaluation(self) -> dict[str, EvaluationReport]:
        """What the last evaluation found, by the name of each set: metrics, tables, the worst samples."""
        return self.parts.evaluator.last_reports

    @property
    def hub_uploaded(self) -> bool | None:
        """Whether the end of the run is on the Hub; None if nothing was pushed."""
        return self.parts.session.hub_uploaded

    def reconfigure(self, config: TrainerConfig | None = None, splits: Splits | None = None) -> None:
        """Go on with another config or other data from the next call of `train()` on; weights and counters stay.

        Fields that were built into the trainer are refused, and what is refused leaves everything as it was.
        """
        refuse_while_learning(self.parts.loop, "another config or other data")
        before = self.setup
        wanted = refuse_built_in(self.config, self.config if config is None else config)
        try:
            self._is_built = False
            self.config = wanted  # which an overridden `create_train_dataloader` may read
            self._use_splits(self.splits if splits is None else splits)
            self._show(reconfigure(self.parts, wanted, self.splits))
        except BaseException:
            self._show(self.parts)
            raise
        if not self.setup.only_for_eval and "due" not in self.hooks[Mode.TRAIN].names(Moment.EPOCH_END):
            self.register_training_hooks(self.hooks[Mode.TRAIN])
        if self.state.global_step == 0:  # nothing was trained by it yet: it is laid out over the new length
            try:
                self.reschedule(lr_scheduler=self.parts.first.given)
            except BaseException:
                self._is_built = False
                self.config = before.config  # first: what is overridden reads it
                self._use_splits(before.splits)
                self._show(reconfigure(self.parts, before.config, before.splits))
                raise

    def reschedule(self, config: TrainerConfig | None = None, lr_scheduler: LRScheduler | None = None) -> None:
        """Follow the schedules of another config, or a scheduler over the optimizer, from their first tick on."""
        refuse_while_learning(self.parts.loop, "another schedule")
        wanted = refuse_built_in(self.config, self.config if config is None else config, RESCHEDULED)
        try:
            self._is_built = False
            self.config = wanted  # which an overridden `build_lr_scheduler` may read
            self.plan = self.data.rescheduled(self.plan, wanted, is_given=lr_scheduler is not None)
            default = self.default_lr_scheduler
            self._show(reschedule(self.parts, wanted, self.plan, lr_scheduler, self.build_schedule, default))
        except BaseException:
            self._show(self.parts)
            raise

    @tells_unknown_keywords
    def save(
        self,
        path: str | os.PathLike[str],
        config_filename: str | None = None,
        model_filename: str | None = None,
        model_config_filename: str | None = None,
        subfolder: str | None = None,
        dataset_config_file: str | None = None,
        optimizer_file: str | None = None,
        lr_scheduler_file: str | None = None,
        *,
        hezar_format: bool = False,
        merge: bool = False,
        max_shard_size: int | str | None = None,
    ) -> Path:
        """Write the model for others: weights, model config and preprocessor at `path`, the trainer's files below.

        Of a model with adapters, the adapters, as peft loads them; with `merge`, the whole model instead, with the
        adapters merged into a copy of its weights, and without the trainer's files. `hezar_format` adds what hezar's
        own `model.save` writes, for its `Model.load`: the weights are a pickle there. With a `max_shard_size` such as
        "5GB", the weights are files of at most that size and their index, named as on the Hub. An override is also
        called whenever a checkpoint falls due, beside it, with a folder `exports/{step}` of the run.
        """
        names = export.ExportNames(
            config=config_filename or self.trainer_config_file,
            model=model_filename or self.model_file,
            model_config=model_config_filename or HEZAR_CONFIG_FILE,
            subfolder=subfolder or self.trainer_subfolder,
            dataset_config=dataset_config_file or self.dataset_config_file,
            optimizer=optimizer_file or self.optimizer_file,
            lr_scheduler=lr_scheduler_file or self.lr_scheduler_file,
            state=self.trainer_state_file,
        )
        parts = self.parts
        if merge and hezar_format:
            raise ConfigError("merge=True writes no hezar_format: leave one of the two out.")
        if merge:
            export.export_merged(
                Path(path), self.model, parts.checkpointing, names, self.runtime.processes, max_shard_size
            )
            return Path(path)
        export.export(
            Path(path), self.model, parts.checkpointing, self.schedule, self.train_dataset, names,
            self.runtime.processes, hezar_format=hezar_format, max_shard_size=max_shard_size,
        )  # fmt: skip
        return Path(path)

    @tells_unknown_keywords
    def push_to_hub(
        self,
        repo_id: str | None = None,
        config_filename: str | None = None,
        push_model: bool = True,
        push_optimizer: bool = True,
        push_logs: bool = True,
        model_filename: str | None = None,
        model_config_filename: str | None = None,
        optimizer_filename: str | None = None,
        subfolder: str | None = None,
        dataset_config_filename: str | None = None,
        commit_message: str | None = None,
        private: bool | None = None,
        hezar_format: bool = False,
    ) -> PushOutcome | None:
        """Push the newest checkpoint with everything that belongs to it in one commit, and wait for it.

        The main process does it and returns the commit (`.oid`, `.url`), the others None. `hezar_format` adds the
        weights as hezar's own `model.save` writes them, which is a pickle.
        """
        names = PushNames(
            config_filename or self.trainer_config_file, model_filename or self.model_file, model_config_filename,
            optimizer_filename or self.optimizer_file, subfolder or self.trainer_subfolder,
            push_model=push_model, push_optimizer=push_optimizer, push_logs=push_logs,
        )  # fmt: skip
        dataset_config = dataset_config_filename or self.dataset_config_file
        return self.runtime.processes.on_main(
            lambda: export.push(
                self.folder.root, self.model, self.train_dataset, dataset_config, names, repo_id=repo_id,
                commit_message=commit_message, private=private, hezar_format=hezar_format,
            )
        )  # fmt: skip

    def log(self, logs: Mapping[str, float], step: int) -> None:
        """Write values to every writer, under their names; while the run trains, or after it.

        An override is called after each evaluation, and at the end of each epoch also where nothing is evaluated, with
        the mean loss and the metrics. The run has written those itself, so that here, where the override calls
        `super().log`, only what it adds is new.
        """
        logs = {name: value for name, value in logs.items() if not is_same_number(self._written.get(name), value)}
        if not logs:
            return
        if not self.storage.writers and self.runtime.is_main:
            append_row(self.folder, self.state, self.storage, self.trainer_csv_log_file, logs, step)
            return
        self.storage.log(logs, step, self.state.epoch)
        self.storage.flush()

    def _log_what_was_found(self, found: dict[str, float], step: int) -> None:
        """Call the user's own `log` with what the run has written already."""
        self._written = dict(found)
        try:
            self.log(found, step)
        finally:
            self._written = {}

    def load_csv_logs(self, logs_dir: str | os.PathLike[str] | None = None) -> dict[Any, Any]:
        """Read the CSV log of this run, or of another logs folder, as a list per column; one item for each row."""
        folder = self.folder.logs(self.state.logs_dir) if logs_dir is None else Path(logs_dir)
        path = folder / self.trainer_csv_log_file
        if logs_dir is None and not path.exists():
            raise DataError("nothing was logged yet: train first, or pass the logs folder of a run")
        return load_csv(path)

    @property
    def device(self) -> torch.device:
        """Where the model and each batch are."""
        return self.runtime.device

    def print_info(self) -> None:
        """Show the facts of the run as a table."""
        if self.runtime.is_main:
            print_facts(
                facts_of(
                    self.config, self.plan, self.runtime, unwrap(self.model), self.schedule, self.state,
                    optimizer=self.optimizer, eval_samples=size_of(self.eval_dataset), best_key=self.setup.best_key,
                )
            )  # fmt: skip

    def __repr__(self) -> str:
        model, state = type(unwrap(self.model)).__name__, self.state
        finished = state.epoch - (not state.epoch_finished)
        return f"{type(self).__name__}({model}, epoch {finished}/{self.config.num_epochs}, step {state.global_step})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {name}: {self.config[name]}" for name in self.config)])

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to assign what a trainer that is built would not look at again."""
        if self.__dict__.get("_is_built") and not hasattr(getattr(type(self), name, None), "__set__"):
            refuse_assignment(name)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Say which door has a name that is not a Trainer's own."""
        if hasattr(type(self), name):  # a property that failed: its own error says more
            return object.__getattribute__(self, name)
        hint = door_of(name)
        if name == "parts":
            hint = ": it is not built yet. Call super().__init__(...) first in an __init__ of your own"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
