"""Sources of data that keeps its own place: samplers and streams, resumed from any window's cursor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from hezar_train.config import TrainerConfig
from hezar_train.data import open_source
from hezar_train.data.loader import identity
from hezar_train.data.streams import SamplerSource, StreamSource
from hezar_train.errors import ConfigError
from hezar_train.plan import make_plan
from tests.data.planned import UNLIMITED, Noisy, order_of, plan_of, samples, seen


class Keeping(Sampler[int]):
    """A sampler that keeps its place, in an order of its own for each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.place = size, 0, 0
        self.calls: list[str] = []

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.place = epoch, 0
        self.calls.append(f"set_epoch {epoch}")

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        self.calls.append(f"load {self.place}")

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        while self.place < self.size:
            self.place += 1
            yield order[self.place - 1]


class KeepingEpoch(Keeping):
    """One whose state names the epoch too, and which starts over by itself."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.place = 0


class KeepingGenerator(Sampler[int]):
    """One that knows no epochs: each order is drawn from a generator of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.order, self.generator = size, [], random.Random(3)

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "generator": self.generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])
        self.generator.setstate(state["generator"])
        self.loaded = True

    def __iter__(self) -> Iterator[int]:
        if not getattr(self, "loaded", False):
            self.order = self.generator.sample(range(self.size), self.size)
        self.loaded = False
        while self.order:
            yield self.order.pop()


class KeepingBatches(Keeping):
    """A batch sampler of uneven batches that keeps its place."""

    def __len__(self) -> int:
        return len(list(self._batches()))

    def _batches(self) -> Iterator[list[int]]:
        order, start = random.Random(self.epoch).sample(range(self.size), self.size), 0
        while start < self.size:
            yield order[start : (start := start + 1 + start % 3)]

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        for batch in islice(self._batches(), self.place, None):
            self.place += 1
            yield batch


def loader_of(sampler: Any, size: int = 17, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 2, "sampler": sampler, **options}
    return DataLoader(Noisy(size), collate_fn=identity, num_workers=num_workers, **options)  # type: ignore[arg-type]


def batch_loader_of(sampler: Any, size: int = 17, num_workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Noisy(size), collate_fn=identity, num_workers=num_workers, batch_sampler=sampler)  # type: ignore[arg-type]


LOADERS = {
    "sampler": lambda workers: loader_of(Keeping(17), num_workers=workers),
    "sampler that knows its epoch": lambda workers: loader_of(KeepingEpoch(17), num_workers=workers),
    "sampler with a generator": lambda workers: loader_of(KeepingGenerator(17), num_workers=workers),
    "sampler in a batch sampler": lambda workers: batch_loader_of(BatchSampler(Keeping(17), 2, False), 17, workers),
    "batch sampler": lambda workers: batch_loader_of(KeepingBatches(17), 17, workers),
}


def sampler_source(loader: DataLoader[Any]) -> SamplerSource:
    source = open_source(loader, None, order_of())
    assert type(source) is SamplerSource
    return source


