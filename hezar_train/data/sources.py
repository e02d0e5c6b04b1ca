"""What a user may hand in as data, told apart once: a dataset, an iterable dataset, or a ready DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hezar_train.data.fetch import Collator, as_it_is
from hezar_train.data.map_source import MapSource
from hezar_train.data.sampler_source import SamplerSource
from hezar_train.data.split_streams import SplitStreamSource, divides
from hezar_train.data.stacking import default_collator
from hezar_train.data.stream_source import StreamSource
from hezar_train.data.windows import Order, Source
from hezar_train.errors import DataError

__all__ = ["collator_for", "is_stream", "open_source"]


def open_source(data: Any, collate: Collator | None, order: Order) -> Source:
    """Return the source of windows for any supported form of data."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if hasattr(dataset, "set_seed"):  # a dataset with a generator of its own
        dataset.set_seed(order.seed)
    if isinstance(data, DataLoader):
        return _from_loader(data, collate, order)
    if is_stream(data):
        return _from_stream(data, collate, order)
    if isinstance(data, Mapping) and 0 not in data:
        names = ", ".join(repr(key) for key in list(data)[:5])
        raise DataError(f"a {type(data).__name__} with the keys {names} was given; expected one of them")
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            f"a dataset of type {type(data).__name__} was given; expected something with __len__ and __getitem__, an "
            "iterable dataset, or a DataLoader"
        )
    return MapSource(data, collator_for(data, collate), order)


def is_stream(data: Any) -> bool:
    """Tell whether data can only be iterated: no length, or declared iterable."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def collator_for(data: Any, collate: Collator | None) -> Collator:
    """Choose the collator: the one given, else the dataset's own, else the default."""
    return collate or getattr(data, "data_collator", None) or default_collator


def _from_stream(data: Any, collate: Collator | None, order: Order) -> Source:
    if order.num_workers:
        raise DataError(
            f"num_dataloader_workers={order.num_workers} with an iterable dataset: workers read ahead of what was "
            "trained, so its place could not be saved. Set num_dataloader_workers=0, or pass a DataLoader with "
            "state_dict()."
        )
    if order.num_processes > 1 and getattr(data, "_distributed", None) is not None:
        raise DataError(
            "the iterable dataset is split by split_dataset_by_node() already, and the trainer shares samples out "
            "among processes itself, so that most would never be seen. Pass it whole."
        )
    if order.splits_streams and order.processes is not None and divides(data, order.num_processes):
        return SplitStreamSource(data, order, collator_for(data, collate), order.processes)
    return StreamSource(data, order, collator_for(data, collate))


def _from_loader(loader: DataLoader[Any], collate: Collator | None, order: Order) -> Source:
    """Rebuild a plain or random loader on our sampler; keep one that has its own sampler or state."""
    if order.num_processes > 1 and isinstance(loader.sampler, DistributedSampler):
        raise DataError(
            "the DataLoader has a DistributedSampler, and the trainer shares samples out among processes itself, so "
            "that some would never be seen. Pass the dataset, or a loader without it."
        )
    own = replace(
        order, batch_size=loader.batch_size or 1, num_workers=loader.num_workers, pin_memory=loader.pin_memory
    )
    if hasattr(loader, "state_dict") or (is_stream(loader.dataset) and loader.num_workers):
        return StreamSource(loader, own, as_it_is, is_batched=True)
    if loader.batch_sampler is None and loader.batch_size is None:
        return _from_ready_batches(loader, own)
    collate = collate or _own_collate(loader)
    if is_stream(loader.dataset):
        return StreamSource(loader.dataset, own, collate, drop_last=loader.drop_last)
    if not _has_plain_order(loader):
        return SamplerSource(loader, collate, own)
    own = replace(own, shuffle=order.shuffle and isinstance(loader.sampler, RandomSampler))
    return MapSource(loader.dataset, collate, own, drop_last=loader.drop_last)  # type: ignore[arg-type]


def _has_plain_order(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader meets every sample once, in order or shuffled, as our own sampler does."""
    if loader.batch_size is None:
        return False
    if type(loader.sampler) is RandomSampler:
        return not loader.sampler.replacement and loader.sampler._num_samples is None
    return type(loader.sampler) is SequentialSampler


def _from_ready_batches(loader: DataLoader[Any], order: Order) -> Source:
    if not is_stream(loader.dataset):
        raise DataError(
            "a DataLoader with batch_size=None over a dataset with a length was given; expected one that makes "
            "batches. Give it a batch_size or a batch_sampler, or pass the dataset."
        )
    return StreamSource(loader.dataset, order, loader.collate_fn, is_batched=True)


def _own_collate(loader: DataLoader[Any]) -> Collator:
    given: Collator = loader.collate_fn
    return collator_for(loader.dataset, None) if given is default_collate else given
