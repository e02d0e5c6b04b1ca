"""FederatedScope's federated training on our loop: trainers by name, algorithms as hooks, its metrics and monitor."""

from hezar_train.federated.ditto import DittoTrainer, wrap_DittoTrainer
from hezar_train.federated.fedprox import (
    FedProx,
    RegularizedOptimizer,
    wrap_fedprox_trainer,
    wrap_regularized_optimizer,
)
from hezar_train.federated.metric_calculator import MetricCalculator, is_larger_better, register_metric
from hezar_train.federated.monitor import Monitor
from hezar_train.federated.registry import PLUGIN_ORDER, get_trainer, register_plugin, register_trainer
from hezar_train.federated.sam import ASAM, SAM, wrap_sam_trainer
from hezar_train.federated.worker import BaseTrainer

__all__ = [
    "ASAM",
    "PLUGIN_ORDER",
    "SAM",
    "BaseTrainer",
    "DittoTrainer",
    "FedProx",
    "MetricCalculator",
    "Monitor",
    "RegularizedOptimizer",
    "get_trainer",
    "is_larger_better",
    "register_metric",
    "register_plugin",
    "register_trainer",
    "wrap_DittoTrainer",
    "wrap_fedprox_trainer",
    "wrap_regularized_optimizer",
    "wrap_sam_trainer",
]
