"""LiBai's trainer: `from hezar_train.compat.libai import DefaultTrainer, HookBase, hooks, get_event_storage`.

What LiBai has where, and where it is here:

    libai.config                        .config: LazyCall, LazyConfig, instantiate, get_config, try_get_key,
                                        default_argument_parser, configurable
    libai.engine, .default, .trainer    .engine: DefaultTrainer(cfg), TrainerBase, EagerTrainer, default_setup;
                                        GraphTrainer is compile=True
    libai.engine.hooks                  .hooks, under its names and with its arguments
    libai.data, .structures             .data: Instance, DistTensorData, the loaders of images and texts
    libai.evaluation                    .evaluation: DatasetEvaluator, ClsEvaluator, PPLEvaluator, inference_on_dataset
    libai.optim, libai.scheduler        .optim, .scheduler
    libai.utils.distributed             .distributed
    libai.utils.events                  here: EventStorage, get_event_storage, EventWriter, JSONWriter,
                                        TensorboardXWriter, CommonMetricPrinter, HistoryBuffer
    libai.utils.checkpoint              here: Checkpointer
    oneflow                             torch

`stand_in()`, before anything imports libai, puts these modules under LiBai's names; then no import of libai changes.
`stand_in(rest="path/to/libai")` takes the rest of LiBai, turned into torch, from a folder.

`Trainer(config, model, data)` is the same over a `TrainerConfig`, without a lazy config.
"""

from __future__ import annotations

from hezar_train.compat.libai import distributed, hooks
from hezar_train.compat.libai.checkpoint import Checkpointer
from hezar_train.compat.libai.config import (
    LazyCall,
    LazyConfig,
    configurable,
    default_argument_parser,
    get_config,
    instantiate,
    try_get_key,
)
from hezar_train.compat.libai.engine import DefaultTrainer, EagerTrainer, GraphTrainer, TrainerBase, default_setup
from hezar_train.compat.libai.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hezar_train.compat.libai.stand_in import stand_in
from hezar_train.compat.libai.trainer import Trainer, total_loss
from hezar_train.config import TrainerConfig
from hezar_train.events import (
    CommonMetricPrinter,
    EventStorage,
    EventWriter,
    HistoryBuffer,
    JSONWriter,
    TensorboardXWriter,
    flatten_results_dict,
    get_event_storage,
    print_csv_format,
)
from hezar_train.metrics import MetricsHandler

__all__ = [
    "BestCheckpointer",
    "CallbackHook",
    "Checkpointer",
    "CommonMetricPrinter",
    "DefaultTrainer",
    "EagerTrainer",
    "EvalHook",
    "EventStorage",
    "EventWriter",
    "GraphTrainer",
    "HistoryBuffer",
    "HookBase",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "LazyCall",
    "LazyConfig",
    "MetricsHandler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "TensorboardXWriter",
    "Trainer",
    "TrainerBase",
    "TrainerConfig",
    "configurable",
    "default_argument_parser",
    "default_setup",
    "distributed",
    "flatten_results_dict",
    "get_config",
    "get_event_storage",
    "hooks",
    "instantiate",
    "print_csv_format",
    "stand_in",
    "total_loss",
    "try_get_key",
]
