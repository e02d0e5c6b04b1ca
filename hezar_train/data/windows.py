"""The windows of an epoch: each holds the fetched micro-batches of one update.

Three kinds of data give windows. `MapSource`: a dataset with a length, in the order of `RangedSampler`; its position
is one integer. `SamplerSource`: a ready DataLoader with a sampler of its own. `StreamSource`: an iterable dataset or
a loader that counts for itself. The last two are resumed through their own `state_dict`, kept as the window's
`cursor`: taken right after the window was read, so reading ahead never shifts it. A source refuses nothing but what
cannot be exact, and says why in `resume_problem`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from hezar_train.data.cuts import rank_ranges
from hezar_train.data.fetch import Collator, Indices, MapDataset, WorkerPool, batch_fetcher, fetched
from hezar_train.data.sampler import RangedSampler
from hezar_train.data.seeds import SeedStream, sample_seed, seed_python_numpy_torch
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import UNLIMITED, Plan, WindowSpan
from hezar_train.runtime import Processes

__all__ = ["MapSource", "Order", "SamplerSource", "Source", "StreamSource", "Window", "batch_length", "without_company"]


@dataclass(slots=True)
class Window:
    """The micro-batches of one update, fetched, with their place in the epoch."""

    first: int
    count: int
    ends_epoch: bool
    batches: list[Any]
    indices: list[Indices] = field(default_factory=list)  # of each micro-batch, where they are known
    sizes: list[int] = field(
        default_factory=list
    )  # samples of each micro-batch; 0: it only keeps other processes company
    firsts: list[int] = field(default_factory=list)  # position of each micro-batch's first sample
    cursor: Any = None  # the data's own state after this window, for sources that are not a pure function
    weights: list[float] = field(default_factory=list)
    total_weight: float = 0.0

    def is_company(self, number: int) -> bool:
        """Tell whether a micro-batch holds no sample of this process's own, and only keeps other processes company."""
        return bool(self.sizes) and self.sizes[number] == 0

    def samples(self) -> list[int]:
        """Return the numbers of this process's samples, where they are known."""
        return [int(index) for part in self.indices for index in part]


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
    processes: Processes | None = None
    """Those who read the same stream and must agree on it; None: nobody else does."""
    splits_streams: bool = False
    """Whether each process may read a part of a stream's files, instead of its share of what all of them read."""

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

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        """Yield the rest of an epoch from `position`, at most so many micro-batches and samples of all processes."""
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
        self.is_shuffled = order.shuffle
        self.num_samples: int | None = len(dataset)
        self.batch_size = order.batch_size
        self._order = order
        self.fetch = batch_fetcher(dataset, collate, order.seed)
        self._pool: WorkerPool | None = None

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        parts = self._parts(plan.windows(position, steps_left, samples_left), epoch, position)
        return self._in_process(parts, epoch) if self._order.num_workers == 0 else self._through_workers(parts, epoch)

    def restore(self, cursor: Any) -> None:
        """Nothing to do: the position says it all."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _in_process(self, parts: Iterator[Window], epoch: int) -> Iterator[Window]:
        fetch = self.fetch
        for window in parts:
            window.batches = [fetch(epoch, part) for part in window.indices]
            yield window

    def _through_workers(self, parts: Iterator[Window], epoch: int) -> Iterator[Window]:
        if self._pool is None:
            self._pool = WorkerPool(self.fetch, self._order.num_workers, self._order.pin_memory)

        def requests() -> Iterator[tuple[int, Indices, Window]]:
            for window in parts:
                for part in window.indices:
                    yield epoch, part, window

        for batch, window in fetched(requests(), self.fetch, self._pool):
            window.batches.append(batch)
            if len(window.batches) == len(window.indices):
                yield window

    def _parts(self, spans: Iterator[WindowSpan], epoch: int, position: int) -> Iterator[Window]:
        """Yield each window with the indices of this process's micro-batches, not yet fetched."""
        order = self._order
        size = self.num_samples or 0
        start = min(position, size)  # the data may have shrunk
        sampler = RangedSampler(
            size, self.batch_size, start, shuffle=order.shuffle, seed=order.seed, epoch=order.key(epoch)
        )
        take = _Reader(sampler.chunks()).take
        for span in spans:
            indices = take(span.count)
            cells = rank_ranges(0, span.count, span.num_steps, order.rank, order.num_processes)
            window = Window(span.first, span.count, span.ends_epoch, [])
            window.indices = [_cell(indices, *cell) for cell in cells]
            window.sizes = [size for _, size in cells]
            window.firsts = [span.first + first for first, _ in cells]
            yield window


