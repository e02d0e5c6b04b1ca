"""Processes, device and precision of a run: the one place that builds an Accelerator, and how several processes train.

The modules:

    accelerator     the Accelerator, checked against the config; the model and its batches on the device
    processes       what the processes of a run tell one another
    place           where each process is, and which one is missing
    messages        values as bytes, to be sent, and back
    data_parallel   each process has a copy of the model
    gradient_exchange   torch's DDP, which averages the gradients of the copies
    sharding        each process has a share of it (FSDP2)
    blocks          the blocks that a model repeats: what is cut by itself, what can be computed twice
    meta            models that are built without values
    logging         what the package says on a terminal, through Python's logging
"""

from hezar_train.runtime.accelerator import (
    build_runtime,
    enable_gradient_checkpointing,
    keep_compiled_code_apart,
    prepare_model,
    prepare_with_plugin,
    to_device,
    use_threads,
)
from hezar_train.runtime.data_parallel import DataParallel, SyncedBatchNorm
from hezar_train.runtime.logging import logger
from hezar_train.runtime.meta import names_on_meta, without_weights
from hezar_train.runtime.processes import Processes, Runtime
from hezar_train.runtime.sharding import data_parallel_of

__all__ = [
    "DataParallel",
    "Processes",
    "Runtime",
    "SyncedBatchNorm",
    "build_runtime",
    "data_parallel_of",
    "enable_gradient_checkpointing",
    "keep_compiled_code_apart",
    "logger",
    "names_on_meta",
    "prepare_model",
    "prepare_with_plugin",
    "to_device",
    "use_threads",
    "without_weights",
]
