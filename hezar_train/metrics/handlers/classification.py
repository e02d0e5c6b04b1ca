"""The handler of classification: it learns from the data whether samples have one label or several.

Beside the metrics asked for it counts what a report shows (a confusion matrix, a row per class), unless the classes are
too many for a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hezar_train.metrics.decisions import largest
from hezar_train.metrics.handlers.handler import Decode, MetricsHandler, names_in_order
from hezar_train.metrics.metric import Metric, Table
from hezar_train.metrics.registry import build_metric
from hezar_train.metrics.sample_losses import of_classes, of_labels

__all__ = ["ClassificationHandler"]

MOST_CLASSES_IN_A_TABLE = 64


class ClassificationHandler(MetricsHandler):
    """One label per sample, the largest logit's; or several, those whose logit is positive (labels as 0/1 rows)."""

    valid_metrics = ("accuracy", "top_k_accuracy", "precision", "recall", "f1", "matthews", "auroc", "confusion_matrix")
    default_metrics = ("accuracy",)

    def __init__(
        self, metrics: Sequence[Any] | None = None, trainer: Any = None, *, is_multilabel: bool = False
    ) -> None:
        self._is_multilabel = is_multilabel
        self._reported: list[Metric] = []  # for tables only: they add no output
        self._label_names: Mapping[int, str] = {}
        self._num_classes = 0
        super().__init__(metrics, trainer)

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        super().expect(label_names, decode)
        self._label_names = label_names or {}

    def options(self) -> dict[str, Any]:
        return {"multilabel": True} if self._is_multilabel else {}

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        logits = outputs.get("logits")
        if logits is None:
            return None
        if self._is_multilabel:
            return (logits > 0).long()
        if logits.ndim == 1 or logits.shape[-1] == 1:  # one logit says yes or no
            return (logits.reshape(len(logits)) > 0).long()
        return largest(logits)

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        logits = outputs.get("logits")
        if logits is None:
            return None
        if logits.ndim == 2 and labels.ndim == 1 and logits.shape[1] > 1:
            return of_classes(logits, labels)
        if logits.numel() != labels.numel():
            return None
        return of_labels(logits.reshape(len(labels), -1), labels.reshape(len(labels), -1))

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        return torch.ones(len(labels), device=labels.device)

    def reset(self) -> None:
        super().reset()
        for metric in self._reported:
            metric.reset()

    def update(
        self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor | None = None, num_units: float = 1.0
    ) -> None:
        logits = outputs.get("logits")
        if logits is None or labels is None:
            return
        self._look_at(logits, labels)
        super().update(outputs, labels, weights, num_units)
        predicted = self.predictions(outputs, labels) if self._reported else None
        for metric in self._reported:
            metric.update(predicted, labels)

    def state(self) -> list[dict[str, torch.Tensor]]:
        kind = {"kind": torch.tensor([int(self._is_multilabel), self._num_classes])}
        return [kind, *super().state(), *(metric.state() for metric in self._reported)]

    def merge(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        is_multilabel, num_classes = states[0]["kind"].tolist()
        if num_classes == 0:  # a process without a batch
            return
        self._learn_kind(bool(is_multilabel), num_classes)
        first_reported = len(states) - len(self._reported)
        super().merge(states[1:first_reported])
        for metric, state in zip(self._reported, states[first_reported:], strict=True):
            metric.merge(state)

    def tables(self) -> list[Table]:
        found = {table["name"]: table for table in super().tables()}
        for metric in self._reported:
            if (table := metric.table()) is not None:
                found.setdefault(table["name"], table)
        return list(found.values())

    def _look_at(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Learn from a batch whether samples have several labels, and how many classes there are."""
        is_multilabel = self._is_multilabel or (labels.ndim > 1 and logits.shape == labels.shape)
        num_columns = logits.shape[-1] if logits.ndim > 1 else 1
        self._learn_kind(is_multilabel, num_columns if is_multilabel else max(2, num_columns))

    def _learn_kind(self, is_multilabel: bool, num_classes: int) -> None:
        if (is_multilabel, num_classes) == (self._is_multilabel, self._num_classes):
            return
        if is_multilabel != self._is_multilabel:
            self._is_multilabel = is_multilabel
            self.metrics = self._built()
        self._num_classes = num_classes
        self._reported = self._built_for_report()
        names = names_in_order(self._label_names, num_classes)  # a config may name fewer classes than the model has
        for metric in (*self.metrics, *self._reported):
            metric.expect_classes(num_classes, names)

    def _built_for_report(self) -> list[Metric]:
        if self._num_classes > MOST_CLASSES_IN_A_TABLE:
            return []
        names = ["f1"] if self._is_multilabel else ["confusion_matrix", "f1"]
        return [build_metric(name, self.options()) for name in names]
