"""Windows of data that keeps its own place: a user's sampler, an iterable dataset, a loader that counts for itself.

Such data is resumed through its own `state_dict`, kept as the window's `cursor`: taken right after the window was read,
so reading ahead never shifts it. What reading draws from the global generators follows from the place alone.

`CursorSource` is what `SamplerSource` and `StreamSource` have in common: every process reads all of the data and takes
its share of it. `SplitStreamSource` lets each process read its own files.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hezar_train.data.loader import Collator, WindowFetcher, batch_fetcher
from hezar_train.data.seeding import SeedStream, sample_seed, seed_python_numpy_torch
from hezar_train.data.windows import (
    NUM_FILLER_ITEMS,
    Item,
    Order,
    Remaining,
    Window,
    WindowSize,
    batch_length,
    cut_group,
    in_groups,
    in_lockstep,
)
from hezar_train.errors import ConfigError, DataError, a_kind, state_for
from hezar_train.plan import UNLIMITED, Plan
from hezar_train.runtime import Processes

__all__ = [
    "CursorSource",
    "SamplerSource",
    "SplitStreamSource",
    "StreamSource",
    "has_equal_shards",
    "is_stateful",
    "seeded_each",
    "stream_resume_problem",
]


class CursorSource:
    """Data of which `stateful` knows the place; a subclass reads the items and makes batches of them."""

    num_samples: int | None = None
    num_batches: int | None = None

    def __init__(self, stateful: Any, order: Order, *, by_sample: bool) -> None:
        """Take items that are samples or, without `by_sample`, whole batches."""
        self._stateful, self._order, self._by_sample = stateful, order, by_sample
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        """Say why a run cannot go on in the middle of an epoch; None if it can."""
        raise NotImplementedError

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        remaining = Remaining(steps_left, samples_left)
        return in_lockstep(self._windows(plan, epoch, position, remaining), self._order.processes)

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        """Nothing is held."""

    def _windows(self, plan: Plan, epoch: int, position: int, remaining: Remaining) -> Iterator[Window]:
        """Yield the windows with their batches."""
        raise NotImplementedError

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        """Read the items from where the data is; `position` says at which sample that is."""
        raise NotImplementedError

    def _epoch_aware(self) -> list[Any]:
        """Return what may have a `set_epoch`, to be called before an epoch is read."""
        raise NotImplementedError

    def _cut_windows(
        self, plan: Plan, epoch: int, position: int, remaining: Remaining
    ) -> Iterator[tuple[Window, list[list[Any]]]]:
        """Yield windows that have no batches yet, each with the items of this process's micro-batches."""
        cursor, self._cursor = self._cursor, None
        items = self._rest_of_epoch(cursor, epoch, position)
        size = WindowSize.of(plan, by_sample=self._by_sample)
        for group in in_groups(items, size, remaining, self._state, drop_last=plan.drop_last):
            window, cells = cut_group(group, size, self._order, position)
            position += window.count
            yield window, cells

    def _rest_of_epoch(self, cursor: Any, epoch: int, position: int) -> Iterator[Item]:
        """Yield the items from `position` on, once the data is where the cursor says."""
        if cursor is not None and position == 0:  # it is where the epoch before ended: enter this one from there
            self._go_to(cursor)
            self._set_epoch(epoch)
            if (first := next(items := self._items(epoch, 0), None)) is not None:
                yield first
                yield from items
                return
        self._set_epoch(epoch)
        if cursor is not None and position > 0:
            self._go_to(cursor)  # after set_epoch, which may reset the place
        yield from self._items(epoch, position)

    def _go_to(self, cursor: Any) -> None:
        with state_for(f"the data ({type(self._stateful).__name__})"):
            self._stateful.load_state_dict(cursor)

    def _set_epoch(self, epoch: int) -> None:
        for one in {id(aware): aware for aware in self._epoch_aware()}.values():
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def _state(self) -> Any:
        # Copied: a state dict may be the live object, which reading ahead moves on.
        return None if self.resume_problem else copy.deepcopy(self._stateful.state_dict())


