"""What a handler is: it turns what a model returned into what metrics read, has them count, and asks for the result.

Metrics read class ids, label sequences, texts or values. A handler never keeps logits and never averages per-batch
values; the result is that of the whole set, for any batch size. A handler of your own is a small class: name its
metrics, and override `predictions` or `targets` where the task wants another reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.metrics.bootstrap import interval
from hezar_train.metrics.class_counts import share_counts
from hezar_train.metrics.metric import Metric, Table, shown
from hezar_train.metrics.registry import build_metric, fits_any_task
from hezar_train.metrics.sample_losses import LossIntervals

__all__ = ["Decode", "MetricsHandler", "names_in_order"]

Decode = Callable[[Any], list[str]]


class MetricsHandler:
    """Loss only: the handler of tasks without metrics, and the shape of all others."""

    valid_metrics: ClassVar[tuple[str, ...]] = ()
    """Names that make sense for the task; objects of your own always do."""

    default_metrics: ClassVar[tuple[str, ...]] = ()
    """What is computed unless the config says otherwise."""

    reads_text: ClassVar[bool] = False
    """Whether metrics compare texts: a generative model then generates, and ids are decoded."""

    sample_loss_name: ClassVar[str] = "loss"
    """What `sample_losses` returns, in words: it is not the loss of the training for every task."""

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        self.trainer = trainer
        self.is_default = metrics is None
        self._specs = list(self.default_metrics if metrics is None else metrics)
        self.metrics: list[Metric] = self._built()
        self.decode: Decode | None = None
        self._loss_intervals = LossIntervals()
        _refuse_clashes(self.metrics)

    @property
    def output_keys(self) -> list[str] | None:
        """List the names that `compute` returns; None if that cannot be known beforehand."""
        if type(self).compute is not MetricsHandler.compute and not self.metrics:  # a handler that counts for itself
            return list(self.valid_metrics) or None
        return [key for metric in self.metrics for key in metric.output_keys]

    def objective(self, key: str) -> str:
        """Tell whether a larger or a smaller value of an output is better."""
        owner = next((metric for metric in self.metrics if key in metric.output_keys), None)
        if owner is not None:
            return owner.objective(key)
        return "minimize" if key == "loss" else "maximize"

    def shown(self, name: str, value: float) -> str:
        """Return a value for people, with its metric's decimals; `name` is as in a log, `evaluation.dev.f1.low`."""
        path = f".{name.removesuffix('.low').removesuffix('.high')}"
        owners = (one for one in self.metrics if any(path.endswith(f".{key}") for key in one.output_keys))
        owner = next(owners, None)
        return f"{value:.4g}" if owner is None else shown(value, owner.n_decimals)

    def attach(self, trainer: Any) -> None:
        """Learn which trainer evaluates, for handlers that want to know more than they are given."""
        self.trainer = self.trainer or trainer

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        """Learn what the labels are called and how ids become text, before the first batch."""
        self.decode = self.decode or decode
        if label_names:
            names = names_in_order(label_names, max(label_names) + 1)
            for metric in self.metrics:
                metric.expect_classes(len(names), names)

    def options(self) -> dict[str, Any]:
        """Return options that metrics by name receive if they know them."""
        return {}

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        """Return what the model decided, one item per sample."""
        return outputs.get("logits")

    def targets(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        """Return what would have been right, one item per sample."""
        return labels

    def scores(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        """Return the logits and what would have been right, for metrics that rank."""
        return outputs.get("logits"), self.targets(outputs, labels)

    def compared(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        """Return predictions and targets place by place, for the list of the worst."""
        return self.predictions(outputs, labels), self.targets(outputs, labels)

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        """Return how wrong each sample is, for the list of the worst; None: not known for this task."""
        return None

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        """Return how many units each sample's loss is a mean of; None: these losses do not make the batch's."""
        return None

    def reset(self) -> None:
        """Forget everything counted."""
        self._loss_intervals.reset()
        for metric in self.metrics:
            metric.reset()

    def update(
        self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor | None = None, num_units: float = 1.0
    ) -> None:
        """Count one batch; `weights` are the rows of a bootstrap, `num_units` what the loss is a mean of."""
        consumed = {metric.consumes for metric in self.metrics}
        given: dict[str, tuple[Any, Any]] = {"loss": (outputs.get("loss"), num_units)}
        if labels is not None and "predictions" in consumed:
            given["predictions"] = self.predictions(outputs, labels), self.targets(outputs, labels)
        if labels is not None and "scores" in consumed:
            given["scores"] = self.scores(outputs, labels)
        for metric in self.metrics:
            decided, right = given.get(metric.consumes, (None, None))
            if decided is not None:
                metric.update(decided, right, weights)
        if weights is not None and labels is not None:
            self._count_losses(outputs, labels, weights, num_units)

    @property
    def can_merge(self) -> bool:
        """Whether what several processes count can be put together: not if a class counts by itself and cannot say."""
        own = [one for one in type(self).__mro__ if not one.__module__.startswith("hezar_train.metrics")]
        counts = any({"update", "compute"} & vars(one).keys() for one in own)
        return not counts or any({"state", "merge"} <= vars(one).keys() for one in own)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """Return everything counted, as tensors that another process can merge."""
        return [metric.state() for metric in (*self.metrics, *self._loss_intervals.parts)]

    def merge(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Add what another process counted."""
        for metric, state in zip((*self.metrics, *self._loss_intervals.parts), states, strict=True):
            metric.merge(state)

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since the last reset."""
        return {key: value for metric in self.metrics for key, value in metric.compute().items()}

    def intervals(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Return the bootstrap interval of each output, of the metrics that have one."""
        found = self._loss_intervals.compute(self.metrics, level)
        for metric in self.metrics:
            rows = metric.compute_rows()
            for key in metric.output_keys if len(rows) > 1 else ():
                found[key] = interval([row[key] for row in rows[1:]], level)
        return found

    def tables(self) -> list[Table]:
        """Return what a report shows beside the numbers: a confusion matrix, a row per class."""
        return [table for metric in self.metrics if (table := metric.table()) is not None]

    def _count_losses(self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor, num_units: float) -> None:
        losses, units = self.sample_losses(outputs, labels), self.sample_units(outputs, labels)
        if losses is not None and units is not None and outputs.get("loss") is not None:
            self._loss_intervals.update((outputs["loss"], num_units), (losses, units), weights)

    def _built(self) -> list[Metric]:
        """Return the metrics that were asked for, with the options that hold now."""
        metrics = [self._build(spec) for spec in self._specs]
        share_counts(metrics)
        return metrics

    def _build(self, metric: Any) -> Metric:
        spec = MetricConfig(**metric) if isinstance(metric, Mapping) else metric
        name = spec.name if isinstance(spec, MetricConfig) else spec
        if isinstance(name, str) and not self._computes(name):
            known = choices(self.valid_metrics) or "none, only the loss"
            raise ConfigError(
                f"metrics has {str(name)!r}, which {type(self).__name__} does not compute. It computes: {known}."
                f"{suggestion(str(name), self.valid_metrics)}"
            )
        return build_metric(spec, self.options())

    def _computes(self, name: str) -> bool:
        return name in (*self.valid_metrics, *self.default_metrics) or fits_any_task(name)


def names_in_order(names: Mapping[int, str], count: int) -> list[str]:
    """Return the names of the ids below `count`; an id without one is called by its number."""
    return [str(names.get(number, number)) for number in range(count)]


def _refuse_clashes(metrics: Sequence[Metric]) -> None:
    keys = ["loss"] + [key for metric in metrics for key in metric.output_keys]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"metrics gives {choices(twice)} more than once: leave one out, or choose output_keys")
