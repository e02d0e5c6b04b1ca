"""What the loop does by itself while evaluating: forward, measure; the loss is the weighted mean over the whole set."""

from __future__ import annotations

import inspect
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import nn

from hezar_train.data import Source, Window
from hezar_train.errors import ConfigError, DataError, HookError, MissingDependencyError, TrainingInterrupted, choices
from hezar_train.hooks import StopFlag
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.metrics import MetricsHandler, Table, poisson_weights
from hezar_train.plan import UNLIMITED, one_pass
from hezar_train.runtime import Processes
from hezar_train.terminal import Progress
from hezar_train.trainer.model_runner import labels_of
from hezar_train.trainer.report_samples import WorstSamples

__all__ = [
    "EvaluationReport",
    "EvaluationSteps",
    "LookingBatches",
    "PredictionFile",
    "PredictionSteps",
    "evaluation_mode",
    "looking_only",
    "write_predictions",
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


class EvaluationSteps:
    """The default hooks of evaluation, and the sums they keep."""

    def __init__(
        self,
        prepare: Callable[[Context], None],
        evaluation_step: Callable[[Any], dict[str, Any]],
        handler: MetricsHandler,
        flag: StopFlag,
        bootstrap: tuple[int, int] = (0, 0),
        processes: Processes | None = None,
    ) -> None:
        """Measure with `handler`; `bootstrap` is the seed and the number of resamples."""
        self._prepare, self._evaluation_step, self._handler, self._flag = prepare, evaluation_step, handler, flag
        self._seed, self._num_resamples = bootstrap
        self._processes = processes or Processes()
        self._takes_rows = "weights" in inspect.signature(handler.update).parameters
        self.progress: Progress | None = None
        self._report: EvaluationReport | None = None
        self._loss: torch.Tensor | float = 0.0
        self._weight = 0.0
        self.num_samples = 0
        self.saved: str | None = None  # in words; a signal ends only an evaluation that a resume would do again

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour into a hook set, under its names."""
        hooks.register(self.start, Moment.FIT_START, name="start")
        hooks.register(self._prepare, Moment.BATCH_START, name="prepare_input")
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.measure, Moment.BATCH_END, name="measure")
        hooks.register(self.conclude, Moment.FIT_END, name="conclude")

    def start(self, _: Context) -> None:
        """Forget the last evaluation."""
        self._report = None
        self._handler.reset()
        self._loss = 0.0
        self._weight = 0.0
        self._batches = 0
        self.num_samples = 0
        self._worst = WorstSamples()
        self._examples: list[dict[str, Any]] = []

    def forward(self, ctx: Context) -> None:
        """Run the model and its loss on the batch."""
        ctx.outputs = self._evaluation_step(ctx.batch)

    def measure(self, ctx: Context) -> None:
        """Add the batch to the sums; they stay on the device."""
        window: Window = ctx.window
        if not window.sizes[ctx.batch_in_window]:  # of another process: this one ran to keep it company
            return
        weight = window.weights[ctx.batch_in_window]
        if weight:  # a mean over no unit is NaN
            self._loss = self._loss + ctx.outputs["loss"].double() * weight
            self._weight += weight
        place = (window.firsts[ctx.batch_in_window], window.sizes[ctx.batch_in_window])
        self._measure_metrics(place, ctx.outputs, labels_of(ctx.batch), weight)
        self._batches += 1
        self.num_samples += place[1]
        if self.progress is not None:
            self.progress.advance_evaluation(self._batches)
        if self._flag.asked and self._flag.signal is not None and self.saved is not None:
            words = f"{self._flag.signal.name}: evaluation abandoned, {self.saved}."
            raise TrainingInterrupted(self._flag.exit_code, words)

    def conclude(self, ctx: Context) -> None:
        """Compute everything once, and show it to hooks as `ctx.eval_metrics`, under the split's name."""
        if ctx.failed is None:
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
        self, place: tuple[int, int], outputs: Mapping[str, Any], labels: Any, num_units: float
    ) -> None:
        handler, rows, (first, count) = self._handler, None, place
        if self._num_resamples:
            numbers = torch.arange(first, first + count)
            rows = poisson_weights(self._seed, numbers, self._num_resamples)
        if self._takes_rows:
            handler.update(outputs, labels, rows, num_units)
        else:  # a user's own handler may take outputs and labels alone
            handler.update(outputs, labels)
        if labels is not None:
            self._note_samples(first, outputs, labels)

    def _note_samples(self, first: int, outputs: Mapping[str, Any], labels: Any) -> None:
        """Keep what a report shows of a batch: the samples that went worst, and the first texts."""
        handler = self._handler
        losses = handler.sample_losses(outputs, labels)
        if losses is None:
            return
        compared = handler.compared(outputs, labels)
        self._worst.add(first, losses, *compared)
        if handler.reads_text and first < NUM_EXAMPLES:
            self._examples += [
                {"sample": number, "prediction": said, "target": right}
                for number, said, right in zip(range(first, NUM_EXAMPLES), *compared, strict=False)
                if isinstance(said, str) and isinstance(right, str)
            ]


