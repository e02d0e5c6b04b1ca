"""From a dataset to the batches of each window, in the main process or in worker processes.

Which samples are in a window follows from (seed, epoch, size) and its position: `MapSource`, at the end, takes them
from the sampler, cuts this process's share and has it fetched.

A sample's randomness is a function of (seed, epoch, index): python, numpy and torch are seeded before each
`__getitem__` that draws from them, so neither workers nor prefetch nor a resume can shift it. Pure data (tensors,
lists, a `datasets.Dataset` without transform) draws nothing and is fetched without a seed for each sample, a batch at a
time where the dataset offers it. Of other data it is seen whether it draws (`WatchedFetch`), because seeding three
generators for each sample costs as much as a small model's step.

`batch_fetcher` chooses how a batch is fetched, `WorkerPool` does it in workers that live until the end, `WindowFetcher`
does it for windows whose indices are known. Other forms of data than one with a length: `sources.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from hezar_train.data.by_length import ByLength, Cut
from hezar_train.data.collators import default_collator
from hezar_train.data.failures import WorkerFailure, collated, opened, read_sample, read_samples
from hezar_train.data.sampler import CHUNK_GROWTH, FIRST_CHUNK_SIZE, LARGEST_CHUNK_SIZE, Indices, Permutation
from hezar_train.data.seeding import DrawWatch, generator_marks, sample_seed, seed_python_numpy_torch
from hezar_train.data.windows import Order, Remaining, SampleIndices, Window, rank_ranges, share_or_filler
from hezar_train.errors import TrainingInterrupted
from hezar_train.plan import UNLIMITED, Plan, WindowSpan

__all__ = [
    "Collator",
    "Fetch",
    "MapDataset",
    "MapSource",
    "WindowFetcher",
    "WorkerPool",
    "batch_fetcher",
    "fetched",
    "identity",
    "is_pure",
    "num_rows",
]

Collator = Callable[[list[Any]], Any]
Fetch = Callable[[int, SampleIndices], Any]
"""Give (epoch, indices), get the collated batch."""

AGAIN = object()

logger = logging.getLogger(__name__)

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class MapDataset(Protocol):
    """Anything with a length and items."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class WindowFetcher:
    """Give windows their batches; workers, where they are asked for, start with the first window."""

    def __init__(self, fetch: Fetch, order: Order) -> None:
        self._fetch = fetch
        self._order, self._num_workers, self._by_length = order, order.num_workers, order.by_length
        self._pool: WorkerPool | None = None
        self.fewer_rows: tuple[int, int] | None = None
        """Rows and samples of the first batch that has fewer rows than samples."""

    def filled(self, windows: Iterator[Window], epoch: int) -> Iterator[Window]:
        """Yield the windows, each with a batch for every entry of its indices."""
        if self._pool is None and self._num_workers:
            self._pool = WorkerPool(
                self._fetch, self._num_workers, self._order.pin_memory, **self._order.worker_settings
            )
        requests = ((epoch, part, window) for window in windows for part in window.indices)
        for batch, window in fetched(requests, self._fetch, self._pool):
            indices = window.indices[len(window.batches)]
            self._compare(batch, len(indices))
            if self._by_length is not None:
                self._by_length.refuse_other_lengths(batch, indices)
            window.batches.append(batch)
            if len(window.batches) == len(window.indices):
                yield window

    def close(self) -> None:
        """End the workers; a later window starts them again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _compare(self, batch: Any, num_samples: int) -> None:
        """Tell once of a collator that leaves samples out: they count as trained, and were not."""
        parts = batch.values() if type(batch) is dict else batch if type(batch) is list else ()
        for part in parts:  # the glance that is enough for most batches
            if isinstance(part, torch.Tensor) and part.ndim and part.shape[0] >= num_samples:
                return
        if self.fewer_rows is not None or (rows := num_rows(batch, num_samples)) is None or rows >= num_samples:
            return
        self.fewer_rows = (rows, num_samples)
        logger.warning(
            "the collator made a batch of %d rows of %d samples: if it leaves samples out, they are not trained though "
            "they are counted. Return a row for each sample; leave samples out of the dataset instead.",
            rows, num_samples,
        )  # fmt: skip


def num_rows(batch: Any, num_samples: int) -> int | None:
    """Return the rows of a batch: the length of its longest tensor; None for what has no rows to count.

    Where the second dimension of all tensors is that of the samples, they come time first.
    """
    if isinstance(batch, Mapping) and isinstance(positions := batch.get("position_ids"), torch.Tensor):
        return int((positions == 0).sum()) if len(positions) == 1 else len(positions)  # packed: each begins at 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    shapes = [part.shape for part in parts if isinstance(part, torch.Tensor | np.ndarray) and part.ndim]
    if not shapes or all(len(shape) > 1 and shape[1] == num_samples for shape in shapes):
        return None
    return max(int(shape[0]) for shape in shapes)


def fetched(
    requests: Iterator[tuple[int, SampleIndices, Any]], fetch: Fetch, pool: WorkerPool | None
) -> Iterator[tuple[Any, Any]]:
    """Yield (batch, note) for (epoch, indices, note), in order, through the pool if there is one."""
    if pool is None:
        for epoch, indices, note in requests:
            yield fetch(epoch, indices), note
        return
    notes: deque[Any] = deque()  # the pool asks ahead of what it has answered

    def asked() -> Iterator[tuple[int, SampleIndices]]:
        for epoch, indices, note in requests:
            notes.append(note)
            yield epoch, indices

    for batch in pool.batches(asked()):
        yield batch, notes.popleft()


def batch_fetcher(dataset: MapDataset, collate: Collator, seed: int) -> Fetch:
    """Choose, once, the cheapest way to fetch a batch that keeps the promise about randomness."""
    if not is_pure(dataset):
        return WatchedFetch(dataset, collate, seed)
    if type(dataset) is TensorDataset and collate is default_collator and _is_on_cpu(dataset.tensors):
        return _rows_of(dataset.tensors)
    return _seeded_each_batch(dataset, collate, seed)


def is_pure(dataset: Any) -> bool:
    """Tell whether reading an item is known to draw no random numbers."""
    if type(dataset) in {list, tuple, TensorDataset}:  # a subclass may do anything
        return True
    if type(dataset) is Subset:
        return is_pure(dataset.dataset)
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "format"):
        return bool(dataset.format["type"] != "custom")
    return False


class WatchedFetch:
    """Fetch samples one by one, each seeded, as soon as dataset or collator is seen to draw random numbers.

    The first batch shows who draws: each of its samples is seeded, and the generators are looked at around each. Where
    nobody does, later batches are fetched without seeds, which change nothing where nothing is drawn; one for which
    something was drawn after all is fetched again. From then on what draws is seeded: each sample, or, where only the
    collator draws, the batch. Either way every batch is what seeding each sample makes it.
    """

    def __init__(self, dataset: MapDataset, collate: Collator, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._watch = DrawWatch()
        self._samples_draw = self._collator_draws = False
        self._is_first = True

    def __call__(self, epoch: int, indices: SampleIndices) -> Any:
        numbers = indices.tolist() if isinstance(indices, np.ndarray) else [int(index) for index in indices]
        if self._is_first:
            return self._first_batch(epoch, numbers)
        if not self._samples_draw and not self._collator_draws:
            batch = self._undrawn_batch(numbers)
            if batch is not AGAIN:
                return batch
        samples = self._seeded_samples(epoch, numbers)
        return collated(self._collate, samples, self._dataset, numbers)

    def _first_batch(self, epoch: int, numbers: list[int]) -> Any:
        """Fetch a batch with a seed for each sample, and see who draws; looking so closely takes long."""
        samples = []
        for number in numbers:
            seed_python_numpy_torch(sample_seed(self._seed, epoch, number))
            before = generator_marks()
            samples.append(read_sample(self._dataset, number))
            self._samples_draw |= generator_marks() != before
        before = generator_marks()
        batch = collated(self._collate, samples, self._dataset, numbers)
        self._collator_draws, self._is_first = generator_marks() != before, False
        return batch

    def _undrawn_batch(self, numbers: list[int]) -> Any:
        """Return a batch for which nothing was drawn; AGAIN if something was, or if it failed, which is told then."""
        dataset = self._dataset
        self._watch.begin()
        try:
            batch = self._collate([dataset[number] for number in numbers])
        except TrainingInterrupted:
            raise
        except (Exception, SystemExit):  # noqa: BLE001 - it comes again, and is told with the sample's number
            return AGAIN
        if self._watch.has_drawn():
            self._collator_draws = True  # or the samples, which is seen when they are read again
            return AGAIN
        return batch

    def _seeded_samples(self, epoch: int, numbers: list[int]) -> list[Any]:
        """Return the samples, and leave the generators as the last one's seed and draws do: the collator goes on."""
        if not self._samples_draw and (samples := self._undrawn_samples(numbers)) is not None:
            seed_python_numpy_torch(sample_seed(self._seed, epoch, numbers[-1] if numbers else 0))
            return samples
        self._samples_draw = True
        samples = []
        for number in numbers:
            seed_python_numpy_torch(sample_seed(self._seed, epoch, number))
            samples.append(read_sample(self._dataset, number))
        return samples

    def _undrawn_samples(self, numbers: list[int]) -> list[Any] | None:
        """Return the samples; None if something was drawn for one of them, or before one that failed."""
        self._watch.begin()
        try:
            samples = [read_sample(self._dataset, number) for number in numbers]
        except Exception:
            if not self._watch.has_drawn():
                raise
            return None
        return None if self._watch.has_drawn() else samples


