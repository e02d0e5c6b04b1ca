"""What lengths decide: an epoch's order, which samples make an update, and how an update is cut into steps.

Everything here is a function of (seed, epoch, lengths) and, for the cut alone, of the number of processes. No sample is
read, split, repeated or left out.

The order
---------
Without `group_by_length` it is the sampler's. With it:

1. the samples are shuffled, by the sampler's permutation;
2. each stretch of `GROUPED` updates' worth of samples is sorted by length, longest first, equal lengths as shuffled;
3. it is cut into updates, and the updates of the whole epoch are shuffled by a permutation of their own.

So an update has samples of similar lengths, which of them is decided by the shuffle, and long and short updates take
turns. Where updates are counted in samples, the rest that does not fill one stays at the epoch's end, as shuffled.

The windows
-----------
An update of `global_batch_tokens` takes the next samples of the order, as many as fit. With `group_by_length` each
stretch is cut into as few updates as the budget allows, and these are made as equal as can be: no stretch ends in a
short one. How many updates an epoch has depends on its order, so the plan counts every epoch's (`count`).

The cut
-------
The samples of a window are sorted by length, longest first (packed ones stay in order: nothing is padded). They are cut
into cells, one a step and process, none of more than `max_tokens_per_batch` tokens: the longest row times the number of
rows, or packed the sum. There are as few steps as that allows; then the bound is lowered as far as the same number of
cells allows, so that processes wait little for one another, and steps need about the same memory.

What it costs
-------------
An epoch's order is computed when the epoch is entered: less than a microsecond a sample, and 40 bytes for each while it
is made, 8 afterwards. The plan does so once for every epoch of the run, when the trainer is built. Cutting a window
takes some 50 microseconds.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hezar_train.data.sampler import Indices, Permutation
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import UNLIMITED, EpochCount, Plan, WindowSpan

if TYPE_CHECKING:
    from hezar_train.data.lengths import Lengths
    from hezar_train.data.windows import SampleIndices

__all__ = ["ByLength", "Cut", "EpochOrder", "LengthSettings", "cut_by_tokens", "cut_for_evaluation", "most_that_fit"]

logger = logging.getLogger(__name__)

NUM_FILLER_ITEMS = 2  # because batch normalisation refuses one
GROUPED = 64
"""Updates whose samples are sorted together: the more, the less is padded and the less the shuffle decides."""


class EpochOrder(NamedTuple):
    """One epoch's samples in order and, where tokens make an update, the position after each update's last sample."""

    samples: Indices
    ends: Indices | None


class Cut(NamedTuple):
    """How the samples of a window are shared out."""

    samples: Indices
    """The window's samples in the order in which they are taken."""

    sizes: list[int]
    """Samples of each cell, step by step and, within a step, process by process; trailing cells may be empty."""


@dataclass(frozen=True)
class LengthSettings:
    """What a config asks for of lengths."""

    groups: bool = False
    window_tokens: int | None = None
    step_tokens: int | None = None
    packs: bool = False

    @property
    def counts_tokens(self) -> bool:
        return self.window_tokens is not None or self.step_tokens is not None


