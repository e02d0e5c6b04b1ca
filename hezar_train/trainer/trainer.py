"""The Trainer: it assembles the parts and offers the verbs; each part does its own job elsewhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hezar_train.checkpoint import CheckpointStore, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import (
    Source,
    Window,
    batch_length,
    preserved_randomness,
    seed_device,
    step_seed,
)
from hezar_train.errors import DataError, HookError, HookTypeError
from hezar_train.events import CSV_FILE, EventStorage, load_csv
from hezar_train.hooks import print_facts
from hezar_train.hub import PushNames, PushOutcome, push_run
from hezar_train.loop import Context, Hook, HookSet, Routine
from hezar_train.metrics import MetricsHandler, settle_handler
from hezar_train.plan import UNLIMITED
from hezar_train.runtime import build_runtime, prepare_model, prepare_with_plugin
from hezar_train.state import TrainerState
from hezar_train.trainer.calls import Calls, RoutineResult
from hezar_train.trainer.checks import (
    as_module,
    in_order,
    named_sets,
    one_set,
    refuse_missing,
    refuse_stranger,
    settle_preprocessor,
    size_of,
)
from hezar_train.trainer.context_names import context_names
from hezar_train.trainer.course import Course, EpochBatches
from hezar_train.trainer.decoding import decoder_of, label_names_of
from hezar_train.trainer.evaluation import EvaluationReport
from hezar_train.trainer.export import MODEL_CONFIG_FILE, ExportNames, export, save_own_config
from hezar_train.trainer.facts import facts_of
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.invariance import InvarianceReport, check_invariance
from hezar_train.trainer.models import labels_of, others_of
from hezar_train.trainer.prediction import PredictionFile
from hezar_train.trainer.rate_curve import LRFinderResult
from hezar_train.trainer.rate_finder import SweepSettings, find_lr
from hezar_train.trainer.records import append_row
from hezar_train.trainer.rescheduling import driven_settings
from hezar_train.trainer.splits import Splits
from hezar_train.trainer.steps import note_loss
from hezar_train.trainer.views.epochs import EpochView
from hezar_train.trainer.views.federated import FederatedView
from hezar_train.trainer.views.history import HistoryView
from hezar_train.trainer.views.iterations import IterationView
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["RoutineResult", "Trainer"]


class Trainer(Calls, FederatedView, IterationView, HistoryView, EpochView):
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
        config, model = in_order(config, model)
        self.config = config
        train_dataset, eval_dataset = self._data_at_hand(train_dataset, eval_dataset)
        self.splits = Splits.of(train_dataset, eval_dataset, self.parse_data if self._parses_data() else None)
        self.train_dataset, self.eval_dataset = self.splits.train, self.splits.for_evaluation
        is_built = model is None
        model = self.build_model() if model is None else model
        refuse_missing(
            config=config, model=model, train_dataset=self.train_dataset,
            needs_data=self.eval_dataset is None and not self.splits.data and not is_built,
        )  # fmt: skip
        config.validate()  # a field may have been assigned since it was built
        self.config = copy.deepcopy(config)
        self.folder = RunFolder(self.config)
        self._store = CheckpointStore(self.folder.checkpoints)
        self.data_collator = data_collator
        self.model, self.optimizer = as_module(model), optimizer  # type: ignore[assignment]  # None until it is made
        self.accelerator: Any = accelerator
        self._init_device()
        self._send_to_device()
        metrics_handler = metrics_handler or self.build_evaluator()
        self.metrics_handler = settle_handler(metrics_handler, self.config.task, self.config.metrics)
        self.last_evaluation: dict[str, EvaluationReport] = {}
        self.preprocessor = settle_preprocessor(self.model, preprocessor or self.build_tokenizer())
        bare = unwrap(self.model)
        self.metrics_handler.attach(self)
        reads_text = self.metrics_handler.reads_text
        self.metrics_handler.expect(label_names_of(bare), decoder_of(bare, self.preprocessor) if reads_text else None)
        self._settle_data()
        self._init_dataloaders()
        self._pusher = None
        self.hub_uploaded: bool | None = None
        self._found = self._find_checkpoint()
        self._known_steps = self._store.steps()
        self._init_optimizer()
        if not self.only_for_eval:
            refuse_stranger(self.optimizer, self.model)
        self._first_settings, self._given_scheduler = driven_settings(self.optimizer), lr_scheduler
        self.schedule = self._make_schedule(lr_scheduler)
        self.lr_scheduler = self.schedule.scheduler
        self._stopping = self._make_stopping()
        self.state = TrainerState(total_epochs=self.config.num_epochs, metric_for_best_checkpoint=self.best_key)
        self._init_history()
        self.ctx = Context(**context_names(self))
        eval_hooks = HookSet()
        self.hooks: dict[Mode, HookSet] = {
            Mode.TRAIN: HookSet(), Mode.FINETUNE: HookSet(), Mode.VAL: eval_hooks, Mode.TEST: eval_hooks
        }  # fmt: skip
        self._weighs_itself = type(self).batch_weight is not Trainer.batch_weight
        self._assemble_loop()
        self._hook_objects: list[Hook] = []
        self._snapshot = self._make_snapshot()
        self.register_hooks([*self.build_hooks(), *hooks])
        self._first_optimizer = copy.deepcopy((self.optimizer.state_dict(), self.schedule.state_dict()))
        self._checkpoint = self._go_back()

    def _init_device(self) -> None:
        """Set `runtime` and `accelerator`: the device, the processes and the precision."""
        self.runtime = build_runtime(self.config, self.accelerator)
        self.accelerator = self.runtime.accelerator
        seed_device(self.config.seed, self.runtime.device)

    def _send_to_device(self) -> None:
        """Bring `model` to the device, as the config asks for it."""
        self.model = prepare_model(self.model, self.config, self.runtime)

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

    def _init_history(self) -> None:
        """Set `storage`, where everything measured goes."""
        self.storage = EventStorage()

    def train(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train to the end of the plan (or of this call's part of it), from where the last call or a checkpoint ended.

        With a `hooks_set`, its hooks run instead of the trainer's own.
        """
        self._refuse_to_train(target_data_split_name)
        self._begin_call()
        if self._is_finished():
            self._push_rest()
            return self._say_done()
        self.print_info()
        is_round = self.config.local_update_steps is not None
        before = self.state.call_first_samples if is_round else self.state.samples_seen
        hooks = self.hooks[Mode.TRAIN] if hooks_set is None else hooks_set
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
        with EventStorage(), preserved_randomness(), self._model_at_hand():
            seed_device(step_seed(self.config.seed, 0, self.runtime.rank), self.runtime.device)
            with self._tuning.begin(plan) as state:
                course = Course(
                    routine, source, plan, state, self._tuning.end(plan), UNLIMITED, self._weigh, agree=self._agree
                )
                try:
                    self._learn(course)
                finally:
                    source.close()
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
            ctx.window, ctx.batch_in_window, ctx.closes_window = self._weigh(Window(0, 0, False, [batch])), 0, True
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

    def create_train_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where training batches come from; an override may return any DataLoader.

        Called once, when the trainer is built (the plan and the schedule follow from what it returns), and once more
        by `find_lr`.
        """
        return self._open(dataset)

    def create_eval_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where evaluation batches come from, in order; an override may return any DataLoader."""
        return self._open(dataset, training=False)

    def build_model(self) -> nn.Module | None:
        """Make the model where none was passed, from `self.config`; the default has none to offer."""
        return None

    def build_optimizer(self) -> Optimizer:
        """Make the optimizer that the config names; called if none was passed."""
        return self._optimizer_over(self.model)

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Make the schedule that the config names, over `self.optimizer`; called if none was passed."""
        return self._scheduler_over(self.optimizer)

    def build_hooks(self) -> list[Hook | None]:
        """Make the hooks that every trainer of a class has; the default adds none."""
        return []

    def evaluate(
        self, eval_dataset: Any = None, hooks_set: HookSet | None = None, *, target_data_split_name: str | None = None
    ) -> dict[str, float]:
        """Evaluate; return loss and metrics, under the set's name where there are several. Nothing is logged.

        On the evaluation data, on a split or one of its named sets ("val", "dev"), or on data given, also several by
        name. `last_evaluation` then has the tables and the worst samples of each set.
        """
        asked = eval_dataset if target_data_split_name is None else target_data_split_name
        sets = named_sets(self.eval_dataset, self.splits, asked)
        hooks = self.hooks[Mode.VAL] if hooks_set is None else hooks_set
        with self._model_at_hand(), self._tuned_for_evaluation():
            self.last_evaluation = {one.name: self._evaluate_one(one.data, one.split, hooks) for one in sets}
        is_in_order = type(self).create_eval_dataloader is Trainer.create_eval_dataloader
        if self._evaluated_data is not None and is_in_order:
            self._evaluated_data = {one.name: one.data for one in sets}
        return {
            f"{name}.{key}" if name else key: value
            for name, report in self.last_evaluation.items()
            for key, value in report.metrics.items()
        }

    def predict(self, dataset: Any = None, path: str | os.PathLike[str] | None = None) -> list[Any] | Path:
        """Return the prediction for each sample in order; with a path, write them there as JSON lines or Parquet."""
        data = one_set(self.eval_dataset, dataset)
        if self.runtime.num_processes > 1:
            return self._predict_together(data, path)
        found: list[Any] = []
        file = None if path is None else PredictionFile(Path(path))
        self._prediction.sink = (lambda _, value: found.append(value)) if file is None else file.add
        try:
            with self._model_at_hand():
                self._look_through(data, Routine(self.ctx, self.hooks_in_predict, Mode.TEST, "test"), weighs=False)
        except BaseException:
            if file is not None:
                file.discard()
            raise
        return found if file is None else file.publish()

    def find_lr(
        self, lr_min: float = 1e-7, lr_max: float = 10.0, num_steps: int = 100, **settings: Any
    ) -> LRFinderResult:
        """Train a few updates with growing learning rates to find one; then everything is as it was.

        `settings` are those of `SweepSettings`.
        """
        return find_lr(self, SweepSettings(lr_min, lr_max, num_steps, **settings))

    def log(self, logs: Mapping[str, float], step: int) -> None:
        """Write values to every writer, under their names; while the run trains, or after it."""
        if not self.storage.writers and self.runtime.is_main:
            append_row(self.folder, self.state, self.storage, self.trainer_csv_log_file, logs, step)
            return
        self.storage.log(logs, step, self.state.epoch)
        self.storage.flush()

    def load_csv_logs(self, logs_dir: str | os.PathLike[str] | None = None) -> dict[str, list[Any]]:
        """Read the CSV log of this run, or of another logs folder, as a list per column."""
        if logs_dir is None and self.state.logs_dir is None:
            raise DataError("nothing was logged yet: train first, or pass the logs folder of a run")
        folder = self.folder.logs(self.state) if logs_dir is None else Path(logs_dir)
        return load_csv(folder / self.trainer_csv_log_file)

    def print_info(self) -> None:
        """Show the facts of the run as a table."""
        if self.runtime.is_main:
            print_facts(
                facts_of(
                    self.config, self.plan, self.runtime, unwrap(self.model), self.schedule, self.state,
                    optimizer=self.optimizer, eval_samples=size_of(self.eval_dataset), best_key=self.best_key,
                )
            )  # fmt: skip

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
    ) -> Path:
        """Write the model for others: weights, model config and preprocessor at `path`, the trainer's files below."""
        names = ExportNames(
            config=config_filename or self.trainer_config_file,
            model=model_filename or self.model_file,
            model_config=model_config_filename or MODEL_CONFIG_FILE,
            subfolder=subfolder or self.trainer_subfolder,
            dataset_config=dataset_config_file or self.dataset_config_file,
            optimizer=optimizer_file or self.optimizer_file,
            lr_scheduler=lr_scheduler_file or self.lr_scheduler_file,
            state=self.trainer_state_file,
        )
        parts = self._snapshot.take_whole()
        self.runtime.processes.on_main(lambda: export(Path(path), self._snapshot, parts, self.train_dataset, names))
        return Path(path)

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

        def push() -> PushOutcome:
            with TemporaryDirectory() as extra:
                save_own_config(self.train_dataset, Path(extra) / names.subfolder, dataset_config)
                if hezar_format:
                    unwrap(self.model).save(extra)  # type: ignore[operator]
                return push_run(
                    self.folder.root, repo_id, commit_message=commit_message, private=private, names=names,
                    extra_folder=Path(extra),
                )  # fmt: skip

        return self.runtime.processes.on_main(push)

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

    def verify_invariance(self, num_samples: int = 24, tolerance: float = 1e-5) -> InvarianceReport:
        """Check that cutting a batch of the training data in any way gives the same gradient and loss."""
        source = self._open(self.train_dataset)
        count = min(num_samples, size_of(self.train_dataset) or 0) if hasattr(source, "fetch") else 0
        if count < 2:
            raise DataError("verify_invariance() needs a training dataset with a length and at least two samples")

        def fetch(indices: Iterable[int]) -> Any:
            return source.fetch(1, list(indices))  # type: ignore[attr-defined]

        def loss_of(batch: Any) -> torch.Tensor:
            self.ctx.batch = batch
            self._steps.prepare_input(self.ctx)
            with self._autocast():
                outputs = self._outputs_of(self.ctx.batch)
                return self.compute_loss(outputs, labels_of(self.ctx.batch), **others_of(self.ctx.batch))

        with EventStorage(), preserved_randomness():
            return check_invariance(self.model, range(count), fetch, self._unit_weight, loss_of, tolerance)

    def _data_at_hand(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Return what was passed, or else what `build_train_loader` makes."""
        if train is not None or evaluation is not None:
            return train, evaluation
        made = dict(zip(("train", "val", "test"), self.build_train_loader(), strict=True))
        return (made, None) if made["train"] is not None else (None, made["val"])

    def _parses_data(self) -> bool:
        return type(self).parse_data is not FederatedView.parse_data
