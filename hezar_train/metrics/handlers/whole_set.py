"""The handler of a user's object that computes metrics of a whole set, and cannot count batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hezar_train.metrics.adapters import CollectedMetric
from hezar_train.metrics.handlers.handler import MetricsHandler
from hezar_train.metrics.handlers.texts import generated_ids

__all__ = ["WholeSetHandler"]


class WholeSetHandler(MetricsHandler):
    """Serve a handler that has only `compute_metrics(predictions, labels)`: it is given the whole set, from memory."""

    def __init__(self, handler: Any, *, reads_text: bool = False) -> None:
        self._handler = handler
        self.reads_text = bool(getattr(handler, "reads_text", False)) or reads_text  # type: ignore[misc]
        function = CollectedMetric(
            handler.compute_metrics, type(handler).__name__, consumes="predictions", drops_ignored=False
        )
        super().__init__([function], getattr(handler, "trainer", None))

    @property
    def output_keys(self) -> list[str] | None:
        return None

    def objective(self, key: str) -> str:
        found = getattr(self._handler, "objective", None)
        told = found(key) if callable(found) else found
        return told if told in {"maximize", "minimize"} else ("minimize" if "loss" in key else "maximize")

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        if getattr(self._handler, "trainer", self) is None:
            self._handler.trainer = trainer

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        ids = generated_ids(outputs.get("generated"))
        return outputs.get("logits") if ids is None else ids
