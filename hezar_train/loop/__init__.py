"""The loop: one walk, its moments, the hooks at them and the context they see."""

from hezar_train.loop.context import LIFECYCLE, Alias, Context, CtxVar, Lifecycle, lifecycle
from hezar_train.loop.hook_set import Hook, HookCall, HookSet, name_of
from hezar_train.loop.moments import HOOK_TRIGGER, TRIGGER, Moment, moment_named
from hezar_train.loop.routine import Routine

__all__ = [
    "HOOK_TRIGGER",
    "LIFECYCLE",
    "TRIGGER",
    "Alias",
    "Context",
    "CtxVar",
    "Hook",
    "HookCall",
    "HookSet",
    "Lifecycle",
    "Moment",
    "Routine",
    "lifecycle",
    "moment_named",
    "name_of",
]
