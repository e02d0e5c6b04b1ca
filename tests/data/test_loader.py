from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, default_collate

from hezar_train.data import default_collator
from hezar_train.data.loader import WorkerPool, batch_fetcher, fetched, identity, is_pure
from hezar_train.data.seeding import sample_seed, seed_python_numpy_torch

SEED, EPOCH = 11, 2

# whoever gets a Ctrl-C and is not the main process is gone
TEN_POOLS = """
import os, signal
from hezar_train.data.loader import WorkerPool

main = os.getpid()
signal.signal(signal.SIGINT, lambda *_: None if os.getpid() == main else os._exit(3))
print("ready", flush=True)
num_served = 0
for _ in range(10):
    pool = WorkerPool(lambda epoch, indices: indices, 1, False)
    num_served += list(pool.batches([(0, [1])])) == [[1]]
    pool.close()
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(num_served, flush=True)
"""


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


class Noisy:
    """Samples that draw from all three generators, an uneven number of times."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        for _ in range(index % 3):
            draw()
        return index, *draw()


class NoisyList(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index), random.random()


class Where(Noisy):
    """Samples that tell which process fetched them."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Broken(Noisy):
    def __getitem__(self, index: int) -> int:
        if index == 13:
            raise ValueError("sample 13 is broken")
        return index


def rows(**columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def fetcher(dataset: Any, collate: Any = identity, seed: int = SEED) -> Any:
    return batch_fetcher(dataset, collate, seed)


class TestPurity:
    @pytest.mark.parametrize(
        ("dataset", "expected"),
        [
            ([1, 2], True),
            ((1, 2), True),
            (TensorDataset(torch.ones(3)), True),
            (Subset(TensorDataset(torch.ones(3)), [0]), True),
            (rows(x=[1, 2]), True),
            (rows(x=[1, 2]).with_format("torch"), True),
            (rows(x=[1, 2]).with_transform(lambda row: row), False),
            (Subset(rows(x=[1, 2]).with_transform(lambda row: row), [0]), False),
            (Subset(Noisy(), [0]), False),
            (Noisy(), False),
            (NoisyList([1]), False),
            (type("Mine", (TensorDataset,), {})(torch.ones(3)), False),
            (type("Part", (Subset,), {})([1], [0]), False),
        ],
    )
    def test_only_what_is_known_to_draw_nothing_is_pure(self, dataset: Any, expected: bool) -> None:
        assert is_pure(dataset) is expected


class TestPureData:
    @settings(deadline=None)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    def test_rows_of_tensors_equal_the_default_collation(self, indices: list[int]) -> None:
        dataset = TensorDataset(torch.arange(30.0).view(10, 3), torch.arange(10), torch.rand(10, 2, 2))
        got = batch_fetcher(dataset, default_collator, SEED)(EPOCH, np.array(indices))
        expected = default_collate([dataset[index] for index in indices])
        assert type(got) is type(expected)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))

    @pytest.mark.parametrize("indices", [[2, 0], (2, 0), np.array([2, 0])])
    def test_indices_may_be_any_sequence(self, indices: Any) -> None:
        [got] = batch_fetcher(TensorDataset(torch.tensor([5, 6, 7])), default_collator, SEED)(EPOCH, indices)
        assert got.tolist() == [7, 5]
        assert fetcher([5, 6, 7])(EPOCH, indices) == [7, 5]

    def test_tensors_elsewhere_than_on_the_cpu_are_read_row_by_row(self) -> None:
        [got] = batch_fetcher(TensorDataset(torch.ones(4, 2, device="meta")), default_collator, SEED)(0, [0, 3])
        assert (got.shape, got.device.type) == ((2, 2), "meta")

    def test_own_collators_get_the_samples(self) -> None:
        dataset = TensorDataset(torch.tensor([5, 6, 7]))
        assert fetcher(dataset)(EPOCH, [1]) == [(torch.tensor(6),)]
        assert fetcher(Subset([5, 6, 7], [2, 1]))(EPOCH, [0, 1]) == [7, 6]

    def test_a_datasets_dataset_is_read_a_batch_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        original = datasets.Dataset.__getitems__

        def noted(self: Any, keys: Any) -> Any:
            asked.append(keys)
            return original(self, keys)

        monkeypatch.setattr(datasets.Dataset, "__getitems__", noted)
        assert fetcher(rows(x=list(range(8))))(EPOCH, np.array([4, 1])) == [{"x": 4}, {"x": 1}]
        assert asked == [[4, 1]]

    def test_tensors_with_the_default_collator_draw_and_seed_nothing(self) -> None:
        before = draw_after_seeding(3)
        torch.manual_seed(3)
        batch_fetcher(TensorDataset(torch.ones(4)), default_collator, SEED)(EPOCH, [1, 2])
        assert torch.rand(()).item() == before

    def test_a_collator_that_draws_is_a_function_of_the_batch(self) -> None:
        fetch = fetcher(rows(x=list(range(8))), lambda samples: draw())
        first = fetch(EPOCH, [4, 1])
        draw()
        assert fetch(EPOCH, [4, 1]) == first
        assert fetch(EPOCH, [5, 1]) != first
        assert fetch(EPOCH + 1, [4, 1]) != first


