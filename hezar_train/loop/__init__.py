"""The loop: one walk, its moments, the hooks at them and the context they see."""

from hezar_train.loop.context import LIFECYCLE, Alias, Context, CtxVar, Lifecycle, lifecycle
from hezar_train.loop.hooks import HOOK_TRIGGER, TRIGGER, Hook, HookCall, HookSet, Moment, moment_named, name_of
from hezar_train.loop.loop import Routine

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
