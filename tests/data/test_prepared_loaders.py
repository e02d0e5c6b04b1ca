"""Loaders that Accelerate has prepared for several processes: their samples are shared out once, by the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hezar_train.data import Order, open_source
from hezar_train.data.sources import _before_accelerate
from hezar_train.errors import DataError

ROWS = [torch.tensor(float(number)) for number in range(10)]


def order(**given: Any) -> Order:
    return Order(batch_size=4, seed=0, shuffle=True, **given)


def prepared(loader: Any, **given: Any) -> Any:
    return prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False, **given)


def test_a_loader_is_as_it_was_before() -> None:
    loader = DataLoader(ROWS, batch_size=4, drop_last=True, collate_fn=torch.stack)  # type: ignore[arg-type]
    found = _before_accelerate(prepared(loader), order())
    assert (found.batch_size, found.drop_last, found.collate_fn) == (4, True, torch.stack)
    assert found.dataset is loader.dataset
    assert type(found.sampler) is SequentialSampler


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_samples_are_there_for_both_processes(shuffle: bool) -> None:
    source = open_source(prepared(DataLoader(ROWS, batch_size=4, shuffle=shuffle)), None, order())  # type: ignore[arg-type]
    assert (source.num_samples, source.batch_size) == (10, 4)


def test_a_batch_sampler_of_ones_own_stays() -> None:
    class Own(BatchSampler):
        pass

    loader = DataLoader(ROWS, batch_sampler=Own(SequentialSampler(ROWS), 3, drop_last=False))  # type: ignore[arg-type]
    assert type(_before_accelerate(prepared(loader), order()).batch_sampler) is Own


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def test_a_stream_is_whole_again() -> None:
    loader = prepared(DataLoader(Stream(), batch_size=4), dispatch_batches=False)
    assert type(_before_accelerate(loader, order(num_processes=2)).dataset) is Stream


def test_a_stream_that_one_process_reads_for_all_is_refused() -> None:
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=4), num_processes=2, dispatch_batches=True,
                                 put_on_device=True, device=torch.device("cpu"))  # fmt: skip
    with pytest.raises(DataError, match=r"Return it without prepare\(\)"):
        _before_accelerate(loader, order(num_processes=2))
