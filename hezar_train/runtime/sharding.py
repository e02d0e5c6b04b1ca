"""Sharding: one model spread over all processes, each with a share of every parameter, gradient and state (FSDP2).

`shard_model` cuts a model and `ShardedParallel` trains it; `data_parallel_of` takes that or `DataParallel`. Owns where
the model is cut, in which precision it computes, when it is gathered, and the norm of its gradients. A block of a
repeated list is gathered when its turn comes and let go after it; what is outside such lists stays gathered from the
first forward to the last backward. Gradients are sent with every micro-batch, which costs messages: held back over a
window, those of the whole model would lie on each process. They come out as the mean over the processes, as with
`DataParallel`. Buffers are not shared out: every process keeps its own, and the main process's are saved.

Every forward is a collective: all processes must call the same blocks equally often. So evaluations run in lockstep,
and while texts are generated, which takes each process its own number of forwards, all weights are gathered on all of
them.

Refuses what would train wrongly in silence: parameters without a dimension, and fp16, whose scaler looks at the
gradients of one process only. The optimizer is built after `shard_model`: the parameters are new objects.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hezar_train.errors import ConfigError, choices
from hezar_train.runtime.blocks import blocks_of, statistics_layers
from hezar_train.runtime.data_parallel import DataParallel
from hezar_train.runtime.processes import Runtime

__all__ = [
    "ShardedParallel",
    "Sharding",
    "broadcast_from_main",
    "data_parallel_of",
    "gathered",
    "gradient_norm",
    "is_sharded",
    "local_gradients",
    "reshard",
    "shard_model",
    "sharded_modules",
]

COMPUTE_TYPES = {"no": None, "bf16": torch.bfloat16}
CALLED_LIKE_FORWARD = "generate"  # a method that runs the model, so that FSDP2 must gather for it as for `forward`


def data_parallel_of(model: nn.Module, runtime: Runtime, compression: str | None = None) -> DataParallel:
    """Return how the processes of a run train one model: each a copy of it, or each its share."""
    return ShardedParallel(model, runtime) if is_sharded(model) else DataParallel(model, runtime, compression)


class ShardedParallel(DataParallel):
    """A model of which every process trains a share; FSDP2 joins the gradients in every backward.

    A parameter that some processes use and others do not would make them send different sums to each other, so all send
    all, zeros included; and a parameter that no process used in an update gets no gradient then, because an optimizer
    would move it even by zeros.
    """

    needs_lockstep = True

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        """Expect the weights of the main process: who spread the model has seen to that."""
        self._model, self._count, self._device = model, runtime.num_processes, runtime.device
        self._is_joined = self._is_compared = False
        self._used: set[Tensor] = set()
        self._gathered: list[Tensor] = []
        for module in sharded_modules(model):
            module.set_reduce_scatter_unused_params(self._count > 1, recurse=False)
            self._record_use(module)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Do nothing more: FSDP2 joins the gradients in every backward."""
        yield

    def join_again(self) -> None:
        """Do nothing: each process holds gradients of its own share."""

    @torch.no_grad()
    def _join(self) -> None:
        """Take back the gradients of parameters that no process used; FSDP2 has averaged all."""
        trained = [one for one in self._model.parameters() if one.requires_grad]
        if not trained:
            return
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
        if self._gathered:  # before the first forward there is nothing to reset
            sharded_modules(self._model)[0].reset_iter_state()
        for parameter in self._gathered:
            parameter.grad = None
        self.forget()

    @contextmanager
    def evaluating(self, *, is_free: bool) -> Iterator[None]:
        """Get ready for forwards without backwards; with `is_free`, gather everything, so that each may go its way."""
        before, self.needs_lockstep = self.needs_lockstep, not is_free
        try:
            with gathered(self._model) if is_free else nullcontext():
                yield
        except BaseException:
            self.start_over()
            raise
        finally:
            self.needs_lockstep = before
            reshard(self._model)

    def _record_use(self, module: nn.Module) -> None:
        """Let the backward tell which parameters it reached; it computes with gathered ones, the first forward's."""
        shares = dict(module.named_parameters())

        def register(_module: nn.Module, _inputs: object) -> None:
            for name, one in module.named_parameters():
                if one is not shares[name]:
                    self._gathered.append(one)
                    is_trained = one.requires_grad
                    one.requires_grad_(True)  # torch takes the hook of no other; it may be frozen only for now
                    note = functools.partial(self._mark_used, shares[name])
                    one.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                    one.requires_grad_(is_trained)
            handle.remove()

        handle = module.register_forward_pre_hook(register)  # after FSDP2's own, which gathers

    def _mark_used(self, share: Tensor, _: Tensor) -> None:
        self._used.add(share)


@dataclass(frozen=True)
class Sharding:
    """How a model is spread."""

    precision: str = "no"
    """What it computes in: "no" or "bf16"."""
    group_size: int | None = None
    """Processes that share one copy of the model; other groups hold copies of their own. None: all share one."""
    offloads: bool = False
    """Whether the shares lie in the host's memory, and the device gets what it computes with."""