class SamplerSource:
    """A dataset read in the order of a user's own sampler, which keeps its own place."""

    drop_last = False  # a loader's own dropping is counted in num_samples

    def __init__(self, loader: DataLoader[Any], collate: Collator, order: Order) -> None:
        self._batches: Any = loader.batch_sampler
        self._owners: list[Any] = [loader.sampler, self._batches, getattr(self._batches, "sampler", None)]
        self._has_batch_size = loader.batch_size is not None
        self.batch_size = loader.batch_size or 1
        self.num_samples: int | None = None
        self.num_batches: int | None = None
        if self._has_batch_size and isinstance(loader.sampler, Sized):
            size = len(loader.sampler)
            self.num_samples = size - size % self.batch_size if loader.drop_last else size
        elif not self._has_batch_size and isinstance(loader.batch_sampler, Sized):
            self.num_batches = len(loader.batch_sampler)
        self.fetch = batch_fetcher(loader.dataset, collate, order.seed)  # type: ignore[arg-type]
        self._order = order
        self._pool: WorkerPool | None = None
        self._keeper: Any = next(filter(_keeps_its_place, self._owners), None)
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        if self._keeper is not None:
            return None
        sampler = self._owners[0] if self._has_batch_size else self._batches
        return (
            f"the DataLoader's sampler {type(sampler).__name__} has no state_dict() and load_state_dict(), so its "
            "place in the epoch is not in the checkpoint. Add both methods, or pass the dataset instead of the loader."
        )

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        left = _Left(steps_left, samples_left)
        return in_step(self._windows(plan, epoch, position, left), self._order.processes)

    def _windows(self, plan: Plan, epoch: int, position: int, left: _Left) -> Iterator[Window]:
        if self._pool is None and self._order.num_workers:
            self._pool = WorkerPool(self.fetch, self._order.num_workers, self._order.pin_memory)
        grouped = self._grouped(plan, epoch, position, left)
        for batch, (window, size) in fetched(grouped, self.fetch, self._pool):
            window.batches.append(batch)
            if len(window.batches) == size:
                yield window

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _grouped(
        self, plan: Plan, epoch: int, position: int, left: _Left
    ) -> Iterator[tuple[int, Indices, tuple[Window, int]]]:
        if self._has_batch_size and plan.window_samples % self.batch_size:
            raise ConfigError(
                f"global_batch_size={plan.window_samples} is no multiple of the DataLoader's batch_size="
                f"{self.batch_size}, whose sampler keeps its place batch by batch. Change one of them, or pass the "
                "dataset instead of the loader."
            )
        cursor, self._cursor = self._cursor, None
        batches = _rest_of_epoch(self._owners, self._keeper, cursor, epoch, position, self._drawn)
        items = _single(batches) if self._has_batch_size else batches
        for group, after, ends in _in_groups(
            items, _Pace.of(plan, by_sample=self._has_batch_size), plan, left, self._state
        ):
            window, cells = _cut(group, plan, self._order, position, by_sample=self._has_batch_size)
            window.cursor, window.ends_epoch = after, ends
            position += window.count
            window.indices = [np.concatenate([np.atleast_1d(np.asarray(part)) for part in cell]) for cell in cells]
            for part in window.indices:
                yield epoch, part, (window, len(cells))

    def _drawn(self, epoch: int, position: int) -> Iterator[tuple[Indices, int]]:
        """Yield the sampler's batches; one that draws from the global generators draws by (seed, epoch, place)."""
        seeds = SeedStream(self._order.seed, "sampler", epoch)
        return _seeded_each(self._batches, seeds.at, position, len)

    def _state(self) -> Any:
        return None if self._keeper is None else copy.deepcopy(self._keeper.state_dict())


