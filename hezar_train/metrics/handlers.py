"""Metrics handlers: batches go in, mergeable counts are kept on the device, one result comes out.

A handler never keeps logits and never averages per-batch values; the result is that of the whole set, for any batch
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.types import TaskType

__all__ = ["ClassificationHandler", "MetricsHandler", "handler_for"]

CLASSIFICATION_TASKS = {TaskType.TEXT_CLASSIFICATION, TaskType.AUDIO_CLASSIFICATION, TaskType.IMAGE_CLASSIFICATION}


class MetricsHandler:
    """Loss only: the handler of tasks without metrics, and the shape of all others."""

    valid_metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, metrics: Sequence[Any] | None = None) -> None:
        self.metrics = list(self.valid_metrics) if metrics is None else [_name(metric) for metric in metrics]
        for metric in self.metrics:
            if metric not in self.valid_metrics:
                known = choices(self.valid_metrics) or "none, only the loss"
                raise ConfigError(
                    f"metrics has {metric!r}, which {type(self).__name__} does not compute. It computes: {known}."
                    f"{suggestion(metric, self.valid_metrics)}"
                )

    @property
    def output_keys(self) -> list[str]:
        """List the names that `compute` returns."""
        return list(self.metrics)

    def objective(self, key: str) -> str:
        """Tell whether a larger or a smaller value of an output is better."""
        return "minimize" if key == "loss" else "maximize"

    def reset(self) -> None:
        """Forget everything counted."""

    def update(self, outputs: Mapping[str, Any], labels: torch.Tensor | None) -> None:
        """Count one batch."""

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since the last reset."""
        return {}


class ClassificationHandler(MetricsHandler):
    """Accuracy of single-label classification: the share of samples whose largest logit is the label's."""

    valid_metrics = ("accuracy",)

    def reset(self) -> None:
        self._correct: torch.Tensor | int = 0
        self._total = 0

    def update(self, outputs: Mapping[str, Any], labels: torch.Tensor | None) -> None:
        logits = outputs.get("logits")
        if labels is None or logits is None or not self.metrics:
            return
        self._correct = self._correct + (logits.argmax(dim=-1) == labels).sum()
        self._total += labels.numel()

    def compute(self) -> dict[str, float]:
        if not self.metrics:
            return {}
        return {"accuracy": float(self._correct) / self._total if self._total else float("nan")}


def handler_for(task: str | None, metrics: Sequence[Any] | None) -> MetricsHandler:
    """Build the handler of a task."""
    if task is not None and TaskType(task) in CLASSIFICATION_TASKS:
        return ClassificationHandler(metrics)
    return MetricsHandler(metrics)


def _name(metric: Any) -> str:
    return metric.name if isinstance(metric, MetricConfig) else str(metric)
