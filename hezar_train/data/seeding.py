"""Seeds as functions: the seed of every sample and every step, and how the global generators receive it.

What a sample looks like after augmentation is a function of (seed, epoch, sample index); what the model draws is a
function of (seed, step, rank). This module owns both functions and the seeding of python's, numpy's and torch's global
generators. It refuses to save generator states for a later run: a seed that can be computed again need not be saved.

A seed has 63 bits. Its lower 32 are all that numpy's cheap seeding takes (seeding numpy with several words takes five
times as long, more than everything else here together), so they are not left to chance: within a stream they are a
bijection of the index, and no two samples of an epoch share them below four billion samples.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = [
    "DrawWatch",
    "SeedStream",
    "generator_marks",
    "preserved_randomness",
    "sample_seed",
    "seed_device",
    "seed_python_numpy_torch",
    "step_seed",
    "step_seeds",
]

WORD = 2**64 - 1
HALF_WORD = 2**32 - 1

NUM_WORDS = 624  # of a Mersenne twister, which all three are
TORCH_HEAD, TORCH_PLACE, TORCH_NORMALS = 512, 20, 28  # bytes: of torch's before the words, and right before and after
NUM_RECENT_STREAMS = 32  # one for each epoch, rank or trainer in use at a time; a miss costs microseconds

_get_bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]

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


def generator_marks() -> tuple[Any, ...]:
    """Return what changes with every draw from one of the three global generators of the CPU, to be compared later.

    The second of a pair of normal draws from numpy's, which is kept elsewhere, does not show.
    """
    numpys = _get_bit_generator()
    return (
        (bytes(_python_words), _python_generator.gauss_next) if _python_words is not None else random.getstate(),
        bytes(_numpy_words) if numpys is _numpy_generator else pickle.dumps(numpys.state),
        bytes(_torch_memory) if _torch_memory is not None else torch.default_generator.get_state().numpy().tobytes(),
    )


class DrawWatch:
    """Tell whether code between `begin` and `has_drawn` drew from a global generator of the CPU, or seeded it.

    It looks at the generators' memory before and after, and leaves them as they are; of numpy's alone, a second normal
    draw that waits is dropped, because it is kept where nobody sees it go. What is drawn and put back
    (`torch.random.fork_rng`) stays unseen.
    """

    _before: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Begin to watch."""
        first, second = _numpy_words[:2]
        place = _numpy_words[NUM_WORDS]
        # as the Mersenne twister's own seeding leaves them, so that no normal draw can wait
        is_just_seeded = place == NUM_WORDS and second == (1812433253 * (first ^ first >> 30) + 1) & HALF_WORD
        if not is_just_seeded or _get_bit_generator() is not _numpy_generator:
            np.random.seed(0)
        self._before = generator_marks()

    def has_drawn(self) -> bool:
        """Tell whether something was drawn since."""
        return generator_marks() != self._before


# To look at a generator's memory takes a fiftieth of the time of asking for its state, and what is asked here is asked
# for every batch. numpy documents where its memory is. Of python and torch no document tells the form, so that it is
# compared with the state, and torch's is tried, too; where it is another one the state is asked for.


def _words_of_python(generator: random.Random) -> Any:
    """Return the memory of python's generator, its place and 624 words; None where it has another form."""
    form, head = ctypes.c_uint32 * (1 + NUM_WORDS), object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < head + ctypes.sizeof(form):
        return None
    words = form.from_address(id(generator) + head)
    _, state, _ = generator.getstate()
    return words if (*words[1:], words[0]) == state else None


def _words_of_numpy(generator: Any) -> Any:
    """Return the memory of one of numpy's Mersenne twisters: 624 words, and its place among them."""
    return (ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(generator.ctypes.state_address)


def _memory_of_torch(generator: torch.Generator) -> Any:
    """Return the memory of a generator of torch's: its place, 624 words, a normal draw that waits; None if unknown."""
    address: Any = getattr(generator, "_cdata", None)
    if address is None:
        return None
    words = generator.get_state().numpy().view(np.uint64)[3 : 3 + NUM_WORDS].astype(np.uint32).tobytes()
    start = ctypes.string_at(address, TORCH_HEAD).find(words[:64])
    if start < TORCH_PLACE or ctypes.string_at(address + start, len(words)) != words:
        return None
    form = ctypes.c_char * (TORCH_PLACE + len(words) + TORCH_NORMALS)
    return form.from_address(address + start - TORCH_PLACE)


def _is_telling(generator: torch.Generator) -> bool:
    """Tell whether every draw from a generator of torch's shows in its memory, also one that was computed before."""
    memory, value = _memory_of_torch(generator), torch.empty(1)
    seen = [b"" if memory is None else bytes(memory)]
    for draw in (value.uniform_, value.normal_, value.normal_, value.double().normal_, value.double().normal_):
        draw(generator=generator)
        seen.append(b"" if memory is None else bytes(memory))
    return all(one != other for one, other in itertools.pairwise(seen))


_python_generator: Any = random.random.__self__  # type: ignore[attr-defined]
_python_words = _words_of_python(_python_generator)
_numpy_generator = _get_bit_generator()
_numpy_words = _words_of_numpy(_numpy_generator)
_torch_memory = _memory_of_torch(torch.default_generator) if _is_telling(torch.Generator()) else None


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
