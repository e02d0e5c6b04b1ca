"""The shipped hooks: what is due, signals, progress, stopping; and those that watch at a period."""

from hezar_train.hooks.due import Actions, Due
from hezar_train.hooks.facts import print_facts
from hezar_train.hooks.periodic import (
    CallbackHook,
    Checkpointed,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
)
from hezar_train.hooks.periodic_writer import PeriodicWriter
from hezar_train.hooks.progress import Progress
from hezar_train.hooks.signals import StopFlag
from hezar_train.hooks.stopping import EarlyStopper, Stopping

__all__ = [
    "Actions",
    "CallbackHook",
    "Checkpointed",
    "Due",
    "EarlyStopper",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "Progress",
    "StopFlag",
    "Stopping",
    "print_facts",
]
