"""Metrics: counts that merge, computed once over the whole set."""

from hezar_train.metrics.handlers import ClassificationHandler, MetricsHandler, handler_for

__all__ = ["ClassificationHandler", "MetricsHandler", "handler_for"]
