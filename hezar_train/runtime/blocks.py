"""The blocks that a model repeats: what is cut by itself when it is spread, and what can be computed twice.

A block is a module made of layers that stands in a list of its like (`nn.ModuleList`, `nn.Sequential`). `blocks_of`
finds them; `recompute_blocks` lets each forget what it computed inside until the backward needs it, and compute it
again then. Refuses what would train wrongly in silence: a block whose forward counts batches would count each twice.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hezar_train.errors import ConfigError

__all__ = ["blocks_of", "recompute_blocks", "statistics_layers"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
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


def statistics_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that keep running statistics."""
    normalizing = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [layer for layer in normalizing if layer.track_running_stats]


def recompute_blocks(model: nn.Module) -> int:
    """Let the outermost blocks compute their inner values again in the backward; return how many there are."""
    blocks = blocks_of(model)
    inner = {one for block in blocks for one in block.modules() if one is not block}
    outermost = [block for block in blocks if block not in inner]
    for block in outermost:
        if statistics_layers(block):
            raise ConfigError(
                f"gradient_checkpointing=True computes {type(block).__name__} twice, and its batch normalisation would "
                "count each batch twice. Leave the field out, or give the model a gradient_checkpointing_enable()."
            )
    # Another class, as FSDP2 does it: a wrapper would change names, and a forward of the object's own its copies.
    kinds = {kind: _recomputing(kind) for kind in {type(block) for block in outermost}}
    for block in outermost:
        block.__class__ = kinds[type(block)]
    return len(outermost)


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules like `kind` that keep nothing but their inputs and outputs for the backward."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *inputs, **named)
        return checkpoint(kind.forward, self, *inputs, use_reentrant=False, **named)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
