"""Processes, device and precision of a run: the one place that builds an Accelerator."""

from hezar_train.runtime.batch_norm import SyncedBatchNorm
from hezar_train.runtime.build import build_runtime
from hezar_train.runtime.console import logger
from hezar_train.runtime.devices import to_device
from hezar_train.runtime.models import enable_gradient_checkpointing, prepare_model
from hezar_train.runtime.plugins import prepare_with_plugin
from hezar_train.runtime.process_wide import use_threads
from hezar_train.runtime.processes import Processes
from hezar_train.runtime.replicas import Replicas
from hezar_train.runtime.runtime import Runtime
from hezar_train.runtime.shares import copies_of

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
