"""Metrics: counts that merge, computed once over the whole set."""

from hezar_train.metrics.handlers import (
    GENERATED_KEYS,
    ClassificationHandler,
    LanguageModelingHandler,
    MetricsHandler,
    RegressionHandler,
    SequenceLabelingHandler,
    TextHandler,
    WholeSetHandler,
    handler_for,
    largest,
    settle_handler,
    without_ignored,
)
from hezar_train.metrics.metric import IGNORED_LABEL, AdditiveMetric, Metric, Table, interval, poisson_weights
from hezar_train.metrics.registry import build_metric, known_metrics, register_metric
from hezar_train.metrics.text import normalise

__all__ = [
    "GENERATED_KEYS",
    "IGNORED_LABEL",
    "AdditiveMetric",
    "ClassificationHandler",
    "LanguageModelingHandler",
    "Metric",
    "MetricsHandler",
    "RegressionHandler",
    "SequenceLabelingHandler",
    "Table",
    "TextHandler",
    "WholeSetHandler",
    "build_metric",
    "handler_for",
    "interval",
    "known_metrics",
    "largest",
    "normalise",
    "poisson_weights",
    "register_metric",
    "settle_handler",
    "without_ignored",
]
