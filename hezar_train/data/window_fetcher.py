"""The batches of windows whose indices are known: fetched in this process, or in workers that live until the end."""

from __future__ import annotations

from collections.abc import Iterator

from hezar_train.data.fetch import Fetch, Indices, WorkerPool, fetched
from hezar_train.data.windows import Order, Window

__all__ = ["WindowFetcher"]


class WindowFetcher:
    """Give windows their batches; workers, where they are asked for, start with the first window."""

    def __init__(self, fetch: Fetch, order: Order) -> None:
        self._fetch = fetch
        self._num_workers, self._pin_memory = order.num_workers, order.pin_memory
        self._pool: WorkerPool | None = None

    def filled(self, windows: Iterator[Window], epoch: int) -> Iterator[Window]:
        """Yield the windows, each with a batch for every entry of its indices."""
        if self._pool is None and self._num_workers:
            self._pool = WorkerPool(self._fetch, self._num_workers, self._pin_memory)
        for batch, window in fetched(_requests(windows, epoch), self._fetch, self._pool):
            window.batches.append(batch)
            if len(window.batches) == len(window.indices):
                yield window

    def close(self) -> None:
        """End the workers; a later window starts them again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _requests(windows: Iterator[Window], epoch: int) -> Iterator[tuple[int, Indices, Window]]:
    for window in windows:
        for part in window.indices:
            yield epoch, part, window
