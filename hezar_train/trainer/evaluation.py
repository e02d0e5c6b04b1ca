"""What the loop does by itself while evaluating: forward, measure; the loss is the weighted mean over the whole set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hezar_train.data import Window
from hezar_train.errors import DataError, TrainingInterrupted
from hezar_train.hooks import Progress, StopFlag
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.metrics import MetricsHandler
from hezar_train.trainer.models import labels_of

__all__ = ["EvaluationSteps", "looking_only"]


class EvaluationSteps:
    """The default hooks of evaluation, and the sums they keep."""

    def __init__(
        self,
        prepare: Callable[[Context], None],
        evaluation_step: Callable[[Any], dict[str, Any]],
        handler: MetricsHandler,
        flag: StopFlag,
    ) -> None:
        self._prepare, self._evaluation_step, self._handler, self._flag = prepare, evaluation_step, handler, flag
        self.progress: Progress | None = None

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour into a hook set, under its names."""
        hooks.register(self.start, Moment.FIT_START, name="start")
        hooks.register(self._prepare, Moment.BATCH_START, name="prepare_input")
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.measure, Moment.BATCH_END, name="measure")

    def start(self, _: Context) -> None:
        """Forget the last evaluation."""
        self._handler.reset()
        self._loss: torch.Tensor | float = 0.0
        self._weight = 0.0
        self._batches = 0

    def forward(self, ctx: Context) -> None:
        """Run the model and its loss on the batch."""
        ctx.outputs = self._evaluation_step(ctx.batch)

    def measure(self, ctx: Context) -> None:
        """Add the batch to the sums; they stay on the device."""
        window: Window = ctx.window
        weight = window.weights[ctx.batch_in_window]
        if weight:  # a mean over no unit is NaN
            self._loss = self._loss + ctx.outputs["loss"].double() * weight
            self._weight += weight
        self._handler.update(ctx.outputs, labels_of(ctx.batch))
        self._batches += 1
        if self.progress is not None:
            self.progress.advance_evaluation(self._batches)
        if self._flag.signal is not None:
            raise TrainingInterrupted(self._flag.exit_code, f"{self._flag.signal.name}: evaluation abandoned.")

    def result(self) -> dict[str, float]:
        """Return the loss and the handler's metrics over everything measured."""
        if self._weight == 0:
            raise DataError("the evaluation data is empty: there is nothing to measure")
        return {"loss": float(self._loss) / self._weight, **self._handler.compute()}


@contextmanager
def looking_only(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients; put back every submodule's own mode afterwards."""
    before: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before.items():
            module.training = training
