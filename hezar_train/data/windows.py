"""Windows, each of which holds the fetched micro-batches of one update; and what every source of them must give.

Four kinds of data give windows, each in a module of its own. `MapSource`: a dataset with a length, in the order of
`RangedSampler`; its position is one integer. `SamplerSource`: a ready DataLoader with a sampler of its own.
`StreamSource`: an iterable dataset, or a loader that counts for itself. `SplitStreamSource`: a stream of which each
process reads its own files. A source refuses nothing but what cannot be exact, and says why in `resume_problem`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from hezar_train.data.fetch import Indices
from hezar_train.errors import DataError
from hezar_train.plan import UNLIMITED, Plan
from hezar_train.runtime import Processes

__all__ = [
    "NUM_COMPANY_ITEMS",
    "Order",
    "Source",
    "Window",
    "batch_length",
    "in_step",
    "share_or_company",
    "without_company",
]

NUM_COMPANY_ITEMS = 2  # because batch normalisation refuses one


@dataclass(slots=True)
class Window:
    """The micro-batches of one update, fetched, with their place in the epoch."""

    first: int
    """Position of its first sample."""

    count: int
    """Samples in it, over all processes."""

    ends_epoch: bool
    batches: list[Any]
    indices: list[Indices] = field(default_factory=list)
    """Sample numbers of each micro-batch, where they are known."""

    sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch; 0: it only keeps other processes company."""

    firsts: list[int] = field(default_factory=list)
    """Position of each micro-batch's first sample."""

    cursor: Any = None
    """The data's own state after this window, where a position does not say it all."""

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


def share_or_company(items: Any, first: int, count: int) -> Any:
    """Return a process's share of a window's items; one that has none gets the last ones, which do not count."""
    return items[first : first + count] if count else items[-NUM_COMPANY_ITEMS:]


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
