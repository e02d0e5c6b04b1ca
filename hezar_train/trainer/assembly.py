"""How the parts of a trainer are put together: data, plan, optimizer, schedule, hooks, and what weighs a batch.

None of it is called by users.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hezar_train.checkpoint import Checkpoint, CheckpointStore, SavingGroup, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import (
    Order,
    Source,
    Window,
    batch_length,
    open_source,
)
from hezar_train.errors import ConfigError
from hezar_train.events import EventStorage, EventWriter
from hezar_train.hooks import Due, Progress, StopFlag, Stopping
from hezar_train.hooks.stopping import objective_of
from hezar_train.hub import Pusher, model_config_writer
from hezar_train.loop import Context, Hook, HookSet, Moment, Routine
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import Schedule, build_momentum_schedule, build_optimizer, build_scheduler, watches_metric
from hezar_train.plan import UNLIMITED, End, Plan, make_plan, one_pass
from hezar_train.runtime import Runtime, copies_of
from hezar_train.runtime.sharding import is_sharded
from hezar_train.state import TrainerState
from hezar_train.trainer.checks import (
    evaluation_sets,
    max_steps_of,
    parameters_of,
)
from hezar_train.trainer.course import Course
from hezar_train.trainer.decoding import generates, generator_of
from hezar_train.trainer.evaluation import EvaluationReport, EvaluationSteps
from hezar_train.trainer.finetuning import Finetuning
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.models import ModelCaller, as_outputs, build_criterion
from hezar_train.trainer.prediction import PredictionSteps
from hezar_train.trainer.regularizers import find_regularizer
from hezar_train.trainer.run import Run
from hezar_train.trainer.saving import Snapshot, preprocessor_writer
from hezar_train.trainer.splits import Splits
from hezar_train.trainer.steps import TrainSteps, Verbs
from hezar_train.trainer.time_spent import TimeSpent
from hezar_train.trainer.units import counts_labels, label_counter
from hezar_train.trainer.updates import Updater
from hezar_train.types import Mode

__all__ = ["Assembly"]


class Assembly:
    """The parts, and how each is made from what the trainer was given."""

    trainer_config_file: ClassVar[str]
    trainer_csv_log_file: ClassVar[str]
    default_optimizer: ClassVar[str]
    default_lr_scheduler: ClassVar[str | None]

    config: TrainerConfig
    folder: RunFolder
    runtime: Runtime
    model: nn.Module
    metrics_handler: MetricsHandler
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any] | None
    preprocessor: Any
    splits: Splits
    only_for_eval: bool
    evaluates: bool
    best_key: str
    plan: Plan
    state: TrainerState
    optimizer: Optimizer
    schedule: Schedule
    storage: EventStorage
    ctx: Context
    hooks: dict[Mode, HookSet]
    last_evaluation: dict[str, EvaluationReport]
    _weighs_itself: bool
    _store: CheckpointStore
    _known_steps: list[int]
    _checkpoint: Checkpoint | None
    _first_optimizer: tuple[Any, Any]
    _source: Source
    _stopping: Stopping
    _snapshot: Snapshot
    _hook_objects: list[Hook]
    _run: Run
    _pusher: Pusher | None
    _windows_seen: int

    if TYPE_CHECKING:  # the verbs, which the trainer has

        def prepare_input_batch(self, batch: Any) -> Any: ...

        def forward(self, batch: Any) -> dict[str, Any]: ...

        def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor: ...

        def batch_weight(self, batch: Any) -> float: ...

        def evaluation_step(self, batch: Any) -> dict[str, Any]: ...

        def create_train_dataloader(self, dataset: Any) -> Source | DataLoader[Any]: ...

        def create_eval_dataloader(self, dataset: Any) -> Source | DataLoader[Any]: ...

        def build_lr_scheduler(self) -> LRScheduler | None: ...

        def build_writers(self) -> list[EventWriter]: ...

        def evaluate(self, eval_dataset: Any = None) -> dict[str, float]: ...

        def val_epoch(self) -> dict[str, float] | None: ...

        def test_epoch(self) -> dict[str, float] | None: ...

        def _user_writers(self) -> list[EventWriter]: ...

        def _freeze_as_saved(self) -> None: ...

        def _tests_while_training(self) -> bool: ...

        def finetune(self) -> object: ...

        def inner_training_loop(self, epoch_num: int) -> dict[str, float]: ...

        def get_model_para(self) -> Any: ...

        def _foresee(self, batch: Any) -> dict[str, Any]: ...

    def _assemble_loop(self) -> None:
        model, config = unwrap(self.model), self.config
        self._autocast = self.runtime.autocast()
        self.criterion = build_criterion(config.criterion)
        self.regularizer = find_regularizer(config.regularizer)
        self._replicas = copies_of(self.model, self.runtime)
        self._replicas.watch(self.optimizer)
        self._caller = ModelCaller(self.model, model, self.criterion)
        by_labels = counts_labels(config.loss_weight, config.task, model)
        self._count_labels = label_counter(config.task, model) if by_labels else None
        self.progress = Progress(self.plan.total_steps, self.plan.num_epochs, enabled=False)
        self._flag = StopFlag(waits_for_others=self.runtime.num_processes > 1)
        self._routine: Routine | None = None
        self._spent = TimeSpent()
        self._depth = 0
        verbs = Verbs(self.prepare_input_batch, self._outputs_of, self.compute_loss)
        updater = Updater(self.optimizer, self.runtime.scaler, config)
        self._steps = TrainSteps(verbs, self.runtime, self.state, updater, self.schedule, config.seed)
        self._tuning = Finetuning(config, self.runtime, self.model, verbs, updater)
        for steps in (self._steps, self._tuning.steps):
            steps.replicas, steps.agree = self._replicas, self._agree
        self._due = Due(self.plan, self.state, self._flag, evaluates=self.evaluates, saves=config.save_enabled)
        self._due.agree = self._agree_on_requests if self.runtime.num_processes > 1 else None
        self._due.end = self._end()
        self._course = self._course_of_the_run(self._active())
        self._assemble_looking(model)
        if not self.only_for_eval:
            self._register_train_hooks(self.hooks[Mode.TRAIN])
        self._tuning.register(self.hooks[Mode.FINETUNE], self.regularizer)

    def _assemble_looking(self, model: nn.Module) -> None:
        """Make the parts of evaluation and prediction."""
        handler, config = self.metrics_handler, self.config
        if self.runtime.num_processes > 1 and not handler.can_merge:
            raise ConfigError(
                f"{type(handler).__name__} counts in an update() or compute() of its own, but has no state() and "
                "merge(), so what the processes count cannot be put together. Add both, or evaluate on one process."
            )
        writes_text = handler.reads_text and bool(handler.metrics) and generates(model)
        wanted = writes_text and config.evaluate_with_generate
        self._generate = generator_of(model, config.generation_kwargs) if wanted else None
        self._evaluation = EvaluationSteps(
            self._steps.prepare_input, self.evaluation_step, handler, self._flag,
            bootstrap=(config.seed, config.bootstrap_samples), processes=self.runtime.processes,
        )  # fmt: skip
        self.hooks_in_predict = HookSet()
        for hooks in (self.hooks[Mode.VAL], self.hooks_in_predict):
            hooks.register(self._steps.seed_looking, Moment.BATCH_START, name="seed")
        self._evaluation.register(self.hooks[Mode.VAL])
        self._prediction = PredictionSteps(self._steps.prepare_input, self._foresee, handler)
        self._prediction.register(self.hooks_in_predict)

    def _register_train_hooks(self, hooks: HookSet) -> None:
        self._steps.register(hooks)
        if self.regularizer is not None:
            self._steps.register_regularizer(hooks, self.regularizer, self.config.regularizer_mu)
        self._register_run_hooks(hooks)

    def _register_run_hooks(self, hooks: HookSet) -> None:
        hooks.register(self._keep_place, Moment.BATCH_END, name="keep_place")
        hooks.register(self._show_progress, Moment.BATCH_END, name="progress")
        hooks.register(self._due.at_batch_end, Moment.BATCH_END, name="due", is_last=True)
        hooks.register(self._due.at_epoch_end, Moment.EPOCH_END, name="due", is_last=True)

    def _order(self, *, training: bool) -> Order:
        config, runtime = self.config, self.runtime
        return Order(
            batch_size=config.batch_size if training else config.eval_batch_size or config.batch_size,
            seed=config.seed,
            shuffle=config.dataloader_shuffle and training,
            reshuffle=config.reshuffle_each_epoch,
            num_workers=config.num_dataloader_workers,
            pin_memory=runtime.device.type == "cuda",
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            processes=runtime.processes,
            splits_streams=training and config.global_batch_size is None,
        )

    def _open(self, data: Any, *, training: bool = True) -> Source:
        return open_source(data, self.data_collator, self._order(training=training))

    def _as_source(self, loader: Any, *, training: bool) -> Source:
        return self._open(loader, training=training) if isinstance(loader, DataLoader) else loader

    def _train_source(self) -> Source:
        if self.only_for_eval:
            return self._open([])
        return self._as_source(self.create_train_dataloader(self.train_dataset), training=True)

    def _make_plan(self, source: Source) -> Plan:
        if self.only_for_eval:
            return one_pass(source.num_samples, source.batch_size, self.runtime.num_processes)
        asked = copy.copy(self.config)
        asked.drop_last = asked.drop_last or source.drop_last
        if source.num_batches is not None:  # a batch sampler counts batches, not samples
            asked.max_steps = max_steps_of(asked, source.num_batches * asked.num_epochs)
        return make_plan(asked, source.num_samples, self.runtime.num_processes, source.batch_size)

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

    def _make_snapshot(self) -> Snapshot:
        return Snapshot(
            self.config, self.plan, self.model, self.optimizer, self.schedule, self.runtime.scaler, self.state,
            self._hook_objects, self._facts(), preprocessor_writer(self.preprocessor),
            model_config_writer(unwrap(self.model)), stopping=self._stopping,
            group=SavingGroup.form() if is_sharded(self.model) else None,
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

    def _course_of_the_run(self, routine: Routine) -> Course:
        is_round = self.config.local_update_steps is not None
        num_epochs = UNLIMITED if is_round else self.plan.num_epochs
        return Course(
            routine, self._source, self.plan, self.state, self._due.end, num_epochs, self._weigh_first,
            agree=self._agree, spent=self._spent,
        )  # fmt: skip

    def _end(self) -> End:
        """Return where the run, or this call, ends; where epochs alone end it, changed data or batches must not."""
        plan, state = self.plan, self.state
        if self.config.local_update_steps is not None:
            if state.call_last_samples is not None:
                return End(samples=state.call_last_samples)
            return End(state.call_end or plan.total_steps)
        if plan.last_samples is not None:
            return End(samples=plan.last_samples)
        is_counted = self.config.max_steps is not None or plan.num_samples is None
        return End(plan.total_steps) if is_counted else End()

    def _total_steps(self) -> int:
        return self.plan.total_steps if self.state.call_end is None else self.state.call_end

    def _weigh_first(self, window: Window) -> Window:
        """Weigh a window of the run; by its second one the optimizer has its state, which saves need room for."""
        self._windows_seen += 1
        if self._windows_seen == 2:
            self._run.reserve_buffers()
        return self._weigh(window)

    def _weigh(self, window: Window) -> Window:
        """Say what each micro-batch weighs, and all of them on all processes together."""
        self._weigh_here(window)
        if self.runtime.num_processes > 1:
            by_samples = window.count > 0 and not (self._weighs_itself or self._count_labels)
            total = float(window.count) if by_samples else self.runtime.processes.sum([window.total_weight])[0]
            window.total_weight = total
        return window

    def _weigh_here(self, window: Window) -> Window:
        sizes = window.sizes or map(batch_length, window.batches)
        window.weights = [
            self._unit_weight(batch, size) if size else 0.0 for batch, size in zip(window.batches, sizes, strict=True)
        ]
        window.total_weight = sum(window.weights)
        return window

    def _agree_on_requests(self) -> None:
        """Let all processes stop or save if one was asked to."""
        state, processes = self.state, self.runtime.processes
        stops, saves = processes.sum([float(state.stop_reason is not None), float(self._due.save_requested)])
        if stops:
            state.stop_reason = next(reason for reason in processes.gather(state.stop_reason) if reason is not None)
        self._due.save_requested = saves > 0

    def _agree(self, loss: Any) -> float:
        """Return an update's loss over all processes, and let all know if one was asked to stop."""
        total, asked = self.runtime.processes.sum([loss, float(self._flag.signal is not None)])
        if asked:
            self._flag.agree()
        return total

    def _unit_weight(self, batch: Any, size: int) -> float:
        return self.batch_weight(batch) if self._weighs_itself or self._count_labels else float(size)

    def _active(self) -> Routine:
        """Return the routine under way; a step called on its own gets one of its own."""
        return self._routine or Routine(self.ctx, self.hooks[Mode.TRAIN], Mode.TRAIN, "train")

    def _outputs_of(self, batch: Any) -> dict[str, Any]:
        """Run `forward`, whose override may return a bare tensor."""
        outputs = self.forward(batch)
        return outputs if isinstance(outputs, dict) else as_outputs(outputs)

    def _keep_place(self, ctx: Context) -> None:
        if ctx.closes_window:
            self._snapshot.cursor = ctx.window.cursor

    def _show_progress(self, ctx: Context) -> None:
        if ctx.closes_window:
            state, rate = self.state, self.optimizer.param_groups[0]["lr"]
            loss = state.period_loss_sum / state.period_loss_count if state.period_loss_count else None
            self.progress.advance(state.global_step, state.epoch, ctx.window.count, loss, rate)