@contextmanager
def looking_only(model: nn.Module) -> Iterator[None]:
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


# Predictions, streamed: to a list, to JSON lines, or to Parquet; nothing but the file is kept of what was written.

SUFFIXES = (".jsonl", ".json", ".parquet")


class PredictionSteps:
    """The default hooks of prediction."""

    def __init__(
        self, prepare: Callable[[Context], None], look: Callable[[Any], Mapping[str, Any]], handler: MetricsHandler
    ) -> None:
        self._prepare, self._look, self._handler = prepare, look, handler
        self.sink: Callable[[int, Any], None] = _nowhere

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour into a hook set, under its names."""
        hooks.register(self._prepare, Moment.BATCH_START, name="prepare_input")
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.collect, Moment.BATCH_END, name="collect")

    def forward(self, ctx: Context) -> None:
        """Run the model on the batch."""
        ctx.outputs = self._look(ctx.batch)

    def collect(self, ctx: Context) -> None:
        """Hand each sample's prediction on, with its number."""
        window: Window = ctx.window
        count = window.sizes[ctx.batch_in_window]
        if not count:  # of another process: this one ran to keep it company
            return
        found = self._handler.predictions(ctx.outputs, labels_of(ctx.batch))
        if found is None:
            raise DataError(
                f"the model's outputs have no 'logits' to predict from; they are: {choices(ctx.outputs)}. Return "
                "logits, or pass a metrics_handler whose predictions() reads what there is."
            )
        values = found.tolist() if isinstance(found, torch.Tensor) else list(found)
        if len(values) != count:
            raise DataError(
                f"there are {len(values)} predictions for {count} samples; expected one each, in their order. "
                "Return logits whose first axis is the sample's, or pass a metrics_handler whose predictions() does."
            )
        for number, value in enumerate(values, start=window.firsts[ctx.batch_in_window]):
            self.sink(number, value)


def write_predictions(path: Path, numbered: Iterable[tuple[int, Any]]) -> None:
    """Write predictions that are all there, in order."""
    with PredictionFile(path) as file:
        for number, value in numbered:
            file.add(number, value)


class PredictionFile:
    """Write predictions line by line under a temporary name; the file appears if the body ends well."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in SUFFIXES:
            raise ConfigError(
                f"predictions cannot be written to {path}: expected a name that ends in {choices(SUFFIXES)}"
            )
        if path.suffix == ".parquet":
            _datasets()  # better missed now than after the last prediction
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self._temporary.open("w", encoding="utf-8")

    def add(self, number: int, value: Any) -> None:
        """Write one prediction."""
        self._file.write(json.dumps({"sample": number, "prediction": value}, ensure_ascii=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._publish()
        else:
            self._temporary.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Give the file its name; Parquet is made of the lines, batch by batch."""
        if self._path.suffix == ".parquet":
            table = self._temporary.with_suffix(".parquet")
            try:
                _to_parquet(self._temporary, table)
                table.replace(self._path)
            finally:
                table.unlink(missing_ok=True)
                self._temporary.unlink()
        else:
            self._temporary.replace(self._path)


def _to_parquet(lines: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{lines.name}.", dir=lines.parent) as cache:
        _datasets().Dataset.from_json(str(lines), cache_dir=cache).to_parquet(str(target))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", "datasets", "writing Parquet") from error
    return datasets


def _nowhere(_: int, __: Any) -> None:
    raise RuntimeError("predictions have nowhere to go")


# The batches of a set to look at, for an overridden `val_epoch` or `test_epoch` that goes over them itself.


class LookingBatches:
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