class ByLength:
    """The order, the windows and the cut of data whose lengths are known."""

    def __init__(
        self, lengths: Lengths, settings: LengthSettings, *, seed: int, shuffle: bool, reshuffle: bool = True
    ) -> None:
        self.lengths, self.settings = lengths, settings
        self._seed, self._shuffle, self._reshuffle = seed, shuffle, reshuffle
        self._last: tuple[tuple[int, int], EpochOrder] | None = None
        self._has_told = False
        for limit, field in (
            (settings.window_tokens, "global_batch_tokens"),
            (settings.step_tokens, "max_tokens_per_batch"),
        ):
            if limit is not None:
                lengths.refuse_longer(limit, field)

    def order(self, epoch: int, window_samples: int) -> EpochOrder:
        """Return an epoch's order; where samples are counted, for windows of so many."""
        key = epoch if self._reshuffle else 0
        asked = (key, window_samples if self.settings.window_tokens is None else 0)
        if self._last is None or self._last[0] != asked:
            self._last = asked, self._computed(key, window_samples)
        return self._last[1]

    def spans(self, plan: Plan, epoch: int, position: int, samples_left: int = UNLIMITED) -> Iterator[WindowSpan]:
        """Yield the windows from a position on; how many steps each takes is for the cut to say."""
        if self.settings.window_tokens is None:
            yield from plan.windows(position, UNLIMITED, samples_left)
            return
        ends = self.order(epoch, plan.window_samples).ends
        assert ends is not None
        for end in ends[np.searchsorted(ends, position, side="right") :].tolist():
            if samples_left <= 0:
                return
            count = min(end - position, samples_left)
            yield WindowSpan(position, count, 1, ends_epoch=position + count == len(self.lengths))
            position += count
            samples_left -= count

    def cut(self, samples: Indices, num_processes: int, most_samples: int) -> Cut:
        """Cut a window's samples into cells that processes and steps take."""
        settings = self.settings
        bound = UNLIMITED if settings.step_tokens is None else settings.step_tokens
        if settings.window_tokens is not None:
            most_samples = UNLIMITED
        tokens = self.lengths.tokens[samples]
        if not settings.packs:
            by_length = np.argsort(-tokens, kind="stable")
            samples, tokens = samples[by_length], tokens[by_length]
        return Cut(samples, cut_by_tokens(tokens.tolist(), bound, num_processes, most_samples, packs=settings.packs))

    def filler(self, samples: Indices) -> Indices:
        """Return what a process runs that has no samples of a window in a step: its last ones, if both fit."""
        both = samples[-NUM_FILLER_ITEMS:]
        bound = self.settings.step_tokens
        is_too_long = bound is not None and int(self.lengths.tokens[both].max()) * len(both) > bound
        return both[-1:] if is_too_long else both

    def refuse_other_lengths(self, batch: Any, indices: SampleIndices) -> None:
        """Raise if a batch has another number of tokens than its samples were measured to have, if that can be seen."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if ids is None or not (self.settings.packs or self.settings.step_tokens):
            return
        tokens = self.lengths.tokens[np.asarray(indices, dtype=np.int64)]
        found = int(np.prod(ids.shape))
        if self.settings.packs and found != (measured := int(tokens.sum())):
            raise DataError(
                f"a packed batch has {found} tokens, and its samples were measured to have {measured}: they have "
                "changed, or lengths are not those of input_ids. Let every sample have one length, in every epoch."
            )
        bound = self.settings.step_tokens
        if bound is not None and found > bound and not self._has_told:
            self._has_told = True
            logger.warning(
                "a batch has %d tokens with its padding, more than max_tokens_per_batch=%d: the collator pads further "
                "than to the longest sample, or lengths are not those of input_ids.", found, bound,
            )  # fmt: skip

    def count(self, plan: Plan, epoch: int, num_processes: int, most_updates: int = UNLIMITED) -> EpochCount:
        """Count the updates of an epoch, at most so many, with their samples and their steps on so many processes."""
        updates = samples = steps = 0
        order = self.order(epoch, plan.window_samples).samples
        for span in self.spans(plan, epoch, 0):
            if updates == most_updates:
                break
            updates += 1
            samples += span.count
            steps += self._num_steps(order[span.first : span.first + span.count], num_processes, plan.batch_size)
        return EpochCount(updates, samples, steps)

    def _num_steps(self, samples: Indices, num_processes: int, most_samples: int) -> int:
        settings = self.settings
        if settings.step_tokens is None:
            return 1
        if settings.window_tokens is not None:
            most_samples = UNLIMITED
        tokens = self.lengths.tokens[samples]
        listed = tokens.tolist() if settings.packs else np.sort(tokens)[::-1].tolist()
        cut = _cutter(listed, most_samples, packs=settings.packs)
        return -(-len(cut(settings.step_tokens)) // num_processes)

    def _computed(self, key: int, window_samples: int) -> EpochOrder:
        size, settings = len(self.lengths), self.settings
        samples = np.arange(size, dtype=np.int64)
        if self._shuffle:
            samples = Permutation(size, self._seed, key).chunk(0, size)
        if not settings.groups:
            budget = settings.window_tokens
            return EpochOrder(samples, None if budget is None else most_that_fit(self.lengths.tokens[samples], budget))
        if settings.window_tokens is None:
            return EpochOrder(self._grouped_by_count(samples, key, window_samples), None)
        return self._grouped_by_tokens(samples, key, settings.window_tokens)

    def _grouped_by_count(self, samples: Indices, key: int, window_samples: int) -> Indices:
        """Group whole windows of so many samples; the rest that fills none stays last."""
        num_windows = len(samples) // window_samples
        grouped = num_windows * window_samples
        whole = self._sorted(samples[:grouped], GROUPED * window_samples).reshape(num_windows, window_samples)
        return np.concatenate([whole[self._shuffled(num_windows, key)].reshape(-1), samples[grouped:]])

    def _grouped_by_tokens(self, samples: Indices, key: int, budget: int) -> EpochOrder:
        """Group windows of so many tokens; those of a stretch are as few as the budget allows, and as equal."""
        per_window = max(1, budget * len(samples) // max(1, self.lengths.total))
        stretch = GROUPED * per_window
        by_length = self._sorted(samples, stretch)
        tokens = self.lengths.tokens[by_length]
        ends = [
            start + np.cumsum(_equal(tokens[start : start + stretch].tolist(), budget), dtype=np.int64)
            for start in range(0, len(samples), stretch)
        ]
        return _in_turns(by_length, np.concatenate([np.zeros(1, dtype=np.int64), *ends]), self._shuffled, key)

    def _sorted(self, samples: Indices, stretch: int) -> Indices:
        """Sort each stretch by length, longest first."""
        shorter = self.lengths.longest - self.lengths.tokens[samples]
        keys = np.arange(len(samples), dtype=np.int64) // stretch * (self.lengths.longest + 1) + shorter
        return samples[np.argsort(keys, kind="stable")]

    def _shuffled(self, num_windows: int, key: int) -> Indices:
        if not self._shuffle:
            return np.arange(num_windows, dtype=np.int64)
        return Permutation(num_windows, self._seed, key).chunk(0, num_windows)


def _in_turns(samples: Indices, edges: Indices, shuffled: Callable[[int, int], Indices], key: int) -> EpochOrder:
    """Put the windows between the edges into another order."""
    turns = shuffled(len(edges) - 1, key)
    sizes, starts = np.diff(edges)[turns], edges[:-1][turns]
    ends = np.cumsum(sizes)
    places = np.arange(len(samples), dtype=np.int64) + np.repeat(starts - (ends - sizes), sizes)
    return EpochOrder(samples[places], ends)


def most_that_fit(tokens: Indices, budget: int) -> Indices:
    """Return the ends of windows, each of as many of the next samples as the budget holds."""
    sums = np.cumsum(tokens)
    ends, end, before = [], 0, 0
    while end < len(sums):
        end = max(int(np.searchsorted(sums, before + budget, side="right")), end + 1)
        before = int(sums[end - 1])
        ends.append(end)
    return np.array(ends, dtype=np.int64)


def cut_for_evaluation(lengths: Lengths, bound: int, most_samples: int, num_processes: int) -> list[Cut]:
    """Cut all samples, longest first, into steps of a cell for each process; one that is too long is a cell alone."""
    samples = np.argsort(-lengths.tokens, kind="stable")
    tokens = lengths.tokens[samples].tolist()
    sizes = _width_cutter(tokens, most_samples)(max(bound, lengths.longest))
    cuts, start = [], 0
    for first in range(0, len(sizes), num_processes):
        cells = sizes[first : first + num_processes]
        count = sum(cells)
        cuts.append(Cut(samples[start : start + count], cells + [0] * (num_processes - len(cells))))
        start += count
    return cuts


def cut_by_tokens(
    tokens: list[int], bound: int, num_processes: int, most_samples: int = UNLIMITED, *, packs: bool = False
) -> list[int]:
    """Return the samples of each cell, of at most `bound` tokens: as few steps as that allows, as equal as can be.

    Unless they are packed, `tokens` come longest first, and a cell is as wide as its first sample.
    """
    if num_processes < 1 or (tokens and max(tokens) > bound):
        raise ConfigError(
            f"a sample of {max(tokens, default=0)} tokens does not fit into a step of {bound} on {num_processes} "
            "processes: expected at least one process, and no sample longer than a step."
        )
    cut = _cutter(tokens, most_samples, packs=packs)
    num_cells = -(-len(cut(bound)) // num_processes) * num_processes
    sizes = _lowest(cut, tokens, bound, num_cells)
    return sizes + [0] * (num_cells - len(sizes))


def _equal(tokens: list[int], budget: int) -> list[int]:
    """Cut a stretch into as few windows as the budget allows, as equal as can be."""
    cut = _cutter(tokens, UNLIMITED, packs=True)
    return _lowest(cut, tokens, budget, len(cut(budget)))


def _cutter(tokens: list[int], most_samples: int, *, packs: bool) -> Callable[[int], list[int]]:
    """Return how to cut for a bound: each cell takes as many of the next samples as fit."""
    return _sum_cutter(tokens, most_samples) if packs else _width_cutter(tokens, most_samples)


def _width_cutter(tokens: list[int], most_samples: int) -> Callable[[int], list[int]]:
    def cut(bound: int) -> list[int]:
        sizes, start, size = [], 0, len(tokens)
        while start < size:
            count = min(bound // tokens[start], most_samples, size - start)
            sizes.append(count)
            start += count
        return sizes

    return cut


def _sum_cutter(tokens: list[int], most_samples: int) -> Callable[[int], list[int]]:
    sums = np.cumsum(tokens).tolist()

    def cut(bound: int) -> list[int]:
        sizes, start, before = [], 0, 0
        while start < len(sums):
            end = min(bisect_right(sums, before + bound), start + most_samples)
            sizes.append(end - start)
            start, before = end, sums[end - 1]
        return sizes

    return cut


def _lowest(cut: Callable[[int], list[int]], tokens: list[int], bound: int, num_cells: int) -> list[int]:
    """Cut for the lowest bound that needs no more cells."""
    low, high = max(tokens, default=1), min(bound, max(tokens, default=1) * max(1, len(tokens)))
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= num_cells:
            high = middle
        else:
            low = middle + 1
    return cut(low)