def draw_after_seeding(seed: int) -> float:
    torch.manual_seed(seed)
    return torch.rand(()).item()


class TestSeeding:
    @settings(deadline=None, max_examples=30)
    @given(st.permutations(range(12)), st.integers(1, 12))
    def test_a_sample_looks_the_same_in_any_batch_and_order(self, order: list[int], batch_size: int) -> None:
        fetch = fetcher(Noisy())
        alone = {index: fetch(EPOCH, [index])[0] for index in range(12)}
        for start in range(0, 12, batch_size):
            for sample in fetch(EPOCH, order[start : start + batch_size]):
                assert sample == alone[sample[0]]

    def test_every_generator_differs_by_seed_epoch_and_index(self) -> None:
        seen = [
            fetcher(Noisy())(EPOCH, [3])[0],
            fetcher(Noisy())(EPOCH, [6])[0],
            fetcher(Noisy())(EPOCH + 1, [3])[0],
            fetcher(Noisy(), seed=SEED + 1)(EPOCH, [3])[0],
        ]
        for drawn in list(zip(*seen, strict=True))[1:]:
            assert len(set(drawn)) == 4

    def test_a_list_with_its_own_items_is_seeded_too(self) -> None:
        fetch = fetcher(NoisyList(range(5)))
        assert fetch(EPOCH, [2, 3]) == fetch(EPOCH, [2, 3])
        assert fetch(EPOCH, [3, 2]) == fetch(EPOCH, [2, 3])[::-1]

    def test_a_transform_of_a_datasets_dataset_is_seeded(self) -> None:
        noisy = rows(x=list(range(8))).with_transform(lambda row: {"x": row["x"], "noise": [draw() for _ in row["x"]]})
        fetch = fetcher(noisy)
        alone = {index: fetch(EPOCH, [index])[0] for index in range(8)}
        assert fetch(EPOCH, [5, 2, 7]) == [alone[5], alone[2], alone[7]]
        assert len({str(sample["noise"]) for sample in alone.values()}) == 8


def seeded_one_by_one(dataset: Any, collate: Any, epoch: int, indices: Sequence[int]) -> Any:
    """Fetch a batch in the plain way that every other way must equal: a seed for each sample."""
    samples = []
    for index in indices:
        seed_python_numpy_torch(sample_seed(SEED, epoch, index))
        samples.append(dataset[index])
    return collate(samples)


class DrawsNowAndThen:
    """Samples of which some draw, from one of the generators, in ways that leave something behind in it."""

    ways: tuple[Any, ...] = (
        random.random, lambda: random.gauss(0, 1), np.random.random, lambda: float(np.random.randn()),
        lambda: torch.rand(()).item(), lambda: torch.randn(1).item(), lambda: random.sample(range(9), 2),
    )  # fmt: skip

    def __init__(self, drawing: dict[int, int], failing: frozenset[int] = frozenset()) -> None:
        self._drawing, self._failing = drawing, failing

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        found = self.ways[self._drawing[index]]() if index in self._drawing else None
        if index in self._failing and isinstance(found, float) and found > 0.5:
            raise ValueError(f"drew {found}")
        return index, found