def _seeded_each_batch(dataset: MapDataset, collate: Collator, seed: int) -> Fetch:
    """Fetch samples that draw nothing; a user's collator may draw (masks), and then is seeded once a batch."""
    may_draw = collate is not default_collator

    def fetch(epoch: int, indices: SampleIndices) -> Any:
        numbers = [int(index) for index in indices]
        samples = read_samples(dataset, numbers)
        if may_draw:
            seed_python_numpy_torch(sample_seed(seed, epoch, numbers[0] if numbers else 0))
        return collated(collate, samples, dataset, numbers)

    return fetch


def _is_on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _rows_of(tensors: Sequence[torch.Tensor]) -> Fetch:
    # One gather for each tensor, instead of a view for each sample and a stack of them.
    def fetch(_: int, indices: SampleIndices) -> list[torch.Tensor]:
        rows = torch.from_numpy(np.asarray(indices))
        return [tensor.index_select(0, rows) for tensor in tensors]

    return fetch


class WorkerPool:
    """Run `fetch` in processes that live as long as the pool; requests are handed in anew for each pass."""

    def __init__(
        self,
        fetch: Fetch,
        num_workers: int,
        pin_memory: bool,
        worker_init_fn: Callable[[int], object] | None = None,
        **settings: Any,
    ) -> None:
        # tokenizers warn or dead-lock when a process that used them forks
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            _FetchedBatches(fetch),  # type: ignore[arg-type]
            batch_sampler=self._requests,  # type: ignore[arg-type]
            collate_fn=identity,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=True,
            worker_init_fn=functools.partial(_begin_worker, worker_init_fn),
            **settings,
            generator=torch.Generator(),  # an iterator draws a base seed: never from the global generator
        )

    def batches(self, requests: Iterable[tuple[int, SampleIndices]]) -> Iterator[Any]:
        """Answer the requests in order; one pass at a time."""
        if self._loader is None:
            raise RuntimeError("the worker pool is closed")
        self._requests.pending = requests
        if self._loader._iterator is not None:  # torch's own mark that the workers run
            return opened(iter(self._loader))
        with _signals_blocked():
            return opened(iter(self._loader))

    def close(self) -> None:
        """End the workers, also where an abandoned pass still holds the loader's iterator."""
        if self._loader is not None and self._loader._iterator is not None:
            self._loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        self._loader = None


