"""The loop: one walk, its moments, the hooks at them and the context they see."""

from hezar_train.loop.context import Context
from hezar_train.loop.hook_set import Hook, HookCall, HookSet
from hezar_train.loop.moments import Moment, moment_named
from hezar_train.loop.routine import Routine

__all__ = ["Context", "Hook", "HookCall", "HookSet", "Moment", "Routine", "moment_named"]
