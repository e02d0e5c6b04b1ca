"""What the loop does by itself while evaluating: forward, measure; the loss is the weighted mean over the whole set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hezar_train.data import Window
from hezar_train.errors import DataError, HookError, TrainingInterrupted
from hezar_train.hooks import Progress, StopFlag
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.metrics import MetricsHandler, Table, poisson_weights
from hezar_train.runtime import Processes
from hezar_train.trainer.models import labels_of
from hezar_train.trainer.worst import WorstSamples

__all__ = ["EvaluationReport", "EvaluationSteps", "evaluation_mode", "looking_only"]

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
