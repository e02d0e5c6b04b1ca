"""Windows of a dataset with a length: which samples are in one follows from (seed, epoch, size) and its position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hezar_train.data.cuts import rank_ranges
from hezar_train.data.fetch import Collator, MapDataset, batch_fetcher
from hezar_train.data.permutation import Indices
from hezar_train.data.sampler import RangedSampler
from hezar_train.data.window_fetcher import WindowFetcher
from hezar_train.data.windows import Order, Window, share_or_company
from hezar_train.plan import UNLIMITED, Plan, WindowSpan

__all__ = ["MapSource"]


class MapSource:
    """A dataset with a length, in an order that is a pure function of (seed, epoch, size)."""

    resume_problem: str | None = None
    num_batches: int | None = None

    def __init__(self, dataset: MapDataset, collate: Collator, order: Order, *, drop_last: bool = False) -> None:
        self.drop_last = drop_last
        self.is_shuffled = order.shuffle
        self.num_samples: int | None = len(dataset)
        self.batch_size = order.batch_size
        self.fetch = batch_fetcher(dataset, collate, order.seed)
        self._order = order
        self._fetcher = WindowFetcher(self.fetch, order)

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        spans = plan.windows(position, steps_left, samples_left)
        return self._fetcher.filled(self._with_indices(spans, epoch, position), epoch)

    def restore(self, cursor: Any) -> None:
        """Nothing to do: the position says it all."""

    def close(self) -> None:
        self._fetcher.close()

    def _with_indices(self, spans: Iterator[WindowSpan], epoch: int, position: int) -> Iterator[Window]:
        """Yield each window with the indices of this process's micro-batches, not yet fetched."""
        order = self._order
        num_samples = self.num_samples or 0
        start = min(position, num_samples)  # the data may have shrunk
        sampler = RangedSampler(
            num_samples, self.batch_size, start, shuffle=order.shuffle, seed=order.seed, epoch=order.key(epoch)
        )
        take = _Reader(sampler.chunks()).take
        for span in spans:
            indices = take(span.count)
            cells = rank_ranges(0, span.count, span.num_steps, order.rank, order.num_processes)
            window = Window(span.first, span.count, span.ends_epoch, [])
            window.indices = [share_or_company(indices, *cell) for cell in cells]
            window.sizes = [size for _, size in cells]
            window.firsts = [span.first + first for first, _ in cells]
            yield window


class _Reader:
    """Take any number of indices at a time from an iterator of chunks."""

    def __init__(self, chunks: Iterator[Indices]) -> None:
        self._chunks = chunks
        self._chunk: Indices = np.empty(0, dtype=np.int64)
        self._used = 0

    def take(self, count: int) -> Indices:
        end = self._used + count
        while end > len(self._chunk):
            self._chunk = np.concatenate([self._chunk[self._used :], next(self._chunks)])
            self._used, end = 0, count
        taken = self._chunk[self._used : end]
        self._used = end
        return taken
