"""Devices: which are here, which is meant, and a batch on its way to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["is_here", "is_same", "to_device"]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch (nested in mappings, lists, tuples) to `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, PackedSequence):  # a named tuple with a part that must stay on the CPU
        return batch.to(device, non_blocking=True)  # type: ignore[arg-type]
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def is_here(device: torch.device) -> bool:
    """Tell whether this machine has a device."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != device.type:
        return False
    return device.index is None or device.index < torch.accelerator.device_count()


def is_same(asked: torch.device, got: torch.device) -> bool:
    """Tell whether a device is the one that was asked for; where one has no number, its kind decides."""
    return asked.type == got.type and (asked.index is None or got.index in {asked.index, None})
