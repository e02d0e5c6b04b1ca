"""The order in which an epoch's samples are met: `RangedSampler`, and the keyed permutation that shuffles them.

`RangedSampler` is a range of positions of an epoch's order: the identity, or a `Permutation`. It refuses to hold state
that moves: iterating twice gives the same indices twice, the order changes with `set_epoch` only, and no global random
generator is read or moved. Whether epochs differ is the caller's decision, made with the epoch number it gives.

An epoch's order is a pure function of (seed, epoch, size). `Permutation(size, seed, epoch)` answers "which sample
stands at position p" and "at which position does sample i stand" for any p and i, alone or in arrays, without having
computed the others. So a run that resumes at position 9 * 10^11 pays what a run that starts at 0 pays, nothing is drawn
from a global random generator, and no order is ever saved.

How the permutation works
-------------------------
Above `LARGEST_SORTED_SIZE` samples: a Feistel network over a grid. The size is covered by `rows` x `columns` cells,
both about its square root. A position is a cell (row, column). Eight rounds alternate between

    row    <- (row    + hash(column, key)) mod rows
    column <- (column + hash(row,    key)) mod columns

Each round can be undone by subtracting the same hash, so the whole is a bijection of the cells whatever the hash does,
and the same keys in reverse order give the inverse. The grid has fewer than sqrt(size) cells too many (none at all at
10^12): a result that falls among them is sent through again until it lands inside ("cycle walking"). That ends, since
a bijection's cycle returns to where it came from, and it keeps the inverse exact. A grid instead of a power of two
makes it rare at every size; over a power of two, half of the work could be such repeats.

Up to that size: the stable argsort of one keyed 64-bit hash per sample, computed once and kept (64 KB with its
inverse). A Feistel network over a handful of cells has too little freedom: of six samples, the commonest order of an
eight-round network comes up nearly four times as often as the rarest. Sorting independent hashes has no such flaw.

Why it is a good shuffle
------------------------
- Keys: 64 bytes of BLAKE2b over the text of (seed, epoch, size), one 64-bit key for each round. Neighbouring seeds,
  epochs and sizes share nothing; negative seeds and seeds beyond 64 bits are welcome.
- Hash: the key is added, then fold, multiply, fold, multiply, and the highest bits are scaled to the modulus. The
  scaling is uneven by at most modulus^2 / 2^63: one part in nine million at 10^12 samples, and rounds of sums wash
  that out.
- Rounds: theory asks for four, were each round truly random. On the smallest grid, over 400,000 keys, the difference
  between the places of two samples of one column fails a chi-square test at three and at four rounds (by 60 standard
  deviations and more) and passes from five on. Eight leave a margin.
- Tested, not only argued: each sample equally likely at each position; every order of three to six samples
  equally likely; neighbours, epochs and seeds uncorrelated; fixed points as many as chance has; low bits independent.

What it refuses
---------------
It is no cipher: whoever sees the order may well learn the key. It is not a uniform draw from all orders (no seed of 64
bits could be); it only looks like one to whatever trains on it. It does not weight, group or repeat samples. And its
formula is part of every run that was ever saved: change it, and a resumed run meets other samples than it left.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Sized
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from hezar_train.errors import ConfigError, DataError

__all__ = [
    "LARGEST_SIZE",
    "LARGEST_SORTED_SIZE",
    "Indices",
    "Permutation",
    "RangedSampler",
]

Indices: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

FIRST_CHUNK_SIZE = 256  # numpy's overhead per call dominates up to here: fewer indices would come no sooner
LARGEST_CHUNK_SIZE = 16_384
CHUNK_GROWTH = 4

LARGEST_SORTED_SIZE = 4096
"""Up to this many samples hashes are sorted; above, the Feistel network is used."""

LARGEST_SIZE = 2**62
"""A side of the grid then has at most 2^31 cells, so that no product of a scaled hash leaves 64 bits."""

NUM_ROUNDS = 8
BLOCK_SIZE = 16_384  # the scratch arrays of one block stay in a core's cache, and memory stays constant

FIRST_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)
SECOND_MULTIPLIER = np.uint64(0xC4CEB9FE1A85EC53)
FIRST_FOLD = np.uint64(32)
SECOND_FOLD = np.uint64(29)


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


class Permutation:
    """Map the positions of one epoch to sample indices, and back, by (seed, epoch, size) alone."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.seed, self.epoch = operator.index(size), operator.index(seed), operator.index(epoch)
        if not 0 <= self.size <= LARGEST_SIZE:
            raise DataError(f"size={size} cannot be shuffled: expected 0 to {LARGEST_SIZE} samples.")
        keys = _round_keys(self.seed, self.epoch, self.size)
        self._order: _SortedHashes | _Feistel
        self._order = (_SortedHashes if self.size <= LARGEST_SORTED_SIZE else _Feistel)(self.size, keys)

    def at(self, positions: npt.NDArray[np.integer]) -> Indices:
        """Return the sample index that stands at each position."""
        return self._in_blocks(self._order.forward, self._checked(positions, "position"))

    def index_of(self, indices: npt.NDArray[np.integer]) -> Indices:
        """Return the position at which each sample index stands: the inverse of `at`.

        A run has no need of it. It shows that orders too long to be listed are permutations.
        """
        return self._in_blocks(self._order.backward, self._checked(indices, "index"))

    def chunk(self, start: int, stop: int) -> Indices:
        """Return the sample indices at positions start to stop, without stop."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Permutation(size={self.size}, seed={self.seed}, epoch={self.epoch})"

    def _checked(self, values: npt.NDArray[np.integer], what: str) -> Indices:
        checked = np.asarray(values).astype(np.int64, casting="same_kind", copy=False)
        if checked.size and (checked.min() < 0 or checked.max() >= self.size):
            raise DataError(
                f"{what} {checked.min()} to {checked.max()} asked of {self!r}: expected 0 to {self.size - 1}."
            )
        return checked

    @staticmethod
    def _in_blocks(mapping: Callable[[Indices], Indices], values: Indices) -> Indices:
        if values.size <= BLOCK_SIZE:
            return mapping(values)
        flat, mapped = values.reshape(-1), np.empty(values.size, dtype=np.int64)
        for start in range(0, values.size, BLOCK_SIZE):
            mapped[start : start + BLOCK_SIZE] = mapping(flat[start : start + BLOCK_SIZE])
        return mapped.reshape(values.shape)


class _SortedHashes:
    """The order of few samples: by their keyed hashes, ties by index."""

    def __init__(self, size: int, keys: Words) -> None:
        self._size = size
        self._keys = keys

    @cached_property
    def _index_at(self) -> Indices:
        hashes, scratch = np.arange(self._size, dtype=np.uint64), np.empty(self._size, dtype=np.uint64)
        for key in self._keys[:3]:
            _mix(hashes, key, hashes, scratch)
        return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)

    @cached_property
    def _position_of(self) -> Indices:
        return np.argsort(self._index_at).astype(np.int64, copy=False)

    def forward(self, positions: Indices) -> Indices:
        return self._index_at[positions]

    def backward(self, indices: Indices) -> Indices:
        return self._position_of[indices]


class _Feistel:
    """The order of many samples: eight keyed rounds over a grid of about sqrt(size) x sqrt(size) cells."""

    def __init__(self, size: int, keys: Words) -> None:
        self._size = np.uint64(size)
        self._num_rows = math.isqrt(size - 1) + 1
        self._num_columns = -(-size // self._num_rows)
        self._keys = keys

    def forward(self, positions: Indices) -> Indices:
        return self._walked(self._encrypt, positions)

    def backward(self, indices: Indices) -> Indices:
        return self._walked(self._decrypt, indices)

    def _walked(self, mapping: Callable[[Words], Words], values: Indices) -> Indices:
        """Map the values, again and again those that fall outside the size ("cycle walking")."""
        cells = mapping(values.astype(np.uint64))
        while (outside := cells >= self._size).any():
            cells[outside] = mapping(cells[outside])
        return cells.view(np.int64)

    def _encrypt(self, cells: Words) -> Words:
        # Every operation writes into an array that is there: allocating is what would cost most here.
        row, column = np.divmod(cells, np.uint64(self._num_columns))
        shift, scratch = np.empty_like(row), np.empty_like(row)
        for even, odd in zip(self._keys[0::2], self._keys[1::2], strict=True):
            _hash_below(self._num_rows, column, even, shift, scratch)
            _add(row, shift, self._num_rows)
            _hash_below(self._num_columns, row, odd, shift, scratch)
            _add(column, shift, self._num_columns)
        return self._joined(row, column)

    def _decrypt(self, cells: Words) -> Words:
        row, column = np.divmod(cells, np.uint64(self._num_columns))
        shift, scratch = np.empty_like(row), np.empty_like(row)
        for even, odd in zip(self._keys[-2::-2], self._keys[-1::-2], strict=True):
            _hash_below(self._num_columns, row, odd, shift, scratch)
            _subtract(column, shift, self._num_columns)
            _hash_below(self._num_rows, column, even, shift, scratch)
            _subtract(row, shift, self._num_rows)
        return self._joined(row, column)

    def _joined(self, row: Words, column: Words) -> Words:
        row *= np.uint64(self._num_columns)
        row += column
        return row


def _round_keys(seed: int, epoch: int, size: int) -> Words:
    """Derive one 64-bit key a round; the same on every platform."""
    text = f"{seed} {epoch} {size}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * NUM_ROUNDS, person=b"hezar_train perm").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(source: Words, key: np.uint64, mixed: Words, scratch: Words) -> None:
    """Write a keyed hash of `source` into `mixed`, modulo 2^64; its high bits depend on every bit given."""
    np.add(source, key, out=mixed)
    np.right_shift(mixed, FIRST_FOLD, out=scratch)
    np.bitwise_xor(mixed, scratch, out=mixed)
    np.multiply(mixed, FIRST_MULTIPLIER, out=mixed)
    np.right_shift(mixed, SECOND_FOLD, out=scratch)
    np.bitwise_xor(mixed, scratch, out=mixed)
    np.multiply(mixed, SECOND_MULTIPLIER, out=mixed)


def _hash_below(modulus: int, source: Words, key: np.uint64, hashed: Words, scratch: Words) -> None:
    """Write a keyed hash of `source` into `hashed`, each value below `modulus`, by scaling the highest bits."""
    num_bits = modulus.bit_length()
    _mix(source, key, hashed, scratch)
    np.right_shift(hashed, np.uint64(num_bits), out=hashed)
    np.multiply(hashed, np.uint64(modulus), out=hashed)
    np.right_shift(hashed, np.uint64(64 - num_bits), out=hashed)


def _add(target: Words, shift: Words, modulus: int) -> None:
    """Add `shift` to `target` modulo `modulus`; both are below it. Overwrites `shift`."""
    np.add(target, shift, out=target)
    # What goes below zero wraps to a huge number, so the minimum is the reduced sum: cheaper than a division.
    np.subtract(target, np.uint64(modulus), out=shift)
    np.minimum(target, shift, out=target)


def _subtract(target: Words, shift: Words, modulus: int) -> None:
    """Subtract `shift` from `target` modulo `modulus`; both are below it. Overwrites `shift`."""
    np.subtract(target, shift, out=target)
    np.add(target, np.uint64(modulus), out=shift)
    np.minimum(target, shift, out=target)
