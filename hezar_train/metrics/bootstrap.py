"""Confidence intervals by the Poisson bootstrap: each sample counts 0, 1, 2, ... times in each row, 1 on average.

The number is a function of (seed, row, sample number) alone. So an interval does not depend on the batch size, the
order or the number of processes, nothing is drawn from a generator, and each row is a sum that merges as the
metric itself does. Row 0 counts every sample once: it is the data as it is.

The hash of a sample is cut into pieces of 16 bits, one for each of four rows, and a piece chooses the number from a
table. The table's shares are Poisson(1)'s to 2^-16, far below what any number of rows could tell.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hezar_train.errors import ConfigError

__all__ = ["interval", "poisson_weights"]

NUM_PIECES = 4
PIECE_BITS = 16
NUM_RECENT_SEEDS = 32
FIRST_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)
SECOND_MULTIPLIER = np.uint64(0xC4CEB9FE1A85EC53)
FIRST_FOLD = np.uint64(32)
SECOND_FOLD = np.uint64(29)


def poisson_weights(seed: int, sample_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return how often each row counts each sample, (1 + num_rows, samples) in float32; row 0 is all ones."""
    words = sample_ids.detach().cpu().numpy().astype(np.uint64)
    first_key, keys = _keys(operator.index(seed), math.ceil(num_rows / NUM_PIECES))
    hashes = _mixed(_mixed(words + first_key)[None, :] + keys[:, None])  # (groups of rows, samples)
    shifts = np.arange(NUM_PIECES, dtype=np.uint64) * np.uint64(PIECE_BITS)
    pieces = (hashes[:, None, :] >> shifts[None, :, None]).astype(np.uint16)
    weights = np.ones((1 + num_rows, len(words)), dtype=np.float32)
    weights[1:] = _counts_by_piece()[pieces.reshape(-1, len(words))[:num_rows]]
    return torch.from_numpy(weights).to(sample_ids.device)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the interval that covers the truth with chance `level`, from the metric of each row but row 0.

    It lies between two percentiles of the rows. Those in which the metric is undefined are left out; (NaN, NaN) if none
    is left.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level={level!r} of an interval must lie between 0 and 1, as in 0.95")
    rows = np.asarray(values, dtype=np.float64)
    rows = rows[~np.isnan(rows)]
    if not len(rows):
        return float("nan"), float("nan")
    low, high = np.quantile(rows, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@cache
def _counts_by_piece() -> npt.NDArray[np.uint8]:
    """Return the inverse of Poisson(1)'s distribution function, at the middle of each of 2^16 equal steps."""
    shares = [math.exp(-1.0) / math.factorial(count) for count in range(20)]
    middles = (np.arange(2**PIECE_BITS) + 0.5) / 2**PIECE_BITS
    counts: npt.NDArray[np.uint8] = np.searchsorted(np.cumsum(shares), middles, side="right").astype(np.uint8)
    return counts


@lru_cache(maxsize=NUM_RECENT_SEEDS)
def _keys(seed: int, num_groups: int) -> tuple[np.uint64, npt.NDArray[np.uint64]]:
    """Return the key of a bootstrap and those of its groups of rows."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=16, person=b"hezar_train boot").digest()
    first_key, group_key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return first_key, _mixed(np.arange(num_groups, dtype=np.uint64) + group_key)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> FIRST_FOLD)) * FIRST_MULTIPLIER
    words = (words ^ (words >> SECOND_FOLD)) * SECOND_MULTIPLIER
    return words ^ (words >> FIRST_FOLD)
