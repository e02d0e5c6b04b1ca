"""The windows of an epoch: each holds the fetched micro-batches of one update.

Three kinds of data give windows. `MapSource`: a dataset with a length, in the order of `RangedSampler`; its position
is one integer. `SamplerSource`: a ready DataLoader with a sampler of its own. `StreamSource`: an iterable dataset or
a loader that counts for itself. The last two are resumed through their own `state_dict`, kept as the window's
`cursor`: taken right after the window was read, so reading ahead never shifts it. A source refuses nothing but what
cannot be exact, and says why in `resume_problem`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from hezar_train.data.cuts import rank_ranges
from hezar_train.data.fetch import Collator, Indices, MapDataset, WorkerPool, batch_fetcher, fetched
from hezar_train.data.sampler import RangedSampler
from hezar_train.data.seeds import sample_seed, seed_python_numpy_torch
from hezar_train.errors import DataError
from hezar_train.plan import Plan, WindowSpan

__all__ = ["MapSource", "Order", "SamplerSource", "Source", "StreamSource", "Window", "batch_length"]


@dataclass(slots=True)
class Window:
    """The micro-batches of one update, fetched, with their place in the epoch."""

    first: int
    count: int
    ends_epoch: bool
    batches: list[Any]
    indices: list[Indices] = field(default_factory=list)  # of each micro-batch, where they are known
    cursor: Any = None  # the data's own state after this window, for sources that are not a pure function
    weights: list[float] = field(default_factory=list)
    total_weight: float = 0.0


@dataclass(frozen=True)
class Order:
    """Everything that decides which samples come when, and how they are fetched."""

    batch_size: int
    seed: int
    shuffle: bool
    reshuffle: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    rank: int = 0
    num_processes: int = 1

    def key(self, epoch: int) -> int:
        """Return the epoch number that enters the permutation."""
        return epoch if self.reshuffle else 0


class Source(Protocol):
    """Where windows come from."""

    batch_size: int
    num_samples: int | None
    num_batches: int | None
    """Batches in an epoch, where they are counted but their samples are not."""
    drop_last: bool

    @property
    def resume_problem(self) -> str | None:
        """Say why a run cannot go on in the middle of an epoch; None if it can."""
        ...

    def windows(self, plan: Plan, epoch: int, position: int, steps_left: int) -> Iterator[Window]:
        """Yield the rest of an epoch from `position`, at most `steps_left` micro-batches."""
        ...

    def restore(self, cursor: Any) -> None:
        """Go back to where a saved window ended."""
        ...

    def close(self) -> None:
        """Give back what the source holds."""
        ...


class MapSource:
    """A dataset with a length, in an order that is a pure function of (seed, epoch, size)."""

    resume_problem: str | None = None
    num_batches: int | None = None

    def __init__(self, dataset: MapDataset, collate: Collator, order: Order, *, drop_last: bool = False) -> None:
        self.drop_last = drop_last
        self.num_samples: int | None = len(dataset)
        self.batch_size = order.batch_size
        self._order = order
        self.fetch = batch_fetcher(dataset, collate, order.seed)
        self._pool: WorkerPool | None = None

    def windows(self, plan: Plan, epoch: int, position: int, steps_left: int) -> Iterator[Window]:
        if self._order.num_workers == 0:
            return self._in_process(plan, epoch, position, steps_left)
        return self._through_workers(plan, epoch, position, steps_left)

    def restore(self, cursor: Any) -> None:
        """Nothing to do: the position says it all."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _in_process(self, plan: Plan, epoch: int, position: int, steps_left: int) -> Iterator[Window]:
        fetch = self.fetch
        for span, parts in self._parts(plan, epoch, position, steps_left):
            batches = [fetch(epoch, part) for part in parts]
            yield Window(span.first, span.count, span.ends_epoch, batches, parts)

    def _through_workers(self, plan: Plan, epoch: int, position: int, steps_left: int) -> Iterator[Window]:
        if self._pool is None:
            self._pool = WorkerPool(self.fetch, self._order.num_workers, self._order.pin_memory)

        def requests() -> Iterator[tuple[int, Indices, Window]]:
            for span, parts in self._parts(plan, epoch, position, steps_left):
                window = Window(span.first, span.count, span.ends_epoch, [], parts)
                for part in parts:
                    yield epoch, part, window

        for batch, window in fetched(requests(), self.fetch, self._pool):
            window.batches.append(batch)
            if len(window.batches) == len(window.indices):
                yield window

    def _parts(
        self, plan: Plan, epoch: int, position: int, steps_left: int
    ) -> Iterator[tuple[WindowSpan, list[Indices]]]:
        """Yield each window's span with the indices of this process's micro-batches."""
        order = self._order
        take = _Reader(
            RangedSampler(
                self.num_samples or 0, self.batch_size, position, shuffle=order.shuffle, seed=order.seed,
                epoch=order.key(epoch),
            ).chunks()
        ).take  # fmt: skip
        for span in plan.windows(position, steps_left):
            indices = take(span.count)
            ranges = rank_ranges(0, span.count, span.num_steps, order.rank, order.num_processes)
            yield span, [indices[start : start + size] for start, size in ranges]


