"""Data parallelism: one model on several processes, each with a copy, whose gradients torch's DDP averages.

`DataParallel` says when: during the backward of an update's last micro-batch, where it is the trainer's own or that of
`accelerator.backward` (`exchanging`), so that sending overlaps with computing; otherwise, at the latest when an
optimizer steps, whoever steps it (`join_gradients`). Both give the same bits. `GradientExchange` says how. A parameter
that no process used keeps no gradient; one that some used gets zeros elsewhere. So nothing has to be known about the
model: parameters may be unused, frozen, used outside `forward`, now and then.

The first backward with a list of parameters is only observed, and its gradients are joined after it: where DDP could
not follow it, those of later ones are, too. What somebody's code makes of gradients that are joined, each process in
its own way, shows in their norm, which must be the same on all: where it is not, they are averaged again.

Buffers that a checkpoint holds become the main process's after every update, so that a resume changes nothing.

`SyncedBatchNorm` is batch normalisation over the batches of all processes, on any device: torch's own refuses tensors
on the CPU. The statistics of a step are those of the samples of all processes together, as if one had computed the
batch alone. Filler (see `data.Window`) counts for nothing in them.
"""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hezar_train.errors import HezarTrainError
from hezar_train.runtime.gradient_exchange import GradientExchange
from hezar_train.runtime.logging import logger
from hezar_train.runtime.processes import Runtime

__all__ = [
    "DataParallel",
    "SyncedBatchNorm",
    "convert_sync_batchnorm",
    "gradient_mark",
]

BUCKET_BYTES = 25 << 20  # of one message: large enough that its latency is nothing, small beside a model
MARKS = 1 << 20  # few enough that the sum of their squares over thousands of processes is exact
LEFT_OPEN = (
    "a backward failed half way while its gradients were exchanged, and what the other processes have got of it cannot "
    "be taken back. Let the error end the run, and resume it."
)
SPARSE = "some of them are sparse"
CHANGED = (
    "The processes had different gradients after these were exchanged, so they are averaged once more, in every update "
    "that needs it. Some code changes them, on each process in its own way, after the backward of an update's last "
    "micro-batch: do it before, or alike on all processes."
)


