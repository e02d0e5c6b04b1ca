"""Windows: the fetched micro-batches of one update, how samples are cut into them, and what a source of them must give.

A window is a run of consecutive epoch positions; it is cut into `num_steps` x `num_processes` cells, read step by step
and, within a step, process by process (`cut_window`, in plain integers). The cells cover the window exactly: nothing
twice, nothing left out, nothing padded with repeats. With num_steps = ceil(count / (batch_size * num_processes)) no
cell exceeds batch_size; that is all this module knows about batch sizes.

A process whose cell is empty still runs the forward, because other processes may wait for it there: it is given filler,
the window's last samples once more, which count for nothing.

Two are not cut so. Windows bounded by tokens are cut by `ByLength.cut`, into as few steps as the tokens allow. In
`SplitStreamSource` a micro-batch is what each process has read of its own files, so sizes may differ, there are as many
as the process with most samples needs, and the filler is the process's own. In all of them every process has the same
number of micro-batches in a window.

Four kinds of data give windows. In `loader.py`, `MapSource`: a dataset with a length, in the order of `RangedSampler`;
its position is one integer. In `streams.py`, `SamplerSource`: a ready DataLoader with a sampler of its own;
`StreamSource`: an iterable dataset, or a loader that counts for itself; `SplitStreamSource`: a stream of which each
process reads its own files. A source refuses nothing but what cannot be exact, and says why in `resume_problem`.

What streams read is of unknown number: `in_groups` groups it into windows and `cut_group` cuts it for the processes. An
item there is a sample, or a batch that is ready already; who reads it, and from where, is the sources' affair.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from hezar_train.data.by_length import NUM_FILLER_ITEMS, ByLength
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import UNLIMITED, Plan
from hezar_train.runtime import Processes

__all__ = [
    "NUM_FILLER_ITEMS",
    "Group",
    "Item",
    "Order",
    "Remaining",
    "SampleIndices",
    "Source",
    "Window",
    "WindowSize",
    "batch_length",
    "cut_group",
    "cut_window",
    "in_groups",
    "in_lockstep",
    "rank_ranges",
    "share_or_filler",
    "without_filler",
]

SampleIndices = Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]
Item: TypeAlias = tuple[Any, int]
"""What was read, and how many samples it holds."""


@dataclass(slots=True)
class Window:
    """The micro-batches of one update, fetched, with their place in the epoch."""

    first: int
    """Position of its first sample."""

    count: int
    """Samples in it, over all processes."""

    ends_epoch: bool
    batches: list[Any]
    indices: list[SampleIndices] = field(default_factory=list)
    """Sample numbers of each micro-batch, where they are known."""

    sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch; 0: it is filler."""

    firsts: list[int] = field(default_factory=list)
    """Position of each micro-batch's first sample."""

    cursor: Any = None
    """The data's own state after this window, where a position does not say it all."""

    is_reordered: bool = False
    """Whether an evaluation takes the samples in another order than the data's, so that `firsts` do not name them."""

    weights: list[float] = field(default_factory=list)
    total_weight: float = 0.0

    def is_filler(self, number: int) -> bool:
        """Tell whether a micro-batch holds no sample of this process's own, and runs for the other processes' sake."""
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
    worker_settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What a user's own DataLoader says of its workers: `worker_init_fn`, `prefetch_factor`, `timeout`."""

    rank: int = 0
    num_processes: int = 1
    processes: Processes | None = None
    """Those who read the same stream and must agree on it; None: nobody else does."""

    splits_streams: bool = False
    """Whether each process may read a part of a stream's files, instead of its share of what all of them read."""

    by_length: ByLength | None = None
    """What the lengths of the samples decide, where the order or the batches depend on them."""

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


def cut_window(count: int, num_steps: int, num_processes: int = 1) -> list[list[int]]:
    """Return sizes[step][rank]: as even as can be, the larger cells first.

    Even cells avoid a lone sample, which BatchNorm refuses: there is none from two samples a cell on. Only a window
    with fewer samples than cells leaves cells empty, and those come last.
    """
    smaller, num_larger = _even_sizes(count, num_steps, num_processes)
    return [
        [smaller + (step * num_processes + rank < num_larger) for rank in range(num_processes)]
        for step in range(num_steps)
    ]