class SamplerSource:
    """A dataset read in the order of a user's own sampler, which keeps its own place."""

    drop_last = False  # a loader's own dropping is counted in num_samples

    def __init__(self, loader: DataLoader[Any], collate: Collator, order: Order) -> None:
        self._sampler: Any = loader.sampler
        self._batches: Any = loader.batch_sampler
        self.batch_size = loader.batch_size or 1
        self.num_samples: int | None = None
        self.num_batches: int | None = None
        if loader.batch_size is not None and isinstance(loader.sampler, Sized):
            size = len(loader.sampler)
            self.num_samples = size - size % self.batch_size if loader.drop_last else size
        elif isinstance(loader.batch_sampler, Sized):
            self.num_batches = len(loader.batch_sampler)
        self.fetch = batch_fetcher(loader.dataset, collate, order.seed)  # type: ignore[arg-type]
        self._order = order
        self._pool: WorkerPool | None = None
        self._keeper: Any = next((k for k in (self._sampler, self._batches) if hasattr(k, "state_dict")), None)
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        if self._keeper is not None:
            return None
        return (
            f"the DataLoader's sampler {type(self._sampler).__name__} has no state_dict(), so its place in the "
            "epoch is not in the checkpoint. Give it state_dict() and load_state_dict(), or pass the dataset "
            "instead of the loader."
        )

    def windows(self, plan: Plan, epoch: int, position: int, steps_left: int) -> Iterator[Window]:
        if self._pool is None and self._order.num_workers:
            self._pool = WorkerPool(self.fetch, self._order.num_workers, self._order.pin_memory)
        _enter_epoch(self._sampler, epoch)
        _back_to(self._keeper, self._cursor)
        self._cursor = None
        grouped = self._grouped(plan, epoch, position, steps_left)
        for batch, (window, size) in fetched(grouped, self.fetch, self._pool):
            window.batches.append(batch)
            if len(window.batches) == size:
                yield window

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _grouped(
        self, plan: Plan, epoch: int, position: int, steps_left: int
    ) -> Iterator[tuple[int, Indices, tuple[Window, int]]]:
        batches = _limited(iter(self._batches), steps_left)
        for parts, cursor, is_last in _in_groups(batches, plan.accumulation, self._state):
            count = sum(map(len, parts))
            window = Window(position, count, is_last and not batches.stopped, [], list(parts), cursor)
            position += count
            for part in parts:
                yield epoch, part, (window, len(parts))

    def _state(self) -> Any:
        return None if self._keeper is None else copy.deepcopy(self._keeper.state_dict())


