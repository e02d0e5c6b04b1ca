"""Processes, device and precision of a run: the one place that builds an Accelerator."""

from hezar_train.runtime.accelerator import (
    build_runtime,
    enable_gradient_checkpointing,
    prepare_model,
    prepare_with_plugin,
    to_device,
    use_threads,
)
from hezar_train.runtime.console import logger
from hezar_train.runtime.data_parallel import Replicas, SyncedBatchNorm
from hezar_train.runtime.processes import Processes, Runtime
from hezar_train.runtime.sharding import copies_of

__all__ = [
    "Processes",
    "Replicas",
    "Runtime",
    "SyncedBatchNorm",
    "build_runtime",
    "copies_of",
    "enable_gradient_checkpointing",
    "logger",
    "prepare_model",
    "prepare_with_plugin",
    "to_device",
    "use_threads",
]
