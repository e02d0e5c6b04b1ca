"""One model on several processes: each computes the gradients of its samples, and one sum per update joins them.

The sum is laid out by the list of trained parameters alone, so its rounding is the same in every update, also in the
first one after a resume. A parameter that no process used keeps no gradient; one that some used gets zeros elsewhere.
So nothing has to be known about the model: parameters may be unused, frozen, used outside `forward`, now and then.
The sum happens where the norm is read, and at the latest when an optimizer steps, whoever steps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hezar_train.runtime.build import Runtime

__all__ = ["Replicas"]

BUCKET_BYTES = 25 << 20


class Replicas:
    """A model that trains on all processes of a run, or on the only one."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        """Give all processes the main one's weights and buffers."""
        self._model, self._count, self._device = model, runtime.num_processes, runtime.device
        self._is_joined = False
        self._share([*model.parameters(), *model.buffers()])

    def watch(self, optimizer: Optimizer) -> None:
        """Join the gradients before an optimizer steps, if that was not done yet."""
        if self._count > 1:
            optimizer.register_step_pre_hook(lambda *_: self.join_gradients())
            optimizer.register_step_post_hook(self.forget)

    def share_buffers(self) -> None:
        """Give all processes the main one's buffers, as a checkpoint has them."""
        self._share(self._model.buffers())

    def join_gradients(self) -> None:
        """Average the gradients over all processes, once for an update."""
        if self._count == 1 or self._is_joined:
            return
        self._is_joined = True
        for bucket in _buckets(self._used_gradients()):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self._count
            for gradient, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _used_gradients(self) -> list[Tensor]:
        """Return a gradient for every parameter that any process has one for."""
        trained = [one for one in self._model.parameters() if one.requires_grad]
        used = torch.tensor([one.grad is not None for one in trained], dtype=torch.int32, device=self._device)
        if trained:
            dist.all_reduce(used)
        gradients = []
        for parameter, count in zip(trained, used.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        return gradients

    def forget(self, *_: Any) -> None:
        """Expect the gradients of another update."""
        self._is_joined = False

    def _share(self, tensors: Iterable[Tensor]) -> None:
        if self._count > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of one type, so many bytes at a time."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        group = groups.setdefault(gradient.dtype, [])
        if sum(one.nbytes for one in group) + gradient.nbytes > BUCKET_BYTES and group:
            yield groups.pop(gradient.dtype)
            group = groups.setdefault(gradient.dtype, [])
        group.append(gradient)
    yield from groups.values()
