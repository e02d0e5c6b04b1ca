"""Seeds as functions: the seed of every sample and every step, and how the global generators receive it.

What a sample looks like after augmentation is a function of (seed, epoch, sample index); what the model draws is a
function of (seed, step, rank). This module owns both functions and the seeding of python's, numpy's and torch's global
generators. It refuses to save generator states for a later run: a seed that can be computed again need not be saved.

A seed has 63 bits. Its lower 32 are all that numpy's cheap seeding takes (seeding numpy with several words takes five
times as long, more than everything else here together), so they are not left to chance: within a stream they are a
bijection of the index, and no two samples of an epoch share them below four billion samples.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = [
    "DrawWatch",
    "SeedStream",
    "generator_states",
    "preserved_randomness",
    "sample_seed",
    "seed_device",
    "seed_python_numpy_torch",
    "step_seed",
    "step_seeds",
]

WORD = 2**64 - 1
HALF_WORD = 2**32 - 1

NUM_RECENT_STREAMS = 32  # one for each epoch, rank or trainer in use at a time; a miss costs microseconds

DEVICES_WITHOUT_GENERATOR = frozenset({"cpu", "meta"})


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed for fetching the sample `index` in `epoch`."""
    return _recent_stream("sample", seed, epoch).at(index)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed for the forward pass of `step` on the process `rank`."""
    return step_seeds(seed, rank).at(step)


def step_seeds(seed: int, rank: int) -> SeedStream:
    """Return the seeds of all steps on the process `rank`, by their numbers."""
    return _recent_stream("step", seed, rank)


@lru_cache(maxsize=NUM_RECENT_STREAMS)
def _recent_stream(purpose: str, seed: int, number: int) -> SeedStream:
    return SeedStream(seed, purpose, number)


class SeedStream:
    """Seeds numbered by an index, under a prefix: streams of different prefixes share nothing."""

    __slots__ = ("_high_key", "_low_keys")

    def __init__(self, seed: int, *prefix: int | str) -> None:
        words = [word if isinstance(word, str) else operator.index(word) for word in (seed, *prefix)]
        digest = hashlib.blake2b(repr(words).encode(), digest_size=16, person=b"hezar_train seed").digest()
        self._high_key = int.from_bytes(digest[:8], "little")
        self._low_keys = int.from_bytes(digest[8:12], "little"), int.from_bytes(digest[12:], "little")

    def at(self, index: int) -> int:
        """Return the seed of `index`: 63 bits, so that every generator accepts it."""
        high = (index + self._high_key) & WORD
        high = ((high ^ (high >> 32)) * 0xBF58476D1CE4E5B9) & WORD
        high = ((high ^ (high >> 29)) * 0x94D049BB133111EB) & WORD
        # Two keyed rounds: with one, the low halves of two streams would be one sequence from two starting points.
        first_key, second_key = self._low_keys
        low = (index + (index >> 32) * 0x9E3779B1 + first_key) & HALF_WORD
        low = ((low ^ (low >> 16)) * 0x85EBCA6B) & HALF_WORD
        low = ((low ^ (low >> 13)) * 0xC2B2AE35 + second_key) & HALF_WORD
        low = ((low ^ (low >> 16)) * 0x7FEB352D) & HALF_WORD
        low = ((low ^ (low >> 15)) * 0x846CA68B) & HALF_WORD
        return (high >> 33 << 32) | (low ^ (low >> 16))


def seed_python_numpy_torch(value: int) -> None:
    """Seed the three global generators of the CPU; cheap enough to be done for each sample."""
    random.seed(value)
    np.random.seed(value & HALF_WORD)
    # Not torch.manual_seed: it visits every backend, which costs as much as a small training step.
    torch.default_generator.manual_seed(value)


def seed_device(value: int, device: torch.device) -> None:
    """Seed the three global generators, and that of `device` (no other device's) if it has its own."""
    seed_python_numpy_torch(value)
    if device.type not in DEVICES_WITHOUT_GENERATOR:
        _seed_accelerator(torch.get_device_module(device), device.index, value)


def _seed_accelerator(backend: Any, index: int | None, value: int) -> None:
    """Seed one device through its torch backend (torch.cuda, torch.xpu, torch.mps, ...)."""
    if not hasattr(backend, "default_generators"):
        backend.manual_seed(value)
        return
    if not backend.is_initialized():
        backend.init()  # the generators exist from then on
    backend.default_generators[backend.current_device() if index is None else index].manual_seed(value)


def generator_states() -> tuple[Any, ...]:
    """Return what the three global generators of the CPU would give next, to be compared with a later answer."""
    state: Any = np.random.get_state()
    name, keys, *place = state
    return random.getstate(), name, keys.tobytes(), *place, torch.default_generator.get_state().numpy().tobytes()


class DrawWatch:
    """Tell whether code between `begin` and `has_drawn` drew from a global generator of the CPU.

    All three are seeded with one known value, and afterwards each must give the number that comes first with it. What
    is drawn and put back (`torch.random.fork_rng`) stays unseen.
    """

    SEED = sample_seed(0, 0, 0)

    def __init__(self) -> None:
        self._drawn = torch.empty((), dtype=torch.int64)
        with preserved_randomness():
            self.begin()
            self._first = self._next()

    def begin(self) -> None:
        """Begin to watch."""
        seed_python_numpy_torch(self.SEED)

    def has_drawn(self) -> bool:
        """Tell whether something was drawn since; the generators are of no use to anybody afterwards."""
        return self._next() != self._first

    def _next(self) -> tuple[float, float, int]:
        return random.random(), np.random.random_sample(), int(self._drawn.random_())


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Put the three global generators of the CPU back as they were, whatever happened in between."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
