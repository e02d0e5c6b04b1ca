from __future__ import annotations

import random
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.data import RangedSampler
from hezar_train.data.sampler import FIRST_CHUNK_SIZE
from hezar_train.errors import ConfigError

HUGE = 10**12


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    """A size and a range of it, on both sides of the size from which on the order is computed in another way."""
    size = draw(st.one_of(st.integers(0, 300), st.integers(4090, 4200)))
    end = draw(st.integers(0, size))
    return size, draw(st.integers(0, end)), end


@settings(deadline=None)
@given(ranges(), st.booleans(), st.integers(), st.integers(0, 50))
def test_resumed_sampler_yields_the_tail_of_the_unbroken_order(
    given_range: tuple[int, int, int], shuffle: bool, seed: int, epoch: int
) -> None:
    size, start, end = given_range
    unbroken = list(RangedSampler(size, 4, shuffle=shuffle, seed=seed, epoch=epoch))
    assert sorted(unbroken) == list(range(size))
    assert list(RangedSampler(size, 4, start, end, shuffle=shuffle, seed=seed, epoch=epoch)) == unbroken[start:end]


@settings(deadline=None)
@given(ranges(), st.integers(1, 40), st.booleans(), st.booleans())
def test_len_is_the_number_of_indices_yielded(
    given_range: tuple[int, int, int], batch_size: int, drop_last: bool, shuffle: bool
) -> None:
    size, start, end = given_range
    sampler = RangedSampler(range(size), batch_size, start, end, drop_last, shuffle, seed=3)
    assert len(sampler) == len(list(sampler)) == sum(map(len, sampler.chunks(7)))
    assert len(sampler) == (end - start) - (end - start) % batch_size * drop_last


def test_drop_last_trims_the_end_to_whole_batches() -> None:
    assert list(RangedSampler(10, 4, drop_last=True)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(RangedSampler(10, 4, start_index=4, drop_last=True)) == [4, 5, 6, 7]
    assert list(RangedSampler(10, 4, start_index=3, drop_last=True)) == [3, 4, 5, 6]
    assert list(RangedSampler(3, 4, drop_last=True)) == []


def test_an_end_index_of_zero_yields_nothing() -> None:
    sampler = RangedSampler(10, 2, end_index=0, shuffle=True, seed=1)
    assert list(sampler) == []
    assert len(sampler) == 0


def test_a_start_at_the_end_of_the_data_yields_nothing() -> None:
    assert list(RangedSampler(10, 2, start_index=10)) == []
    assert list(RangedSampler([], 2, shuffle=True, seed=1)) == []


def test_data_may_be_anything_with_a_length_or_the_length_itself() -> None:
    expected = list(RangedSampler(6, 2, shuffle=True, seed=9))
    assert list(RangedSampler("abcdef", 2, shuffle=True, seed=9)) == expected
    assert list(RangedSampler(torch.zeros(6, 3), 2, shuffle=True, seed=9)) == expected


@pytest.mark.parametrize("size", [50, 5000])
def test_two_runs_are_equal_and_two_epochs_differ(size: int) -> None:
    def run(epoch: int) -> list[int]:
        return list(RangedSampler(size, 8, shuffle=True, seed=7, epoch=epoch))

    assert run(0) == run(0)
    assert len({tuple(run(epoch)) for epoch in range(10)}) == 10


def test_set_epoch_takes_that_epochs_order_and_nothing_else_changes_it() -> None:
    sampler = RangedSampler(100, 8, start_index=20, shuffle=True, seed=7)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(3)
    assert list(sampler) == list(RangedSampler(100, 8, start_index=20, shuffle=True, seed=7, epoch=3)) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert list(RangedSampler(1000, 8, 10, 990, seed=5, epoch=2)) == list(range(10, 990))


def test_chunks_start_small_and_grow_to_the_size_asked_for() -> None:
    sampler = RangedSampler(60_000, 8, shuffle=True, seed=1)
    assert [len(chunk) for chunk in sampler.chunks(5000)][:4] == [FIRST_CHUNK_SIZE, 1024, 4096, 5000]
    assert max(len(chunk) for chunk in sampler.chunks(100)) == 100
    assert np.concatenate(list(sampler.chunks(5000))).tolist() == list(sampler)


def test_indices_are_plain_integers() -> None:
    assert {type(index) for index in RangedSampler(300, 8, shuffle=True, seed=1)} == {int}


def test_no_global_generator_is_read_or_moved() -> None:
    def states() -> tuple[object, ...]:
        keys = np.random.get_state(legacy=True)[1]
        return random.getstate(), keys.tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    first = [list(RangedSampler(size, 4, shuffle=True, seed=1)) for size in (100, 5000)]
    assert states() == before
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert [list(RangedSampler(size, 4, shuffle=True, seed=1)) for size in (100, 5000)] == first


def test_shuffling_without_a_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="shuffle=True needs a seed"):
        RangedSampler(10, 2, shuffle=True)


@pytest.mark.parametrize(("start", "end"), [(-1, None), (11, None), (5, 4), (0, 11), (0, -1)])
def test_a_range_outside_the_data_is_refused(start: int, end: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"start_index={start}, .*no range of 10 samples"):
        RangedSampler(10, 2, start, end)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="3 problems"):
        RangedSampler(10, 0, start_index=12, shuffle=True)


def _first_index_after(position: int) -> float:
    started = time.perf_counter()
    next(iter(RangedSampler(HUGE, 8, start_index=position, shuffle=True, seed=1)))
    return time.perf_counter() - started


def test_first_index_deep_in_a_huge_dataset_comes_as_soon_as_the_very_first() -> None:
    # Interleaved, and the quickest of many: other work on the machine only ever adds time.
    seconds = [(_first_index_after(0), _first_index_after(9 * 10**11)) for _ in range(300)]
    at_the_start, deep = map(min, zip(*seconds, strict=True))
    assert deep <= 1.2 * at_the_start


def test_first_index_deep_in_a_huge_dataset_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        next(iter(RangedSampler(HUGE, 8, start_index=9 * 10**11, shuffle=True, seed=1)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
