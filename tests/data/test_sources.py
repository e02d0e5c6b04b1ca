"""Any form of data becomes its source of windows; a dataset with a length is met in the order of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from hezar_train.config import TrainerConfig
from hezar_train.data import (
    Source,
    collator_for,
    default_collator,
    is_stream,
    open_source,
)
from hezar_train.data.loader import MapSource, identity
from hezar_train.data.sampler import RangedSampler
from hezar_train.data.streams import SamplerSource, StreamSource
from hezar_train.errors import DataError
from hezar_train.plan import make_plan
from tests.data.planned import UNLIMITED, Noisy, order_of, plan_of, samples, seen


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class SizedStream(Stream):
    """Iterable by declaration, though it has a length."""

    def __len__(self) -> int:
        return 10


class OwnSampler(SequentialSampler):
    """Even a subclass of torch's own may do anything."""


class StatefulLoader(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def opened(data: Any, collate: Any = None, **fields: Any) -> Source:
    return open_source(data, collate, order_of(4, **fields))


def first_epoch(source: Source) -> list[list[int]]:
    """Return the samples of each batch of an epoch."""
    config = TrainerConfig(output_dir="run", max_steps=100 if source.num_samples is None else None)
    config.drop_last = source.drop_last
    plan = make_plan(config, source.num_samples, 1, source.batch_size)
    batches = [batch for window in source.windows(plan, 1, 0, 100) for batch in window.batches]
    source.close()
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in batches]


class TestDispatch:
    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            (Numbers(), MapSource),
            ([1, 2, 3], MapSource),
            (range(10), MapSource),
            (torch.arange(10), MapSource),
            (TensorDataset(torch.arange(10)), MapSource),
            ({0: "a", 1: "b"}, MapSource),
            (datasets.Dataset.from_dict({"x": [1, 2]}), MapSource),
            (datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset(), StreamSource),
            (Stream(), StreamSource),
            (SizedStream(), StreamSource),
            ((number for number in range(3)), StreamSource),
            (iter([1, 2]), StreamSource),
            (DataLoader(Numbers(), batch_size=3), MapSource),
            (DataLoader(Numbers(), batch_size=3, shuffle=True), MapSource),
            (DataLoader(Numbers(), batch_size=3, sampler=SequentialSampler(Numbers())), MapSource),
            (DataLoader(Numbers(), batch_size=3, sampler=RandomSampler(Numbers())), MapSource),
            (DataLoader(Numbers(), sampler=RandomSampler(Numbers(), replacement=True)), SamplerSource),
            (DataLoader(Numbers(), sampler=RandomSampler(Numbers(), num_samples=4)), SamplerSource),
            (DataLoader(Numbers(), sampler=SubsetRandomSampler([1, 2])), SamplerSource),
            (DataLoader(Numbers(), sampler=WeightedRandomSampler([1.0] * 10, 10)), SamplerSource),
            (DataLoader(Numbers(), sampler=OwnSampler(Numbers())), SamplerSource),
            (DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 3, False)), SamplerSource),
            (DataLoader(Numbers(), batch_sampler=[[0, 1], [2]]), SamplerSource),
            (DataLoader(Stream(), batch_size=3), StreamSource),
            (DataLoader(Stream(), batch_size=3, num_workers=1), StreamSource),
            (DataLoader(Stream(), batch_size=None), StreamSource),
            (StatefulLoader(Numbers(), batch_size=3), StreamSource),
        ],
    )
    def test_each_form_of_data_has_its_source(self, data: Any, kind: type) -> None:
        assert type(opened(data)) is kind

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (3, "3, an int"),
            (None, "None"),
            (object(), "an object"),
            ("imdb", "'imdb'"),
            (b"imdb", "a bytes"),
            ({1, 2}, "a set, which has no __getitem__"),
            ({"a": 1}.values(), "a dict_values, which has no __getitem__"),
        ],
    )
    def test_what_is_no_data_is_refused(self, data: Any, said: str) -> None:
        with pytest.raises(DataError, match=f"the data is {said}.*; expected a dataset with __len__"):
            opened(data)

    def test_splits_under_names_are_refused_with_their_names(self) -> None:
        splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]}), "test": []})
        with pytest.raises(DataError, match=r"a DatasetDict with the keys 'train', 'test'; expected one .*Pass one"):
            opened(splits)

    def test_a_stream_with_workers_is_refused(self) -> None:
        with pytest.raises(
            DataError, match=r"num_dataloader_workers=2, and the data is an iterable dataset.*Set num_dataloader_wo"
        ):
            opened(Stream(), num_workers=2)

    def test_a_loader_that_makes_no_batches_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"batch_size=None over a dataset with a length.*Give it a batch_size"):
            opened(DataLoader(Numbers(), batch_size=None))

    @pytest.mark.parametrize(
        ("data", "expected"),
        [(Numbers(), False), ([1], False), (Stream(), True), (SizedStream(), True), (iter([1]), True), (3, False)],
    )
    def test_a_stream_is_what_can_only_be_iterated(self, data: Any, expected: bool) -> None:
        assert is_stream(data) is expected


