"""LiBai's samples and loaders: `Instance` with its named tensors, and the loaders that its configs describe.

The loaders are torch's, of whole batches; the trainer keeps the order of training samples itself (shuffled anew each
epoch, exact after a resume), and shares them out among the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, Self

import torch
from torch.utils.data import ConcatDataset, DataLoader

from hezar_train.compat.libai.config import instantiate
from hezar_train.errors import DataError, choices

__all__ = [
    "DistTensorData",
    "Instance",
    "build_image_test_loader",
    "build_image_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_loader",
    "build_nlp_train_val_test_loader",
    "trivial_batch_collator",
]


@dataclass
class DistTensorData:
    """A tensor of a sample or of a batch; how OneFlow would cut it is kept and not used."""

    tensor: torch.Tensor
    sbp_list: list[str] = field(default_factory=lambda: ["split_0", "broadcast"])
    placement_idx: int = 0

    def to_global(self, sbp: Any = None, placement: Any = None, device_type: str = "cuda") -> None:
        """Bring the tensor to a device, where there is one; it stays local."""
        del sbp, placement
        if device_type != "cuda" or torch.cuda.is_available():
            self.tensor = self.tensor.to(device_type)

    @staticmethod
    def stack(several: Sequence[DistTensorData]) -> DistTensorData:
        """Make a batch of the tensors of samples."""
        first = several[0]
        tensor = torch.stack([one.tensor for one in several])
        return DistTensorData(tensor, first.sbp_list, first.placement_idx)


class Instance:
    """A sample, or a batch, of named tensors; a name is an attribute as well."""

    _fields: dict[str, Any]

    def __init__(self, **fields: Any) -> None:
        self.__dict__["_fields"] = dict(fields)

    def set(self, name: str, value: Any) -> None:
        """Set a field."""
        self._fields[name] = value

    def get(self, name: str) -> Any:
        """Return a field."""
        if name not in self._fields:
            raise DataError(f"the instance has no field {name!r}. It has: {choices(self._fields) or 'none'}.")
        return self._fields[name]

    def has(self, name: str) -> bool:
        """Tell whether there is such a field."""
        return name in self._fields

    def remove(self, name: str) -> None:
        """Take a field out."""
        del self._fields[name]

    def get_fields(self) -> dict[str, Any]:
        """Return all fields by name."""
        return self._fields

    def values(self) -> Iterator[Any]:
        """Yield the tensors of the fields."""
        return (getattr(one, "tensor", one) for one in self._fields.values())

    def __setattr__(self, name: str, value: Any) -> None:
        self._fields[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.__dict__.get("_fields", {}):
            raise AttributeError(f"the instance has no field {name!r}")
        return self._fields[name]

    def __repr__(self) -> str:
        return f"Instance({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"

    @classmethod
    def stack(cls, several: Sequence[Instance]) -> Self:
        """Make a batch of samples, field by field."""
        names = list(several[0].get_fields())
        return cls(**{name: _stacked(name, [one.get(name) for one in several]) for name in names})


def _stacked(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    if isinstance(first, list):
        return values
    if hasattr(type(first), "stack"):
        return type(first).stack(values)
    raise DataError(f"the field {name!r} is a {type(first).__name__}; expected a tensor, or what can stack itself")


def trivial_batch_collator(batch: Sequence[Instance]) -> Instance:
    """Make a batch of instances."""
    if not isinstance(batch[0], Instance):
        raise DataError(f"a sample is a {type(batch[0]).__name__}; expected an Instance, or a collate_fn for others")
    return Instance.stack(batch)


def build_nlp_train_loader(
    dataset: Any,
    train_batch_size: int,
    test_batch_size: int | None = None,
    sampler: Any = None,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Callable[..., Any] | None = None,
    dataset_mixer: Callable[[list[Any]], Any] = ConcatDataset,
    **kwargs: Any,
) -> tuple[DataLoader[Any], None, None]:
    """Make the loader of training data, of one dataset or several; there is none for validation and test.

    Where to begin after a resume (`consumed_samples`) the trainer knows.
    """
    del test_batch_size, consumed_samples, seed
    _refuse_sampler(sampler)
    found = instantiate(dataset)
    several = list(found) if isinstance(found, list) else [found]
    mixed = several[0] if len(several) == 1 else dataset_mixer(several)
    loader: DataLoader[Any] = DataLoader(
        mixed, batch_size=train_batch_size, shuffle=True, drop_last=True, num_workers=num_workers,
        collate_fn=collate_fn or trivial_batch_collator, **kwargs,
    )  # fmt: skip
    return loader, None, None


def build_nlp_train_val_test_loader(*args: Any, **kwargs: Any) -> Never:
    """Refuse to read LiBai's indexed files; a config that only imports this name loads."""
    del args, kwargs
    raise DataError(
        "build_nlp_train_val_test_loader reads LiBai's indexed files and splits them, which is not offered here. Use "
        "LazyCall(build_nlp_train_loader)(dataset=[LazyCall(YourDataset)(...)]) with a dataset of torch's, and "
        "build_nlp_test_loader for each test set."
    )


def build_image_train_loader(
    dataset: Any, train_batch_size: int, *args: Any, mixup_func: Any = None, **kwargs: Any
) -> tuple[DataLoader[Any], None, None]:
    """Make the loader of training images; `mixup_func` mixes each batch when the trainer gets it."""
    loader, *_ = build_nlp_train_loader(dataset, train_batch_size, *args, **kwargs)
    loader.mixup_func = instantiate(mixup_func)
    return loader, None, None


def build_nlp_test_loader(
    dataset: Any,
    test_batch_size: int,
    sampler: Any = None,
    num_workers: int = 4,
    seed: int = 0,
    collate_fn: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Make the loader of a test set, in order."""
    del seed
    _refuse_sampler(sampler)
    return DataLoader(
        instantiate(dataset), batch_size=test_batch_size, num_workers=num_workers,
        collate_fn=collate_fn or trivial_batch_collator, **kwargs,
    )  # fmt: skip


build_image_test_loader = build_nlp_test_loader


def _refuse_sampler(sampler: Any) -> None:
    if sampler is not None:
        raise DataError(
            "a sampler was given to a loader of LiBai's: the trainer keeps the order itself, exact after a resume. "
            "Leave it out, or override build_train_loader() and return a DataLoader with a sampler of your own."
        )