class DataParallel:
    """A model that trains on all processes of a run, or on the only one."""

    needs_lockstep = False
    """Whether every forward needs all processes, so that all must run equally many."""

    def __init__(self, model: nn.Module, runtime: Runtime, compression: str | None = None) -> None:
        """Give all processes the main one's weights and buffers; `compression` is that of the gradients they send."""
        self._model, self._count, self._device = model, runtime.num_processes, runtime.device
        self._processes = runtime.processes
        self._is_joined = self._is_compared = False
        self._exchange: GradientExchange | None = None
        self._compression = compression
        self._overlaps: bool | None = None
        self._told: set[str] = set()
        self._has_warned = False
        self._broadcast([*model.parameters(), *model.buffers()])

    def watch(self, optimizer: Optimizer) -> None:
        """Join the gradients before an optimizer steps, if that was not done yet, and the buffers after it."""
        if self._count > 1:
            # Hooks of the optimizer itself: also a step that the trainer does not take must see joined gradients.
            optimizer.register_step_pre_hook(lambda *_: self._begin_step())
            optimizer.register_step_post_hook(lambda *_: self._end_update())

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Join the gradients while the body computes them, with what earlier micro-batches have left: the last ones.

        The first body of an exchange is watched, to know whether its backward can overlap at all (`_overlaps`, None
        until then), and its gradients are joined at the end (`finish`, which joins what was not begun).
        """
        exchange = self._current_exchange()
        if exchange is None or self._waits(exchange):
            yield
            return
        if self._overlaps is None:
            with self._observed(exchange):
                yield
        else:
            exchange.start()
            yield
        self._is_joined, self._is_compared = True, False
        exchange.finish()
        if exchange.has_sparse:  # on some process: this one may have used none of them yet
            self._decide(SPARSE)

    def join_gradients(self) -> None:
        """Make the gradients those of all processes together, once for an update."""
        if self._count == 1 or self._is_joined:
            return
        self._is_joined, self._is_compared = True, True  # what is done with them from here on is the user's business
        self._join()

    def join_again(self) -> None:
        """Make gradients alike that are not, because somebody has changed them since they were joined."""
        if not self._has_warned and self._processes.is_main:
            self._has_warned = True
            logger.warning("%s", CHANGED)
        self._join()

    def note_compared(self) -> None:
        """Know that all processes have the same gradients now."""
        self._is_compared = True

    def start_over(self) -> None:
        """Forget what a step that failed half way has left behind."""
        if self._exchange is not None and self._exchange.is_open:
            self._drop_exchange()
        self.forget()

    def evaluating(self, *, is_free: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - copies are always free
        """Get ready for forwards without backwards; with `is_free`, each process may call the model on its own."""
        return nullcontext()

    def forget(self, *_: Any) -> None:
        """Expect the gradients of another update."""
        self._is_joined = self._is_compared = False

    def _join(self) -> None:
        exchange = self._current_exchange()
        if exchange is not None:
            exchange.finish()

    def _waits(self, exchange: GradientExchange) -> bool:
        """Tell whether gradients are joined after the backward that begins, and not during it."""
        if self._is_joined and exchange.holds_gradients:
            self._is_joined = False
            self._decide("an update has several backwards, of which any may be the last")
        return self._overlaps is False

    def _current_exchange(self) -> GradientExchange | None:
        """Return what exchanges the gradients of all that is trained now; None where nothing is, or on one process."""
        if self._count == 1:
            return None
        if self._exchange is not None and self._exchange.is_open:
            raise HezarTrainError(LEFT_OPEN)
        every = list(self._model.parameters())
        trained = [one for one in every if one.requires_grad and one.numel()]
        if self._exchange is None or not _are_same(self._exchange.trained, trained):
            self._drop_exchange()
            if trained:
                self._refuse_unlike(every)
                self._exchange = GradientExchange(trained, self._compression)
                self._overlaps = None
                self._decide(self._reason_in_model())
        return self._exchange

    def _drop_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _refuse_unlike(self, every: Sequence[Tensor]) -> None:
        """Raise if the processes do not train the same parameters."""
        flags = bytes(one.requires_grad for one in every)
        if not self._processes.agree([len(every), sum(flags), zlib.crc32(flags)]):
            raise HezarTrainError(
                f"the processes train different parameters; process {self._processes.rank} trains {sum(flags)} of "
                f"{len(every)}. Freeze and unfreeze the same ones on all of them."
            )

    def _decide(self, reason: str | None) -> None:
        """Note, and tell once, that gradients are joined after the backward if there is a reason for it."""
        if reason is None:
            return
        self._overlaps = False
        if reason not in self._told:
            self._told.add(reason)
            logger.info("Gradients are exchanged after the backward and not during it: %s.", reason)

    def _reason_in_model(self) -> str | None:
        """Return what in a model keeps gradients from being sent while a backward runs."""
        modules = list(self._model.modules())
        if any(isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse for one in modules):
            return SPARSE
        if any(isinstance(one, SyncedBatchNorm) for one in modules):
            return "batch normalisation over all processes sends messages of its own there"
        return None

    @contextmanager
    def _observed(self, exchange: GradientExchange) -> Iterator[None]:
        """See whether DDP could follow a backward, which the next ones will be like."""
        reached: Counter[Tensor] = Counter()
        hooks = [one.register_post_accumulate_grad_hook(lambda one: reached.update([one])) for one in exchange.trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._overlaps = True
        if any(times > 1 for times in reached.values()):
            self._decide(
                "a parameter gets its gradient in several parts, as with reentrant gradient checkpointing "
                "(use_reentrant=False sends them during it)"
            )

    def _begin_step(self) -> None:
        """Have the gradients of all processes, alike on all, before an optimizer uses them."""
        self.join_gradients()
        if not self._is_compared:
            self._is_compared = True
            gradients = [one.grad for one in self._model.parameters() if one.grad is not None]
            norm = torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
            if not self._processes.sum_and_compare([], gradient_mark(float(norm)))[1]:
                self.join_again()

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


def gradient_mark(norm: float) -> int:
    """Return a small number that tells gradients of different norms apart; the bits count, not the value."""
    return zlib.crc32(repr(norm).encode()) % MARKS


def _are_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


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