class _Requests:
    """The batch sampler of a pool: each pass yields what was handed in for it."""

    pending: Iterable[tuple[int, SampleIndices]] = ()

    def __iter__(self) -> Iterator[tuple[int, SampleIndices]]:
        return iter(self.pending)


class _FetchedBatches:
    """The dataset of a pool: a request goes in, a finished batch comes out.

    torch's loader calls `__getitems__` with whatever its batch sampler yields, here a whole request.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitems__(self, request: tuple[int, SampleIndices]) -> Any:
        epoch, indices = request
        try:
            return self._fetch(epoch, indices)
        except Exception as error:  # noqa: BLE001 - raised again in the main process, with the user's own lines
            return WorkerFailure.of(error)


def identity(batch: Any) -> Any:
    """Return the batch: the collator of what is collated already."""
    return batch


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let signals wait while workers start: else one may meet them before they know what to do with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(own: Callable[[int], object] | None, number: int) -> None:
    """Begin a worker: signals first, then what the user's own DataLoader does there."""
    _leave_signals_to_the_main_process()
    if own is not None:
        own(number)


def _leave_signals_to_the_main_process() -> None:
    """Let a worker serve the update in hand when a signal goes to every process of the run.

    Ctrl-C is never a worker's business: one that died of the second would turn it into a crash of the run. The main
    process ends its workers by word, then by SIGTERM, of which the second one counts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _ignore_once(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


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
        self.by_length = order.by_length
        self._order = order
        self._fetcher = WindowFetcher(self.fetch, order)

    @property
    def fewer_rows(self) -> tuple[int, int] | None:
        """Rows and samples of the first batch whose collator made fewer rows; None while there was none."""
        return self._fetcher.fewer_rows

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        if plan.counts_tokens and self.by_length is not None:
            cut = self._cut_by_tokens(self.by_length, plan, epoch, position, Remaining(steps_left, samples_left))
            return self._fetcher.filled(cut, epoch)
        spans = plan.windows(position, steps_left, samples_left)
        return self._fetcher.filled(self._with_indices(plan, spans, epoch), epoch)

    def cut(self, cuts: Iterable[Cut]) -> Iterator[Window]:
        """Yield windows of samples that are cut for the processes already, each a single step."""
        rank = self._order.rank

        def windows() -> Iterator[Window]:
            first = 0
            for samples, sizes in cuts:
                start, size = sum(sizes[:rank]), sizes[rank]
                window = Window(first, len(samples), False, [], sizes=[size], firsts=[first + start], is_reordered=True)
                window.indices = [share_or_filler(samples, start, size)]
                first += len(samples)
                yield window

        return self._fetcher.filled(windows(), 0)

    def restore(self, cursor: Any) -> None:
        """Nothing to do: the position says it all."""

    def close(self) -> None:
        self._fetcher.close()

    def _with_indices(self, plan: Plan, spans: Iterator[WindowSpan], epoch: int) -> Iterator[Window]:
        """Yield each window with the indices of this process's micro-batches, not yet fetched.

        Only these indices are computed, those of many windows together: what the other processes take costs nothing.
        """
        order, index_at = self._order, self._index_at(plan, epoch)
        chunk_size = FIRST_CHUNK_SIZE
        for cut, alike in itertools.groupby(
            spans, lambda span: (span.count, span.num_steps)
        ):  # all but an epoch's last
            cells = rank_ranges(0, *cut, order.rank, order.num_processes)
            places = [share_or_filler(range(cut[0]), *cell) for cell in cells]
            offsets = np.fromiter(itertools.chain.from_iterable(places), np.int64)
            edges = list(itertools.pairwise(itertools.accumulate(map(len, places), initial=0)))
            while ahead := list(itertools.islice(alike, max(1, chunk_size // len(offsets)))):
                firsts = np.fromiter((span.first for span in ahead), np.int64)
                for span, indices in zip(ahead, index_at(firsts[:, None] + offsets), strict=True):
                    yield Window(
                        span.first, span.count, span.ends_epoch, [],
                        indices=[indices[start:end] for start, end in edges], sizes=[size for _, size in cells],
                        firsts=[span.first + first for first, _ in cells],
                    )  # fmt: skip
                chunk_size = min(chunk_size * CHUNK_GROWTH, LARGEST_CHUNK_SIZE)

    def _index_at(self, plan: Plan, epoch: int) -> Callable[[Indices], Indices]:
        """Return what tells the sample at each position of an epoch."""
        order = self._order
        if self.by_length is not None:
            samples = self.by_length.order(epoch, plan.window_samples).samples
            return lambda positions: samples[positions]
        if not order.shuffle:
            return lambda positions: positions
        return Permutation(self.num_samples or 0, order.seed, order.key(epoch)).at

    def _cut_by_tokens(
        self, by_length: ByLength, plan: Plan, epoch: int, position: int, left: Remaining
    ) -> Iterator[Window]:
        """Yield each window with the indices of this process's micro-batches; no window is cut short for steps."""
        rank, num_processes, steps_left = self._order.rank, self._order.num_processes, left.steps
        samples = by_length.order(epoch, plan.window_samples).samples
        for span in by_length.spans(plan, epoch, min(position, len(samples)), left.samples):
            if steps_left <= 0:
                return
            cut = by_length.cut(samples[span.first : span.first + span.count], num_processes, plan.batch_size)
            window = Window(span.first, span.count, span.ends_epoch, [])
            window.sizes = cut.sizes[rank::num_processes]
            starts = list(itertools.accumulate(cut.sizes, initial=0))[rank:-1:num_processes]
            window.firsts = [span.first + start for start in starts]
            window.indices = [
                cut.samples[start : start + size] if size else by_length.filler(cut.samples)
                for start, size in zip(starts, window.sizes, strict=True)
            ]
            steps_left -= len(window.sizes)
            yield window
