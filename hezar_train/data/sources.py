"""What a user may hand in as data, and the source of windows that it becomes.

`open_source` tells a dataset, an iterable dataset and a ready DataLoader apart, once. A dataset with a length becomes a
`MapSource` (`loader.py`); data that keeps its own place becomes one of the sources of `streams.py`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, MappingView, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hezar_train.data.collators import default_collator
from hezar_train.data.failures import form_of
from hezar_train.data.loader import Collator, MapSource, identity
from hezar_train.data.streams import SamplerSource, SplitStreamSource, StreamSource, has_equal_shards
from hezar_train.data.windows import Order, Source
from hezar_train.errors import DataError, a_kind

__all__ = ["collator_for", "is_stream", "open_source", "refuse_without_lengths"]

A_DATASET = "expected a dataset with __len__ and __getitem__, an iterable dataset, or a DataLoader"


def open_source(data: Any, collate: Collator | None, order: Order, name: str = "the data") -> Source:
    """Return the source of windows for any supported form of data; an error calls it by its `name`."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if hasattr(dataset, "set_seed"):  # a dataset with a generator of its own
        dataset.set_seed(order.seed)
    if isinstance(data, Set | MappingView):
        raise DataError(
            f"{name} is {a_kind(data)}, which has no __getitem__; {A_DATASET}. Make a list of it: list(data)."
        )
    if order.by_length is not None:
        refuse_without_lengths(data)
    if isinstance(data, DataLoader):
        return _from_loader(data, collate, order)
    if is_stream(data):
        return _from_stream(data, collate, order, name)
    _refuse_no_dataset(data, name)
    return MapSource(data, collator_for(data, collate), order)


def _refuse_no_dataset(data: Any, name: str) -> None:
    """Raise for what cannot be read sample by sample, or would be read as something else than was meant."""
    if isinstance(data, Mapping) and 0 not in data:
        names = ", ".join(repr(key) for key in list(data)[:5])
        raise DataError(
            f"{name} is a {type(data).__name__} with the keys {names}; expected one dataset. {_split_up(data)}"
        )
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(f"{name} is {_shown(data)}{_lacks(data)}; {A_DATASET}. {_how_to_pass(data)}.")
    if hasattr(data, "iloc"):  # a DataFrame or Series of pandas
        raise DataError(
            f"{name} is {a_kind(data)}, of which [0] is a column and no sample. Pass its rows: "
            "frame.to_dict('records'), or datasets.Dataset.from_pandas(frame)."
        )
    if isinstance(data, list | tuple) and _holds_datasets(data):
        raise DataError(
            f"{name} is {form_of(data)}: datasets; expected one. Give each to its own argument (train_dataset=..., "
            "eval_dataset=...), or join them: torch.utils.data.ConcatDataset([...])."
        )


def _split_up(data: Mapping[Any, Any]) -> str:
    """Say what to pass instead of a mapping: its columns as samples, or one of several datasets."""
    if data and all(isinstance(value, torch.Tensor | np.ndarray | list) for value in data.values()):
        columns = ", ".join(f"data[{key!r}]" for key in data)
        return f"If they are columns, make samples of them: torch.utils.data.TensorDataset({columns}), of tensors."
    return "Pass one of its values, or name the splits 'train', 'val' and 'test'."


def _shown(data: Any) -> str:
    if isinstance(data, str | os.PathLike):
        return repr(os.fspath(data))
    if isinstance(data, int | float):
        return f"{data}, {a_kind(data)}"
    return f"the function {data.__name__}" if inspect.isfunction(data) else a_kind(data)


def _how_to_pass(data: Any) -> str:
    if inspect.isgeneratorfunction(data):
        return f"Make a list of what it yields, list({data.__name__}()), or an IterableDataset whose __iter__ yields it"
    if inspect.isfunction(data):
        return "Call it, and pass what it returns, if that is one"
    if isinstance(data, str | bytes | os.PathLike):
        return f"Load what it {'holds' if isinstance(data, bytes) else 'names'} first, and pass that"
    return "Give it one" if _lacks(data) else "Build or load the dataset first, and pass that"


