"""What the current batch, epoch and routine are doing: a stack of frames, so that routines nest.

Attributes belong to the innermost frame and vanish with it; a name that the frame does not have is looked up among the
shared ones (model, config, state, ...), which live as long as the trainer. Nothing here is ever saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hezar_train.types import Mode

__all__ = ["Context"]


class Context:
    """One bag of names for hooks: `ctx.x`, `ctx["x"]`, `ctx.get("x")`."""

    def __init__(self, **shared: Any) -> None:
        object.__setattr__(self, "_frames", [])
        object.__setattr__(self, "_shared", shared)

    def __getattr__(self, name: str) -> Any:  # called only when the frame does not have the name
        try:
            return object.__getattribute__(self, "_shared")[name]
        except KeyError:
            raise AttributeError(f"the context has no {name!r} at this moment") from None

    if TYPE_CHECKING:  # any name may be set

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__ or name in self._shared

    def get(self, name: str, default: Any = None) -> Any:
        """Return a name's value, or `default` where it has none."""
        return getattr(self, name, default)

    def share(self, values: Mapping[str, Any]) -> None:
        """Make names readable in every frame, for as long as the trainer lives."""
        self._shared.update(values)

    @contextmanager
    def frame(self, mode: Mode, split: str) -> Iterator[None]:
        """Open a frame for a routine; it and everything set in it are gone when the routine ends, however it ends."""
        own = self.__dict__
        frames, shared = own.pop("_frames"), own.pop("_shared")
        frames.append(dict(own))
        own.clear()
        own.update(_frames=frames, _shared=shared, mode=mode, split=split, failed=None)
        try:
            yield
        finally:
            outer = frames.pop()
            own.clear()
            own.update(_frames=frames, _shared=shared, **outer)