class TestSamplerSource:
    @pytest.mark.parametrize("name", LOADERS)
    @pytest.mark.parametrize(("accumulation", "num_workers"), [(1, 0), (3, 0), (3, 2)])
    def test_from_the_cursor_of_any_window_on_it_is_the_unbroken_run(
        self, name: str, accumulation: int, num_workers: int
    ) -> None:
        plan = plan_of(None, 2, accumulation)
        unbroken = sampler_source(LOADERS[name](0))
        epochs = [list(unbroken.windows(plan, epoch, 0, UNLIMITED)) for epoch in (1, 2)]
        assert [sorted(sample[0] for sample in samples(windows)) for windows in epochs] == [list(range(17))] * 2
        assert [sample[0] for sample in samples(epochs[0])] != [sample[0] for sample in samples(epochs[1])]
        for number, window in enumerate(epochs[0]):
            resumed = sampler_source(LOADERS[name](num_workers))
            resumed.restore(window.cursor)
            if not window.ends_epoch:
                tail = resumed.windows(plan, 1, window.first + window.count, UNLIMITED)
                assert seen(tail) == seen(epochs[0][number + 1 :])
            assert seen(resumed.windows(plan, 2, 0, UNLIMITED)) == seen(epochs[1])
            resumed.close()

    def test_reading_ahead_in_workers_does_not_shift_the_cursors(self) -> None:
        plan = plan_of(None, 2, 2)
        alone, source = (sampler_source(LOADERS["sampler"](workers)) for workers in (0, 2))
        expected = [(w.cursor, w.batches) for w in alone.windows(plan, 1, 0, UNLIMITED)]
        assert [(w.cursor, w.batches) for w in source.windows(plan, 1, 0, UNLIMITED)] == expected
        assert [cursor["place"] for cursor, _ in expected] == [4, 8, 12, 16, 17]
        source.close()

    def test_the_epoch_is_entered_before_the_place_is_restored(self) -> None:
        sampler = Keeping(17)
        source = sampler_source(loader_of(sampler))
        source.restore({"place": 6})
        next(source.windows(plan_of(None), 4, 6, UNLIMITED))
        assert sampler.calls == ["set_epoch 4", "load 6"]

    def test_a_batch_sampler_is_told_of_the_epoch(self) -> None:
        sampler = KeepingBatches(17)
        list(sampler_source(batch_loader_of(sampler)).windows(plan_of(None), 4, 0, UNLIMITED))
        assert sampler.calls == ["set_epoch 4"]

    @pytest.mark.parametrize(
        ("steps_left", "counts", "ends"),
        [
            (UNLIMITED, [6, 6, 5], [False, False, True]),
            (9, [6, 6, 5], [False, False, True]),
            (8, [6, 6, 4], [False, False, False]),
            (7, [6, 6, 2], [False, False, False]),
            (6, [6, 6], [False, False]),
            (1, [2], [False]),
            (0, [], []),
        ],
    )
    def test_no_more_steps_than_are_left(self, steps_left: int, counts: list[int], ends: list[bool]) -> None:
        windows = list(sampler_source(LOADERS["sampler"](0)).windows(plan_of(None, 2, 3), 1, 0, steps_left))
        assert [window.count for window in windows] == counts
        assert [window.ends_epoch for window in windows] == ends
        assert [window.cursor["place"] for window in windows] == list(np.cumsum(counts))

    @pytest.mark.parametrize(("accumulation", "counts"), [(1, [2] * 8), (3, [6, 6]), (4, [8, 8]), (9, [])])
    def test_a_short_last_window_is_dropped_if_the_plan_says_so(self, accumulation: int, counts: list[int]) -> None:
        plan = plan_of(None, 2, accumulation, drop_last=True)
        windows = list(sampler_source(LOADERS["sampler"](0)).windows(plan, 1, 0, UNLIMITED))
        assert [window.count for window in windows] == counts
        assert [window.ends_epoch for window in windows] == [
            number == len(counts) for number in range(1, len(counts) + 1)
        ]

    def test_counts_are_those_of_the_sampler_or_of_its_batches(self) -> None:
        even = sampler_source(loader_of(Keeping(17)))
        assert (even.num_samples, even.num_batches, even.batch_size) == (17, None, 2)
        dropping = sampler_source(loader_of(Keeping(17), drop_last=True))
        assert (dropping.num_samples, dropping.num_batches) == (16, None)
        uneven = sampler_source(batch_loader_of(KeepingBatches(17)))
        assert (uneven.num_samples, uneven.num_batches) == (None, len(KeepingBatches(17)))

    def test_a_sampler_without_a_length_is_counted_as_it_goes(self) -> None:
        class Endless(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                while True:
                    yield 3

        source = sampler_source(loader_of(Endless()))
        assert (source.num_samples, source.num_batches) == (None, None)
        windows = list(source.windows(plan_of(None), 1, 0, 4))
        assert [(w.count, w.ends_epoch) for w in windows] == [(2, False)] * 4

    @pytest.mark.parametrize(
        ("loader", "name"),
        [
            (loader_of(WeightedRandomSampler([1.0] * 17, 17)), "WeightedRandomSampler"),
            (batch_loader_of([[0, 1], [2]]), "list"),
        ],
    )
    def test_one_that_keeps_no_place_says_so_by_its_name(self, loader: DataLoader[Any], name: str) -> None:
        problem = sampler_source(loader).resume_problem
        assert problem is not None
        assert f"sampler {name} has no state_dict() and load_state_dict()" in problem
        assert [window.cursor for window in sampler_source(loader).windows(plan_of(None), 1, 0, 2)] == [None, None]

    def test_half_a_keeper_is_none(self) -> None:
        kind = type("Half", (Sampler,), {"__iter__": Keeping.__iter__, "state_dict": Keeping.state_dict})
        assert sampler_source(loader_of(kind())).resume_problem is not None
        assert sampler_source(loader_of(Keeping(17))).resume_problem is None

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize(
        "sampler",
        [
            lambda: WeightedRandomSampler([1.0, 3.0] * 8, 16),
            lambda: RandomSampler(Noisy(16), replacement=True),
        ],
    )
    def test_a_sampler_that_draws_from_the_global_generators_draws_by_seed_and_epoch(
        self, sampler: Any, num_workers: int
    ) -> None:
        plan = plan_of(None)

        def epoch(number: int, workers: int) -> list[Any]:
            random.seed()
            torch.seed()
            source = sampler_source(loader_of(sampler(), 16, num_workers=workers))
            windows = seen(source.windows(plan, number, 0, UNLIMITED))
            source.close()
            return windows

        assert epoch(1, num_workers) == epoch(1, 0)
        assert epoch(1, 0) != epoch(2, 0)


def test_a_window_that_would_end_inside_a_samplers_batch_is_refused() -> None:
    loader = loader_of(Keeping(17), batch_size=4)
    plan = make_plan(TrainerConfig(output_dir="run", batch_size=4, global_batch_size=6), 17)
    with pytest.raises(ConfigError, match=r"global_batch_size=6 is no multiple of the DataLoader's batch_size=4"):
        next(sampler_source(loader).windows(plan, 1, 0, 99))


class Counter(IterableDataset[Any]):
    """A stream that counts what it gave, the plainest way to keep a place."""

    def __init__(self, size: int = 17) -> None:
        self.size, self.given, self.epoch = size, 0, 0
        self.calls: list[str] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls.append(f"set_epoch {epoch}")

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = self.start = state["given"]
        self.calls.append(f"load {self.given}")

    def __iter__(self) -> Iterator[Any]:
        first, self.start = getattr(self, "start", 0), 0
        for number in range(first, self.size):
            self.given = number + 1
            yield self.epoch, number, random.random(), float(np.random.random()), torch.rand(()).item()


class RestartingCounter(Counter):
    """One that goes on from its place at any time, and starts over when it ends."""

    def __iter__(self) -> Iterator[Any]:
        while self.given < self.size:
            self.given += 1
            yield self.epoch, self.given - 1, random.random(), float(np.random.random()), torch.rand(()).item()
        self.given = 0


class KeepingLoader(DataLoader[Any]):
    """A loader that counts its batches and skips those given before without reading them."""

    given = skipped = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["given"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.given, self.skipped = self.skipped, 0
        for indices in islice(self.batch_sampler, self.given, None):
            self.given += 1
            yield self.collate_fn([self.dataset[index] for index in indices])


def hugging_rows() -> Any:
    return datasets.Dataset.from_dict({"x": list(range(17))}).to_iterable_dataset(num_shards=2)


STREAMS = {
    "counter": Counter,
    "counter that starts over": RestartingCounter,
    "datasets": hugging_rows,
    "loader of a counter": lambda: DataLoader(Counter(), batch_size=2, collate_fn=identity),
    "loader of ready batches": lambda: DataLoader(Counter(), batch_size=None, collate_fn=lambda one: [list(one[:1])]),
    "loader that keeps its place": lambda: KeepingLoader(Noisy(17), batch_size=2, collate_fn=lambda some: [some]),  # type: ignore[arg-type]
}


def stream_source(data: Any, **fields: Any) -> StreamSource:
    source = open_source(data, None if isinstance(data, DataLoader) else identity, order_of(**fields))
    assert type(source) is StreamSource
    return source


class TestStreamSource:
    @pytest.mark.parametrize("name", STREAMS)
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_from_the_cursor_of_any_window_on_it_is_the_unbroken_run(self, name: str, accumulation: int) -> None:
        plan = plan_of(None, 2, accumulation)
        unbroken = stream_source(STREAMS[name]())
        epochs = [list(unbroken.windows(plan, epoch, 0, UNLIMITED)) for epoch in (1, 2)]
        assert [sum(window.count for window in windows) for windows in epochs] == [17, 17]
        for number, window in enumerate(epochs[0]):
            resumed = stream_source(STREAMS[name]())
            assert resumed.resume_problem is None
            resumed.restore(window.cursor)
            if not window.ends_epoch:
                tail = resumed.windows(plan, 1, window.first + window.count, UNLIMITED)
                assert seen(tail) == seen(epochs[0][number + 1 :])
            assert seen(resumed.windows(plan, 2, 0, UNLIMITED)) == seen(epochs[1])

    def test_windows_follow_each_other_and_only_the_last_ends_the_epoch(self) -> None:
        windows = list(stream_source(Counter()).windows(plan_of(None, 2, 3), 1, 0, UNLIMITED))
        assert [(w.first, w.count, w.ends_epoch) for w in windows] == [(0, 6, False), (6, 6, False), (12, 5, True)]
        assert [sample[1] for sample in samples(windows)] == list(range(17))
        assert [window.cursor for window in windows] == [{"given": 6}, {"given": 12}, {"given": 17}]
        assert all(window.indices == [] for window in windows)

    @pytest.mark.parametrize(
        ("steps_left", "counts", "ends"),
        [(UNLIMITED, [4, 4, 1], True), (5, [4, 4, 1], True), (4, [4, 4], False), (3, [4, 2], False), (0, [], False)],
    )
    def test_no_more_steps_than_are_left(self, steps_left: int, counts: list[int], ends: bool) -> None:
        windows = list(stream_source(Counter(9)).windows(plan_of(None, 2, 2), 1, 0, steps_left))
        assert [window.count for window in windows] == counts
        assert [window.ends_epoch for window in windows] == [ends and window is windows[-1] for window in windows]
        assert [window.cursor["given"] for window in windows] == list(np.cumsum(counts))

    def test_the_epoch_is_entered_before_the_place_is_restored(self) -> None:
        stream = Counter()
        source = stream_source(stream)
        source.restore({"given": 6})
        [window] = islice(source.windows(plan_of(None), 4, 6, UNLIMITED), 1)
        assert stream.calls == ["set_epoch 4", "load 6"]
        assert [sample[:2] for sample in window.batches[0]] == [(4, 6), (4, 7)]

    def test_a_loader_hands_the_epoch_on_to_its_dataset_and_its_sampler(self) -> None:
        stream = Counter()
        list(stream_source(DataLoader(stream, batch_size=2, collate_fn=identity)).windows(plan_of(None), 4, 0, 1))
        sampler = Keeping(17)
        loader = KeepingLoader(Noisy(17), batch_size=2, sampler=sampler, collate_fn=lambda some: [some])  # type: ignore[arg-type]
        list(stream_source(loader).windows(plan_of(None), 5, 0, 1))
        assert (stream.calls, sampler.calls) == (["set_epoch 4"], ["set_epoch 5"])

    def test_what_samples_draw_is_a_function_of_seed_epoch_and_place(self) -> None:
        def drawn(epoch: int, **fields: Any) -> list[Any]:
            return [one[2:] for one in samples(stream_source(Counter(), **fields).windows(plan_of(None), epoch, 0, 9))]

        first = drawn(1)
        torch.rand(3)
        assert drawn(1) == first
        assert not {one for sample in first for one in sample} & {one for sample in drawn(2) for one in sample}
        assert drawn(1, seed=6) != first

    @pytest.mark.parametrize(("accumulation", "counts"), [(1, [2] * 8), (3, [6, 6]), (9, [])])
    def test_a_short_last_window_is_dropped_if_the_plan_says_so(self, accumulation: int, counts: list[int]) -> None:
        windows = list(
            stream_source(Counter()).windows(plan_of(None, 2, accumulation, drop_last=True), 1, 0, UNLIMITED)
        )
        assert [window.count for window in windows] == counts
        assert [window.ends_epoch for window in windows] == [
            number == len(counts) for number in range(1, len(counts) + 1)
        ]

    def test_an_endless_stream_ends_with_the_steps(self) -> None:
        windows = list(stream_source(Counter(10**9)).windows(plan_of(None, 2, 2), 1, 0, 5))
        assert [(w.count, w.ends_epoch) for w in windows] == [(4, False), (4, False), (2, False)]

    def test_one_that_keeps_no_place_says_what_to_add(self) -> None:
        source = stream_source(number for number in range(5))
        assert source.resume_problem is not None
        assert "generator has no state_dict() and load_state_dict()" in source.resume_problem
        assert seen(source.windows(plan_of(None), 1, 0, UNLIMITED)) == [
            (0, 2, False, [[0, 1]]), (2, 2, False, [[2, 3]]), (4, 1, True, [[4]]),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "shuffled",
        [
            lambda: hugging_rows().shuffle(seed=1, buffer_size=5),
            lambda: hugging_rows().shuffle(seed=1, buffer_size=5).map(lambda row: row),
            lambda: datasets.interleave_datasets([hugging_rows().shuffle(seed=1), hugging_rows()]),
        ],
    )
    def test_a_shuffle_buffer_would_lose_samples_and_says_so(self, shuffled: Any) -> None:
        problem = stream_source(shuffled()).resume_problem
        assert problem is not None
        assert "has a shuffle buffer" in problem