def shuffled_now(samples: list[Any]) -> Any:
    return random.sample(samples, len(samples)), float(np.random.randn()), torch.randn(1).item()


class TestWatching:
    @settings(max_examples=60)
    @given(
        st.dictionaries(st.integers(0, 39), st.integers(0, len(DrawsNowAndThen.ways) - 1), max_size=4),
        st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=5), min_size=1, max_size=8),
        st.sampled_from([identity, shuffled_now]),
    )
    def test_whatever_draws_each_batch_is_that_of_a_seed_for_each_sample(
        self, drawing: dict[int, int], batches: list[list[int]], collate: Any
    ) -> None:
        dataset = DrawsNowAndThen(drawing)
        fetch = fetcher(dataset, collate)
        for indices in batches:
            expected = seeded_one_by_one(dataset, collate, EPOCH, indices)
            random.gauss(0, 1), np.random.randn()  # leave a second number waiting in both
            assert fetch(EPOCH, indices) == expected

    def test_data_that_draws_nothing_is_read_once(self) -> None:
        read: list[int] = []

        class Plain(Noisy):
            def __getitem__(self, index: int) -> Any:
                read.append(index)
                return index

        fetch = fetcher(Plain())
        assert [fetch(EPOCH, [1, 2]), fetch(EPOCH, [3])] == [[1, 2], [3]]
        assert read == [1, 2, 3]

    def test_a_sample_that_fails_by_the_draw_of_the_dice_fails_by_its_own_seed(self) -> None:
        dataset = DrawsNowAndThen(dict.fromkeys(range(40), 0), frozenset(range(40)))
        for index in range(40):
            try:
                expected = seeded_one_by_one(dataset, identity, EPOCH, [index])
            except ValueError as error:
                with pytest.raises(ValueError, match=str(error)) as raised:
                    fetcher(dataset)(EPOCH, [index])
                assert f"sample {index} of" in raised.value.__notes__[0]
            else:
                assert fetcher(dataset)(EPOCH, [index]) == expected


def answers(pool: WorkerPool, requests: Sequence[Any]) -> list[Any]:
    return list(pool.batches((EPOCH, indices) for indices in requests))


BATCHES = [[5, 2], [7], [1, 0, 3], [30], [21, 20], [9, 8, 39]]


@pytest.fixture
def pools() -> Iterator[list[WorkerPool]]:
    opened: list[WorkerPool] = []
    yield opened
    for pool in opened:
        pool.close()