class StreamSource:
    """An iterable dataset, or a loader that keeps its own place: batches as they come."""

    num_samples: int | None = None
    num_batches: int | None = None

    def __init__(
        self, stream: Any, order: Order, collate: Collator, *, is_batched: bool = False, drop_last: bool = False
    ) -> None:
        """Collate samples into batches; with `is_batched`, `collate` is given each ready batch instead."""
        self._stream, self._collate, self._seed, self._order = stream, collate, order.seed, order
        self._is_batched, self.drop_last = is_batched, drop_last
        self.batch_size = order.batch_size
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        if _has_shuffle_buffer(getattr(self._stream, "_ex_iterable", None)):
            return (
                "the iterable dataset has a shuffle buffer, and its state_dict() does not hold what is in it: a resume "
                "would lose samples and repeat others. Leave shuffle() out (shuffle the files beforehand), or use a "
                "dataset with a length."
            )
        if _keeps_its_place(self._stream):
            return None
        return (
            f"{type(self._stream).__name__} has no state_dict() and load_state_dict(), so its place in the epoch "
            "is not in the checkpoint. Add both methods (a counter of samples read is enough), or use a dataset "
            "with a length."
        )

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        left = _Left(steps_left, samples_left)
        return in_step(self._windows(plan, epoch, position, left), self._order.processes)

    def _windows(self, plan: Plan, epoch: int, position: int, left: _Left) -> Iterator[Window]:
        cursor, self._cursor = self._cursor, None
        parts = ("sampler", "batch_sampler", "dataset")  # of a loader
        owners = [self._stream, *(getattr(self._stream, part, None) for part in parts)]
        items = _rest_of_epoch(owners, self._stream, cursor, epoch, position, self._items)
        by_sample = not self._is_batched
        for group, after, ends in _in_groups(items, _Pace.of(plan, by_sample=by_sample), plan, left, self._state):
            window, cells = _cut(group, plan, self._order, position, by_sample=by_sample)
            window.cursor, window.ends_epoch = after, ends
            for first, cell in zip(window.firsts, cells, strict=True):
                window.batches.append(self._collated(cell, epoch, first) if by_sample else cell[0])
            yield window
            position += window.count

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        """Nothing is held."""

    def _items(self, epoch: int, position: int) -> Iterator[tuple[Any, int]]:
        seeds = partial(sample_seed, self._seed, epoch)
        if self._is_batched:
            return _seeded_each(self._ready_batches(), seeds, position, batch_length)
        return _seeded_each(self._stream, seeds, position, lambda _: 1)

    def _collated(self, samples: list[Any], epoch: int, first: int) -> Any:
        """Collate a micro-batch; what that draws from the global generators follows from its first sample's place."""
        seed_python_numpy_torch(sample_seed(self._seed, epoch, first))
        return self._collate(samples)

    def _ready_batches(self) -> Iterator[Any]:
        for item in self._stream:
            yield self._collate(item)

    def _state(self) -> Any:
        return None if self.resume_problem else copy.deepcopy(self._stream.state_dict())


def in_step(windows: Iterator[Window], processes: Processes | None) -> Iterator[Window]:
    """Yield windows as long as all processes read the same ones; nobody goes on alone, and nobody waits for ever."""
    if processes is None or processes.count == 1:
        yield from windows
        return
    for window in itertools.chain(windows, [None]):
        place = [-1, 0, 0] if window is None else [window.first, window.count, int(window.ends_epoch)]
        if not processes.agree(place):
            raise DataError(
                f"the processes read different data: samples read by each are "
                f"{[first + count for first, count, _ in processes.gather(place)]}. Every process must be given the "
                "same stream or sampler, whole and in the same order; the trainer takes each one's share of it."
            )
        if window is None:
            return
        yield window


def without_company(window: Window) -> Window:
    """Take out the micro-batches that hold no sample of this process's own."""
    if all(window.sizes):
        return window
    kept = [number for number, size in enumerate(window.sizes) if size]
    for name in ("batches", "indices", "sizes", "firsts"):
        values = getattr(window, name)
        setattr(window, name, [values[number] for number in kept] if values else [])
    return window


def batch_length(batch: Any) -> int:
    """Count the samples of a collated batch by its first tensor, array or list; what has no length tells nothing."""
    is_array = isinstance(batch, torch.Tensor | np.ndarray)
    if is_array and batch.ndim:
        return len(batch)
    values = batch.values() if hasattr(batch, "values") and not is_array else batch
    if is_array or isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise DataError(f"cannot tell how many samples a batch of type {type(batch).__name__} holds")
    for value in values:
        if isinstance(value, Mapping):
            return batch_length(value)
        if hasattr(value, "__len__") and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0:
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


class _Pace(NamedTuple):
    """How many items, samples or ready batches, make a step and a whole window."""

    per_step: int
    per_window: int
    samples: int
    """Samples in an item, as the plan counts them."""

    @classmethod
    def of(cls, plan: Plan, *, by_sample: bool) -> _Pace:
        if by_sample:
            return cls(plan.step_samples, plan.window_samples, 1)
        return cls(plan.num_processes, plan.num_processes * plan.accumulation, plan.batch_size)


