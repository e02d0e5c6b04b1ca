"""The order in which one epoch's samples are met, from any position on.

This module owns `RangedSampler`: a range of positions of an epoch's order (the identity, or the keyed permutation of
`permutation.py`). It refuses to hold state that moves: iterating twice gives the same indices twice, the order changes
with `set_epoch` only, and no global random generator is read or moved. Whether epochs differ is the caller's decision,
made with the epoch number it gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from hezar_train.data.permutation import Indices, Permutation
from hezar_train.errors import ConfigError

__all__ = ["RangedSampler"]

FIRST_CHUNK_SIZE = 256  # numpy's overhead per call dominates up to here: fewer indices would come no sooner
LARGEST_CHUNK_SIZE = 16_384
CHUNK_GROWTH = 4


class RangedSampler(Sampler[int]):
    """Yield one epoch's indices from `start_index` to `end_index`, in an order fixed by (seed, epoch, size) alone.

    The order does not depend on `start_index`: a run resumed at sample 1,200 meets exactly the samples that an unbroken
    run would have met from there, and getting there costs nothing. `len` is the number of indices yielded. `drop_last`
    moves the end down until that number is a whole number of batches. `data` is anything with a length, or the length.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        start_index: int | None = None,
        end_index: int | None = None,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int | None = None,
        epoch: int = 0,
    ) -> None:
        self.data = data
        self.size = data if isinstance(data, int) else len(data)
        self.batch_size = batch_size
        self.start_index = 0 if start_index is None else start_index
        self.end_index = self.size if end_index is None else end_index
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.seed = seed
        if problems := list(self._problems()):
            raise ConfigError(problems)
        if drop_last:
            self.end_index -= len(self) % batch_size
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch; the same number gives the same order."""
        self.epoch = epoch
        self._permutation = Permutation(self.size, self.seed, epoch) if self.shuffle and self.seed is not None else None

    def chunks(self, chunk_size: int = LARGEST_CHUNK_SIZE) -> Iterator[Indices]:
        """Yield the indices in arrays that grow up to `chunk_size`, a small one first: the first index comes soon."""
        if chunk_size < 1:
            raise ConfigError(f"chunk_size={chunk_size} must be at least 1.")
        return self._chunks(chunk_size)

    def __iter__(self) -> Iterator[int]:
        for chunk in self.chunks():
            yield from chunk.tolist()

    def __len__(self) -> int:
        return self.end_index - self.start_index

    def _chunks(self, chunk_size: int) -> Iterator[Indices]:
        start, length = self.start_index, min(FIRST_CHUNK_SIZE, chunk_size)
        while start < self.end_index:
            stop = min(start + length, self.end_index)
            yield self._indices(start, stop)
            start, length = stop, min(length * CHUNK_GROWTH, chunk_size)

    def _indices(self, start: int, stop: int) -> Indices:
        if self._permutation is None:
            return np.arange(start, stop, dtype=np.int64)
        return self._permutation.chunk(start, stop)

    def _problems(self) -> Iterator[str]:
        if self.batch_size < 1:
            yield f"batch_size={self.batch_size} must be at least 1."
        if not 0 <= self.start_index <= self.end_index <= self.size:
            yield (
                f"start_index={self.start_index}, end_index={self.end_index} is no range of {self.size} samples: "
                f"expected 0 <= start_index <= end_index <= {self.size}."
            )
        if self.shuffle and self.seed is None:
            yield "shuffle=True needs a seed, since the order is a function of it. Pass seed=, or shuffle=False."
