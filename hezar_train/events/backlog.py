"""What was measured and not yet written, with a place mark for each writer.

Owns the marks: no writer gets an item twice, and one that fails gets it again. Does not know what the items are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

__all__ = ["Backlog"]

T = TypeVar("T")


class Backlog(Generic[T]):
    """Items that some reader has not had; beyond `limit` of them the oldest is forgotten."""

    def __init__(self, limit: int | None = None) -> None:
        self.items: deque[T] = deque(maxlen=limit)
        self._num_added = 0
        self._num_read: dict[int, int] = {}

    def add(self, item: T) -> None:
        """Add an item for every reader."""
        self.items.append(item)
        self._num_added += 1

    def hand_to(self, reader: int, read: Callable[[Sequence[T]], None]) -> None:
        """Give a reader what it has not had; if it fails, it gets the same again next time."""
        end = self._num_added
        num_unread = min(self._num_unread(reader), len(self.items))
        if num_unread:
            read(list(self.items)[-num_unread:])
        self._num_read[reader] = end

    def forget_read(self, readers: Iterable[int]) -> None:
        """Forget what all `readers` have had, and the marks of others."""
        self._num_read = {reader: self._num_added - self._num_unread(reader) for reader in readers}
        num_kept = max((self._num_unread(reader) for reader in self._num_read), default=0)
        while len(self.items) > num_kept:
            self.items.popleft()

    def clear(self) -> None:
        """Forget everything, read or not."""
        self.items.clear()

    def _num_unread(self, reader: int) -> int:
        return self._num_added - self._num_read.get(reader, 0)
