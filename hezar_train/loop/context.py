"""What the current batch, epoch and routine are doing: a stack of frames, so that routines nest.

A name that is set belongs to the innermost frame and vanishes with it; `CtxVar` gives it a shorter life. A name that
the frame does not have is looked up among the shared ones (model, config, state, ...), which live as long as the
trainer, and may there be a function of the context: an alias. Nothing here is ever saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from hezar_train.types import Mode

__all__ = ["LIFECYCLE", "Alias", "Context", "CtxVar", "Lifecycle", "lifecycle"]

F = TypeVar("F", bound=Callable[..., Any])


class Lifecycle(StrEnum):
    """How long a variable of the context lives."""

    BATCH = "batch"
    EPOCH = "epoch"
    ROUTINE = "routine"
    NONE = "none"  # as long as its frame


LIFECYCLE = Lifecycle

OWN_BATCH_NAMES = frozenset({"batch", "outputs", "loss", "loss_regular"})
"""What the loop itself sets for a batch."""


@dataclass(frozen=True, slots=True)
class CtxVar:
    """A value with a life: `ctx.hits = CtxVar(0, Lifecycle.EPOCH)` stores 0, which is gone after the epoch."""

    obj: Any
    lifecycle: Lifecycle | str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """A shared name whose value is worked out when it is read."""

    read: Callable[[Context], Any]


class Context:
    """One bag of names for hooks: `ctx.x`, `ctx["x"]`, `ctx.get("x")`, `del ctx.x`, `"x" in ctx`."""

    def __init__(self, **shared: Any) -> None:
        own = self.__dict__
        own["_frames"], own["_shared"], own["_lives"] = [], shared, _new_lives()

    def __getattr__(self, name: str) -> Any:  # called only when the frame does not have the name
        try:
            value = self.__dict__["_shared"][name]
        except KeyError:
            raise AttributeError(f"the context has no {name!r} at this moment") from None
        return value.read(self) if type(value) is Alias else value

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is CtxVar:
            for names in self._lives.values():
                names.discard(name)
            self._lives[Lifecycle(value.lifecycle or Lifecycle.NONE)].add(name)
            value = value.obj
        self.__dict__[name] = value

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__ or name in self._shared

    def get(self, name: str, default: Any = None) -> Any:
        """Return a name's value, or `default` where it has none."""
        return getattr(self, name, default)

    def merge_from_dict(self, values: Mapping[str, Any]) -> None:
        """Set several names."""
        for name, value in values.items():
            setattr(self, name, value)

    def share(self, values: Mapping[str, Any]) -> None:
        """Make names readable in every frame, for as long as the trainer lives."""
        self._shared.update(values)

    def clear(self, life: Lifecycle | str) -> None:
        """Drop the variables of the innermost frame whose life ends now."""
        own = self.__dict__
        if life != Lifecycle.NONE:
            for name in own["_lives"][life]:
                own.pop(name, None)

    @property
    def mode_stack(self) -> list[Mode]:
        """The modes of the routines under way, the innermost last."""
        return [frame["mode"] for frame in self._routines()]

    @property
    def split_stack(self) -> list[str]:
        """The splits of the routines under way, the innermost last."""
        return [frame["split"] for frame in self._routines()]

    @property
    def lifecycles(self) -> dict[str, set[str]]:
        """The names that have a shorter life than their frame."""
        return {str(life): set(names) for life, names in self._lives.items()}

    @contextmanager
    def frame(self, mode: Mode, split: str) -> Iterator[None]:
        """Open a frame for a routine; it and everything set in it are gone when the routine ends, however it ends."""
        own = self.__dict__
        outer = dict(own)
        frames, shared = outer["_frames"], outer["_shared"]
        frames.append(outer)
        own.clear()
        own.update(_frames=frames, _shared=shared, _lives=_new_lives(), mode=mode, split=split, failed=None)
        try:
            yield
        finally:
            own.clear()
            own.update(frames.pop())

    def _routines(self) -> list[dict[str, Any]]:
        return [frame for frame in (*self._frames, self.__dict__) if "mode" in frame]


def lifecycle(life: Lifecycle | str) -> Callable[[F], F]:
    """Drop the variables of a life after a trainer's method, also when it fails."""
    life = Lifecycle(life)

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            finally:
                self.ctx.clear(life)

        return limited  # type: ignore[return-value]

    return decorate


def _new_lives() -> dict[Lifecycle, set[str]]:
    return {life: set(OWN_BATCH_NAMES) if life is Lifecycle.BATCH else set() for life in Lifecycle}