def is_stateful(owner: Any) -> bool:
    """Tell whether something can say where it is, and go back there."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def seeded_each(
    things: Iterable[Any], seed_at: Callable[[int], int], position: int, length: Callable[[Any], int]
) -> Iterator[Item]:
    """Yield things with their lengths; what reading one draws from the global generators follows from its place."""
    reader: Iterator[Any] | None = None
    while True:
        seed_python_numpy_torch(seed_at(position))
        reader = _reader_of(things) if reader is None else reader  # some draw the whole order here
        try:
            thing = next(reader)
        except StopIteration:
            return
        size = length(thing)
        yield thing, size
        position += size


def _reader_of(things: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(things)
    except TypeError as error:
        if "non-iterator" not in str(error):
            raise
        kind = type(things).__name__
        raise DataError(
            f"{kind}.__iter__() returned what is no iterator ({error}); expected one. Yield the samples there, or "
            "return iter(...) of what holds them."
        ) from error


class SamplerSource(CursorSource):
    """A ready DataLoader's dataset in the order of the user's own sampler, which keeps its own place.

    Where the loader has a batch size, the sampler's indices are taken one by one; a batch sampler of the user's own
    makes batches that stay whole.
    """

    drop_last = False  # a loader's own dropping is counted in num_samples

    def __init__(self, loader: DataLoader[Any], collate: Collator, order: Order) -> None:
        self._batches: Any = loader.batch_sampler
        self._samplers = [loader.sampler, self._batches, getattr(self._batches, "sampler", None)]
        stateful = next(filter(is_stateful, self._samplers), None)
        super().__init__(stateful, order, by_sample=loader.batch_size is not None)
        self.batch_size = loader.batch_size or 1
        self.num_samples, self.num_batches = _counted(loader)
        self.fetch = batch_fetcher(loader.dataset, collate, order.seed)  # type: ignore[arg-type]
        self._fetcher = WindowFetcher(self.fetch, order)

    @property
    def fewer_rows(self) -> tuple[int, int] | None:
        """Rows and samples of the first batch whose collator made fewer rows; None while there was none."""
        return self._fetcher.fewer_rows

    @property
    def resume_problem(self) -> str | None:
        if self._stateful is not None:
            return None
        sampler = self._samplers[0] if self._by_sample else self._batches
        return (
            f"the DataLoader's sampler {type(sampler).__name__} has no state_dict() and load_state_dict(), so its "
            "place in the epoch is not in the checkpoint. Add both methods, or pass the dataset instead of the loader."
        )

    def close(self) -> None:
        self._fetcher.close()

    def _windows(self, plan: Plan, epoch: int, position: int, remaining: Remaining) -> Iterator[Window]:
        return self._fetcher.filled(self._with_indices(plan, epoch, position, remaining), epoch)

    def _with_indices(self, plan: Plan, epoch: int, position: int, remaining: Remaining) -> Iterator[Window]:
        if self._by_sample and plan.window_samples % self.batch_size:
            raise ConfigError(
                f"global_batch_size={plan.window_samples} is no multiple of the DataLoader's batch_size="
                f"{self.batch_size}, whose sampler keeps its place batch by batch. Change one of them, or pass the "
                "dataset instead of the loader."
            )
        for window, cells in self._cut_windows(plan, epoch, position, remaining):
            window.indices = [np.concatenate([np.atleast_1d(np.asarray(part)) for part in cell]) for cell in cells]
            yield window

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        """Read the sampler; one that draws from the global generators draws by (seed, epoch, place)."""
        seeds = SeedStream(self._order.seed, "sampler", epoch)
        batches = seeded_each(self._batches, seeds.at, position, len)
        return _one_by_one(batches) if self._by_sample else batches

    def _epoch_aware(self) -> list[Any]:
        return self._samplers


def _counted(loader: DataLoader[Any]) -> tuple[int | None, int | None]:
    """Return the samples of an epoch, or else its batches, as far as the loader's sampler tells."""
    sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if not isinstance(sampler, Sized):
        return None, None
    if (size := len(sampler)) < 1:
        which, what = ("batch_sampler", "batch") if loader.batch_size is None else ("sampler", "sample")
        raise DataError(
            f"the DataLoader's {which} ({a_kind(sampler)}) has a len() of 0; expected at least one {what}. Look at "
            "what it was made of."
        )
    if loader.batch_size is None:
        return None, size
    if loader.drop_last and size < loader.batch_size:
        raise DataError(
            f"drop_last=True of the DataLoader drops all that its sampler gives: {size} samples are no batch of "
            f"{loader.batch_size}. Give it a smaller batch_size, or leave drop_last out."
        )
    return size - size % loader.batch_size if loader.drop_last else size, None


def _one_by_one(batches: Iterator[Item]) -> Iterator[Item]:
    """Yield the indices of batches one at a time."""
    for indices, _ in batches:
        for index in indices:
            yield index, 1


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

    def _windows(self, plan: Plan, epoch: int, position: int, remaining: Remaining) -> Iterator[Window]:
        for window, cells in self._cut_windows(plan, epoch, position, remaining):
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

    def _epoch_aware(self) -> list[Any]:
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
    if is_stateful(stream):
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


