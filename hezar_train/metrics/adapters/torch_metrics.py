"""Metrics of the `torchmetrics` package, which keep their own state and merge by their own synchronisation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hezar_train.errors import ConfigError
from hezar_train.metrics.adapters.adapted import AdaptedMetric, counted_pairs, probabilities
from hezar_train.metrics.metric import Inputs

__all__ = ["TorchMetric", "is_torchmetric"]


class TorchMetric(AdaptedMetric):
    """A metric or a collection of the `torchmetrics` package.

    Processes are merged by its own synchronisation, for which the merged states stand in for a gather: it must not talk
    to other processes by itself, and does not. A metric of classification receives probabilities, made of the model's
    logits (with `from_logits=False`: the model's outputs as they are), any other one the predictions.
    """

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        output_keys: Sequence[str] | None = None,
        objective: str | None = None,
        consumes: Inputs | None = None,
        from_logits: bool = True,
    ) -> None:
        torchmetrics = importlib.import_module("torchmetrics")
        self._metric = metric
        self._parts = [_Part(one) for one in metric.modules() if isinstance(one, torchmetrics.Metric)]
        self._family = _family([part.metric for part in self._parts])
        self._is_collection = isinstance(metric, torchmetrics.MetricCollection)
        self._is_updated = False
        self._from_logits = from_logits
        keys = list(metric.keys()) if self._is_collection and output_keys is None else output_keys
        consumes = consumes or ("scores" if self._family else "predictions")
        super().__init__(name or str(getattr(metric, "name", type(metric).__name__)), keys, objective, consumes)

    def objective(self, key: str) -> str:
        if self._objective is None:
            metric = self._metric[key] if self._is_collection and key in self._metric else self._metric
            higher_is_better = getattr(metric, "higher_is_better", None)
            if higher_is_better is not None:
                return "maximize" if higher_is_better else "minimize"
        return super().objective(key)

    def reset(self) -> None:
        self._metric.reset()
        self._is_updated = False
        for part in self._parts:
            part.others.clear()

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:  # noqa: ARG002
        if self._family != "multilabel":
            predictions, targets = counted_pairs(predictions, targets)
        if isinstance(predictions, torch.Tensor):
            self._metric.to(predictions.device)
            if self.consumes == "scores" and self._family and self._from_logits:
                predictions = probabilities(predictions.detach(), self._family)
        self._metric.update(predictions, targets)
        self._is_updated = True

    def compute(self) -> dict[str, float]:
        if not self._is_updated and not any(part.others for part in self._parts):
            return self._undefined()
        return self._outputs(self._metric.compute())

    def state(self) -> dict[str, torch.Tensor]:
        if not self._is_updated:
            return {}
        return {
            f"{number}.{place}": tensor
            for number, part in enumerate(self._parts)
            for place, tensor in enumerate(part.tensors())
        }

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if not state:
            return
        for number, part in enumerate(self._parts):
            own = [name for name in state if name.startswith(f"{number}.")]
            part.add([state[f"{number}.{place}"] for place in range(len(own))], instead=not self._is_updated)


class _Part:
    """One metric of torchmetrics; where it would gather from other processes, it receives what was merged."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.others: list[list[torch.Tensor]] = []
        self._leaves_out_own = False
        self._place = 0
        metric.dist_sync_fn = self._gather
        metric.distributed_available_fn = self._has_others

    def tensors(self) -> list[torch.Tensor]:
        """Return what the metric would send to other processes, in the order in which it would."""
        sent: list[torch.Tensor] = []

        def record(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:  # noqa: ARG001
            sent.append(tensor.detach().clone())
            return [tensor]

        self.metric.sync(dist_sync_fn=record, distributed_available=lambda: True)
        self.metric.unsync()
        return sent

    def add(self, tensors: list[torch.Tensor], *, instead: bool) -> None:
        """Take what another process sent, beside the own state or instead of it (if that is empty)."""
        name = type(self.metric).__name__
        if not self.metric.sync_on_compute:
            raise ConfigError(f"{name} has sync_on_compute=False, so processes cannot be merged: leave it True")
        before = self.others if instead else [*self.others, self.tensors()]
        if any(len(one) != len(tensors) for one in before):
            raise ConfigError(f"{name} keeps lists that differ between processes: evaluate it on one process")
        self._leaves_out_own = instead
        self.others.append(tensors)

    def _has_others(self) -> bool:
        return bool(self.others)

    def _gather(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:  # noqa: ARG002
        received = [other[self._place].to(tensor.device) for other in self.others]
        self._place = (self._place + 1) % len(self.others[0])
        return received if self._leaves_out_own else [tensor, *received]


def is_torchmetric(value: Any) -> bool:
    """Tell whether this is a metric or a collection of torchmetrics, without importing it."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.Metric | package.MetricCollection)


def _family(metrics: Sequence[Any]) -> str:
    """Return "binary", "multiclass" or "multilabel" for metrics of classification, else an empty string."""
    for cls in (cls for metric in metrics for cls in type(metric).__mro__):
        for family in ("Binary", "Multiclass", "Multilabel"):
            if cls.__module__.startswith("torchmetrics.classification") and cls.__name__.startswith(family):
                return family.lower()
    return ""
