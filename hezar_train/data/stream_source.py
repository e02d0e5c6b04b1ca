"""Windows of data that can only be iterated: an iterable dataset, or a loader that keeps its own place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hezar_train.data.cursor_source import CursorSource, keeps_its_place, seeded_each
from hezar_train.data.fetch import Collator
from hezar_train.data.grouping import Item, Left
from hezar_train.data.seeds import sample_seed, seed_python_numpy_torch
from hezar_train.data.windows import Order, Window, batch_length
from hezar_train.plan import Plan

__all__ = ["StreamSource", "stream_resume_problem"]


class StreamSource(CursorSource):
    """An iterable dataset, or a loader that keeps its own place: batches as they come."""

    def __init__(
        self, stream: Any, order: Order, collate: Collator, *, is_batched: bool = False, drop_last: bool = False
    ) -> None:
        """Collate samples into batches; with `is_batched`, `collate` is given each ready batch instead."""
        super().__init__(stream, order, by_sample=not is_batched)
        self._stream, self._collate = stream, collate
        self.batch_size, self.drop_last = order.batch_size, drop_last

    @property
    def resume_problem(self) -> str | None:
        return stream_resume_problem(self._stream)

    def _windows(self, plan: Plan, epoch: int, position: int, left: Left) -> Iterator[Window]:
        for window, cells in self._cut_windows(plan, epoch, position, left):
            for first, cell in zip(window.firsts, cells, strict=True):
                window.batches.append(self._collated(cell, epoch, first) if self._by_sample else cell[0])
            yield window

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        seed_at = partial(sample_seed, self._order.seed, epoch)
        if self._by_sample:
            return seeded_each(self._stream, seed_at, position, lambda _: 1)
        return seeded_each(self._ready_batches(), seed_at, position, batch_length)

    def _ready_batches(self) -> Iterator[Any]:
        for batch in self._stream:  # entered when the first is asked for, that is with the generators seeded
            yield self._collate(batch)

    def _epoch_followers(self) -> list[Any]:
        parts = ("sampler", "batch_sampler", "dataset")  # of a loader
        return [self._stream, *(getattr(self._stream, part, None) for part in parts)]

    def _collated(self, samples: list[Any], epoch: int, first: int) -> Any:
        """Collate a micro-batch; what that draws from the global generators follows from its first sample's place."""
        seed_python_numpy_torch(sample_seed(self._order.seed, epoch, first))
        return self._collate(samples)


def stream_resume_problem(stream: Any) -> str | None:
    """Say why a stream cannot be resumed in the middle of an epoch; None if it can."""
    if _has_shuffle_buffer(getattr(stream, "_ex_iterable", None)):
        return (
            "the iterable dataset has a shuffle buffer, and its state_dict() does not hold what is in it: a resume "
            "would lose samples and repeat others. Leave shuffle() out (shuffle the files beforehand), or use a "
            "dataset with a length."
        )
    if keeps_its_place(stream):
        return None
    return (
        f"{type(stream).__name__} has no state_dict() and load_state_dict(), so its place in the epoch "
        "is not in the checkpoint. Add both methods (a counter of samples read is enough), or use a dataset "
        "with a length."
    )


def _has_shuffle_buffer(examples: Any) -> bool:
    """Look through the layers of a `datasets.IterableDataset` for one that holds samples back."""
    if examples is None:
        return False
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or [])]
    return type(examples).__name__.startswith("BufferShuffled") or any(map(_has_shuffle_buffer, inner))
