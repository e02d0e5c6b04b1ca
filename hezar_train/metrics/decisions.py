"""From logits to decided classes; a decision that is asked for twice in a batch is made once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MadeOnce", "largest"]

BLOCK = 128
FEWEST_BLOCKS = 8


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the class of the largest logit, the first of equal ones."""
    if logits.device.type == "cpu" and logits.shape[-1] >= BLOCK * FEWEST_BLOCKS:
        return _largest_by_blocks(logits)
    return logits.max(dim=-1).indices


def _largest_by_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Find the block that has it, then the place in the block: on the CPU torch finds maxima fast, but not where."""
    num_classes = logits.shape[-1]
    num_blocks = num_classes // BLOCK
    num_in_blocks = num_blocks * BLOCK
    tops = logits[..., :num_in_blocks].reshape(*logits.shape[:-1], num_blocks, BLOCK).amax(dim=-1)
    if num_in_blocks < num_classes:
        tops = torch.cat([tops, logits[..., num_in_blocks:].amax(dim=-1, keepdim=True)], dim=-1)
    first = tops.max(dim=-1).indices * BLOCK
    # Behind the end of a short block its last place is repeated: of equal ones the first counts.
    places = (first[..., None] + torch.arange(BLOCK)).clamp_(max=num_classes - 1)
    return first + logits.gather(-1, places).max(dim=-1).indices


class MadeOnce:
    """What was made of the last tensor, for as long as that lives; the tensor itself is not held."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._made: Any = None

    def get(self, tensor: Any, make: Callable[[], Any]) -> Any:
        """Return what was made of the tensor, or make it."""
        if self._of is None or self._of() is not tensor or not isinstance(tensor, torch.Tensor):
            self._made = make()
            self._of = weakref.ref(tensor) if isinstance(tensor, torch.Tensor) else None
        return self._made
