"""A model that is spread over the processes, while it trains: the counterpart of `Replicas`, with the same semantics.

Its gradients are joined by FSDP2 in every backward. A parameter that some processes use and others do not would make
them send different sums to each other, so all send all, zeros included; and a parameter that no process used in an
update gets no gradient then, because an optimizer would move it even by zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hezar_train.runtime.replicas import Replicas
from hezar_train.runtime.runtime import Runtime
from hezar_train.runtime.sharding import gathered, is_sharded, reshard, sharded_modules

__all__ = ["Shares", "copies_of"]


def copies_of(model: nn.Module, runtime: Runtime) -> Replicas:
    """Return how the processes of a run train one model: each a copy of it, or each its share."""
    return Shares(model, runtime) if is_sharded(model) else Replicas(model, runtime)


class Shares(Replicas):
    """A model of which every process trains a share."""

    walks_together = True

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        """Expect the weights of the main process: who spread the model has seen to that."""
        self._model, self._count, self._device = model, runtime.num_processes, runtime.device
        self._is_joined = False
        self._used: set[Tensor] = set()
        self._gathered: list[Tensor] = []
        for module in sharded_modules(model):
            module.set_reduce_scatter_unused_params(self._count > 1, recurse=False)
            self._note_use(module)

    def _join(self, trained: Sequence[Tensor]) -> None:
        """Take back the gradients of parameters that no process used."""
        used = torch.tensor([one in self._used for one in trained], dtype=torch.int32, device=self._device)
        dist.all_reduce(used)
        for parameter, count in zip(trained, used.tolist(), strict=True):
            if not count:
                parameter.grad = None

    def forget(self, *_: Any) -> None:
        """Expect the gradients of another update."""
        super().forget()
        self._used.clear()

    def start_over(self) -> None:
        """Forget what a step that failed half way has left behind, in the model too."""
        if self._gathered:
            sharded_modules(self._model)[0].reset_iter_state()
        for parameter in self._gathered:
            parameter.grad = None
        self.forget()

    @contextmanager
    def looked_at(self, *, is_free: bool) -> Iterator[None]:
        """Get ready for forwards without backwards; with `is_free`, gather everything, so that each may go its way."""
        before, self.walks_together = self.walks_together, not is_free
        try:
            with gathered(self._model) if is_free else nullcontext():
                yield
        except BaseException:
            self.start_over()
            raise
        finally:
            self.walks_together = before
            reshard(self._model)

    def _note_use(self, module: nn.Module) -> None:
        """Let the backward tell which parameters it reached; it computes with gathered ones, the first forward's."""
        shares = dict(module.named_parameters())

        def register(_module: nn.Module, _inputs: object) -> None:
            for name, one in module.named_parameters():
                if one is not shares[name]:
                    self._gathered.append(one)
                    is_trained = one.requires_grad
                    one.requires_grad_(True)  # also if it is frozen now
                    note = functools.partial(self._note, shares[name])
                    one.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                    one.requires_grad_(is_trained)
            handle.remove()

        handle = module.register_forward_pre_hook(register)  # after FSDP2's own, which gathers

    def _note(self, share: Tensor, _: Tensor) -> None:
        self._used.add(share)
