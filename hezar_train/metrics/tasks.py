"""Which handler a task has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hezar_train.errors import ConfigError
from hezar_train.metrics.handlers import (
    ClassificationHandler,
    ErrorRateHandler,
    LanguageModelingHandler,
    MetricsHandler,
    RegressionHandler,
    SequenceLabelingHandler,
    TextGenerationHandler,
    WholeSetHandler,
)
from hezar_train.types import TaskType

__all__ = ["handler_for", "settle_handler"]

HANDLERS: dict[TaskType, Callable[..., MetricsHandler]] = {
    TaskType.TEXT_CLASSIFICATION: ClassificationHandler,
    TaskType.AUDIO_CLASSIFICATION: ClassificationHandler,
    TaskType.IMAGE_CLASSIFICATION: ClassificationHandler,
    TaskType.SEQUENCE_LABELING: SequenceLabelingHandler,
    TaskType.LANGUAGE_MODELING: LanguageModelingHandler,
    TaskType.MASK_FILLING: partial(LanguageModelingHandler, is_causal=False),
    TaskType.REGRESSION: RegressionHandler,
    TaskType.IMAGE2TEXT: ErrorRateHandler,
    TaskType.SPEECH_RECOGNITION: ErrorRateHandler,
    TaskType.TEXT_GENERATION: TextGenerationHandler,
}
TEXT_TASKS = {TaskType.IMAGE2TEXT, TaskType.SPEECH_RECOGNITION, TaskType.TEXT_GENERATION}


def handler_for(task: str | None, metrics: Sequence[Any] | None) -> MetricsHandler:
    """Build the handler of a task; tasks without one have the loss only."""
    build = HANDLERS.get(TaskType(task), MetricsHandler) if task is not None else MetricsHandler
    return build(metrics)


def settle_handler(given: Any, task: str | None, metrics: Sequence[Any] | None) -> MetricsHandler:
    """Take the handler given, serving one that only computes on the whole set; else build the task's."""
    if given is None:
        return handler_for(task, metrics)
    if metrics:
        listed = ", ".join(map(str, metrics))
        warnings.warn(f"metrics ({listed}) has no effect beside a metrics_handler, which has its own", stacklevel=2)
    if isinstance(given, MetricsHandler) and not hasattr(given, "compute_metrics"):
        return given
    if callable(getattr(given, "compute_metrics", None)):
        return WholeSetHandler(given, reads_text=task in TEXT_TASKS)
    raise ConfigError(
        f"metrics_handler is a {type(given).__name__}; expected a MetricsHandler, or an object with "
        "compute_metrics(predictions, labels)"
    )
