"""The Trainer: it assembles the parts and offers the verbs; each part does its own job elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import CheckpointStore, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import Window, batch_length, preserved_randomness, seed_device, step_seed
from hezar_train.data.splits import Splits
from hezar_train.errors import HookError, HookTypeError
from hezar_train.events import CSV_FILE, EventStorage
from hezar_train.loop import Context, Hook, HookSet, Routine
from hezar_train.metrics import MetricsHandler, settle_handler
from hezar_train.runtime import build_runtime, prepare_model, prepare_with_plugin
from hezar_train.state import TrainerState
from hezar_train.trainer.calls import RoutineResult
from hezar_train.trainer.checks import as_module, in_order, refuse_missing, refuse_stranger, settle_preprocessor
from hezar_train.trainer.context_names import context_names
from hezar_train.trainer.course import EpochBatches
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.generation import decoder_of, label_names_of
from hezar_train.trainer.handover import Handover
from hezar_train.trainer.model_runner import labels_of, others_of
from hezar_train.trainer.optimization import driven_settings
from hezar_train.trainer.telling import Telling
from hezar_train.trainer.train_step import note_loss
from hezar_train.trainer.trials import Trials
from hezar_train.trainer.views.epochs import EpochView
from hezar_train.trainer.views.federated import FederatedView
from hezar_train.trainer.views.history import HistoryView
from hezar_train.trainer.views.iterations import IterationView
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["RoutineResult", "Trainer"]


class Trainer(Trials, Handover, Telling, FederatedView, IterationView, HistoryView, EpochView):
    """Train a model from a config; kill it anywhere and get the same model.

    The walk, with the moments at which hooks run and the methods that may be overridden:

        train()                         FIT_START
          for epoch                     EPOCH_START
            inner_training_loop(epoch)
              train_epoch()
                for batch               BATCH_START        prepare_input_batch
                  run_step()
                    training_step()     BATCH_FORWARD      forward, compute_loss
                                        BATCH_BACKWARD
                    optimization_step() UPDATE             on the window's last micro-batch
                                        BATCH_END          count, schedule, what is due: log, save, evaluate
                                        EPOCH_END
                                        FIT_END            also after a failure
    """

    trainer_subfolder: ClassVar[str] = "train"
    trainer_config_file: ClassVar[str] = "train_config.yaml"
    trainer_csv_log_file: ClassVar[str] = CSV_FILE
    dataset_config_file: ClassVar[str] = "dataset_config.yaml"
    trainer_state_file: ClassVar[str] = "trainer_state.json"
    optimizer_file: ClassVar[str] = "optimizer.safetensors"
    lr_scheduler_file: ClassVar[str] = "lr_scheduler.json"
    model_file: ClassVar[str] = "model.safetensors"
    default_optimizer: ClassVar[str] = "adam"
    default_lr_scheduler: ClassVar[str | None] = None

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
        self.config, model = in_order(config, model)
        self._settle_splits(train_dataset, eval_dataset)
        model = self._model_or_built(model)
        self.config.validate()  # a field may have been assigned since it was built
        self.config = copy.deepcopy(self.config)
        self.folder = RunFolder(self.config)
        self._store = CheckpointStore(self.folder.checkpoints)
        self.data_collator, self.accelerator = data_collator, accelerator
        self.model, self.optimizer = as_module(model), optimizer  # type: ignore[assignment]  # None until it is made
        self._init_device()
        self._send_to_device()
        self._settle_metrics(metrics_handler, preprocessor)
        self._settle_data()
        self._init_dataloaders()
        self._found, self._known_steps = self._find_checkpoint(), self._store.steps()
        self._init_optimizer()
        self._settle_schedule(lr_scheduler)
        self.state = TrainerState(total_epochs=self.config.num_epochs, metric_for_best_checkpoint=self.best_key)
        self._init_history()
        self._make_loop()
        self.register_hooks([*self.build_hooks(), *hooks])
        self._first_optimizer = copy.deepcopy((self.optimizer.state_dict(), self.schedule.state_dict()))
        self._checkpoint = self._go_back()

    def _settle_splits(self, train: Any, evaluation: Any) -> None:
        """Set `splits` and what is trained and evaluated on: the data passed, else what `build_train_loader` makes."""
        if train is None and evaluation is None:
            made = dict(zip(("train", "val", "test"), self.build_train_loader(), strict=True))
            train, evaluation = (made, None) if made["train"] is not None else (None, made["val"])
        has_own_parser = type(self).parse_data is not Trainer.parse_data
        self.splits = Splits.of(train, evaluation, self.parse_data if has_own_parser else None)
        self.train_dataset, self.eval_dataset = self.splits.train, self.splits.for_evaluation

    def _model_or_built(self, given: Any) -> Any:
        """Return the model passed, or else what `build_model` makes; raise if it, the config or the data is missing."""
        model = self.build_model() if given is None else given
        has_data = self.eval_dataset is not None or self.splits.data
        refuse_missing(
            config=self.config, model=model, train_dataset=self.train_dataset,
            needs_data=given is not None and not has_data,
        )  # fmt: skip
        return model

    def _init_device(self) -> None:
        """Set `runtime` and `accelerator`: the device, the processes and the precision."""
        self.runtime = build_runtime(self.config, self.accelerator)
        self.accelerator = self.runtime.accelerator
        seed_device(self.config.seed, self.runtime.device)

    def _send_to_device(self) -> None:
        """Bring `model` to the device, as the config asks for it."""
        self.model = prepare_model(self.model, self.config, self.runtime)

    def _settle_metrics(self, handler: MetricsHandler | None, preprocessor: Any) -> None:
        """Set `metrics_handler` and `preprocessor`: those passed, or else what the `build_*` methods make."""
        self.metrics_handler = settle_handler(handler or self.build_evaluator(), self.config.task, self.config.metrics)
        self.last_evaluation = {}
        self.preprocessor = settle_preprocessor(self.model, preprocessor or self.build_tokenizer())
        bare = unwrap(self.model)
        self.metrics_handler.attach(self)
        reads_text = self.metrics_handler.reads_text
        self.metrics_handler.expect(label_names_of(bare), decoder_of(bare, self.preprocessor) if reads_text else None)

    def _init_dataloaders(self) -> None:
        """Open the training data, by `create_train_dataloader`, and plan the run over it."""
        self._source = self._train_source()
        self.plan = self._make_plan(self._source)

    def _init_optimizer(self) -> None:
        """Set `optimizer`: the one passed, else what `build_optimizer` makes."""
        if self.only_for_eval and not any(one.requires_grad for one in self.model.parameters()):
            self.optimizer = self.optimizer or torch.optim.SGD([torch.zeros(0)])  # nothing will ever be stepped
        self.optimizer = self.optimizer or self.build_optimizer()
        self.model, self.optimizer = prepare_with_plugin(self.model, self.optimizer, self.accelerator)

    def _settle_schedule(self, given: LRScheduler | None) -> None:
        """Set `schedule`, over the scheduler passed or what `build_lr_scheduler` makes, and when to stop early."""
        if not self.only_for_eval:
            refuse_stranger(self.optimizer, self.model)
        self._first_settings, self._given_scheduler = driven_settings(self.optimizer), given
        self.schedule = self._make_schedule(given)
        self.lr_scheduler = self.schedule.scheduler
        self._stopping = self._make_stopping()

    def _init_history(self) -> None:
        """Set `storage`, where everything measured goes."""
        self.storage = EventStorage()

    def _make_loop(self) -> None:
        """Set `ctx` and `hooks`, put the parts of the loop together, and say what a checkpoint of them holds."""
        self.ctx = Context(**context_names(self))
        eval_hooks = HookSet()
        self.hooks = {
            Mode.TRAIN: HookSet(), Mode.FINETUNE: HookSet(), Mode.VAL: eval_hooks, Mode.TEST: eval_hooks
        }  # fmt: skip
        self._weighs_itself = type(self).batch_weight is not Trainer.batch_weight
        self._assemble_loop()
        self._hook_objects = []
        self._snapshot = self._make_snapshot()

    def train(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train to the end of the plan (or of this call's part of it), from where the last call or a checkpoint ended.

        With a `hooks_set`, its hooks run instead of the trainer's own.
        """
        self._refuse_to_train(target_data_split_name)
        self._begin_call()
        if self._is_finished():
            self._push_rest()
            return self._say_done()
        before = self.state.call_first_samples if self._trains_in_rounds else self.state.samples_seen
        hooks = self.hooks[Mode.TRAIN] if hooks_set is None else hooks_set
        with self._locked():
            self.print_info()
            with self._under_way() as run, self._measured_around() as around:
                self._walk_run(hooks, target_data_split_name)
        self._finish_pushes()
        self.progress.say("Training done!")
        return RoutineResult(self.state.samples_seen - before, run.last_metrics | around, self.get_model_para)

    def finetune(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train for `finetune_steps` with an optimizer of its own; counters, folder and train optimizer stay."""
        data = self.splits.named(target_data_split_name)
        hooks = self.hooks[Mode.FINETUNE] if hooks_set is None else hooks_set
        routine = Routine(self.ctx, hooks, Mode.FINETUNE, target_data_split_name)
        source = self._open(data)
        plan = self._tuning.plan(source)
        with EventStorage(), preserved_randomness(), self._model_at_hand(), closing(source):
            seed_device(step_seed(self.config.seed, 0, self.runtime.rank), self.runtime.device)
            with self._tuning.begin(plan) as state:
                course = self._course_beside_the_run(routine, source, plan, state, self._tuning.end(plan))
                self._learn(course)
        return RoutineResult(course.num_samples, {"train.loss": state.loss_tracker_avg}, self.get_model_para)

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        """Train on the rest of an epoch; return the mean loss since the start of the whole training."""
        course, before = self._course, self._course.state.global_step
        self.train_loader = EpochBatches(course, self.ctx, epoch_num)
        try:
            self.train_epoch()
            self.train_loader.refuse_left_batch()
        finally:
            course.leave_epoch()
        course.close_epoch(before)
        return {"loss": course.state.loss_tracker_avg}

    def train_epoch(self) -> None:
        """Step through the batches that are left of the epoch.

        An override goes over `self.train_loader` itself, and for each batch calls `run_step()`, or does the step in its
        own way and calls `note_loss(loss)`.
        """
        ctx = self.ctx
        for _ in self.train_loader:
            outputs = self.run_step()
            if not ctx.is_loss_noted:  # an override that goes its own way
                note_loss(ctx, outputs, "run_step")
            del outputs  # else they would live through the next step

    def val_epoch(self) -> dict[str, float] | None:
        """Evaluate while training; an override returns metrics by name, or None if it has none."""
        return self.evaluate()

    def run_step(self) -> Any:
        """Do one step: forward and backward, and the update if the window closes.

        An override may do all of it in its own way; it returns the loss, or outputs that hold it.
        """
        ctx = self.ctx
        outputs = self.training_step(ctx.batch)
        if not ctx.is_loss_noted:  # an override, or another hook for the backward, that goes its own way
            has_loss = not isinstance(outputs, Mapping) or "loss" in outputs
            note_loss(ctx, outputs if has_loss else ctx.get("loss", outputs), "training_step")
        self.optimization_step()
        return outputs

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Run forward and backward on a batch; return the outputs with the loss, detached. No update happens here."""
        ctx, routine = self.ctx, self._routine
        own = ctx.__dict__
        if routine is None:  # called on its own, outside train()
            ctx.window = self._weigher.weigh(Window(0, 0, False, [batch]))
            ctx.batch_in_window, ctx.closes_window = 0, True
            routine = self._active()
        own["batch"] = batch
        for call in routine.forward_calls:
            call(ctx)
        for call in routine.backward_calls:
            call(ctx)
        if "outputs" not in own:
            raise HookError(
                "no hook ran the model at on_batch_forward. A hook set for one call may start as a copy: "
                "trainer.hooks_in_train.copy()."
            )
        return own["outputs"]  # type: ignore[no-any-return]

    def optimization_step(self) -> None:
        """Update the weights and free the gradients, on the last micro-batch of a window."""
        ctx = self.ctx
        if ctx.closes_window:
            for call in (self._routine or self._active()).update_calls:
                call(ctx)

    def note_loss(self, loss: Any) -> None:
        """Tell the loss of the batch under way, for a step that is not done by the trainer's own methods."""
        note_loss(self.ctx, loss, "note_loss")

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """Run the model and its loss on a batch, without gradients."""
        with torch.no_grad(), self._autocast():
            outputs = self._outputs_of(batch)
            if self._generate is not None:
                outputs["generated"] = self._generate(batch)
            outputs["loss"] = self.compute_loss(outputs, labels_of(batch), **others_of(batch))
        return outputs

    def prepare_input_batch(self, batch: Any) -> Any:
        """Change a batch before the model sees it; the default returns it as it is."""
        return batch

    def forward(self, batch: Any) -> dict[str, Any]:
        """Call the model with what it takes of the batch; return its outputs as a dict."""
        return self._caller.forward(batch)

    def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss, a mean over its units: the model's own, the criterion's, or `outputs["loss"]`."""
        return self._caller.loss(model_outputs, labels, kwargs)

    def batch_weight(self, batch: Any) -> float:
        """Count the units that a batch's loss is the mean of; sees the batch as it was collated, on the CPU."""
        return self._count_labels(batch) if self._count_labels else float(batch_length(batch))

    def build_model(self) -> nn.Module | None:
        """Make the model where none was passed, from `self.config`; the default has none to offer."""
        return None

    def build_hooks(self) -> list[Hook | None]:
        """Make the hooks that every trainer of a class has; the default adds none."""
        return []

    def register_hooks(self, hooks: Iterable[Hook | None]) -> None:
        """Add hook objects; each runs at the moments whose methods it has, and gets back the state that was saved."""
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, Hook):
                raise HookTypeError(
                    f"hooks holds {hook!r}; expected Hook objects. A function goes to one moment: "
                    "trainer.hooks[Mode.TRAIN].register(function, 'on_batch_end')."
                )
            hook.attach(self)
            self._hook_objects.append(hook)
            self._snapshot.put_back_hooks([hook])
            for hook_set in {id(self.hooks[mode]): self.hooks[mode] for mode in hook.modes}.values():
                for moment, call in hook.calls():
                    hook_set.register(call, moment, name=hook.name)

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this update."""
        self._due.save_requested = True

    def request_stop(self, reason: str) -> None:
        """Ask to end the run after this update, as if it were the last one."""
        self._course.state.stop_reason = reason