def shard_model(
    model: nn.Module, num_processes: int, how: Sharding | None = None, device: torch.device | None = None
) -> nn.Module:
    """Spread a model over the processes, in place, with the main process's weights; all of them call this together.

    It may be on the host still: each block comes to the device when it is cut, so that no device ever holds all of it.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    how = how or Sharding()
    _refuse_impossible(model, num_processes, how)
    device = device or torch.device(_device_type(model))
    mesh = _mesh(device, num_processes, how.group_size)
    is_mixed = how.precision != "no"
    # Sums over processes and what leaves the model are in full precision.
    compute = COMPUTE_TYPES[how.precision]
    policy = MixedPrecisionPolicy(compute, torch.float32) if is_mixed else MixedPrecisionPolicy()
    # Pinned memory speeds up copies to a device; a CPU has none.
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if how.offloads else OffloadPolicy()
    cut = functools.partial(fully_shard, mesh=mesh, offload_policy=offload)
    broadcast_from_main(model, device)
    for layer in statistics_layers(model) if is_mixed else ():
        if layer.affine:
            cut(layer)  # in full precision: so must the weights beside statistics be
    for block in blocks_of(model):  # before the model itself, which takes what is left
        cut(block, mp_policy=policy)
    cut(model, mp_policy=replace(policy, output_dtype=torch.float32) if is_mixed else policy)
    if callable(getattr(model, CALLED_LIKE_FORWARD, None)):
        register_fsdp_forward_method(model, CALLED_LIKE_FORWARD)
    return model


def _mesh(device: torch.device, num_processes: int, group_size: int | None) -> Any:
    """Lay out the processes: neighbours share one copy of the model, and each group has a copy."""
    from torch.distributed.device_mesh import init_device_mesh

    if group_size is None or group_size == num_processes:
        return init_device_mesh(device.type, (num_processes,))
    sizes = (num_processes // group_size, group_size)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shares"))


def broadcast_from_main(model: nn.Module, device: torch.device) -> None:
    """Give all processes the main one's weights and buffers, one after another over the device."""
    # Each process cuts its share out of its own copy: unequal copies would make a model that never existed.
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta:
            continue
        values = tensor.detach()
        sent = values.to(device)
        dist.broadcast(sent, src=0)
        if sent is not values:
            values.copy_(sent)


def _refuse_impossible(model: nn.Module, num_processes: int, how: Sharding) -> None:
    problems = []
    if how.precision not in COMPUTE_TYPES:
        problems.append(f"mixed_precision={how.precision!r} cannot be used with sharding='full'. Use 'bf16' or 'no'.")
    if how.group_size is not None and num_processes % how.group_size:
        fitting = [str(size) for size in range(2, num_processes + 1) if num_processes % size == 0]
        problems.append(
            f"sharding_group_size={how.group_size} does not divide the {num_processes} processes. "
            f"Use {choices(fitting)}, or start another number of processes."
        )
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        problems.append(
            f"sharding='full' cannot cut parameters without a dimension: {', '.join(scalars)}. "
            "Give them the shape (1,)."
        )
    if not dist.is_initialized():
        problems.append("sharding='full' needs a process group. Start the script with a launcher, such as torchrun.")
    if problems:
        raise ConfigError(problems)


def _device_type(model: nn.Module) -> str:
    found = {parameter.device.type for parameter in model.parameters()}
    if len(found) != 1:
        raise ConfigError(f"sharding='full' needs a model with parameters on one device; they are on {sorted(found)}.")
    return found.pop()


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model was spread by `shard_model`, or by FSDP2 through whatever else."""
    return bool(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that are gathered and let go by themselves, the model itself first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all weights on all processes while the body runs, so that its forwards send nothing."""
    modules = sharded_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for number, module in enumerate(modules):
            # As FSDP2 has it by default: the outermost module stays gathered, since its backward comes at once.
            module.set_reshard_after_forward(number > 0, recurse=False)
            module.reshard()


def reshard(model: nn.Module) -> None:
    """Let go what a forward without a backward has left gathered: `model.parameters()` are shares again."""
    for module in sharded_modules(model):
        module.reshard()


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm over all gradients of all processes, on the device; all processes call this together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), device=gradients[0].device if gradients else None)
    for groups, members in _by_shard_groups(gradients):
        power = _power_sum([_local(member) for member in members], norm_type)
        if groups:  # what lies in the host's memory is summed where its processes talk
            power = power.to(members[0].device_mesh.device_type)  # type: ignore[attr-defined]
        for group in groups:
            dist.all_reduce(power, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
        power = power.to(total.device)
        total = torch.maximum(total, power) if math.isinf(norm_type) else total + power
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of the gradients that this process holds, in their own memory: scale them to scale the whole."""
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _by_shard_groups(gradients: list[Tensor]) -> Iterator[tuple[tuple[Any, ...], list[Tensor]]]:
    """Yield the gradients that are cut alike, with the groups of processes that hold the pieces."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault((*_shard_groups(gradient), gradient.device, gradient.dtype), []).append(gradient)
    for (*groups, _device, _dtype), members in found.items():
        yield tuple(groups), members


def _shard_groups(gradient: Any) -> list[Any]:
    if not _is_distributed(gradient):
        return []
    placements = enumerate(gradient.placements)
    return [gradient.device_mesh.get_group(number) for number, placement in placements if placement.is_shard()]


def _power_sum(parts: list[Tensor], norm_type: float) -> Tensor:
    filled = [part for part in parts if part.numel()] or [parts[0].new_zeros(1)]
    norms = torch.stack(list(torch._foreach_norm(filled, norm_type)))
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if _is_distributed(tensor) else tensor
    return local


def _is_distributed(tensor: Tensor) -> bool:
    # Looked up, not imported: the import takes seconds, and where nobody has done it there is no such tensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
