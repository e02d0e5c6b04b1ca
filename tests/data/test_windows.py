"""A window's samples: cut for steps and processes, each exactly once; and counted in a batch."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from hezar_train import TrainerConfig
from hezar_train.data import RangedSampler, batch_length
from hezar_train.data.loader import MapSource
from hezar_train.data.windows import Order, cut_window, rank_ranges
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import make_plan

counts = st.integers(0, 500)
steps = st.integers(1, 20)
processes = st.integers(1, 9)


@pytest.mark.parametrize(
    ("count", "num_steps", "num_processes", "expected"),
    [
        (24, 5, 1, [[5], [5], [5], [5], [4]]),
        (9, 3, 1, [[3], [3], [3]]),
        (9, 2, 1, [[5], [4]]),
        (1, 1, 1, [[1]]),
        (10, 2, 2, [[3, 3], [2, 2]]),
        (7, 1, 3, [[3, 2, 2]]),
        (3, 2, 2, [[1, 1], [1, 0]]),
        (0, 1, 2, [[0, 0]]),
    ],
)
def test_windows_are_cut_like_this(count: int, num_steps: int, num_processes: int, expected: list[list[int]]) -> None:
    assert cut_window(count, num_steps, num_processes) == expected


@settings(deadline=None)
@given(counts, steps, processes)
def test_sizes_sum_to_the_window_and_differ_by_at_most_one_larger_first(count: int, num_steps: int, world: int) -> None:
    rows = cut_window(count, num_steps, world)
    cells = [size for row in rows for size in row]
    assert [len(row) for row in rows] == [world] * num_steps
    assert sum(cells) == count
    assert max(cells) - min(cells) <= 1
    assert cells == sorted(cells, reverse=True)


@settings(deadline=None)
@given(st.integers(0, 10**12), counts, steps, processes)
def test_all_ranks_together_take_every_position_of_the_window_once(
    first: int, count: int, num_steps: int, world: int
) -> None:
    by_rank = [rank_ranges(first, count, num_steps, rank, world) for rank in range(world)]
    in_order = [by_rank[rank][step] for step in range(num_steps) for rank in range(world)]
    taken = [position for start, size in in_order for position in range(start, start + size)]
    assert taken == list(range(first, first + count))


@settings(deadline=None)
@given(counts, steps, processes)
def test_ranges_have_the_sizes_of_the_cut(count: int, num_steps: int, world: int) -> None:
    sizes = cut_window(count, num_steps, world)
    for rank in range(world):
        assert [size for _, size in rank_ranges(7, count, num_steps, rank, world)] == [row[rank] for row in sizes]


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 40), processes)
def test_no_cell_exceeds_the_batch_size_with_as_many_steps_as_it_takes(count: int, batch_size: int, world: int) -> None:
    num_steps = -(-count // (batch_size * world))
    assert max(max(row) for row in cut_window(count, num_steps, world)) <= batch_size


@settings(deadline=None)
@given(counts, steps, processes)
def test_no_sample_is_alone_where_there_are_two_for_each_cell(count: int, num_steps: int, world: int) -> None:
    count += 2 * num_steps * world
    assert min(min(row) for row in cut_window(count, num_steps, world)) >= 2


@pytest.mark.parametrize(("count", "num_steps", "world"), [(-1, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_windows_that_cannot_be_cut_are_refused(count: int, num_steps: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"count={count} .*num_steps={num_steps} .*num_processes={world}"):
        cut_window(count, num_steps, world)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank={rank} is none of num_processes=2"):
        rank_ranges(0, 8, 2, rank, 2)


class TestBatchLength:
    @pytest.mark.parametrize(
        "batch",
        [
            torch.ones(3, 2),
            np.ones((3, 2)),
            {"x": torch.ones(3, 2)},
            {"scale": torch.tensor(2.0), "x": torch.ones(3)},
            {"scale": 0.5, "name": "train", "missing": None, "x": torch.ones(3)},
            {"inputs": {"ids": torch.ones(3, 2)}, "labels": torch.ones(3)},
            {"texts": ["a", "b", "c"]},
            OrderedDict(x=np.ones(3)),
            [torch.ones(3, 2), torch.ones(3)],
            (torch.ones(3), ["a", "b", "c"]),
            BatchEncoding({"input_ids": torch.ones(3, 5)}),
            BaseModelOutput(last_hidden_state=torch.ones(3, 5)),
        ],
    )
    def test_the_first_thing_with_a_length_tells(self, batch: Any) -> None:
        assert batch_length(batch) == 3

    @pytest.mark.parametrize("batch", [3, "abc", b"abc", None, torch.tensor(1.0), np.array(1.0), object()])
    def test_what_is_no_batch_is_refused(self, batch: Any) -> None:
        with pytest.raises(DataError, match=f"samples a batch of type {type(batch).__name__} holds"):
            batch_length(batch)

    @pytest.mark.parametrize("batch", [{}, [], {"loss": torch.tensor(1.0)}, {"name": "abc"}, [None]])
    def test_a_batch_in_which_nothing_tells_is_refused(self, batch: Any) -> None:
        with pytest.raises(DataError, match="no tensor or list in it tells"):
            batch_length(batch)


class Numbers:
    """So many samples, each its own number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize(("size", "window", "position"), [(47, 12, 0), (47, 12, 24), (5003, 5, 4990), (5003, 5001, 0)])
def test_the_processes_together_take_the_order_of_the_sampler(
    world: int, size: int, window: int, position: int
) -> None:
    plan = make_plan(TrainerConfig("run", batch_size=2, global_batch_size=window), size, world)
    orders = [Order(2, 7, shuffle=True, rank=rank, num_processes=world) for rank in range(world)]
    sources = [MapSource(Numbers(size), list, order) for order in orders]
    together = zip(*(source.windows(plan, 3, position, plan.total_steps) for source in sources), strict=True)
    found = []
    for windows in together:
        in_order = zip(*(zip(one.indices, one.sizes, one.batches, strict=True) for one in windows), strict=True)
        for step in in_order:
            assert all(batch == list(indices) for indices, _, batch in step)
            found += [int(index) for indices, count, _ in step for index in indices[:count]]
            fillers = [indices for indices, count, _ in step if not count]
            last = RangedSampler(size, 2, shuffle=True, seed=7, epoch=3)
            last.start_index = windows[0].first + windows[0].count - 1
            assert all(filler[-1] == next(iter(last)) for filler in fillers)
    assert found == list(RangedSampler(size, 2, position, shuffle=True, seed=7, epoch=3))


def test_a_process_pays_for_its_own_samples_alone() -> None:
    world, size = 4_000_000, 10**12
    plan = make_plan(TrainerConfig("run", batch_size=2), size, world)
    source = MapSource(Numbers(size), list, Order(2, 7, shuffle=True, rank=1, num_processes=world))
    tracemalloc.start()
    try:
        windows = list(islice(source.windows(plan, 1, 9 * plan.window_samples, 1 << 60), 20))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    first = 9 * plan.window_samples + 2
    assert [one.firsts for one in windows] == [[first + number * plan.window_samples] for number in range(20)]
    assert windows[0].samples() == list(islice(RangedSampler(size, 2, first, shuffle=True, seed=7, epoch=1), 2))