class _Left(NamedTuple):
    """What may still be read: steps, and samples of all processes."""

    steps: int
    samples: int


def _in_groups(
    items: Iterator[tuple[Any, int]], pace: _Pace, plan: Plan, left: _Left, state: Callable[[], Any]
) -> Iterator[tuple[list[tuple[Any, int]], Any, bool]]:
    """Group (item, size) into windows: the items, the state after them, whether the epoch ends.

    One window is read ahead, because only that tells.
    """

    def take(length: int) -> list[tuple[Any, int]]:
        group = [pair for _, pair in zip(range(length), items, strict=False)]
        return [] if plan.drop_last and len(group) < length else group

    held: tuple[list[tuple[Any, int]], Any] | None = None
    steps_left, items_left = left.steps, -(-left.samples // pace.samples)
    while group := take(min(pace.per_window, steps_left * pace.per_step, items_left)):
        if held is not None:
            yield *held, False
        held = group, state()
        steps_left -= -(-len(group) // pace.per_step)
        items_left -= len(group)
    if held is not None:
        may_go_on = steps_left > 0 and items_left > 0
        yield *held, may_go_on or not take(pace.per_window if plan.drop_last else 1)


def _cut(
    group: list[tuple[Any, int]], plan: Plan, order: Order, position: int, *, by_sample: bool
) -> tuple[Window, list[list[Any]]]:
    """Cut a window's items for this process: a window without batches, and the items of each micro-batch."""
    num_steps = -(-len(group) // _Pace.of(plan, by_sample=by_sample).per_step)
    ranges = rank_ranges(0, len(group), num_steps, order.rank, order.num_processes)
    items, sizes = [item for item, _ in group], [size for _, size in group]
    starts = [position, *itertools.accumulate(sizes, initial=position)][1:]
    window = Window(position, sum(sizes), False, [])
    window.sizes = [sum(sizes[first : first + count]) for first, count in ranges]
    window.firsts = [starts[first] for first, _ in ranges]
    return window, [_cell(items, first, count) for first, count in ranges]


def _cell(items: Any, first: int, count: int) -> Any:
    """Return a process's items; one that has none gets an item of the window all the same, which does not count."""
    return items[first : first + count] if count else items[-2:]  # two, for batch normalisation refuses one


def _single(batches: Iterator[tuple[Indices, int]]) -> Iterator[tuple[Any, int]]:
    """Yield the indices of batches one at a time."""
    for indices, _ in batches:
        for index in indices:
            yield index, 1


def _rest_of_epoch(
    owners: list[Any],
    keeper: Any,
    cursor: Any,
    epoch: int,
    position: int,
    read: Callable[[int, int], Iterator[tuple[Any, int]]],
) -> Iterator[tuple[Any, int]]:
    """Yield what `read` gives from `position` on, once those who keep a place of their own are where `cursor` says."""
    if cursor is not None and position == 0:  # it is where the epoch before ended: enter this one from there
        keeper.load_state_dict(cursor)
        _enter_epoch(owners, epoch)
        if (first := next(batches := read(epoch, 0), None)) is not None:
            yield first
            yield from batches
            return
    _enter_epoch(owners, epoch)
    if cursor is not None and position > 0:
        keeper.load_state_dict(cursor)  # after set_epoch, which may reset the place
    yield from read(epoch, position)


def _seeded_each(
    items: Iterable[Any], seed_at: Callable[[int], int], position: int, length: Callable[[Any], int]
) -> Iterator[tuple[Any, int]]:
    """Yield items with their lengths; what reading one draws from the global generators follows from its place."""
    reader: Iterator[Any] | None = None
    while True:
        seed_python_numpy_torch(seed_at(position))
        reader = iter(items) if reader is None else reader  # some draw the whole order here
        try:
            item = next(reader)
        except StopIteration:
            return
        size = length(item)
        yield item, size
        position += size


def _enter_epoch(owners: list[Any], epoch: int) -> None:
    for owner in {id(owner): owner for owner in owners}.values():
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def _keeps_its_place(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _has_shuffle_buffer(examples: Any) -> bool:
    """Look through the layers of a `datasets.IterableDataset` for one that holds samples back."""
    if examples is None:
        return False
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or [])]
    return type(examples).__name__.startswith("BufferShuffled") or any(map(_has_shuffle_buffer, inner))