class StreamSource:
    """An iterable dataset, or a loader that keeps its own place: batches as they come."""

    num_samples: int | None = None
    num_batches: int | None = None
    drop_last = False

    def __init__(self, stream: Any, order: Order, collate: Collator | None) -> None:
        self._stream, self._collate, self._seed = stream, collate, order.seed
        self.batch_size = order.batch_size
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        if hasattr(self._stream, "state_dict") and hasattr(self._stream, "load_state_dict"):
            return None
        return (
            f"{type(self._stream).__name__} has no state_dict() and load_state_dict(), so its place in the epoch "
            "is not in the checkpoint. Add both methods (a counter of samples read is enough), or use a dataset "
            "with a length."
        )

    def windows(self, plan: Plan, epoch: int, position: int, steps_left: int) -> Iterator[Window]:
        _enter_epoch(self._stream, epoch)
        _back_to(self._stream, self._cursor)
        self._cursor = None
        batches = _limited(self._batches(epoch, position), steps_left)
        for group, cursor, is_last in _in_groups(batches, plan.accumulation, self._state):
            count = sum(size for _, size in group)
            found = [batch for batch, _ in group]
            yield Window(position, count, is_last and not batches.stopped, found, [], cursor)
            position += count

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        """Nothing is held."""

    def _batches(self, epoch: int, position: int) -> Iterator[tuple[Any, int]]:
        if self._collate is None:
            for batch in self._stream:
                yield batch, batch_length(batch)
            return
        samples: list[Any] = []
        for sample in _seeded_each(iter(self._stream), self._seed, epoch, position):
            samples.append(sample)
            if len(samples) == self.batch_size:
                yield self._collate(samples), len(samples)
                samples = []
        if samples:
            yield self._collate(samples), len(samples)

    def _state(self) -> Any:
        return None if self.resume_problem else copy.deepcopy(self._stream.state_dict())


def batch_length(batch: Any) -> int:
    """Count the samples of a collated batch by its first tensor or list."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    values = batch.values() if hasattr(batch, "values") else batch
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise DataError(f"cannot tell how many samples a batch of type {type(batch).__name__} holds")
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            continue
        return len(value)
    raise DataError("the batch is empty: no tensor or list in it tells how many samples it holds")


class _Reader:
    """Take any number of indices at a time from an iterator of chunks."""

    def __init__(self, chunks: Iterator[np.ndarray[Any, np.dtype[np.int64]]]) -> None:
        self._chunks = chunks
        self._chunk: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, dtype=np.int64)
        self._used = 0

    def take(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        end = self._used + count
        while end > len(self._chunk):
            self._chunk = np.concatenate([self._chunk[self._used :], next(self._chunks)])
            self._used, end = 0, count
        taken = self._chunk[self._used : end]
        self._used = end
        return taken


class _limited:  # noqa: N801 - reads like a function: an iterator that remembers why it ended
    """Iterate at most `limit` items; `stopped` tells that the limit, not the data, ended it."""

    def __init__(self, items: Iterator[Any], limit: int) -> None:
        self._items, self._left, self.stopped = items, limit, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._left <= 0:
            self.stopped = True
            raise StopIteration
        self._left -= 1
        return next(self._items)


def _in_groups(items: Iterator[Any], size: int, state: Any) -> Iterator[tuple[list[Any], Any, bool]]:
    """Group items, with the state after each group and whether it is the last: one group is read ahead."""
    held: tuple[list[Any], Any] | None = None
    while True:
        group = [item for _, item in zip(range(size), items, strict=False)]
        if not group:
            break
        if held is not None:
            yield *held, False
        held = group, state()
    if held is not None:
        yield *held, True


def _seeded_each(samples: Iterator[Any], seed: int, epoch: int, position: int) -> Iterator[Any]:
    while True:
        seed_python_numpy_torch(sample_seed(seed, epoch, position))
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample
        position += 1


def _enter_epoch(owner: Any, epoch: int) -> None:
    if hasattr(owner, "set_epoch"):
        owner.set_epoch(epoch)


def _back_to(keeper: Any, cursor: Any) -> None:
    """Restore a keeper of state; after `set_epoch`, which may reset its place."""
    if cursor is not None:
        keeper.load_state_dict(cursor)
