"""The loop: one walk, its moments, the hooks at them, and what a step knows."""

from hezar_train.loop.context import LIFECYCLE, Alias, Context, CtxVar, Fixed, Lifecycle, Step, lifecycle
from hezar_train.loop.hooks import (
    HOOK_TRIGGER,
    TRIGGER,
    Hook,
    HookCall,
    HookList,
    HookSet,
    Moment,
    insert_hook,
    moment_named,
    name_of,
    replace_hook,
    reset_hook,
)
from hezar_train.loop.loop import EpochBatches, Fit, Loop, Routine, Verbs, add_loss, note_loss, share_of

__all__ = [
    "HOOK_TRIGGER",
    "LIFECYCLE",
    "TRIGGER",
    "Alias",
    "Context",
    "CtxVar",
    "EpochBatches",
    "Fit",
    "Fixed",
    "Hook",
    "HookCall",
    "HookList",
    "HookSet",
    "Lifecycle",
    "Loop",
    "Moment",
    "Routine",
    "Step",
    "Verbs",
    "add_loss",
    "insert_hook",
    "lifecycle",
    "moment_named",
    "name_of",
    "note_loss",
    "replace_hook",
    "reset_hook",
    "share_of",
]
