"""Attributes of lernomatic's Trainer: plain values to its users, which the parts of a run follow.

A trainer that was built with lernomatic's keywords keeps each value under its name, and the parts are made of the
values when they are needed. What the parts show under the same name (`model`, `optimizer`, ...) is kept beside it. A
trainer that was built from a config has no values of its own: a name is read from the parts, and assigned by a verb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Setting", "is_from_config", "is_ready", "own_values", "set_ready", "showing"]

Read = Callable[[Any], Any]
Write = Callable[[Any, Any], Any]
Follow = Callable[[Any, Any, Any], None]

OWN, SHOWN, IS_SHOWING, FORM, READY = "_own_values", "_shown_values", "_is_showing", "_is_from_config", "_is_ready"


def own_values(trainer: Any) -> dict[str, Any]:
    """Return the values that a user has given, by name."""
    found: dict[str, Any] = vars(trainer).setdefault(OWN, {})
    return found


def is_from_config(trainer: Any) -> bool:
    """Tell whether a trainer was built from a config, and not with lernomatic's keywords."""
    return bool(vars(trainer).get(FORM, False))


def is_ready(trainer: Any) -> bool:
    """Tell whether lernomatic's constructor is through."""
    return bool(vars(trainer).get(READY, False))


def set_ready(trainer: Any, *, from_config: bool) -> None:
    """Note how a trainer was built; what is assigned from now on, the parts follow."""
    vars(trainer)[FORM], vars(trainer)[READY] = from_config, not from_config


@contextmanager
def showing(trainer: Any) -> Iterator[None]:
    """While the body runs, names stand for what the parts are made of, and not for the user's values."""
    before = vars(trainer).get(IS_SHOWING, False)
    vars(trainer)[IS_SHOWING] = True
    try:
        yield
    finally:
        vars(trainer)[IS_SHOWING] = before


class Setting:
    """An attribute with two faces: the user's value, and what the parts show under the same name."""

    def __init__(
        self,
        read: Read | None = None,
        write: Write | None = None,
        *,
        follow: Follow | None = None,
        convert: Read | None = None,
        renew: Read | None = None,
        falls_back: bool = False,
    ) -> None:
        """`read` and `write` are for a trainer that was built from a config.

        `follow` is called with the trainer, the old and the new value when a user assigns one, before it is there;
        `convert` makes of it what is kept, and `renew` of that what is read.
        With `falls_back`, a user's None stands for what the parts show.
        """
        self._read, self._write, self._follow = read, write, follow
        self._convert, self._renew, self._falls_back = convert, renew, falls_back

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        if trainer is None:
            return self
        own, shown = own_values(trainer), vars(trainer).setdefault(SHOWN, {})
        if self.name in shown and (vars(trainer).get(IS_SHOWING) or is_from_config(trainer)):
            return shown[self.name]
        if self.name in own and not (self._falls_back and own[self.name] is None):
            return own[self.name] if self._renew is None else self._renew(own[self.name])
        if self._falls_back and self.name in shown:
            return shown[self.name]
        if self._read is not None and is_from_config(trainer):
            return self._read(trainer)
        if self.name in own:
            return own[self.name]
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {self.name!r} yet")

    def __set__(self, trainer: Any, value: Any) -> None:
        if vars(trainer).get(IS_SHOWING):
            vars(trainer).setdefault(SHOWN, {})[self.name] = value
        elif not is_from_config(trainer):
            own = own_values(trainer)
            if self._follow is not None and is_ready(trainer):
                self._follow(trainer, own.get(self.name), value)
            own[self.name] = value if self._convert is None else self._convert(value)
        elif self._write is not None:
            self._write(trainer, value)
        else:
            raise AttributeError(
                f"{self.name} cannot be assigned on a trainer that was built from a TrainerConfig. Build it with the "
                "keywords of lernomatic, Trainer(model, ...), or build another one."
            )
