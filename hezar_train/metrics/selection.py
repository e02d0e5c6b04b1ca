"""Which outputs of a metric are wanted: `output_keys` and `objective` of a config, for any metric."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.metrics.metric import Metric, Table

__all__ = ["SelectedMetric", "check_outputs"]


class SelectedMetric(Metric):
    """A metric of which a config chose some outputs, or the objective."""

    def __init__(self, metric: Metric, output_keys: Sequence[str] | None, objective: str | None) -> None:
        self.name = metric.name
        self.consumes = metric.consumes
        self._metric = metric
        self._keys = None if output_keys is None else list(output_keys)
        self._objective = objective
        if metric.output_keys:  # one with an output per class has none until the classes are known
            check_outputs(self.name, self._keys or (), metric.output_keys)

    @property
    def output_keys(self) -> list[str]:
        return self._metric.output_keys if self._keys is None else list(self._keys)

    @property
    def unwrapped(self) -> Metric:
        return self._metric.unwrapped

    def objective(self, key: str) -> str:
        return self._objective or self._metric.objective(key)

    def expect_classes(self, num_classes: int, names: Sequence[str] | None = None) -> None:
        self._metric.expect_classes(num_classes, names)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        self._metric.update(predictions, targets, weights)

    def compute(self) -> dict[str, float]:
        return self._selected(self._metric.compute())

    def compute_rows(self) -> list[dict[str, float]]:
        return [self._selected(row) for row in self._metric.compute_rows()]

    def table(self) -> Table | None:
        return self._metric.table()

    def state(self) -> dict[str, torch.Tensor]:
        return self._metric.state()

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        self._metric.merge(state)

    def _selected(self, outputs: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in outputs.items() if key in self.output_keys}


def check_outputs(metric: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Refuse a chosen output that the metric of this name does not have."""
    for key in chosen:
        if key not in known:
            has, hint = choices(known) or "none", suggestion(key, known)
            raise ConfigError(f"metric {metric!r} has no output {key!r}. It has: {has}.{hint}")