class TestLoaders:
    def test_a_plain_one_keeps_its_batch_size_and_its_order(self) -> None:
        source = opened(DataLoader(Numbers(), batch_size=3))
        assert (source.batch_size, source.num_samples, source.drop_last) == (3, 10, False)
        assert first_epoch(source) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]

    def test_a_random_one_takes_the_order_of_our_sampler(self) -> None:
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
        assert first_epoch(opened(loader)) == first_epoch(opened(Numbers()))
        assert sorted(chain.from_iterable(first_epoch(opened(loader)))) == list(range(10))

    def test_a_random_one_is_not_shuffled_where_the_config_says_no(self) -> None:
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
        assert first_epoch(opened(loader, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_one_that_drops_its_last_batch_drops_the_short_window(self, shuffle: bool) -> None:
        source = opened(DataLoader(Numbers(), batch_size=4, drop_last=True, shuffle=shuffle))
        assert source.drop_last
        assert [len(batch) for batch in first_epoch(source)] == [4, 4]

    def test_one_with_a_sampler_of_its_own_drops_its_last_batch_itself(self) -> None:
        source = opened(DataLoader(Numbers(), batch_size=4, sampler=OwnSampler(Numbers()), drop_last=True))
        assert (source.num_samples, source.drop_last) == (8, False)
        assert first_epoch(source) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_one_of_a_stream_drops_its_last_batch_too(self) -> None:
        assert first_epoch(opened(DataLoader(Stream(), batch_size=4, drop_last=True))) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_one_of_ready_batches_gives_them_as_they_are(self) -> None:
        class Ready(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                yield torch.arange(3)
                yield torch.arange(2)

        assert first_epoch(opened(DataLoader(Ready(), batch_size=None))) == [[0, 1, 2], [0, 1]]

    def test_one_of_a_stream_with_workers_is_read_as_it_is_and_cannot_go_on_in_an_epoch(self) -> None:
        source = opened(DataLoader(Stream(), batch_size=4, num_workers=1))
        assert first_epoch(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert source.resume_problem is not None
        assert source.resume_problem.startswith("DataLoader has no state_dict()")

    def test_its_workers_count_and_not_those_of_the_config(self) -> None:
        loader = DataLoader(Numbers(), batch_size=4, num_workers=0)
        assert opened(loader, num_workers=2)._order.num_workers == 0  # type: ignore[attr-defined]
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1)
        assert opened(loader)._order.num_workers == 1  # type: ignore[attr-defined]


class TestSeeds:
    @pytest.mark.parametrize("wrap", [lambda data: data, lambda data: DataLoader(data, batch_size=2)])
    @pytest.mark.parametrize("kind", [Numbers, Stream])
    def test_a_dataset_with_a_generator_of_its_own_gets_the_seed(self, wrap: Any, kind: type) -> None:
        seeds: list[int] = []
        data = type("Own", (kind,), {"set_seed": lambda self, seed: seeds.append(seed)})()
        opened(wrap(data))
        assert seeds == [5]


class TestCollators:
    def test_the_given_one_comes_first_then_the_datasets_own_then_the_default(self) -> None:
        class Own(Numbers):
            data_collator = staticmethod(len)

        assert collator_for(Own(), max) is max
        assert collator_for(Own(), None) is len
        assert collator_for(Numbers(), None) is default_collator

    @pytest.mark.parametrize(
        ("loader_has", "given", "expected"),
        [(None, None, [0, 1]), (sum, None, 1), (None, max, 1), (sum, min, 0), (default_collate, None, [0, 1])],
    )
    def test_a_loaders_own_is_kept_unless_one_is_given(self, loader_has: Any, given: Any, expected: Any) -> None:
        loader = DataLoader(Numbers(), batch_size=2, collate_fn=loader_has)
        source = opened(loader, given)
        batch = source.fetch(1, [0, 1])  # type: ignore[attr-defined]
        assert (batch.tolist() if isinstance(batch, torch.Tensor) else batch) == expected

    def test_a_sampler_of_the_users_own_is_no_reason_to_change_the_collator(self) -> None:
        class Backwards(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(9, -1, -1))

        assert first_epoch(opened(DataLoader(Numbers(), batch_size=4, sampler=Backwards()))) == [
            [9, 8, 7, 6], [5, 4, 3, 2], [1, 0],
        ]  # fmt: skip


sizes = st.integers(1, 60)


batch_sizes = st.integers(1, 7)


accumulations = st.integers(1, 4)


class TestMapSource:
    @settings(deadline=None)
    @given(sizes, batch_sizes, accumulations, st.booleans(), st.integers(0, 5))
    def test_an_epoch_takes_every_sample_once_in_the_order_of_the_sampler(
        self, size: int, batch_size: int, accumulation: int, shuffle: bool, epoch: int
    ) -> None:
        source = MapSource(range(size), identity, order_of(batch_size, shuffle=shuffle))
        plan = plan_of(size, batch_size, accumulation)
        windows = list(source.windows(plan, epoch, 0, UNLIMITED))
        expected = list(RangedSampler(size, batch_size, shuffle=shuffle, seed=5, epoch=epoch))
        assert samples(windows) == expected
        assert [int(index) for window in windows for part in window.indices for index in part] == expected
        assert sorted(expected) == list(range(size))

    @settings(deadline=None)
    @given(sizes, batch_sizes, accumulations)
    def test_windows_follow_each_other_and_only_the_last_ends_the_epoch(
        self, size: int, batch_size: int, accumulation: int
    ) -> None:
        plan = plan_of(size, batch_size, accumulation)
        windows = list(MapSource(range(size), identity, order_of(batch_size)).windows(plan, 1, 0, UNLIMITED))
        assert [window.first for window in windows] == list(range(0, size, batch_size * accumulation))
        assert [window.ends_epoch for window in windows] == [False] * (len(windows) - 1) + [True]
        assert sum(window.count for window in windows) == size
        for window in windows:
            lengths = [len(batch) for batch in window.batches]
            assert sum(lengths) == window.count
            assert 1 <= min(lengths) <= max(lengths) <= batch_size
            assert len(lengths) == -(-window.count // batch_size)

    @settings(deadline=None, max_examples=50)
    @given(sizes, batch_sizes, accumulations, st.data())
    def test_from_any_window_on_it_is_the_tail_of_the_unbroken_epoch(
        self, size: int, batch_size: int, accumulation: int, data: st.DataObject
    ) -> None:
        plan = plan_of(size, batch_size, accumulation)
        unbroken = list(MapSource(Noisy(size), identity, order_of(batch_size)).windows(plan, 3, 0, UNLIMITED))
        number = data.draw(st.integers(0, len(unbroken) - 1))
        resumed = MapSource(Noisy(size), identity, order_of(batch_size))
        assert seen(resumed.windows(plan, 3, unbroken[number].first, UNLIMITED)) == seen(unbroken[number:])

    @settings(deadline=None)
    @given(sizes, batch_sizes, accumulations, st.integers(0, 40))
    def test_no_more_steps_than_are_left_are_taken_from_the_same_order(
        self, size: int, batch_size: int, accumulation: int, steps_left: int
    ) -> None:
        plan = plan_of(size, batch_size, accumulation)
        source = MapSource(range(size), identity, order_of(batch_size))
        whole = list(source.windows(plan, 1, 0, UNLIMITED))
        cut = list(source.windows(plan, 1, 0, steps_left))
        num_steps = sum(len(window.batches) for window in cut)
        assert num_steps == min(steps_left, sum(len(window.batches) for window in whole))
        assert samples(cut) == samples(whole)[: sum(window.count for window in cut)]
        assert seen(cut[:-1]) == seen(whole[: len(cut)][:-1])
        assert any(window.ends_epoch for window in cut) == (len(samples(cut)) == size)

    @settings(deadline=None, max_examples=50)
    @given(sizes, batch_sizes, accumulations, st.sampled_from([2, 3]), st.data())
    def test_all_processes_together_take_each_window_exactly(
        self, size: int, batch_size: int, accumulation: int, world: int, data: st.DataObject
    ) -> None:
        plan = plan_of(size, batch_size, accumulation, world)
        position = data.draw(st.sampled_from(range(0, size, plan.window_samples)))
        ranks = [
            list(
                MapSource(range(size), identity, order_of(batch_size, rank=rank, num_processes=world)).windows(
                    plan, 2, position, UNLIMITED
                )
            )
            for rank in range(world)
        ]
        expected = list(RangedSampler(size, batch_size, position, shuffle=True, seed=5, epoch=2))
        for windows in zip(*ranks, strict=True):
            assert (
                len({(window.first, window.count, window.ends_epoch, len(window.batches)) for window in windows}) == 1
            )
            cells = [list(zip(w.batches, w.sizes, strict=True)) for w in windows]
            taken = [sample for step in zip(*cells, strict=True) for batch, size in step for sample in batch[:size]]
            start = windows[0].first - position
            assert taken == expected[start : start + windows[0].count]

    def test_the_number_of_processes_does_not_change_what_an_update_takes(self) -> None:
        def updates(world: int) -> list[list[int]]:
            plan = plan_of(23, 12 // world, 1, world)
            every = [
                MapSource(range(23), identity, order_of(12 // world, rank=rank, num_processes=world)).windows(
                    plan, 1, 0, UNLIMITED
                )
                for rank in range(world)
            ]
            return [sorted(samples(list(windows))) for windows in zip(*every, strict=True)]

        assert updates(1) == updates(2) == updates(3)

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_workers_give_the_windows_of_the_main_process(self, num_workers: int) -> None:
        plan = plan_of(23, 3, 2)
        alone = MapSource(Noisy(23), identity, order_of(3))
        source = MapSource(Noisy(23), identity, order_of(3, num_workers=num_workers))
        for epoch, position, steps_left in [(1, 0, UNLIMITED), (2, 0, UNLIMITED), (2, 12, UNLIMITED), (3, 0, 3)]:
            expected = seen(alone.windows(plan, epoch, position, steps_left))
            assert seen(source.windows(plan, epoch, position, steps_left)) == expected
        source.close()

    def test_workers_after_a_walk_that_ended_early_start_the_next_one_cleanly(self) -> None:
        plan = plan_of(40, 2)
        source = MapSource(Noisy(40), identity, order_of(2, num_workers=2))
        alone = MapSource(Noisy(40), identity, order_of(2))
        early = source.windows(plan, 1, 0, UNLIMITED)
        assert seen(islice(early, 3)) == seen(islice(alone.windows(plan, 1, 0, UNLIMITED), 3))
        assert seen(source.windows(plan, 2, 6, UNLIMITED)) == seen(alone.windows(plan, 2, 6, UNLIMITED))
        source.close()

    def test_a_closed_source_can_be_opened_again(self) -> None:
        plan = plan_of(6)
        source = MapSource(range(6), identity, order_of(num_workers=1))
        first = samples(source.windows(plan, 1, 0, UNLIMITED))
        source.close()
        source.close()
        assert samples(source.windows(plan, 1, 0, UNLIMITED)) == first
        source.close()

    def test_epochs_differ_in_order_and_in_what_samples_draw(self) -> None:
        source, plan = MapSource(Noisy(30), identity, order_of()), plan_of(30)
        one, two = (samples(source.windows(plan, epoch, 0, UNLIMITED)) for epoch in (1, 2))
        assert [sample[0] for sample in one] != [sample[0] for sample in two]
        assert not {sample[1] for sample in one} & {sample[1] for sample in two}

    def test_without_reshuffling_the_order_stays_but_samples_draw_anew(self) -> None:
        source, plan = MapSource(Noisy(30), identity, order_of(reshuffle=False)), plan_of(30)
        one, two = (samples(source.windows(plan, epoch, 0, UNLIMITED)) for epoch in (1, 2))
        assert [sample[0] for sample in one] == [sample[0] for sample in two]
        assert not {sample[1] for sample in one} & {sample[1] for sample in two}

    def test_a_short_last_window_is_dropped_if_the_plan_says_so(self) -> None:
        source = MapSource(range(11), identity, order_of(shuffle=False))
        windows = source.windows(plan_of(11, 2, 2, drop_last=True), 1, 0, UNLIMITED)
        assert seen(windows) == [(0, 4, False, [[0, 1], [2, 3]]), (4, 4, True, [[4, 5], [6, 7]])]

    def test_seeking_reads_no_sample_that_was_skipped(self) -> None:
        class Counting(Noisy):
            def __init__(self) -> None:
                super().__init__(1000)
                self.read: list[int] = []

            def __getitem__(self, index: int) -> Any:
                self.read.append(index)
                return super().__getitem__(index)

        data = Counting()
        windows = MapSource(data, identity, order_of(4)).windows(plan_of(1000, 4), 1, 900, UNLIMITED)
        found = [sample[0] for sample in samples([next(windows)])]
        assert len(found) == 4
        assert data.read == found

    def test_the_position_says_it_all(self) -> None:
        source = MapSource(range(6), identity, order_of())
        windows = list(source.windows(plan_of(6), 1, 0, UNLIMITED))
        assert [window.cursor for window in windows] == [None, None, None]
        source.restore({"anything": 1})
        assert source.resume_problem is None
        assert (source.num_samples, source.num_batches, source.batch_size) == (6, None, 2)


IS_READY = False


def make_ready(_: int) -> None:
    global IS_READY  # noqa: PLW0603 - what a user's own function does in a worker
    IS_READY = True


class Readiness(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(IS_READY)])


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler([1.0] * 8, 8)])
def test_workers_begin_as_a_ready_loader_says(sampler: Any) -> None:
    loader = DataLoader(
        Readiness(), batch_size=4, num_workers=1, worker_init_fn=make_ready, prefetch_factor=3, timeout=60,
        sampler=sampler,
    )  # fmt: skip
    rows = [row for batch in first_epoch(opened(loader)) for row in batch]
    assert [is_ready for _, is_ready in rows] == [1] * 8


def test_a_loader_that_starts_its_workers_itself_may_start_them_in_any_way() -> None:
    loader = StatefulLoader(Readiness(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert isinstance(opened(loader), StreamSource)


def test_workers_that_would_start_otherwise_are_refused() -> None:
    loader = DataLoader(Readiness(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(DataError, match="multiprocessing_context='spawn', and the trainer forks its workers"):
        opened(loader)
