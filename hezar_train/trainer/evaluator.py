"""Evaluation and prediction: one pass over data without learning from it, and what it measures.

`Evaluator` walks the loop over a set with hooks of its own. The loss is the weighted mean over the whole set, the
metrics are the handler's, merged over the processes once; predictions go to a list or a file (`predictions`). Nothing
of the training is touched: modes, generators and counters are as before afterwards.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.data import Source, Window, note_samples, preserved_randomness, seed_device, step_seed, without_filler
from hezar_train.errors import ConfigError, DataError, HookError, TrainingInterrupted
from hezar_train.events import EventStorage
from hezar_train.hooks import StopFlag
from hezar_train.loop import Context, HookSet, Loop, Moment, Routine, Verbs
from hezar_train.metrics import MetricsHandler, Table, poisson_weights
from hezar_train.metrics.metric import in_float64
from hezar_train.plan import UNLIMITED, Plan, one_pass
from hezar_train.runtime import DataParallel, Processes, Runtime, to_device
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.trainer.data_setup import NamedSet, RunSetup, TrainData, named_sets, one_set
from hezar_train.trainer.generation import generates, generator_of
from hezar_train.trainer.loss_weight import Weigher
from hezar_train.trainer.model_runner import DeviceHold, as_outputs, labels_of, others_of
from hezar_train.trainer.predictions import PredictionFile, PredictionSteps, write_predictions
from hezar_train.trainer.report_samples import Drawn, ReportDetails, WorstSamples
from hezar_train.trainer.rollback import keepers_of, untouched_model
from hezar_train.types import Mode

__all__ = [
    "EvalBatches",
    "EvaluationReport",
    "EvaluationSteps",
    "Evaluator",
    "evaluation_mode",
    "inference_mode",
]

NUM_EXAMPLES = 8


@dataclass(frozen=True)
class EvaluationReport:
    """The outcome of an evaluation: numbers by name, tables, the samples that went worst, and the first texts."""

    metrics: dict[str, float]
    tables: list[Table]
    worst_samples: list[dict[str, Any]]
    examples: list[dict[str, Any]] = field(default_factory=list)
    """Of a task with texts, what was read or written for the first samples, and what would have been right."""


class Evaluator:
    """Evaluate and predict, for a trainer and for its run."""

    def __init__(
        self,
        setup: RunSetup,
        runtime: Runtime,
        model: nn.Module,
        handler: MetricsHandler,
        verbs: Verbs,
        *,
        ctx: Context,
        state: TrainerState,
        loop: Loop,
        data: TrainData,
        weigher: Weigher,
        data_parallel: DataParallel,
        hold: DeviceHold,
        flag: StopFlag,
        progress: Progress,
        preprocessor: Any,
        shows_samples: bool,
    ) -> None:
        """With `shows_samples`, reports may fetch samples by their numbers: the order of the data is ours."""
        _refuse_unmergeable(handler, runtime)
        self._setup, self._runtime, self._model, self._handler, self._verbs = setup, runtime, model, handler, verbs
        self._ctx, self._state, self._loop, self._data, self._weigher = ctx, state, loop, data, weigher
        self._data_parallel, self._hold, self._progress = data_parallel, hold, progress
        self._preprocessor, self._shows_samples = preprocessor, shows_samples
        self._autocast, self._generate = runtime.autocast(), _generator_for(model, handler, setup)
        self.steps = EvaluationSteps(
            self._prepare, verbs.evaluation_step, handler, flag, progress, runtime.processes,
            bootstrap=(setup.config.seed, setup.config.bootstrap_samples),
        )  # fmt: skip
        self._prediction = PredictionSteps(self._prepare, self._predict_batch, handler)
        self.hooks, self.hooks_in_predict = self.make_hooks(), HookSet()
        """The hooks of evaluation, and of prediction."""
        self.hooks_in_predict.register(self._seed, Moment.BATCH_START, name="seed")
        self._prediction.register(self.hooks_in_predict)
        self.last_reports: dict[str, EvaluationReport] = {}
        """What the last evaluation found, by the name of each set."""
        self._first_places: dict[int, tuple[Any, list[Any]]] = {}  # of data that keeps its own place, by the data's id
        self._recorded_sets: list[NamedSet] | None = None  # while an evaluation is made for the record

    def make_hooks(self) -> HookSet:
        """Return the default hooks of evaluation in a set of their own."""
        hooks = HookSet()
        hooks.register(self._seed, Moment.BATCH_START, name="seed")
        self.steps.register(hooks)
        return hooks

    def follow(self, setup: RunSetup) -> None:
        """Evaluate for another config, on other data."""
        self._setup = setup

    def evaluate(self, asked: Any, hooks: HookSet | None = None) -> dict[str, float]:
        """Evaluate on what is asked for; return loss and metrics, under the set's name where there are several."""
        sets = named_sets(self._setup.splits, asked)
        with self._hold.held(), self._finetuned():
            limit = self._setup.config.max_eval_batches
            self.last_reports = {one.name: self.evaluate_set(one.data, one.split, hooks, limit) for one in sets}
        if self._recorded_sets is not None:
            self._recorded_sets = sets
        return {
            f"{name}.{key}" if name else key: value
            for name, report in self.last_reports.items()
            for key, value in report.metrics.items()
        }

    def evaluate_set(
        self, data: Any, split: str, hooks: HookSet | None = None, max_batches: int | None = None
    ) -> EvaluationReport:
        """Evaluate on one set, on so many batches of it at most."""
        mode = Mode.VAL if split == "val" else Mode.TEST
        routine = Routine(self._ctx, self.hooks if hooks is None else hooks, mode, split)
        self.steps.forget()
        self._pass_over(data, routine, max_batches)
        return self.steps.report()

    def step(self, batch: Any) -> dict[str, Any]:
        """Run the model and its loss on a batch, without gradients."""
        with torch.no_grad(), self._autocast():
            outputs = as_outputs(self._verbs.forward(batch))
            if self._generate is not None:
                outputs["generated"] = self._generate(batch)
            outputs["loss"] = self._verbs.compute_loss(outputs, labels_of(batch), **others_of(batch))
        return outputs

    def predict(self, dataset: Any, path: str | os.PathLike[str] | None) -> list[Any] | Path:
        """Return the prediction for each sample in order; with a path, write them there."""
        data = one_set(self._setup.splits.for_evaluation, dataset)
        if self._runtime.num_processes > 1:
            return self._predict_together(data, path)
        if path is None:
            found: list[Any] = []
            self._predict_into(lambda _, value: found.append(value), data)
            return found
        with PredictionFile(Path(path)) as file:
            self._predict_into(file.add, data)
        return Path(path)

    def evaluate_for_record(
        self, pictures: Path, root: Path, what_is_saved: Callable[[], str]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Evaluate while training; return the metrics, and what only a report shows.

        Pictures go to a folder below the run's `root`; `what_is_saved` tells what a signal leaves behind.
        """
        runtime = self._runtime
        self.last_reports, self._recorded_sets = {}, []
        try:
            # an override may draw, and forget the modes
            with preserved_randomness(), inference_mode(self._model), self.steps.may_be_abandoned(what_is_saved):
                seed_device(step_seed(self._setup.config.seed, self._state.global_step, runtime.rank), runtime.device)
                metrics = self._verbs.evaluate_while_training()
                drawn = list(self._verbs.pictures())  # by every process: a model may be in pieces
                details = self._report_details(drawn, pictures, root) if runtime.is_main else {}
        finally:
            self._recorded_sets = None
        return metrics, details

    def batches(self, data: Any) -> EvalBatches:
        """Return the batches of a set in order, prepared, for an evaluation of one's own."""
        device = self._runtime.device
        source = self._data.eval_source(self._setup.config, data)
        return EvalBatches(source, lambda batch: self._verbs.prepare_input_batch(to_device(batch, device)))

    def _report_details(self, drawn: list[Drawn], pictures: Path, root: Path) -> dict[str, Any]:
        sets = self._recorded_sets if self._shows_samples else None
        details = ReportDetails(
            self._setup.config, self._runtime, self._model, self._handler, self._preprocessor, root, pictures
        )
        return details.of(self.last_reports, {one.name: one.data for one in sets or []}, drawn)

    def _predict_together(self, data: Any, path: str | os.PathLike[str] | None) -> list[Any] | Path:
        """Let each process predict its share; all get the list, and the main one writes the file."""
        own: list[tuple[int, Any]] = []
        self._predict_into(lambda number, value: own.append((number, value)), data)
        gathered = self._runtime.processes.gather(own)
        everyone = sorted((pair for part in gathered for pair in part), key=lambda pair: pair[0])
        if path is None:
            return [value for _, value in everyone]
        self._runtime.processes.on_main(lambda: write_predictions(Path(path), everyone))
        return Path(path)

    def _predict_into(self, sink: Callable[[int, Any], None], data: Any) -> None:
        """Hand the number and the prediction of each sample on."""
        self._prediction.begin(sink)
        with self._hold.held():
            self._pass_over(data, Routine(self._ctx, self.hooks_in_predict, Mode.TEST, "test"), weighs=False)

    def _predict_batch(self, batch: Any) -> dict[str, Any]:
        """Run the model for its predictions alone; one that writes texts may not even run without labels."""
        with torch.no_grad(), self._autocast():
            if self._generate is not None:
                return {"generated": self._generate(batch)}
            return as_outputs(self._verbs.forward(batch))

    @contextmanager
    def _finetuned(self) -> Iterator[None]:
        """With `finetune_before_eval`, let the body see finetuned weights, which are gone afterwards."""
        is_asked = self._setup.config.finetune_before_eval and not self._setup.only_for_eval
        if not is_asked or self._ctx.get("mode") is Mode.FINETUNE:
            yield
            return
        with untouched_model(self._model):
            self._verbs.finetune()
            yield

    def _pass_over(self, data: Any, routine: Routine, max_batches: int | None = None, *, weighs: bool = True) -> None:
        """Walk once over data, in order, without gradients and without moving the global generators."""
        self._begin_anew(data)
        source = self._data.eval_source(self._setup.config, data)
        plan = one_pass(source.num_samples, source.batch_size, self._runtime.num_processes)
        is_sorted = self._setup.config.uses_lengths and weighs and max_batches is None
        cuts = self._data.eval_cuts(self._setup.config, data, source) if is_sorted else None
        num_steps = plan.steps_in_epoch if cuts is None else len(cuts)
        self._progress.start_evaluation(num_steps)
        try:
            with self._inference(routine, num_steps):
                windows = self._lockstep(
                    self._windows_in_order(source, plan, max_batches) if cuts is None else source.cut(cuts)  # type: ignore[attr-defined]
                )
                if weighs:  # what is to be predicted may lack labels
                    windows = map(self._weigher.weigh_here, windows)
                self._loop.infer(routine, windows)
        finally:
            self._progress.end_evaluation()
            source.close()

    def _begin_anew(self, data: Any) -> None:
        """Let data that keeps its own place begin where it did the first time: else each round would see other samples.

        But for the training data, whose place is the run's.
        """
        keepers = [] if data is self._setup.splits.train else keepers_of(data)
        if not keepers:
            return
        if id(data) not in self._first_places:
            self._first_places[id(data)] = data, [copy.deepcopy(one.state_dict()) for one in keepers]
            return
        for keeper, place in zip(keepers, self._first_places[id(data)][1], strict=True):
            keeper.load_state_dict(copy.deepcopy(place))

    @contextmanager
    def _inference(self, routine: Routine, num_batches: int | None) -> Iterator[None]:
        """Run a routine of one epoch around the body, and leave nothing behind but what its hooks keep."""
        lengths = {f"num_{routine.split}_batch": num_batches, f"num_{routine.split}_epoch": 1}
        with (
            EventStorage(),
            preserved_randomness(),
            inference_mode(self._model),
            self._data_parallel.evaluating(is_free=self._generate is not None),
            routine.running(announce=lambda: self._ctx.merge_from_dict(lengths)),
            routine.epoch(),
        ):
            seed_device(step_seed(self._setup.config.seed, 0, self._runtime.rank), self._runtime.device)
            yield

    def _windows_in_order(self, source: Source, plan: Plan, max_batches: int | None) -> Iterator[Window]:
        samples_left = UNLIMITED if max_batches is None else max_batches * plan.batch_size
        return source.windows(plan, 0, 0, UNLIMITED, samples_left)

    def _lockstep(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Leave out what runs for other processes' sake alone, unless they wait for it."""
        return windows if self._data_parallel.needs_lockstep else map(without_filler, windows)

    def _seed(self, ctx: Context) -> None:
        """Make what an evaluation draws a function of (seed, first sample of the batch, rank)."""
        first = ctx.step.window.firsts[ctx.step.batch_in_window]
        seed_device(step_seed(self._setup.config.seed, first, self._runtime.rank), self._runtime.device)

    def _prepare(self, ctx: Context) -> None:
        """Bring the batch to the device and let the user's method change it."""
        device, batch = self._runtime.device, ctx.step.batch
        ctx.step.batch = self._verbs.prepare_input_batch(batch if device.type == "cpu" else to_device(batch, device))


class EvaluationSteps:
    """The default hooks of evaluation, and the sums they keep."""

    def __init__(
        self,
        prepare: Callable[[Context], None],
        evaluation_step: Callable[[Any], dict[str, Any]],
        handler: MetricsHandler,
        flag: StopFlag,
        progress: Progress,
        processes: Processes,
        bootstrap: tuple[int, int],
    ) -> None:
        """Measure with `handler`; `bootstrap` is the seed and the number of resamples."""
        self._prepare, self._evaluation_step, self._handler, self._flag = prepare, evaluation_step, handler, flag
        self._seed, self._num_resamples = bootstrap
        self._processes, self._progress = processes, progress
        self._takes_rows = "weights" in inspect.signature(handler.update).parameters
        self._report: EvaluationReport | None = None
        self._is_started = False
        self._loss: torch.Tensor | float = 0.0
        self._weight = 0.0
        self.num_samples = 0
        self._what_is_saved: Callable[[], str] | None = None

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour into a hook set, under its names."""
        hooks.register(self.start, Moment.FIT_START, name="start")
        hooks.register(self._prepare, Moment.BATCH_START, name="prepare_input")
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.measure, Moment.BATCH_END, name="measure")
        hooks.register(self.conclude, Moment.FIT_END, name="conclude")

    @contextmanager
    def may_be_abandoned(self, what_is_saved: Callable[[], str]) -> Iterator[None]:
        """Let a signal end the evaluations of the body, which a resume does again from what is saved."""
        self._what_is_saved = what_is_saved
        try:
            yield
        finally:
            self._what_is_saved = None

    def forget(self) -> None:
        """Drop the result of the last evaluation: hooks that measure nothing must not return it as theirs."""
        self._report, self._is_started = None, False

    def start(self, _: Context) -> None:
        """Begin to measure anew."""
        self._is_started = True
        self._handler.reset()
        self._loss = 0.0
        self._weight = 0.0
        self._batches = 0
        self.num_samples = 0
        self._worst = WorstSamples()
        self._examples: list[dict[str, Any]] = []

    def forward(self, ctx: Context) -> None:
        """Run the model and its loss on the batch."""
        try:
            ctx.outputs = self._evaluation_step(ctx.batch)
        except Exception as error:
            note_samples(error, ctx.step.window, ctx.step.batch_in_window, "evaluation data")
            raise

    def measure(self, ctx: Context) -> None:
        """Add the batch to the sums; they stay on the device."""
        step, window = ctx.step, ctx.step.window
        if not window.sizes[step.batch_in_window]:  # a filler: the samples are those of another process
            return
        weight = window.weights[step.batch_in_window]
        if weight:  # a mean over no unit is NaN
            self._loss = self._loss + in_float64(step.outputs["loss"]) * weight
            self._weight += weight
        numbers = numbers_of(window, step.batch_in_window)
        self._measure_metrics(numbers, step.outputs, labels_of(step.batch), weight)
        self._batches += 1
        self.num_samples += len(numbers)
        self._progress.advance_evaluation(self._batches)
        if self._flag.asked and self._flag.signal is not None and self._what_is_saved is not None:
            words = f"{self._flag.signal.name}: evaluation abandoned, {self._what_is_saved()}."
            raise TrainingInterrupted(self._flag.exit_code, words)

    def conclude(self, ctx: Context) -> None:
        """Compute everything once, and show it to hooks as `ctx.eval_metrics`, under the split's name."""
        if ctx.failed is None and self._is_started:  # else the sums are those of another evaluation
            self._merge()
            self._report = self._result()
            ctx.share({"eval_metrics": {f"{ctx.split}_{name}": value for name, value in self._report.metrics.items()}})

    def report(self) -> EvaluationReport:
        """Return what the last evaluation found."""
        if self._report is None:
            raise HookError("the evaluation has no result: its hooks 'start' and 'conclude' are gone or replaced")
        return self._report

    @property
    def sums(self) -> tuple[float, float]:
        """The weighted loss and the weight so far."""
        return float(self._loss), self._weight

    def _merge(self) -> None:
        """Put what all processes counted together; every one then computes the same."""
        if self._processes.count == 1:
            return
        shown = (self._worst.listed(), self._examples)
        own = (float(self._loss), self._weight, self.num_samples, self._handler.state(), shown)
        gathered = self._processes.gather(own)
        self._handler.reset()
        for _, _, _, state, _ in gathered:
            self._handler.merge(state)
        self._loss, self._weight = sum(loss for loss, *_ in gathered), sum(weight for _, weight, *_ in gathered)
        self.num_samples = sum(count for _, _, count, *_ in gathered)
        self._worst = WorstSamples.of([row for *_, (worst, _) in gathered for row in worst])
        self._examples = [row for *_, (_, examples) in gathered for row in examples]

    def _result(self) -> EvaluationReport:
        """Return the loss and the handler's metrics over everything measured, with what a report shows beside them."""
        if self._weight == 0:
            raise DataError("the evaluation data is empty: there is nothing to measure")
        metrics = {"loss": float(self._loss) / self._weight, **self._handler.compute()}
        if self._num_resamples:
            for key, (low, high) in self._handler.intervals().items():
                metrics |= {f"{key}.low": low, f"{key}.high": high}
        examples = sorted(self._examples, key=lambda row: int(row["sample"]))[:NUM_EXAMPLES]
        return EvaluationReport(metrics, self._handler.tables(), self._worst.listed(), examples)

    def _measure_metrics(
        self, numbers: Sequence[int], outputs: Mapping[str, Any], labels: Any, num_units: float
    ) -> None:
        handler, rows = self._handler, None
        if self._num_resamples:
            rows = poisson_weights(self._seed, torch.tensor(numbers), self._num_resamples)
        if self._takes_rows:
            handler.update(outputs, labels, rows, num_units)
        else:  # a user's own handler may take outputs and labels alone
            handler.update(outputs, labels)
        if labels is not None:
            self._note_samples(numbers, outputs, labels)

    def _note_samples(self, numbers: Sequence[int], outputs: Mapping[str, Any], labels: Any) -> None:
        """Keep what a report shows of a batch: the samples that went worst, and the first texts."""
        handler = self._handler
        losses = handler.sample_losses(outputs, labels)
        if losses is None:
            return
        compared = handler.compared(outputs, labels)
        self._worst.add(numbers, losses, *compared)
        if handler.reads_text and min(numbers) < NUM_EXAMPLES:
            self._examples += [
                {"sample": number, "prediction": said, "target": right}
                for number, said, right in zip(numbers, *compared, strict=False)
                if number < NUM_EXAMPLES and isinstance(said, str) and isinstance(right, str)
            ]


def numbers_of(window: Window, batch_in_window: int) -> Sequence[int]:
    """Return the numbers of a micro-batch's samples, in the order of its rows."""
    first, size = window.firsts[batch_in_window], window.sizes[batch_in_window]
    if not window.is_reordered:
        return range(first, first + size)
    return [int(index) for index in window.indices[batch_in_window]]


@contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients; put back every submodule's own mode afterwards."""
    with evaluation_mode(model), torch.no_grad():
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; put back every submodule's own mode afterwards."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


class EvalBatches:
    """All batches of a source, in order, each as `prepare` makes it; every walk over them is a new one."""

    def __init__(self, source: Source, prepare: Callable[[Any], Any]) -> None:
        self._source, self._prepare = source, prepare

    def __len__(self) -> int:
        if self._source.num_samples is None:
            raise TypeError("the length of the data is unknown")
        return math.ceil(self._source.num_samples / self._source.batch_size)

    def __iter__(self) -> Iterator[Any]:
        plan = one_pass(self._source.num_samples, self._source.batch_size)
        try:
            for window in self._source.windows(plan, 0, 0, UNLIMITED):
                yield from map(self._prepare, window.batches)
        finally:
            self._source.close()


def _refuse_unmergeable(handler: MetricsHandler, runtime: Runtime) -> None:
    if runtime.num_processes > 1 and not handler.can_merge:
        raise ConfigError(
            f"{type(handler).__name__} counts in an update() or compute() of its own, but has no state() and "
            "merge(), so what the processes count cannot be put together. Add both, or evaluate on one process."
        )


def _generator_for(model: nn.Module, handler: MetricsHandler, setup: RunSetup) -> Callable[[Any], Any] | None:
    """Return how to generate texts for a batch, where the task is measured by texts that the model writes."""
    bare, config = unwrap(model), setup.config
    writes_text = handler.reads_text and bool(handler.metrics) and generates(bare)
    return generator_of(bare, config.generation_kwargs) if writes_text and config.evaluate_with_generate else None
