"""One model spread over all processes: each keeps a share of every parameter, gradient and optimizer state (FSDP2).

Owns where the model is cut, in which precision it computes, when gradients travel, and their norm. A block of a
repeated list is gathered when its turn comes and let go after it; what is outside such lists stays gathered from the
first forward to the last backward. Gradients come out as the mean over the processes, as with replicas. Buffers are
not shared out: every process keeps its own, and the main process's are saved.

Refuses what would train wrongly in silence: parameters without a dimension, and fp16, whose scaler looks at the
gradients of one process only. The optimizer is built after `shard_model`: the parameters are new objects.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hezar_train.errors import ConfigError

__all__ = ["clip_gradients", "gradient_norm", "is_sharded", "local_gradients", "set_gradient_sync", "shard_model"]

COMPUTE_TYPES = {"no": None, "bf16": torch.bfloat16}
CLIP_MARGIN = 1e-6  # what torch adds to the norm before it divides


def shard_model(model: nn.Module, num_processes: int, precision: str) -> nn.Module:
    """Spread a model over the processes, in place, with the main process's weights; all of them call this together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _refuse_impossible(model, precision)
    mesh = init_device_mesh(_device_type(model), (num_processes,))
    is_mixed = precision != "no"
    # Sums over processes and what leaves the model are in full precision.
    policy = MixedPrecisionPolicy(COMPUTE_TYPES[precision], torch.float32) if is_mixed else MixedPrecisionPolicy()
    _take_over_from_main(model)
    for layer in _statistics_layers(model) if is_mixed else ():
        fully_shard(layer, mesh=mesh)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32) if is_mixed else policy)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model was spread by `shard_model`, or by FSDP2 through whatever else."""
    return any(_is_distributed(parameter) for parameter in model.parameters())


def set_gradient_sync(model: nn.Module, flag: bool) -> None:
    """Say whether the coming backwards send their gradients; without, each process sums its own, whole, until one does.

    Holding them back saves messages and costs memory for the gradients of the whole model.
    """
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(flag, recurse=False)  # type: ignore[operator]


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of the gradients that this process holds, in their own memory: scale them to scale the whole."""
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm over all gradients of all processes, on the device; all processes call this together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), device=gradients[0].device if gradients else None)
    for cuts, members in _by_cuts(gradients):
        power = _power_sum([_local(member) for member in members], norm_type)
        for group in cuts:
            dist.all_reduce(power, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
        power = power.to(total.device)
        total = torch.maximum(total, power) if math.isinf(norm_type) else total + power
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: Tensor | float | None = None) -> Tensor:
    """Scale the gradients down to `max_norm` if they are longer, without a wait for the device; return their norm."""
    trained = list(parameters)
    found = gradient_norm(trained) if norm is None else torch.as_tensor(norm)
    gradients = local_gradients(trained)
    if gradients:
        factor = torch.clamp(max_norm / (found + CLIP_MARGIN), max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return found


def _refuse_impossible(model: nn.Module, precision: str) -> None:
    problems = []
    if precision not in COMPUTE_TYPES:
        problems.append(f"mixed_precision={precision!r} cannot be used with sharding='full'. Use 'bf16' or None.")
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


def _take_over_from_main(model: nn.Module) -> None:
    # Each process cuts its share out of its own copy: unequal copies would make a model that never existed.
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def _statistics_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics: these stay in full precision, and so must the weights beside them."""
    normalizing = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [layer for layer in normalizing if layer.affine and layer.track_running_stats]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of repeated lists, inner ones first: what is gathered, computed and let go by itself."""
    uses = Counter(id(parameter) for _, parameter in _uses(model))
    found: dict[nn.Module, None] = {}
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.ModuleList | nn.Sequential) and _is_repeated(module):
            found |= {block: None for block in module if _stands_alone(block, uses)}
    return list(found)


def _is_repeated(blocks: nn.ModuleList | nn.Sequential) -> bool:
    return len(blocks) > 1 and len({type(block) for block in blocks}) == 1


def _stands_alone(block: nn.Module, uses: Counter[int]) -> bool:
    """Tell whether a block is made of layers, can be called, and shares no parameter with the rest of the model."""
    own = Counter(id(parameter) for _, parameter in _uses(block))
    is_called = bool(own) and any(block.children()) and not isinstance(block, nn.ModuleList | nn.ModuleDict)
    return is_called and all(uses[key] == count for key, count in own.items())


def _uses(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _by_cuts(gradients: list[Tensor]) -> Iterator[tuple[tuple[Any, ...], list[Tensor]]]:
    """Yield the gradients that are cut alike, with the groups of processes that hold the pieces."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault((*_cuts(gradient), gradient.device, gradient.dtype), []).append(gradient)
    for (*cuts, _device, _dtype), members in found.items():
        yield tuple(cuts), members


def _cuts(gradient: Any) -> list[Any]:
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
