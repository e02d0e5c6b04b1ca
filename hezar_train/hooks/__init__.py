"""Shipped hooks that watch at a period, and two rules that the trainer asks: signals, early stopping."""

from hezar_train.hooks.early_stopping import EarlyStopper, Stopping
from hezar_train.hooks.periodic import (
    CallbackHook,
    Checkpointed,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hezar_train.hooks.signals import StopFlag

__all__ = [
    "CallbackHook",
    "Checkpointed",
    "EarlyStopper",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "StopFlag",
    "Stopping",
]