def _holds_datasets(data: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether a few datasets were given in the place of one, of which each would be taken for a sample."""
    if data and all(isinstance(one, Dataset | DataLoader) for one in data):
        return True
    return (
        isinstance(data, tuple) and 0 < len(data) <= len(("train", "val", "test")) and all(map(_is_like_dataset, data))
    )


def _is_like_dataset(data: Any) -> bool:
    is_value = isinstance(data, torch.Tensor | np.ndarray | str | bytes | list | tuple | Mapping)
    return not is_value and hasattr(data, "__len__") and hasattr(data, "__getitem__")


def refuse_without_lengths(data: Any) -> None:
    """Raise for data whose order or batches are not ours, so that lengths could not decide them."""
    if not isinstance(data, DataLoader) and not is_stream(data):
        return
    given = (
        "a ready DataLoader, which has batches of its own"
        if isinstance(data, DataLoader)
        else (f"{a_kind(data)}, which can only be read in its own order")
    )
    raise DataError(
        "group_by_length, global_batch_tokens, max_tokens_per_batch and packing make batches by the lengths of all "
        f"samples, and the training data is {given}. Pass a dataset with __len__ and __getitem__, or leave these out."
    )


def _lacks(data: Any) -> str:
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(data, name)]
    return f", which has no {' and no '.join(lacking)}" if len(lacking) == 1 else ""


def is_stream(data: Any) -> bool:
    """Tell whether data can only be iterated: no length, or declared iterable."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def collator_for(data: Any, collate: Collator | None) -> Collator:
    """Choose the collator: the one given, else the dataset's own, else the default."""
    chosen = collate or getattr(data, "data_collator", None) or default_collator
    if not callable(chosen):
        raise DataError(
            f"the data_collator is {form_of(chosen)}; expected a function, or an object that can be called, that makes "
            "a batch of a list of samples. Pass one, or leave data_collator out for the usual one."
        )
    _refuse_uncallable(chosen)
    return chosen


def _refuse_uncallable(collate: Collator) -> None:
    """Raise for a class that should have been made an object, and for a function that takes no list of samples."""
    name = getattr(collate, "__name__", type(collate).__name__)
    if isinstance(collate, type) and any("__call__" in vars(one) for one in collate.__mro__):
        raise DataError(f"the data_collator is the class {name}; expected an object of it. Make one: {name}(...)")
    try:
        inspect.signature(collate).bind([])
    except TypeError as error:
        raise DataError(
            f"the data_collator {name} cannot be called with one list of samples ({error}). Give it that one argument."
        ) from error
    except ValueError:  # one in C that does not tell
        pass


def _from_stream(data: Any, collate: Collator | None, order: Order, name: str) -> Source:
    if order.num_workers:
        raise DataError(
            f"num_dataloader_workers={order.num_workers}, and {name} is an iterable dataset: workers would read ahead, "
            "so that its place could not be saved. Set num_dataloader_workers=0, or pass a DataLoader with "
            "state_dict()."
        )
    if order.num_processes > 1 and getattr(data, "_distributed", None) is not None:
        raise DataError(
            "the iterable dataset is split by split_dataset_by_node() already, and the trainer shares samples out "
            "among processes itself, so that most would never be seen. Pass it whole."
        )
    if order.splits_streams and order.processes is not None and has_equal_shards(data, order.num_processes):
        return SplitStreamSource(data, order, collator_for(data, collate), order.processes)
    return StreamSource(data, order, collator_for(data, collate))


def _from_loader(loader: DataLoader[Any], collate: Collator | None, order: Order) -> Source:
    """Rebuild a plain or random loader on our sampler; keep one that has its own sampler or state."""
    loader = _before_accelerate(loader, order)
    if order.num_processes > 1 and isinstance(loader.sampler, DistributedSampler):
        raise DataError(
            "the DataLoader has a DistributedSampler, and the trainer shares samples out among processes itself, so "
            "that some would never be seen. Pass the dataset, or a loader without it."
        )
    own = replace(
        order, batch_size=loader.batch_size or 1, num_workers=loader.num_workers, pin_memory=loader.pin_memory
    )
    if hasattr(loader, "state_dict") or (is_stream(loader.dataset) and loader.num_workers):
        return StreamSource(loader, own, identity, is_batched=True)  # it starts its workers itself
    own = replace(own, worker_settings=_worker_settings(loader))
    if loader.batch_sampler is None and loader.batch_size is None:
        return _from_ready_batches(loader, own)
    collate = collate or _own_collate(loader)
    if is_stream(loader.dataset):
        return StreamSource(loader.dataset, own, collate, drop_last=loader.drop_last)
    if not _has_plain_order(loader):
        return SamplerSource(loader, collate, own)
    own = replace(own, shuffle=order.shuffle and isinstance(loader.sampler, RandomSampler))
    return MapSource(loader.dataset, collate, own, drop_last=loader.drop_last)  # type: ignore[arg-type]


def _worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader says of its workers, which ours follow; refuse a way to start them that ours have not."""
    context = loader.multiprocessing_context
    if context is not None and (method := context.get_start_method()) != "fork":
        raise DataError(
            f"the DataLoader has multiprocessing_context={method!r}, and the trainer forks its workers. Leave it out, "
            "or set num_workers=0."
        )
    if not loader.num_workers:
        return {}
    names = ("worker_init_fn", "prefetch_factor", "timeout")
    return {name: value for name in names if (value := getattr(loader, name))}


def _before_accelerate(loader: DataLoader[Any], order: Order) -> DataLoader[Any]:
    """Return a loader as it was before `accelerator.prepare(loader)`: here samples are shared out by the trainer."""
    prepared = getattr(loader, "base_dataloader", None)
    if prepared is None:
        return loader
    given: dict[str, Any] = {
        name: getattr(prepared, name)
        for name in ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor", "timeout")
    }
    if not is_stream(prepared.dataset):
        batches = _inside(prepared.batch_sampler, "BatchSamplerShard", "batch_sampler")
        if type(batches) is not BatchSampler:
            return DataLoader(prepared.dataset, batch_sampler=batches, **given)
        cut: dict[str, Any] = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
        return DataLoader(prepared.dataset, sampler=batches.sampler, **cut, **given)
    stream = _inside(prepared.dataset, "IterableDatasetShard", "dataset")
    if stream is prepared.dataset and order.num_processes > 1:
        raise DataError(
            "the DataLoader of an iterable dataset was given to accelerator.prepare(), which shares out its samples, "
            "and so does the trainer, so that some would never be seen. Return it without prepare()."
        )
    size = getattr(prepared.dataset, "batch_size", prepared.batch_size) if stream is not prepared.dataset else None
    return DataLoader(stream, batch_size=size or prepared.batch_size, drop_last=prepared.drop_last, **given)


def _inside(owner: Any, wrapper: str, attribute: str) -> Any:
    """Return what a wrapper of Accelerate's holds, and anything else as it is; known by name, as it is not needed."""
    return getattr(owner, attribute) if type(owner).__name__ == wrapper else owner


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
