"""Processes, device and precision of a run: the one place that builds an Accelerator."""

from hezar_train.runtime.batch_norm import SyncedBatchNorm
from hezar_train.runtime.build import Runtime, build_runtime, logger, prepare_model, to_device, use_threads
from hezar_train.runtime.plugins import prepare_with_plugin
from hezar_train.runtime.processes import Processes
from hezar_train.runtime.replicas import Replicas
from hezar_train.runtime.shares import copies_of

__all__ = [
    "Processes",
    "Replicas",
    "Runtime",
    "SyncedBatchNorm",
    "build_runtime",
    "copies_of",
    "logger",
    "prepare_model",
    "prepare_with_plugin",
    "to_device",
    "use_threads",
]
