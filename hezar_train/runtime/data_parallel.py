"""Data parallelism: one model on several processes, each with a copy, whose gradients one sum per update joins.

`DataParallel` lays the sum out by the list of trained parameters alone, so its rounding is the same in every update,
also in the first one after a resume. A parameter that no process used keeps no gradient; one that some used gets zeros
elsewhere. Buffers that a checkpoint holds become the main process's after every update, so that a resume changes
nothing. So nothing has to be known about the model: parameters may be unused, frozen, used outside `forward`, now and
then. The sum happens where the norm is read, and at the latest when an optimizer steps, whoever steps it.

`SyncedBatchNorm` is batch normalisation over the batches of all processes, on any device: torch's own refuses tensors
on the CPU. The statistics of a step are those of the samples of all processes together, as if one had computed the
batch alone. Filler (see `data.Window`) counts for nothing in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hezar_train.runtime.processes import Runtime

__all__ = [
    "DataParallel",
    "SyncedBatchNorm",
    "convert_sync_batchnorm",
]

BUCKET_BYTES = 25 << 20  # of one message: large enough that its latency is nothing, small beside a model


class DataParallel:
    """A model that trains on all processes of a run, or on the only one."""

    needs_lockstep = False
    """Whether every forward needs all processes, so that all must run equally many."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        """Give all processes the main one's weights and buffers."""
        self._model, self._count, self._device = model, runtime.num_processes, runtime.device
        self._is_joined = False
        self._has_sparse: bool | None = None
        self._broadcast([*model.parameters(), *model.buffers()])

    def watch(self, optimizer: Optimizer) -> None:
        """Join the gradients before an optimizer steps, if that was not done yet, and the buffers after it."""
        if self._count > 1:
            # Hooks of the optimizer itself: also a step that the trainer does not take must see joined gradients.
            optimizer.register_step_pre_hook(lambda *_: self.join_gradients())
            optimizer.register_step_post_hook(lambda *_: self._end_update())

    @torch.no_grad()
    def join_gradients(self) -> None:
        """Make the gradients those of all processes together, once for an update."""
        if self._count == 1 or self._is_joined:
            return
        self._is_joined = True
        if trained := [one for one in self._model.parameters() if one.requires_grad]:
            self._complete_gradients(trained)

    def start_over(self) -> None:
        """Forget what a step that failed half way has left behind."""
        self.forget()

    def evaluating(self, *, is_free: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - copies are always free
        """Get ready for forwards without backwards; with `is_free`, each process may call the model on its own."""
        return nullcontext()

    def forget(self, *_: Any) -> None:
        """Expect the gradients of another update."""
        self._is_joined = False

    def _complete_gradients(self, trained: Sequence[Tensor]) -> None:
        """Average the gradients over all processes."""
        unused = [number for number, one in enumerate(trained) if one.grad is None]
        marks = _gradient_marks(trained, self._device)  # they travel with the gradients, in one message more at most
        for one, total in _in_buckets([*map(_dense_gradient, trained), marks], dist.all_reduce):
            torch.div(total, self._count, out=one)
        self._restore_missing_and_sparse(trained, unused, marks)

    def _restore_missing_and_sparse(self, trained: Sequence[Tensor], unused: list[int], marks: Tensor) -> None:
        """Leave no gradient where no process had one, and sparse ones where they were sparse."""
        if unused:
            used = marks[0].tolist()
            for number in unused:
                trained[number].grad = None if not used[number] else trained[number].grad
        if self._has_sparse is None:  # a property of the model, so it is read once
            self._has_sparse = bool(marks[1].any())
        if self._has_sparse:
            for parameter, is_sparse in zip(trained, marks[1].tolist(), strict=True):
                if is_sparse and parameter.grad is not None:
                    parameter.grad = parameter.grad.to_sparse(1)

    def _end_update(self) -> None:
        self.forget()
        self._broadcast(self._saved_buffers())

    def _saved_buffers(self) -> list[Tensor]:
        """Return the buffers that a checkpoint holds: a resume gives all processes the main one's."""
        return [
            buffer
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the main one's values."""
        if self._count == 1:
            return
        for one, value in _in_buckets((one.detach() for one in tensors), lambda flat: dist.broadcast(flat, 0)):
            one.copy_(value)


def _gradient_marks(trained: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return which parameters have a gradient here, and which of these are sparse."""
    gradients = [one.grad for one in trained]
    rows = [[one is not None for one in gradients], [one is not None and one.is_sparse for one in gradients]]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _dense_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient in a form that every process has."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _in_buckets(tensors: Iterable[Tensor], send: Callable[[Tensor], object]) -> Iterator[tuple[Tensor, Tensor]]:
    """Send tensors, many of them as one; yield each with the values that came back for it."""
    for bucket in _buckets(tensors):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        send(flat)
        for one, values in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
            yield one, values.view_as(one)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one type and device, so many bytes at a time."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        group = groups.setdefault(kind, [])
        if group and sum(one.nbytes for one in group) + tensor.nbytes > BUCKET_BYTES:
            yield groups.pop(kind)
            group = groups.setdefault(kind, [])
        group.append(tensor)
    yield from groups.values()


class SyncedBatchNorm(_BatchNorm):
    """Batch normalisation of inputs of any number of dimensions, which all processes compute together."""

    skips: ClassVar[bool] = False
    """Whether this process's batch is filler and counts for nothing; the loop says so while the batch is under way."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least two dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        from torch.distributed.nn.functional import all_reduce  # not at the top: it loads much that few need

        self._check_input_dim(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        places, shape = [0, *range(2, values.dim())], (1, -1, *([1] * (values.dim() - 2)))
        # Filler is weighted, not left out: every process must take part in both sums.
        weight = 0.0 if self.skips else 1.0
        count = values.new_full((1,), weight * values.numel() / values.shape[1])
        totals: Tensor = all_reduce(torch.cat([values.sum(places) * weight, count]))  # type: ignore[no-untyped-call]
        num = totals[-1].detach()
        mean = totals[:-1] / num
        centred = values - mean.view(shape)
        # Two passes, the mean first: the difference of large sums would lose the variance.
        squares: Tensor = all_reduce(centred.square().sum(places) * weight)  # type: ignore[no-untyped-call]
        variance = squares / num
        self._update_running(mean.detach(), variance.detach(), num)
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        scaled = normal if self.weight is None else normal * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(input.dtype)

    def _update_running(self, mean: Tensor, variance: Tensor, num: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((variance * num / (num - 1).clamp(min=1)).to(self.running_var), share)


def leave_out_of_batch_norm(is_filler: bool) -> None:
    """Let this process's batch count for nothing, or again for something, in synchronised batch normalisation."""
    SyncedBatchNorm.skips = is_filler


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every batch normalisation of a model; parameters and buffers stay the very same tensors."""
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncedBatchNorm):
        made = SyncedBatchNorm(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
        made.weight, made.bias = model.weight, model.bias  # an optimizer may hold them already
        made.running_mean, made.running_var = model.running_mean, model.running_var
        made.num_batches_tracked = model.num_batches_tracked
        made.training = model.training
        return made
    for name, child in list(model.named_children()):
        replaced = convert_sync_batchnorm(child)
        if replaced is not child:
            setattr(model, name, replaced)
    return model
