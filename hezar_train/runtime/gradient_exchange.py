"""Gradient exchange: torch's DistributedDataParallel averages the gradients of copies, in buckets, during a backward.

DDP expects to be the model, and takes the end of its forward for the sign that a backward follows. Here the model stays
the user's own object: DDP holds the bare list of trained parameters and is told of a backward when one begins. So it
does not matter how the model is called, how often, or whether a loss uses parameters without calling it.

    start()     the next backward sends each bucket as soon as its gradients are there
    finish()    sends what no backward reached, waits, and leaves the average over all processes in `grad`

A `finish()` without a `start()` sends everything then: the same buckets with the same bits, but nothing overlaps. Which
of the two a process does is its own business, because the messages are the same ones in the same order.

The buckets are laid out by the list of parameters alone, the last ones first, and stay so: DDP's own layout follows the
order in which its first backward happened to finish, so that a resumed run would round differently. Marks travel with
the gradients: which parameters have one here, and which of these are sparse. They are one more parameter of DDP's, in
the last bucket, which cannot be sent before the end of the backward anyway, and so cost no message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hezar_train.errors import HezarTrainError

__all__ = ["GradientExchange", "gradient_to_keep"]

SENT_ALREADY = "mark a variable ready only once"  # what DDP says of a parameter that it was told of before


class GradientExchange:
    """The gradients of some parameters, exchanged between all processes; all of them make it together."""

    def __init__(self, trained: Sequence[Tensor], compression: str | None = None) -> None:
        """Send the gradients as they are, or as numbers of half the size: "fp16" or "bf16"."""
        self.trained = list(trained)
        """The parameters, in the order of the model."""
        self.is_open = False
        """Whether something is being sent: begun, and not finished."""
        self._ordered = self.trained[::-1]
        last = self._ordered[-1]
        kind = last.dtype if last.dtype.is_floating_point and last.element_size() > 1 else torch.float32
        self._marks = nn.Parameter(torch.zeros(2, len(self.trained), dtype=kind, device=last.device))
        send_rest = weakref.WeakMethod(self._send_rest)  # else torch's hook would hold this, buckets and all, for ever
        self._marks.register_hook(lambda marks: _call_weak(send_rest, marks))  # type: ignore[no-untyped-call]
        self._usual = torch.stack([torch.ones_like(self._marks[0]), torch.zeros_like(self._marks[1])]).detach()
        self._rest: list[int] = []
        self._places = [0] * len(self.trained)
        self.has_sparse: bool | None = None
        """Whether gradients of some process are sparse; None before the first exchange."""
        with _without_gradients(self.trained):  # else DDP would take those of earlier micro-batches over
            self._ddp = DistributedDataParallel(
                nn.ParameterList([*self._ordered, self._marks]), init_sync=False, gradient_as_bucket_view=True
            )
            self._reducer = self._ddp.reducer
            self._reducer._push_all_rebuilt_params()
            self._reducer._rebuild_buckets()
        _outlive(self._ddp)
        if compression is not None:
            self._ddp.register_comm_hook(None, _compressing(compression))

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of the last exchange are still there."""
        return any(_is_at(one, place) for one, place in zip(self._ordered, self._places, strict=True))

    def start(self) -> None:
        """Let the next backward send each bucket as soon as its gradients are there; what is in `grad` goes with it."""
        for parameter, place in zip(self._ordered, self._places, strict=True):
            if _is_at(parameter, place):  # left from an earlier exchange: `finish` would take it for sent
                parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
        self._reducer.prepare_for_backward([])
        self.is_open = True

    def finish(self) -> None:
        """Make the gradients the average over all processes; a parameter without one on any process keeps none."""
        marks = self._note_gradients()
        if self.is_open:
            places = zip(self._ordered, self._places, strict=True)
            self._rest = [number for number, (one, place) in enumerate(places) if not _is_at(one, place)]
        else:
            self._reducer.prepare_for_backward([])
            self.is_open, self._rest = True, list(range(len(self._ordered)))
        unused = [one for one in self._ordered if one.grad is None]
        torch.autograd.backward([self._marks], [marks])
        self._reducer._check_reducer_finalized()
        self.is_open = False
        if not any(self._places):
            self._places = [_place(one) for one in self._ordered]
        for one in self._ordered:
            # DDP's own view of its bucket is not for others: model.to() gives the tensor in `grad` another memory.
            one.grad = one.grad.detach()  # type: ignore[union-attr]
        self._restore_missing_and_sparse(unused)
        self._marks.grad = None

    def close(self) -> None:
        """Send nothing any more: DDP would go on listening to the parameters."""
        self._reducer._remove_autograd_hooks()

    def _note_gradients(self) -> Tensor:
        """Return what is to be told of the gradients here, and make sparse ones dense, which all processes can add."""
        gradients = [one.grad for one in self.trained]
        sparse = [gradient is not None and gradient.is_sparse for gradient in gradients]
        if not any(sparse) and all(gradient is not None for gradient in gradients):
            return self._usual
        for one, is_sparse in zip(self.trained, sparse, strict=True):
            if is_sparse:
                one.grad = one.grad.to_dense()  # type: ignore[union-attr]
        return self._marks.new_tensor([[gradient is not None for gradient in gradients], sparse])

    def _send_rest(self, _: Tensor) -> None:
        """Tell DDP of what no backward has reached; called inside a backward of ours, where it can end its own."""
        for number in self._rest:
            try:
                self._reducer._autograd_hook(number)  # type: ignore[attr-defined]
            except RuntimeError as error:
                # A backward that passes a parameter without a gradient for it is sent as zeros, and leaves none here.
                if SENT_ALREADY not in str(error) or self._ordered[number].grad is not None:
                    raise

    def _restore_missing_and_sparse(self, unused: list[Tensor]) -> None:
        """Leave no gradient where no process had one, and sparse ones where they were sparse."""
        marks = self._marks.grad
        if marks is None:
            raise HezarTrainError("torch's DDP has not exchanged the gradients. Report this, with the model's code.")
        if unused:
            used = dict(zip(self.trained, marks[0].tolist(), strict=True))
            for one in unused:
                one.grad = one.grad if used[one] else None
        if self.has_sparse is None:  # a property of the model, so it is read once
            self.has_sparse = bool(marks[1].any())
        if self.has_sparse:
            for one, is_sparse in zip(self.trained, marks[1].tolist(), strict=True):
                if is_sparse and one.grad is not None:
                    one.grad = one.grad.to_sparse(1)


