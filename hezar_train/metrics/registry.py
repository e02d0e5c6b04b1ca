"""Metrics by name, by config, or by object: `build_metric` makes one of ours of whatever a config lists.

A name is one of `known_metrics()`, one that `register_metric` gave to a class, or `evaluate:NAME` and
`evaluate:./script.py`. Options of a config are the keyword arguments of the class; a wrong one is told when the metric
is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.metrics.adapters import (
    CollectedMetric,
    EvaluateMetric,
    TorchMetric,
    evaluate_module,
    is_evaluate_module,
    is_torchmetric,
)
from hezar_train.metrics.auroc import Auroc
from hezar_train.metrics.classification import (
    F1,
    Accuracy,
    ConfusionMatrix,
    Matthews,
    Precision,
    Recall,
    TopKAccuracy,
)
from hezar_train.metrics.likelihood import Perplexity, TokenAccuracy
from hezar_train.metrics.metric import Metric, Table
from hezar_train.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    Pearson,
    RootMeanSquaredError,
    Spearman,
)
from hezar_train.metrics.spans import EntityScores
from hezar_train.metrics.text_edit import CharacterErrorRate, WordErrorRate
from hezar_train.metrics.text_overlap import Bleu, ChrF
from hezar_train.metrics.text_rouge import Rouge

__all__ = ["SelectedMetric", "build_metric", "known_metrics", "register_metric"]

AnyClass = TypeVar("AnyClass", bound=type[Any])

EVALUATE_PREFIX = "evaluate:"
OWN: tuple[type[Metric], ...] = (
    *(Accuracy, TopKAccuracy, Precision, Recall, F1, Matthews, Auroc, ConfusionMatrix),
    *(EntityScores, CharacterErrorRate, WordErrorRate, Bleu, ChrF, Rouge),
    *(Perplexity, TokenAccuracy),
    *(MeanSquaredError, RootMeanSquaredError, MeanAbsoluteError, R2, Pearson, Spearman),
)

_classes: dict[str, type[Any]] = {cls.name: cls for cls in OWN}


def known_metrics() -> list[str]:
    """List the names of the metrics that can be built by name."""
    return sorted(_classes)


def register_metric(name: str) -> Callable[[AnyClass], AnyClass]:
    """Give a class a name for configs: a `Metric`, or any class with `compute(predictions, targets)`."""

    def register(cls: AnyClass) -> AnyClass:
        if not isinstance(cls, type) or not callable(getattr(cls, "compute", None)):
            raise ConfigError(f"register_metric({name!r}) got {cls!r}: give a class with a compute method")
        before = _classes.get(name)
        # A cell of a notebook that is run again defines the same class again.
        if before is not None and _full_name(before) != _full_name(cls):
            raise ConfigError(f"register_metric({name!r}): {_full_name(before)} has that name. Choose another")
        _classes[name] = cls
        if issubclass(cls, Metric):
            cls.name = name
        return cls

    return register


def build_metric(metric: Any, defaults: Mapping[str, Any] | None = None) -> Metric:
    """Return the metric that a name, a config or an object stands for.

    `defaults` are options that a metric by name receives if it knows them and its config does not say otherwise.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, Mapping):
        metric = MetricConfig(**metric)
    if isinstance(metric, str):
        metric = MetricConfig(name=str(metric))
    built = _by_config(metric, defaults or {}) if isinstance(metric, MetricConfig) else _adapted(metric)
    if isinstance(metric, MetricConfig):
        built.n_decimals = metric.n_decimals
    return built


class SelectedMetric(Metric):
    """A metric of which a config chose some outputs, or the objective."""

    def __init__(self, metric: Metric, output_keys: Sequence[str] | None, objective: str | None) -> None:
        self.name = metric.name
        self.consumes = metric.consumes
        self._metric = metric
        self._keys = None if output_keys is None else list(output_keys)
        self._objective = objective
        for key in self._keys or ():
            if metric.output_keys and key not in metric.output_keys:
                raise ConfigError(
                    f"metric {self.name!r} has no output {key!r}. It has: {choices(metric.output_keys)}."
                    f"{suggestion(key, metric.output_keys)}"
                )

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


def _by_config(config: MetricConfig, defaults: Mapping[str, Any]) -> Metric:
    if config.name.startswith(EVALUATE_PREFIX):
        path = config.name.removeprefix(EVALUATE_PREFIX)
        module = evaluate_module(path, known_metrics())
        return EvaluateMetric(module, None, config.output_keys, config.objective, config.options)
    if config.name not in _classes:
        raise ConfigError(
            f"metric {config.name!r} is not known. Known are: {choices(_classes)}, 'evaluate:NAME' and those given to "
            f"register_metric.{suggestion(config.name, _classes)}"
        )
    made = _made(config, defaults)
    if not isinstance(made, Metric):
        return CollectedMetric(made.compute, config.name, config.output_keys, config.objective)
    if config.output_keys is None and config.objective is None:
        return made
    return SelectedMetric(made, config.output_keys, config.objective)


def _made(config: MetricConfig, defaults: Mapping[str, Any]) -> Any:
    cls = _classes[config.name]
    signature = inspect.signature(cls)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    accepted = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
    for option in config.options:
        if option not in accepted and not takes_any:
            takes = choices(accepted) or "none"
            raise ConfigError(
                f"metric {config.name!r} has no option {option!r}. Its options: {takes}.{suggestion(option, accepted)}"
            )
    options = {name: value for name, value in defaults.items() if name in accepted} | config.options
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"metric {config.name!r}: {error}. Give it in the config's options") from error
    return cls(**options)


def _adapted(metric: Any) -> Metric:
    if is_torchmetric(metric):
        return TorchMetric(metric)
    if is_evaluate_module(metric):
        return EvaluateMetric(metric)
    if isinstance(metric, type):
        raise ConfigError(f"metrics has the class {metric.__name__}: give an object, as in {metric.__name__}()")
    if callable(getattr(metric, "compute", None)):
        config = getattr(metric, "config", None)  # Hezar's metrics have one
        name = str(getattr(metric, "name", None) or getattr(config, "name", None) or type(metric).__name__)
        keys, objective = getattr(config, "output_keys", None), getattr(config, "objective", None)
        return CollectedMetric(metric.compute, name, keys, objective)
    if callable(metric):
        return CollectedMetric(metric, str(getattr(metric, "__name__", type(metric).__name__)))
    raise ConfigError(
        f"metrics has {metric!r}: give a name, a MetricConfig, a Metric, a metric of torchmetrics or evaluate, "
        "or a function f(predictions, targets)"
    )


def _full_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
