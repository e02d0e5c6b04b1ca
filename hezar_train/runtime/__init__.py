"""Processes, device and precision of a run: the one place that builds an Accelerator."""

from hezar_train.runtime.build import Runtime, build_runtime, logger, prepare_model, to_device
from hezar_train.runtime.processes import Processes
from hezar_train.runtime.replicas import Replicas

__all__ = ["Processes", "Replicas", "Runtime", "build_runtime", "logger", "prepare_model", "to_device"]
