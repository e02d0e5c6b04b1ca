"""How the parts of a trainer are put together: the loop with its default hooks, what is due, what a checkpoint holds.

None of it is called by users.
"""

from __future__ import annotations

from typing import Any

from hezar_train.checkpoint import SavingGroup, unwrap
from hezar_train.data import Source, Window
from hezar_train.errors import ConfigError
from hezar_train.hooks import StopFlag
from hezar_train.hub import model_config_writer
from hezar_train.loop import Context, HookSet, Moment, Routine
from hezar_train.plan import UNLIMITED, End, Plan
from hezar_train.runtime import copies_of
from hezar_train.runtime.sharding import is_sharded
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.trainer.checkpointing import Snapshot, preprocessor_writer
from hezar_train.trainer.course import Course
from hezar_train.trainer.evaluator import EvaluationSteps, PredictionSteps
from hezar_train.trainer.finetuning import Finetuning
from hezar_train.trainer.generation import generates, generator_of
from hezar_train.trainer.model_runner import (
    ModelCaller,
    Weigher,
    as_outputs,
    build_criterion,
    counts_labels,
    find_regularizer,
    label_counter,
)
from hezar_train.trainer.opening import Opening
from hezar_train.trainer.optimization import Updater
from hezar_train.trainer.scheduling import Scheduling
from hezar_train.trainer.session import Due, TimeSpent
from hezar_train.trainer.train_step import TrainSteps, Verbs
from hezar_train.types import Mode

__all__ = ["Assembly"]


class Assembly(Opening, Scheduling):
    """The parts of the loop, made from what the trainer was given."""

    def _assemble_loop(self) -> None:
        self._spent, self._depth = TimeSpent(), 0
        self._routine: Routine | None = None
        self.progress = Progress(self.plan.total_steps, self.plan.num_epochs, enabled=False)
        self._flag = StopFlag(waits_for_others=self.runtime.num_processes > 1)
        self._assemble_calling()
        self._assemble_learning()
        self._assemble_looking()
        if not self.only_for_eval:
            self._register_train_hooks(self.hooks[Mode.TRAIN])
        self._tuning.register(self.hooks[Mode.FINETUNE], self.regularizer)

    def _assemble_calling(self) -> None:
        """Make what calls the model and its loss, and knows what that is a mean of."""
        model, config = unwrap(self.model), self.config
        self._autocast = self.runtime.autocast()
        self.criterion = build_criterion(config.criterion)
        self.regularizer = find_regularizer(config.regularizer)
        self._caller = ModelCaller(self.model, model, self.criterion)
        by_labels = counts_labels(config.loss_weight, config.task, model)
        self._count_labels = label_counter(config.task, model) if by_labels else None
        counts_units = self._weighs_itself or by_labels
        self._weigher = Weigher(self.batch_weight if counts_units else None, self.runtime.processes)

    def _assemble_learning(self) -> None:
        """Make the parts of training and finetuning."""
        config, verbs = self.config, self._verbs()
        self._replicas = copies_of(self.model, self.runtime)
        self._replicas.watch(self.optimizer)
        updater = Updater(self.optimizer, self.runtime.scaler, config)
        self._steps = TrainSteps(verbs, self.runtime, self.state, updater, self.schedule, config.seed)
        self._tuning = Finetuning(config, self.runtime, self.model, verbs, updater)
        for steps in (self._steps, self._tuning.steps):
            steps.replicas, steps.agree = self._replicas, self._agree
        self._due = Due(self.plan, self.state, self._flag, evaluates=self.evaluates, saves=config.save_enabled)
        self._due.agree = self._agree_on_requests if self.runtime.num_processes > 1 else None
        self._due.end = self._end()
        self._course = self._course_of_the_run(self._active())

    def _assemble_looking(self) -> None:
        """Make the parts of evaluation and prediction."""
        model, handler, config = unwrap(self.model), self.metrics_handler, self.config
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
        self._steps.register(hooks, self.regularizer, self.config.regularizer_mu)
        self._register_run_hooks(hooks)

    def _register_run_hooks(self, hooks: HookSet) -> None:
        hooks.register(self._keep_place, Moment.BATCH_END, name="keep_place")
        hooks.register(self._show_progress, Moment.BATCH_END, name="progress")
        hooks.register(self._due.at_batch_end, Moment.BATCH_END, name="due", is_last=True)
        hooks.register(self._due.at_epoch_end, Moment.EPOCH_END, name="due", is_last=True)

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
        num_epochs = UNLIMITED if self._trains_in_rounds else self.plan.num_epochs
        return Course(
            routine, self._source, self.plan, self.state, self._due.end, num_epochs, self._weigh_first,
            agree=self._agree, spent=self._spent,
        )  # fmt: skip

    def _course_beside_the_run(
        self, routine: Routine, source: Source, plan: Plan, state: TrainerState, end: End
    ) -> Course:
        """Return the course of a routine that has counters of its own, over as many epochs as its end needs."""
        return Course(routine, source, plan, state, end, UNLIMITED, self._weigher.weigh, agree=self._agree)

    def _end(self) -> End:
        """Return where the run, or this call, ends; where epochs alone end it, changed data or batches must not."""
        plan, state = self.plan, self.state
        if self._trains_in_rounds:
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
        return self._weigher.weigh(window)

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

    def _active(self) -> Routine:
        """Return the routine under way; a step called on its own gets one of its own."""
        return self._routine or Routine(self.ctx, self.hooks[Mode.TRAIN], Mode.TRAIN, "train")

    def _verbs(self) -> Verbs:
        return Verbs(self.prepare_input_batch, self._outputs_of, self.compute_loss)

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
