"""What may be added to the loss: functions of the context, by a registered name or a dotted path."""

from __future__ import annotations

from collections.abc import Callable

from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.loop import Context
from hezar_train.optim.lookup import import_dotted, is_dotted

__all__ = ["Regularizer", "find_regularizer", "register_regularizer"]

Regularizer = Callable[[Context], object]

_REGISTERED: dict[str, Regularizer] = {}


def register_regularizer(name: str, regularizer: Regularizer) -> None:
    """Make a function of the context known as `regularizer=name`."""
    _REGISTERED[name] = regularizer


def find_regularizer(name: str | None) -> Regularizer | None:
    """Return what a config names; None for none."""
    if name is None:
        return None
    if name in _REGISTERED:
        return _REGISTERED[name]
    if not is_dotted(name):
        raise ConfigError(
            f"regularizer={name!r} is not registered. Registered: {choices(_REGISTERED) or 'none'}."
            f"{suggestion(name, _REGISTERED)} Use register_regularizer(name, function) or a dotted path."
        )
    found: Regularizer = import_dotted(name, setting="regularizer")
    return found
