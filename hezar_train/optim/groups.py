"""Parameter groups with a weight decay of their own: one for the biases, one for the layers that normalise.

Every trainable parameter is in exactly one group, also where two modules share it, and no frozen one is in any. The
bias of a normalising layer is a bias first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["largest_group", "parameter_groups"]

# By name, since models bring layers of their own (LlamaRMSNorm, T5LayerNorm) that are no classes of torch.
_NORMALISES = re.compile(r"Norm(\d?d)?$")
_IS_BIAS = re.compile(r"(^|_)bias(_|$)")


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trainable parameters in groups; None leaves a kind in the first group."""
    decays = {"other": weight_decay, "norm": weight_decay_norm, "bias": weight_decay_bias}
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in decays}
    for kinds, parameter in _kinds(model):
        groups[next(kind for kind in kinds if decays[kind] is not None)].append(parameter)
    return [{"params": found, "weight_decay": decays[kind]} for kind, found in groups.items() if found]


def largest_group(optimizer: Optimizer) -> int:
    """Return the number of the group with the most values: the one whose rate tells most about the run."""
    sizes = [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]
    return sizes.index(max(sizes))


def _kinds(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield each trainable parameter once, with what it is, the most telling first."""
    seen: set[int] = set()
    for module in model.modules():
        normalises = any(_NORMALISES.search(cls.__name__) for cls in type(module).__mro__)
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_bias = _IS_BIAS.search(name) is not None
            yield [*(["bias"] if is_bias else []), *(["norm"] if normalises else []), "other"], parameter