def rank_ranges(first: int, count: int, num_steps: int, rank: int, num_processes: int) -> list[tuple[int, int]]:
    """Return (start, size) for each step of one process, in epoch positions, for the window that starts at `first`."""
    smaller, num_larger = _even_sizes(count, num_steps, num_processes)
    if not 0 <= rank < num_processes:
        raise ConfigError(f"rank={rank} is none of num_processes={num_processes}: expected 0 to {num_processes - 1}.")
    # Not by `cut_window`: the other processes' cells are as many as there are processes.
    cells = range(rank, num_steps * num_processes, num_processes)
    return [(first + cell * smaller + min(cell, num_larger), smaller + (cell < num_larger)) for cell in cells]


def _even_sizes(count: int, num_steps: int, num_processes: int) -> tuple[int, int]:
    """Return the size of a window's smaller cells, and how many at its front have one sample more."""
    if count < 0 or num_steps < 1 or num_processes < 1:
        raise ConfigError(
            f"a window of count={count} cannot be cut into num_steps={num_steps} for num_processes={num_processes}: "
            "expected a count of 0 or more, and at least one step and one process."
        )
    return divmod(count, num_steps * num_processes)


def share_or_filler(items: Any, first: int, count: int) -> Any:
    """Return a process's share of a window's items; one that has none gets the last ones, which do not count."""
    return items[first : first + count] if count else items[-NUM_FILLER_ITEMS:]


def without_filler(window: Window) -> Window:
    """Take out the micro-batches that hold no sample of this process's own."""
    if all(window.sizes):
        return window
    kept = [number for number, size in enumerate(window.sizes) if size]
    for name in ("batches", "indices", "sizes", "firsts"):
        values = getattr(window, name)
        setattr(window, name, [values[number] for number in kept] if values else [])
    return window


def in_lockstep(windows: Iterator[Window], processes: Processes | None) -> Iterator[Window]:
    """Yield windows as long as all processes read the same ones; nobody goes on alone, and nobody waits for ever."""
    if processes is None or processes.count == 1:
        yield from windows
        return
    # A last word that there is no more: a process whose data ended early would else leave the others waiting.
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


class WindowSize(NamedTuple):
    """How many items make a step and a whole window."""

    per_step: int
    per_window: int
    samples_per_item: int
    """Samples in an item, as the plan counts them."""

    @classmethod
    def of(cls, plan: Plan, *, by_sample: bool) -> WindowSize:
        """Return the size in single samples, or in ready batches."""
        if by_sample:
            return cls(plan.step_samples, plan.window_samples, 1)
        return cls(plan.num_processes, plan.num_processes * plan.accumulation, plan.batch_size)


class Remaining(NamedTuple):
    """What may still be read: steps, and samples of all processes."""

    steps: int
    samples: int


class Group(NamedTuple):
    """The items of one window."""

    items: list[Item]
    state_after: Any
    """The data's own state once they were read."""

    ends_epoch: bool


def in_groups(
    items: Iterator[Item], size: WindowSize, remaining: Remaining, state: Callable[[], Any], *, drop_last: bool
) -> Iterator[Group]:
    """Group items into windows; one window is read ahead, because only that tells where the epoch ends."""

    def take(count: int) -> list[Item]:
        taken = [item for _, item in zip(range(count), items, strict=False)]
        return [] if drop_last and len(taken) < count else taken

    held: tuple[list[Item], Any] | None = None
    steps_left, items_left = remaining.steps, -(-remaining.samples // size.samples_per_item)
    while taken := take(min(size.per_window, steps_left * size.per_step, items_left)):
        if held is not None:
            yield Group(*held, ends_epoch=False)
        held = taken, state()  # now: reading the next window moves the data on
        steps_left -= -(-len(taken) // size.per_step)
        items_left -= len(taken)
    if held is not None:
        is_data_over = steps_left > 0 and items_left > 0
        yield Group(*held, ends_epoch=is_data_over or not take(size.per_window if drop_last else 1))


def cut_group(group: Group, size: WindowSize, order: Order, position: int) -> tuple[Window, list[list[Any]]]:
    """Cut a window's items for this process: a window without batches, and the items of each micro-batch."""
    num_steps = -(-len(group.items) // size.per_step)
    ranges = rank_ranges(0, len(group.items), num_steps, order.rank, order.num_processes)
    items, sizes = [item for item, _ in group.items], [size for _, size in group.items]
    starts = list(itertools.accumulate(sizes, initial=position))
    window = Window(position, sum(sizes), group.ends_epoch, [], cursor=group.state_after)
    window.sizes = [sum(sizes[first : first + count]) for first, count in ranges]
    window.firsts = [starts[first] for first, _ in ranges]
    return window, [share_or_filler(items, first, count) for first, count in ranges]
