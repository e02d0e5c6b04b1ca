"""Host memory for a copy of the run's tensors, made once and used at every save.

This module owns the stall of a background save: one copy into memory that is already there. A page that is touched for
the first time costs several times its copy, so the buffers are touched when they are reserved.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SnapshotBuffers"]


class SnapshotBuffers:
    """Hold one host buffer per tensor name; what `copy` returned is valid until the next `copy`."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Return the host memory held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, named: dict[str, Tensor]) -> None:
        """Make and touch the buffers that these tensors will need; only shape, dtype and device are looked at."""
        for name, tensor in named.items():
            if not _fits(self._buffers.get(name), tensor):
                self._buffers[name] = _touched_buffer(tensor)

    def copy(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors to the host, done when this returns; buffers of names that are gone are freed."""
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in named}
        self.reserve(named)
        sources = [tensor.detach() for tensor in named.values()]
        targets = [self._buffers[name] for name in named]
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in {source.device for source in sources if source.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return dict(zip(named, targets, strict=True))


def _fits(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _touched_buffer(tensor: Tensor) -> Tensor:
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    buffer.reshape(-1).view(torch.uint8).zero_()
    return buffer