def open_pool(pools: list[WorkerPool], dataset: Any, num_workers: int = 2) -> WorkerPool:
    pools.append(WorkerPool(fetcher(dataset), num_workers, pin_memory=False))
    return pools[-1]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class TestWorkers:
    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    def test_batches_are_those_of_the_main_process_in_order(self, pools: Any, num_workers: int) -> None:
        fetch = fetcher(Noisy())
        pool = open_pool(pools, Noisy(), num_workers)
        assert answers(pool, BATCHES) == [fetch(EPOCH, batch) for batch in BATCHES]

    def test_notes_come_back_with_their_batches(self, pools: Any) -> None:
        requests = [(EPOCH, batch, f"note {number}") for number, batch in enumerate(BATCHES)]
        pool = open_pool(pools, Noisy())
        through = list(fetched(iter(requests), fetcher(Noisy()), pool))
        assert through == list(fetched(iter(requests), fetcher(Noisy()), None))
        assert [note for _, note in through] == [f"note {number}" for number in range(6)]

    def test_passes_share_the_same_processes_and_none_is_the_main_one(self, pools: Any) -> None:
        pool = open_pool(pools, Where())
        passes = [{pid for batch in answers(pool, BATCHES) for _, pid in batch} for _ in range(3)]
        assert passes[0] == passes[1] == passes[2]
        assert len(passes[0]) == 2
        assert os.getpid() not in passes[0]

    def test_a_pass_after_an_abandoned_one_gives_its_own_batches_only(self, pools: Any) -> None:
        pool = open_pool(pools, Noisy())
        fetch = fetcher(Noisy())
        for taken in (0, 1, 5):
            abandoned = pool.batches((EPOCH, [index]) for index in range(40))
            assert [next(abandoned) for _ in range(taken)] == [fetch(EPOCH, [index]) for index in range(taken)]
            assert answers(pool, BATCHES) == [fetch(EPOCH, batch) for batch in BATCHES]

    def test_an_abandoned_pass_with_notes_leaves_none_behind(self, pools: Any) -> None:
        pool = open_pool(pools, Noisy())
        abandoned = fetched(((EPOCH, [index], "old") for index in range(40)), fetcher(Noisy()), pool)
        next(abandoned)
        again = list(fetched(((EPOCH, [index], index) for index in (3, 1, 2)), fetcher(Noisy()), pool))
        assert [(batch[0][0], note) for batch, note in again] == [(3, 3), (1, 1), (2, 2)]

    def test_an_error_in_a_worker_arrives_with_its_traceback_and_the_pool_goes_on(self, pools: Any) -> None:
        pool = open_pool(pools, Broken())
        with pytest.raises(ValueError, match="sample 13 is broken") as caught:
            answers(pool, [[1], [2], [12, 13], [3]])
        lines, note = caught.value.__notes__
        assert lines.startswith("In worker 0 of 2:\n  File ")
        assert "in __getitem__" in lines
        assert note.startswith("This was raised while sample 13 of Broken")
        assert answers(pool, [[1], [2]]) == [[1], [2]]

    def test_closing_ends_the_workers_even_if_a_pass_is_under_way(self, pools: Any) -> None:
        pool = open_pool(pools, Where())
        under_way = pool.batches((EPOCH, [index]) for index in range(40))
        pids = {next(under_way)[0][1] for _ in range(4)}
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        pool.close()
        assert not any(map(is_alive, pids))
        with pytest.raises(RuntimeError, match="the worker pool is closed"):
            pool.batches([])

    def test_closing_twice_or_before_the_first_pass_is_no_trouble(self, pools: Any) -> None:
        pool = open_pool(pools, Where())
        pool.close()
        pool.close()

    def test_a_worker_outlives_one_termination_and_ends_at_the_second(self, pools: Any) -> None:
        pool = open_pool(pools, Where(), num_workers=1)
        [[(_, pid)]] = answers(pool, [[0]])
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        assert answers(pool, [[0]]) == [[(0, pid)]]
        with pytest.raises(RuntimeError, match=f"worker .*{pid}"):  # noqa: PT012 - the news may come at once
            os.kill(pid, signal.SIGTERM)
            answers(pool, [[0]] * 100)

    def test_a_worker_leaves_every_interrupt_to_the_main_process(self, pools: Any) -> None:
        pool = open_pool(pools, Where(), num_workers=1)
        [[(_, pid)]] = answers(pool, [[0]])
        for _ in range(5):
            os.kill(pid, signal.SIGINT)
            time.sleep(0.02)
            assert answers(pool, [[0]]) == [[(0, pid)]]
        pool.close()
        assert not is_alive(pid)

    def test_interrupts_while_workers_start_reach_the_main_process_alone(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", TEN_POOLS], stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.001)
        assert (process.stdout.read(), process.returncode) == (b"10\n", 0)

    def test_the_global_generators_of_the_main_process_are_not_touched(self, pools: Any) -> None:
        pool = open_pool(pools, Noisy())
        torch.manual_seed(4)
        random.seed(4)
        states = random.getstate(), torch.get_rng_state().tolist()
        answers(pool, BATCHES)
        assert (random.getstate(), torch.get_rng_state().tolist()) == states