def gradient_to_keep(parameter: Tensor) -> Tensor | None:
    """Return a gradient that stays as it is: the memory of one that was exchanged is that of the next exchange."""
    gradient = parameter.grad
    return gradient.clone() if gradient is not None and dist.is_initialized() else gradient


def _call_weak(method: weakref.WeakMethod[Any], marks: Tensor) -> None:
    if (found := method()) is not None:
        found(marks)


def _outlive(ddp: DistributedDataParallel) -> None:
    """Hold the process group until all of DDP is gone, which must not be the last to let go of it.

    DDP's destructors keep Python's lock, and that of the group waits for threads, which need the lock as long as they
    hold a tensor: a group that was destroyed before its DDP ends in a deadlock. Python's own reference goes without it.
    """
    for holder in (ddp.reducer, ddp.logger):
        weakref.finalize(holder, lambda _: None, ddp.process_group).atexit = False


def _compressing(name: str) -> Callable[..., Any]:
    """Return torch's hook that sends a bucket as numbers of a smaller kind."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # not at the top: it loads much that few need

    return {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]


@contextmanager
def _without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    held = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    yield
    for one, gradient in zip(parameters, held, strict=True):
        one.grad = gradient


def _place(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else parameter.grad.data_ptr()


def _is_at(parameter: Tensor, place: int) -> bool:
    """Tell whether a gradient lies in DDP's bucket, where only DDP puts it."""
    gradient = parameter.grad
    return gradient is not None and not gradient.is_sparse and gradient.data_ptr() == place
