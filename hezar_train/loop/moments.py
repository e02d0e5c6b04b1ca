"""The named points of the loop at which hooks run, in the order of the walk."""

from __future__ import annotations

from enum import StrEnum

from hezar_train.errors import HookError, choices, suggestion

__all__ = ["HOOK_TRIGGER", "TRIGGER", "Moment", "moment_named"]


class Moment(StrEnum):
    """A point of the walk; its value is the name of the method that a `Hook` has for it."""

    FIT_START = "on_fit_start"
    EPOCH_START = "on_epoch_start"
    BATCH_START = "on_batch_start"
    BATCH_FORWARD = "on_batch_forward"
    BATCH_BACKWARD = "on_batch_backward"
    UPDATE = "on_update"
    BATCH_END = "on_batch_end"
    EPOCH_END = "on_epoch_end"
    FIT_END = "on_fit_end"

    @classmethod
    def contains(cls, name: str) -> bool:
        """Tell whether there is a moment of that name."""
        return name in cls._value2member_map_


TRIGGER = Moment

HOOK_TRIGGER = [str(moment) for moment in Moment if moment is not Moment.UPDATE]
"""The moments that every routine has; an update belongs to learning alone."""


def moment_named(name: str | Moment) -> Moment:
    """Return the moment of that name, or raise with the nearest one."""
    try:
        return Moment(name)
    except ValueError:
        known = [str(moment) for moment in Moment]
        raise HookError(f"{name!r} is not a moment.{suggestion(name, known)} There are: {choices(known)}.") from None
