"""Metrics by name, by config, or by object: `build_metric` makes one of ours of whatever a config lists.

A name is one of `known_metrics()`, one that `register_metric` gave to a class, or `evaluate:NAME` and
`evaluate:./script.py`. Options of a config are the keyword arguments of the class; a wrong one is told when the metric
is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hezar_train.config import MetricConfig, metric_config_of
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.metrics.adapters import (
    CollectedMetric,
    EvaluateMetric,
    TorchMetric,
    evaluate_module,
    is_evaluate_module,
    is_torchmetric,
)
from hezar_train.metrics.classification import F1, Accuracy, ConfusionMatrix, Matthews, Precision, Recall
from hezar_train.metrics.likelihood import Perplexity, TokenAccuracy
from hezar_train.metrics.metric import Metric, SelectedMetric
from hezar_train.metrics.ranking import Auroc, TopKAccuracy
from hezar_train.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    Pearson,
    RootMeanSquaredError,
    Spearman,
)
from hezar_train.metrics.sequence_labeling import EntityScores
from hezar_train.metrics.text import Bleu, CharacterErrorRate, ChrF, ExactMatch, Rouge, WordErrorRate

__all__ = ["build_metric", "fits_any_task", "known_metrics", "register_metric"]

AnyClass = TypeVar("AnyClass", bound=type[Any])

EVALUATE_PREFIX = "evaluate:"
OWN: tuple[type[Metric], ...] = (
    *(Accuracy, TopKAccuracy, Precision, Recall, F1, Matthews, Auroc, ConfusionMatrix),
    *(EntityScores, CharacterErrorRate, WordErrorRate, ExactMatch, Bleu, ChrF, Rouge),
    *(Perplexity, TokenAccuracy),
    *(MeanSquaredError, RootMeanSquaredError, MeanAbsoluteError, R2, Pearson, Spearman),
)
OWN_NAMES = frozenset(cls.name for cls in OWN)

_classes: dict[str, type[Any]] = {cls.name: cls for cls in OWN}


def known_metrics() -> list[str]:
    """List the names of the metrics that can be built by name."""
    return sorted(_classes)


def fits_any_task(name: str) -> bool:
    """Tell whether a name is of a metric that no task owns: one of `evaluate`, or a registered one."""
    return name.startswith(EVALUATE_PREFIX) or (name in _classes and name not in OWN_NAMES)


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
    metric = MetricConfig(name=str(metric)) if isinstance(metric, str) else metric_config_of(metric)
    if not isinstance(metric, MetricConfig):
        return _adapted(metric)
    built = _by_config(metric, defaults or {})
    built.n_decimals = metric.n_decimals
    return built


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
