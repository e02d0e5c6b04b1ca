"""Windows of data that keeps its own place: a user's sampler, an iterable dataset, a loader that counts for itself.

Such data is resumed through its own `state_dict`, kept as the window's `cursor`: taken right after the window was read,
so reading ahead never shifts it. What reading draws from the global generators follows from the place alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hezar_train.data.grouping import Item, Left, Pace, cut, in_groups
from hezar_train.data.seeds import seed_python_numpy_torch
from hezar_train.data.windows import Order, Window, in_step
from hezar_train.plan import UNLIMITED, Plan

__all__ = ["CursorSource", "keeps_its_place", "seeded_each"]


class CursorSource:
    """Data of which `keeper` knows the place; a subclass reads the items and makes batches of them."""

    num_samples: int | None = None
    num_batches: int | None = None

    def __init__(self, keeper: Any, order: Order, *, by_sample: bool) -> None:
        """Take items that are samples or, without `by_sample`, whole batches."""
        self._keeper, self._order, self._by_sample = keeper, order, by_sample
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        """Say why a run cannot go on in the middle of an epoch; None if it can."""
        raise NotImplementedError

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        left = Left(steps_left, samples_left)
        return in_step(self._windows(plan, epoch, position, left), self._order.processes)

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        """Nothing is held."""

    def _windows(self, plan: Plan, epoch: int, position: int, left: Left) -> Iterator[Window]:
        """Yield the windows with their batches."""
        raise NotImplementedError

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        """Read the items from where the data is; `position` says at which sample that is."""
        raise NotImplementedError

    def _epoch_followers(self) -> list[Any]:
        """Return whoever may want to know the number of an epoch before it is read."""
        raise NotImplementedError

    def _cut_windows(
        self, plan: Plan, epoch: int, position: int, left: Left
    ) -> Iterator[tuple[Window, list[list[Any]]]]:
        """Yield windows that have no batches yet, each with the items of this process's micro-batches."""
        cursor, self._cursor = self._cursor, None
        items = self._rest_of_epoch(cursor, epoch, position)
        pace = Pace.of(plan, by_sample=self._by_sample)
        for group in in_groups(items, pace, left, self._state, drop_last=plan.drop_last):
            window, cells = cut(group, pace, self._order, position)
            position += window.count
            yield window, cells

    def _rest_of_epoch(self, cursor: Any, epoch: int, position: int) -> Iterator[Item]:
        """Yield the items from `position` on, once the keeper is where the cursor says."""
        if cursor is not None and position == 0:  # it is where the epoch before ended: enter this one from there
            self._keeper.load_state_dict(cursor)
            self._enter_epoch(epoch)
            if (first := next(items := self._items(epoch, 0), None)) is not None:
                yield first
                yield from items
                return
        self._enter_epoch(epoch)
        if cursor is not None and position > 0:
            self._keeper.load_state_dict(cursor)  # after set_epoch, which may reset the place
        yield from self._items(epoch, position)

    def _enter_epoch(self, epoch: int) -> None:
        for follower in {id(one): one for one in self._epoch_followers()}.values():
            if hasattr(follower, "set_epoch"):
                follower.set_epoch(epoch)

    def _state(self) -> Any:
        return None if self.resume_problem else copy.deepcopy(self._keeper.state_dict())


def keeps_its_place(owner: Any) -> bool:
    """Tell whether something can say where it is, and go back there."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def seeded_each(
    things: Iterable[Any], seed_at: Callable[[int], int], position: int, length: Callable[[Any], int]
) -> Iterator[Item]:
    """Yield things with their lengths; what reading one draws from the global generators follows from its place."""
    reader: Iterator[Any] | None = None
    while True:
        seed_python_numpy_torch(seed_at(position))
        reader = iter(things) if reader is None else reader  # some draw the whole order here
        try:
            thing = next(reader)
        except StopIteration:
            return
        size = length(thing)
        yield thing, size
        position += size
