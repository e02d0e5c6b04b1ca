"""The Trainer: it assembles the parts and offers the verbs; each part does its own job elsewhere."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hezar_train.checkpoint import Checkpoint, CheckpointStore, RunLock, initial_weights, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import (
    Order,
    Source,
    Window,
    batch_length,
    open_source,
    preserved_randomness,
    seed_device,
    step_seed,
)
from hezar_train.errors import DataError, HookError, RunLockedError
from hezar_train.events import CSV_FILE, EventStorage, load_csv
from hezar_train.hooks import Due, Progress, StopFlag, print_facts
from hezar_train.loop import Context, Hook, HookSet, Moment, Routine
from hezar_train.metrics import MetricsHandler, settle_handler
from hezar_train.optim import Schedule, build_optimizer, build_scheduler
from hezar_train.plan import Plan, make_plan
from hezar_train.runtime import build_runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.checks import (
    best_key_of,
    decide_evaluation,
    evaluation_sets,
    in_order,
    max_steps_of,
    one_set,
    refuse_absent_best,
    refuse_missing,
    refuse_stranger,
    settle_preprocessor,
    size_of,
    tell_weights,
)
from hezar_train.trainer.decoding import decoder_of, generates, generator_of, label_names_of
from hezar_train.trainer.evaluation import EvaluationReport, EvaluationSteps, looking_only
from hezar_train.trainer.export import MODEL_CONFIG_FILE, ExportNames, export
from hezar_train.trainer.facts import facts_of
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.invariance import InvarianceReport, check_invariance
from hezar_train.trainer.models import ModelCaller, as_outputs, build_criterion, labels_of, others_of
from hezar_train.trainer.prediction import PredictionFile, PredictionSteps
from hezar_train.trainer.records import Records, append_row
from hezar_train.trainer.resume import apply_accepted, find_checkpoint, refuse_changes, take_over
from hezar_train.trainer.run import Run
from hezar_train.trainer.saving import Snapshot, preprocessor_writer
from hezar_train.trainer.steps import TrainSteps, Verbs, note_loss
from hezar_train.trainer.units import counts_labels, label_counter
from hezar_train.trainer.updates import Updater
from hezar_train.types import LRSchedulerType, Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["RoutineResult", "Trainer"]

UNLIMITED = 1 << 62  # steps of an evaluation
PLATEAUS = {LRSchedulerType.REDUCE_ON_PLATEAU, "ReduceLROnPlateau"}


@dataclass(frozen=True)
class RoutineResult:
    """What a training routine did: samples trained on in this call, and the last metrics."""

    num_samples: int
    metrics: dict[str, float]


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
                  optimization_step()   UPDATE             on the window's last micro-batch
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
        hooks: Iterable[Hook] = (),
    ) -> None:
        config, model = in_order(config, model)
        refuse_missing(config=config, model=model, train_dataset=train_dataset)
        config.validate()  # a field may have been assigned since it was built
        self.config = copy.deepcopy(config)
        self.folder = RunFolder(self.config)
        self._store = CheckpointStore(self.folder.checkpoints)
        self._known_steps = self._store.steps()
        self.runtime = build_runtime(self.config, accelerator)
        self.accelerator = self.runtime.accelerator
        seed_device(self.config.seed, self.runtime.device)
        self.train_dataset, self.eval_dataset, self.data_collator = train_dataset, eval_dataset, data_collator
        self.evaluates = decide_evaluation(self.config, eval_dataset)
        self.metrics_handler = settle_handler(metrics_handler, self.config.task, self.config.metrics)
        self.last_evaluation: dict[str, EvaluationReport] = {}
        self.model: nn.Module = model.to(self.runtime.device)
        self.preprocessor = settle_preprocessor(self.model, preprocessor)
        bare = unwrap(self.model)
        self.metrics_handler.attach(self)
        reads_text = self.metrics_handler.reads_text
        self.metrics_handler.expect(label_names_of(bare), decoder_of(bare, self.preprocessor) if reads_text else None)
        self.best_key = best_key_of(self.config, self.metrics_handler, eval_dataset if self.evaluates else None)
        self._source = self._as_source(self.create_train_dataloader(train_dataset), training=True)
        self.plan = self._make_plan(self._source)
        self.optimizer = optimizer or self._build_optimizer()
        refuse_stranger(self.optimizer, self.model)
        self.schedule = self._build_schedule(lr_scheduler)
        self.lr_scheduler = self.schedule.scheduler
        self.state = TrainerState(total_epochs=self.config.num_epochs, metric_for_best_checkpoint=self.best_key)
        self.storage = EventStorage()
        self.ctx = Context(config=self.config, model=self.model, state=self.state, storage=self.storage)
        self.hooks: dict[Mode, HookSet] = {mode: HookSet() for mode in Mode}
        self._assemble_loop()
        self._hook_objects: list[Hook] = []
        self._snapshot = self._make_snapshot()
        self.register_hooks(hooks)
        self._checkpoint = self._go_back()

    def train(self) -> RoutineResult:
        """Train to the end of the plan, from the beginning or from where the checkpoint left off."""
        if self._is_finished():
            return self._say_done()
        self.print_info()
        before = self.state.samples_seen
        with self._under_way() as (run, routine), routine.running():
            if self.state.evaluation_pending:
                self._due.after_save()
            while not self._due.run_ends and self._enter_next_epoch():
                with routine.epoch():
                    self.inner_training_loop(self.state.epoch)
        self.progress.say("Training done!")
        return RoutineResult(self.state.samples_seen - before, run.last_metrics)

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        """Train on the rest of an epoch; return the mean loss since the start of the whole training."""
        state, before = self.state, self.state.global_step
        windows = self._source.windows(self.plan, epoch_num, state.position, self._due.last_step - before)
        self._active().walk(self._weighed_until_stopped(windows))
        if state.global_step == before:
            self._end_without_data()
        return {"loss": state.loss_tracker_avg}

    def run_step(self) -> Any:
        """Do one step: forward and backward, and the update if the window closes.

        An override may do all of it in its own way; it returns the loss, or outputs that hold it.
        """
        outputs = self.training_step(self.ctx.batch)
        if not self.ctx.is_loss_noted:  # an override that goes its own way
            note_loss(self.ctx, outputs, "training_step")
        self.optimization_step()
        return outputs

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Run forward and backward on a batch; return the outputs with the loss, detached. No update happens here."""
        ctx = self.ctx
        if self._routine is None:  # called on its own, outside train()
            ctx.window, ctx.batch_in_window, ctx.closes_window = self._weigh(Window(0, 0, False, [batch])), 0, True
        ctx.batch = batch
        routine = self._active()
        routine.fire(Moment.BATCH_FORWARD)
        routine.fire(Moment.BATCH_BACKWARD)
        return ctx.outputs  # type: ignore[no-any-return]

    def optimization_step(self) -> None:
        """Update the weights and free the gradients, on the last micro-batch of a window."""
        if self.ctx.closes_window:
            self._active().fire(Moment.UPDATE)

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """Run the model and its loss on a batch, without gradients."""
        with torch.no_grad(), self._autocast():
            # The last batch's logits go now: held during the loss, they make the allocator give memory back and forth.
            self.ctx.outputs = outputs = self._outputs_of(batch)
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

        Called once, when the trainer is built: the plan and the schedule follow from what it returns.
        """
        return self._open(dataset)

    def create_eval_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where evaluation batches come from, in order; an override may return any DataLoader."""
        return self._open(dataset, training=False)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate; return loss and metrics, under the set's name where there are several. Nothing is logged.

        On the evaluation data, on one of its named sets ("dev"), or on data given, also several by name.
        `last_evaluation` then has the tables and the worst samples of each set.
        """
        sets = evaluation_sets(self.eval_dataset, eval_dataset)
        self.last_evaluation = {name: self._evaluate_one(data) for name, data in sets.items()}
        return {
            f"{name}.{key}" if name else key: value
            for name, report in self.last_evaluation.items()
            for key, value in report.metrics.items()
        }

    def predict(self, dataset: Any = None, path: str | os.PathLike[str] | None = None) -> list[Any] | Path:
        """Return the prediction for each sample in order; with a path, write them there as JSON lines or Parquet."""
        data = one_set(self.eval_dataset, dataset)
        found: list[Any] = []
        file = None if path is None else PredictionFile(Path(path))
        self._prediction.sink = (lambda _, value: found.append(value)) if file is None else file.add
        try:
            self._look_through(data, Mode.TEST, "test")
        except BaseException:
            if file is not None:
                file.discard()
            raise
        return found if file is None else file.publish()

    def _evaluate_one(self, data: Any) -> EvaluationReport:
        self._look_through(data, Mode.VAL, "val")
        return self._evaluation.result()

    def _look_through(self, data: Any, mode: Mode, split: str) -> None:
        """Walk once over data, in order, without gradients and without moving the global generators."""
        source = self._as_source(self.create_eval_dataloader(data), training=False)
        plan = replace(
            self.plan, num_samples=source.num_samples, batch_size=source.batch_size, accumulation=1, num_processes=1,
            window_samples=source.batch_size, drop_last=False,
        )  # fmt: skip
        routine = Routine(self.ctx, self.hooks[mode], mode, split)
        self.progress.start_evaluation(source.num_samples and -(-source.num_samples // source.batch_size))
        try:
            with (
                EventStorage(),
                preserved_randomness(),
                looking_only(self.model),
                routine.running(),
                routine.epoch(),
            ):
                seed_device(step_seed(self.config.seed, 0, self.runtime.rank), self.runtime.device)
                windows = source.windows(plan, 0, 0, UNLIMITED)
                routine.walk(windows if mode == Mode.TEST else map(self._weigh, windows))  # predictions weigh nothing
        finally:
            self.progress.end_evaluation()
            source.close()

    def log(self, logs: Mapping[str, float], step: int) -> None:
        """Write values to every writer, under their names; while the run trains, or after it."""
        if not self.storage.writers:
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
        export(Path(path), self._snapshot, self.train_dataset, names)
        return Path(path)

    def register_hooks(self, hooks: Iterable[Hook]) -> None:
        """Add hook objects; each runs at the moments whose methods it has, and gets back the state that was saved."""
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise HookError(
                    f"hooks holds {hook!r}; expected Hook objects. A function goes to one moment: "
                    "trainer.hooks[Mode.TRAIN].register(function, 'on_batch_end')."
                )
            hook.attach(self)
            self._hook_objects.append(hook)
            self._snapshot.put_back_hooks([hook])
            for mode in hook.modes:
                for moment, call in hook.calls():
                    self.hooks[mode].register(call, moment, name=hook.name)

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this update."""
        self._due.save_requested = True

    def request_stop(self, reason: str) -> None:
        """Ask to end the run after this update, as if it were the last one."""
        self.state.stop_reason = reason

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

    # What follows assembles the parts; none of it is called by users.

    def _assemble_loop(self) -> None:
        model, config = unwrap(self.model), self.config
        self._autocast = self.runtime.autocast()
        self._caller = ModelCaller(self.model, model, build_criterion(config.criterion))
        by_labels = counts_labels(config.loss_weight, config.task, model)
        self._count_labels = label_counter(config.task, model) if by_labels else None
        self._weighs_itself = type(self).batch_weight is not Trainer.batch_weight
        self.progress = Progress(self.plan.total_steps, self.plan.num_epochs, enabled=False)
        self._flag = StopFlag()
        verbs = Verbs(self.prepare_input_batch, self._outputs_of, self.compute_loss)
        updater = Updater(self.optimizer, self.runtime.scaler, config)
        self._steps = TrainSteps(verbs, self.runtime, self.state, updater, self.schedule, config.seed)
        self._steps.register(self.hooks[Mode.TRAIN])
        writes_text = self.metrics_handler.reads_text and bool(self.metrics_handler.metrics) and generates(model)
        wanted = writes_text and config.evaluate_with_generate
        self._generate = generator_of(model, config.generation_kwargs) if wanted else None
        self._evaluation = EvaluationSteps(
            self._steps.prepare_input, self.evaluation_step, self.metrics_handler, self._flag,
            bootstrap=(config.seed, config.bootstrap_samples),
        )  # fmt: skip
        for mode in (Mode.VAL, Mode.TEST):
            self.hooks[mode].register(self._steps.seed_looking, Moment.BATCH_START, name="seed")
        self._evaluation.register(self.hooks[Mode.VAL])
        self._prediction = PredictionSteps(self._steps.prepare_input, self._foresee, self.metrics_handler)
        self._prediction.register(self.hooks[Mode.TEST])
        self._due = Due(self.plan, self.state, self._flag, evaluates=self.evaluates, saves=config.save_enabled)
        self._due.last_step = self._last_step()
        self.hooks[Mode.TRAIN].register(self._keep_place, Moment.BATCH_END, name="keep_place")
        self.hooks[Mode.TRAIN].register(self._show_progress, Moment.BATCH_END, name="progress")
        self.hooks[Mode.TRAIN].register(self._due.at_batch_end, Moment.BATCH_END, name="due", is_last=True)
        self.hooks[Mode.TRAIN].register(self._due.at_epoch_end, Moment.EPOCH_END, name="due", is_last=True)
        self._routine: Routine | None = None

    def _order(self, *, training: bool) -> Order:
        config, runtime = self.config, self.runtime
        return Order(
            batch_size=config.batch_size if training else config.eval_batch_size or config.batch_size,
            seed=config.seed,
            shuffle=config.dataloader_shuffle and training,
            reshuffle=config.reshuffle_each_epoch,
            num_workers=config.num_dataloader_workers,
            pin_memory=runtime.device.type == "cuda",
            rank=runtime.rank if training else 0,
            num_processes=runtime.num_processes if training else 1,
        )

    def _open(self, data: Any, *, training: bool = True) -> Source:
        return open_source(data, self.data_collator, self._order(training=training))

    def _as_source(self, loader: Any, *, training: bool) -> Source:
        return self._open(loader, training=training) if isinstance(loader, DataLoader) else loader

    def _make_plan(self, source: Source) -> Plan:
        asked = copy.copy(self.config)
        asked.drop_last = asked.drop_last or source.drop_last
        if source.num_batches is not None:  # a batch sampler counts batches, not samples
            asked.max_steps = max_steps_of(asked, source.num_batches * asked.num_epochs)
        return make_plan(asked, source.num_samples, self.runtime.num_processes, source.batch_size)

    def _build_optimizer(self) -> Optimizer:
        config = self.config
        name = config.optimizer_name if config.optimizer is not None else self.default_optimizer
        return build_optimizer(
            name, self.model.parameters(), learning_rate=config.learning_rate,
            weight_decay=config.weight_decay, kwargs=config.optimizer_kwargs, device=self.runtime.device,
        )  # fmt: skip

    def _build_schedule(self, given: LRScheduler | None) -> Schedule:
        name, plan = self.config.scheduler_name or self.default_lr_scheduler, self.plan
        if given is None and name is not None:
            kwargs = dict(self.config.lr_scheduler_kwargs or {})
            if name in PLATEAUS and self._objective() == "maximize":
                kwargs.setdefault("mode", "max")
            given = build_scheduler(name, self.optimizer, total_ticks=plan.total_ticks, kwargs=kwargs)
        return Schedule(given, plan.schedule_updates, self.optimizer)

    def _make_snapshot(self) -> Snapshot:
        return Snapshot(
            self.config, self.plan, self.model, self.optimizer, self.schedule, self.runtime.scaler, self.state,
            self._hook_objects, self._facts(), preprocessor_writer(self.preprocessor),
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """Return what decides a run beside config and plan: changing it would be another run."""
        units = "labels" if self._count_labels else "samples"
        return {
            "order of the data": type(self._source).__name__,
            "shuffle": getattr(self._source, "is_shuffled", None),
            "drop_last": self._source.drop_last or self.config.drop_last,
            "units of the loss": "your batch_weight()" if self._weighs_itself else units,
        }

    def _go_back(self) -> Checkpoint | None:
        """Restore the checkpoint that the config asks for; else load the initial weights it names."""
        checkpoint = find_checkpoint(self.config, self.folder)
        if checkpoint is None:
            if self.config.init_weights_from is not None:
                tell_weights(initial_weights(self.model, self.config.init_weights_from), self.config.init_weights_from)
            return None
        refuse_changes(checkpoint, self.config, self.plan, self._snapshot.facts)
        self._snapshot.put_back(checkpoint)
        if self.config.accept_changes:
            apply_accepted(checkpoint, self.config, self.optimizer, self.schedule)
        self._refuse_lost_place(self._source)
        self._take_up_measuring()
        logger.info("resuming from %s", checkpoint.path)
        return checkpoint

    @contextmanager
    def _under_way(self) -> Iterator[tuple[Run, Routine]]:
        """Hold everything that exists only while the run trains: lock, signal handlers, files, the writer."""
        with RunLock(self.folder.lock), self._flag, self.storage:
            self._steps.forget_open_window()  # of a failed call, and what a user's own backward left behind
            self._enter_folder()
            self._source.restore(self._snapshot.cursor)
            self.progress = Progress(
                self.plan.total_steps, self.plan.num_epochs, self.state.global_step, enabled=self.runtime.is_main
            )
            run = self._begin_run()
            self._routine = Routine(self.ctx, self.hooks[Mode.TRAIN], Mode.TRAIN, "train", self._step_and_settle)
            self.model.train()
            try:
                run.reserve_buffers()
                yield run, self._routine
            except KeyboardInterrupt:  # the second Ctrl-C: leave at once, what is saved is saved
                run.abandon()
                raise
            finally:
                self._routine = None
                self._source.close()
                run.finish()
                self._known_steps = self._store.steps()

    def _enter_folder(self) -> None:
        """Make the folder this run's own and write down what it is about to do."""
        if self._store.steps() != self._known_steps:
            raise RunLockedError(
                f"{self._store.root} has changed since this trainer was built: another one has trained there. "
                "Build it again."
            )
        take_over(self.folder, self._store, self.state, self._checkpoint, saves=self.config.save_enabled)
        self._checkpoint = None  # from here on the state says where the run is
        if self.config.accept_changes:
            self.state.stop_reason = None
        if self._source.resume_problem and self.config.save_enabled:
            logger.warning("this run can be resumed at epoch ends only: %s", self._source.resume_problem)
        self.config.save(self.folder.root, self.trainer_config_file)
        self.plan.save(self.folder.plan)

    def _refuse_lost_place(self, source: Source) -> None:
        if source.resume_problem and self.state.position and not self.state.epoch_finished:
            raise DataError(f"cannot resume in the middle of an epoch: {source.resume_problem}")

    def _begin_run(self) -> Run:
        records = Records(self.folder, self.state, self.storage, self.config, self.trainer_csv_log_file)
        records.follow(self.runtime, self.folder.root.name, self.config)
        self._steps.storage, self._steps.ledger = self.storage, records.ledger
        self._evaluation.progress = self.progress
        run = Run(
            self.config, self.folder, self.state, self.storage, self.schedule, self.progress, records, self._snapshot,
            evaluate=self._evaluate_for_record if self.evaluates else None,
            objective=self._objective(),
            grad_norm=lambda: self.ctx.get("grad_norm"),
        )  # fmt: skip
        self._due.actions = run.actions
        self._run = run
        return run

    def _objective(self) -> str:
        name = self.best_key.partition(".")[2]
        for one in evaluation_sets(None, self.eval_dataset) if self.evaluates else ():
            name = name.removeprefix(f"{one}.")  # of several sets, the set's name comes first
        return "minimize" if name == "loss" else self.metrics_handler.objective(name)  # a handler knows its own metrics

    def _last_step(self) -> int:
        """Return the step that ends the run; where epochs alone end it, changed data or batches must not."""
        is_counted = self.config.max_steps is not None or self.plan.num_samples is None
        return self.plan.total_steps if is_counted else UNLIMITED

    def _take_up_measuring(self) -> None:
        """Go on with what was measured but not logged, and with the best result if it is of the same metric."""
        state, storage = self.state, self.storage
        state.total_epochs = self.config.num_epochs
        for name, (value, step, hint) in self._snapshot.measured.items():
            storage.step = step
            storage.put_scalar(name, value, hint is not False)
        storage.step = state.global_step
        if state.metric_for_best_checkpoint != self.best_key:
            before = state.metric_for_best_checkpoint
            logger.info("the best model was chosen by %s so far, from now on by %s", before, self.best_key)
            state.update(metric_for_best_checkpoint=self.best_key, best_metric_value=None, best_checkpoint=None)

    def _evaluate_for_record(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Evaluate; return the metrics, and what only a report shows."""
        self._evaluation.may_be_abandoned = True
        try:
            metrics = self.evaluate()
        finally:
            self._evaluation.may_be_abandoned = False
        refuse_absent_best(self.best_key, metrics)
        shown = {name: (report.tables, report.worst_samples) for name, report in self.last_evaluation.items()}
        return metrics, {
            "tables": {name: tables for name, (tables, _) in shown.items()},
            "worst_samples": {name: samples for name, (_, samples) in shown.items()},
        }

    def _enter_next_epoch(self) -> bool:
        """Go to the next epoch if this one is finished; return False when there is none left."""
        state = self.state
        if state.epoch_finished:
            if state.epoch >= self.plan.num_epochs:
                return False
            state.update(epoch=state.epoch + 1, position=0, epoch_step=0, epoch_finished=False)
        return True

    def _end_without_data(self) -> None:
        if self.state.position == 0:
            raise DataError(f"the training data gave no sample in epoch {self.state.epoch}: it is empty")
        self.state.epoch_finished = True  # resumed exactly where a stream ended

    def _weighed_until_stopped(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Pass windows on with their weights known before the first backward, until the run ends."""
        for number, window in enumerate(windows):
            if self._due.run_ends:
                return
            if number == 1:  # by now the optimizer has its state
                self._run.reserve_buffers()
            yield self._weigh(window)

    def _weigh(self, window: Window) -> Window:
        sizes = map(len, window.indices) if window.indices else map(batch_length, window.batches)
        window.weights = [self._unit_weight(batch, size) for batch, size in zip(window.batches, sizes, strict=True)]
        window.total_weight = sum(window.weights)
        return window

    def _unit_weight(self, batch: Any, size: int) -> float:
        return self.batch_weight(batch) if self._weighs_itself or self._count_labels else float(size)

    def _active(self) -> Routine:
        """Return the routine under way; a step called on its own gets one of its own."""
        return self._routine or Routine(self.ctx, self.hooks[Mode.TRAIN], Mode.TRAIN, "train", self._step_and_settle)

    def _foresee(self, batch: Any) -> dict[str, Any]:
        """Run the model for its predictions alone; one that writes texts may not even run without labels."""
        with torch.no_grad(), self._autocast():
            return self._outputs_of(batch) if self._generate is None else {"generated": self._generate(batch)}

    def _outputs_of(self, batch: Any) -> dict[str, Any]:
        """Run `forward`, whose override may return a bare tensor."""
        outputs = self.forward(batch)
        return outputs if isinstance(outputs, dict) else as_outputs(outputs)

    def _step_and_settle(self) -> None:
        """Do a step, also an overridden one, so that it can be counted."""
        ctx = self.ctx
        ctx.is_loss_noted = ctx.applied = False
        ctx.loss_value = None
        outputs = self.run_step()
        if not ctx.is_loss_noted:
            note_loss(ctx, outputs, "run_step")
        if ctx.closes_window and ctx.loss_value is None:
            ctx.loss_value, ctx.applied = float(ctx.window_loss), True

    def _keep_place(self, ctx: Context) -> None:
        if ctx.closes_window:
            self._snapshot.cursor = ctx.window.cursor

    def _show_progress(self, ctx: Context) -> None:
        if ctx.closes_window:
            state, rate = self.state, self.optimizer.param_groups[0]["lr"]
            self.progress.advance(state.global_step, state.epoch, ctx.window.count, ctx.loss_value, rate)

    def _is_finished(self) -> bool:
        state = self.state
        ended = state.epoch_finished and state.epoch >= self.plan.num_epochs
        reason = state.stop_reason or self.folder.recorded_stop_reason(state.global_step)
        stopped = reason is not None and not self.config.accept_changes
        if not (state.global_step >= self._due.last_step or ended or stopped):
            return False
        judged = self.folder.recorded_evaluation(state.global_step) if self.evaluates else {}
        return not state.evaluation_pending or judged is not None

    def _say_done(self) -> RoutineResult:
        state = self.state
        recorded = self.folder.recorded_evaluation(state.global_step) or {}
        metrics = {"train.loss": state.loss_tracker_avg, **{f"evaluation.{k}": v for k, v in recorded.items()}}
        # the checkpoint is older than what its evaluation changed
        is_best = state.update_best_results(metrics.get(self.best_key, math.nan), self._objective(), state.global_step)
        if is_best and self.config.save_enabled and not self.evaluates:  # else a record says that it is written
            self.folder.write_best(state)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        logger.info("already trained to the end (step %d, epoch %d): %s", state.global_step, state.epoch, shown)
        return RoutineResult(0, metrics)
