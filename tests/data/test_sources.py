from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import datasets
import pytest
import torch
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
from hezar_train.data import Order, Source, collator_for, default_collator, is_stream, open_source, preserved_randomness
from hezar_train.data.loader import MapSource
from hezar_train.data.streams import SamplerSource, StreamSource
from hezar_train.errors import DataError
from hezar_train.plan import make_plan


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    with preserved_randomness():
        yield


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


def order_of(**fields: Any) -> Order:
    return Order(**{"batch_size": 4, "seed": 5, "shuffle": True, **fields})


def opened(data: Any, collate: Any = None, **fields: Any) -> Source:
    return open_source(data, collate, order_of(**fields))


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
            ({1, 2}, StreamSource),
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

    @pytest.mark.parametrize("data", [3, None, object(), "imdb", b"imdb"])
    def test_what_is_no_data_is_refused(self, data: Any) -> None:
        with pytest.raises(DataError, match=f"a dataset of type {type(data).__name__} was given; expected something"):
            opened(data)

    def test_splits_under_names_are_refused_with_their_names(self) -> None:
        splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]}), "test": []})
        with pytest.raises(DataError, match="a DatasetDict with the keys 'train', 'test' was given; expected one of"):
            opened(splits)

    def test_a_stream_with_workers_is_refused(self) -> None:
        with pytest.raises(
            DataError, match=r"num_dataloader_workers=2 with an iterable dataset.*Set num_dataloader_wo"
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
