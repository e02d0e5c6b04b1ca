"""What the user asks for: `TrainerConfig`, its checks, and its files. Needs no torch."""

from __future__ import annotations

from hezar_train.config.fields import MetricConfig, metric_config_of
from hezar_train.config.files import read_mapping, to_json, to_plain, to_yaml, write_atomically, write_mapping
from hezar_train.config.names import optimizer_name, precision_name, scheduler_name
from hezar_train.config.trainer_config import CONFIG_FILE, TrainerConfig

__all__ = [
    "CONFIG_FILE",
    "MetricConfig",
    "TrainerConfig",
    "metric_config_of",
    "optimizer_name",
    "precision_name",
    "read_mapping",
    "scheduler_name",
    "to_json",
    "to_plain",
    "to_yaml",
    "write_atomically",
    "write_mapping",
]