class SplitStreamSource:
    """This process's files of a stream, in step with the other processes; nobody reads what another one trains on.

    Only where the files divide evenly among the processes, and only where the batch is each process's own: the updates
    of one process over the whole stream could not be made of it. All processes take the same number of steps: they tell
    one another before each window how much they have, and one whose files have ended goes on with filler. Each has a
    place of its own in the checkpoint, so that another number of processes can go on only at an epoch's end.
    """

    num_samples: int | None = None
    num_batches: int | None = None
    drop_last = False

    def __init__(self, stream: Any, order: Order, collate: Collator, processes: Processes) -> None:
        self._stream, self._collate, self._order, self._processes = stream, collate, order, processes
        self.batch_size = order.batch_size
        self._part = self._own_part()
        self._place = 0
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        return stream_resume_problem(self._stream)

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        del samples_left  # of a global batch, which this source is not for
        samples = self._samples(epoch, position)

        def read(count: int) -> tuple[list[Any], Any]:
            return list(itertools.islice(samples, count)), self._state()

        quota = min(plan.accumulation, steps_left) * plan.batch_size
        held, after = read(quota)
        while True:
            steps_left -= plan.accumulation
            coming = min(plan.accumulation, max(steps_left, 1)) * plan.batch_size  # one is read to see if there are any
            ahead, after_ahead = read(coming)
            # One message tells of this window, of whether there is a next, and of everybody's place after this one.
            counts, more, places = zip(*self._processes.gather((len(held), len(ahead), after)), strict=True)
            if not any(counts) or (plan.drop_last and min(counts) < quota):
                return
            ends = not any(more) or (plan.drop_last and min(more) < coming)
            yield self._window(held, counts, epoch, position, ends_epoch=ends, cursor={"parts": list(places)})
            if ends or steps_left <= 0:
                return
            position += sum(counts)
            held, after, quota = ahead, after_ahead, coming

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        """Nothing is held."""

    def _samples(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield the rest of this process's samples; what reading one draws follows from its place."""
        cursor, self._cursor = self._cursor, None
        self._part, self._place = self._own_part(), 0  # anew: one that was put back begins there again and again
        self._part.set_epoch(epoch)
        if position:
            self._go_to(cursor)
        for sample, _ in seeded_each(self._part, partial(self._seed_of, epoch), self._place, lambda _: 1):
            self._place += 1
            yield sample

    def _own_part(self) -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(self._stream, self._order.rank, self._order.num_processes)

    def _go_to(self, cursor: Any) -> None:
        with state_for(f"the data ({type(self._stream).__name__})"):
            self._go_to_part((cursor or {}).get("parts", []))

    def _go_to_part(self, parts: Any) -> None:
        if len(parts) != self._processes.count:
            raise DataError(
                f"this epoch of the stream was begun by {len(parts)} processes, each with files of its own; there are "
                f"{self._processes.count} now. Go on with as many, or give a global_batch_size from the start."
            )
        own = parts[self._processes.rank]
        self._part.load_state_dict(copy.deepcopy(own["state"]))
        self._place = int(own["place"])

    def _seed_of(self, epoch: int, place: int) -> int:
        return sample_seed(self._order.seed, epoch, place * self._processes.count + self._processes.rank)

    def _state(self) -> Any:
        if self.resume_problem:
            return None
        return {"place": self._place, "state": copy.deepcopy(self._part.state_dict())}

    def _window(
        self, samples: list[Any], counts: tuple[int, ...], epoch: int, position: int, *, ends_epoch: bool, cursor: Any
    ) -> Window:
        window = Window(position, sum(counts), ends_epoch, [], cursor=cursor)
        first = position + sum(counts[: self._processes.rank])
        for start in range(0, max(counts), self.batch_size):
            own = samples[start : start + self.batch_size]
            seed_python_numpy_torch(self._seed_of(epoch, first + start))
            window.batches.append(self._collate(own or samples[-NUM_FILLER_ITEMS:] or self._filler()))
            window.sizes.append(len(own))
            window.firsts.append(first + start)
        return window

    def _filler(self) -> list[Any]:
        """Return samples that count for nothing, for a process that has read none of its own to repeat."""
        found = list(itertools.islice(iter(self._own_part()), NUM_FILLER_ITEMS))
        if not found:
            raise DataError(f"the files of process {self._processes.rank} hold no sample: give each process some")
        return found


def has_equal_shards(stream: Any, num_processes: int) -> bool:
    """Tell whether a stream is one of `datasets` whose files can be shared out evenly."""
    files = getattr(stream, "num_shards", None)
    is_known = hasattr(stream, "_distributed") and hasattr(stream, "state_dict")
    return num_processes > 1 and is_known and isinstance(files, int) and files % num_processes == 0
