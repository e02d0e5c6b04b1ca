"""Metrics of other makers behind our protocol: torchmetrics, evaluate, functions, objects with `compute`.

A torchmetrics metric keeps its own state. Everything else here needs the whole set at once, so predictions and targets
are kept on the host, and a warning says so. None of them can count a sample several times, so none has an interval.

Neither torchmetrics nor evaluate is imported before one of theirs is used. Integer targets of -100 are left out.
Which outputs there are is known after the first computation only: until then `output_keys` is the metric's name,
unless it was given (`MetricConfig.output_keys`, or the adapter's argument of that name).
"""

from hezar_train.metrics.adapters.collected import CollectedMetric
from hezar_train.metrics.adapters.evaluate_modules import EvaluateMetric, evaluate_module, is_evaluate_module
from hezar_train.metrics.adapters.torch_metrics import TorchMetric, is_torchmetric

__all__ = [
    "CollectedMetric",
    "EvaluateMetric",
    "TorchMetric",
    "evaluate_module",
    "is_evaluate_module",
    "is_torchmetric",
]
