"""Sample texts of a language model: the beginnings of a few samples, and how the model goes on from there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hezar_train.trainer.decoding import decoded_inputs, generator_of

__all__ = ["continuations"]

MOST_PROMPT_IDS = 24
LEAST_PROMPT_IDS = 2
NUM_NEW_IDS = 48
LENGTH_OPTION = "max_new_tokens"


def continuations(
    model: nn.Module, samples: Sequence[Any], preprocessor: Any, options: Mapping[str, Any] | None, device: torch.device
) -> list[dict[str, Any]]:
    """Return for each sample its beginning, what the model writes after it, and what was there; none if it cannot."""
    rows = [torch.as_tensor(one["input_ids"]).reshape(-1) for one in samples if _has_ids(one)]
    length = min([MOST_PROMPT_IDS, *(len(row) // 2 for row in rows)])
    if not rows or length < LEAST_PROMPT_IDS:
        return []
    prompts = torch.stack([row[:length] for row in rows]).to(device)
    generate = generator_of(model, options if options else _length_for(model.generate))  # type: ignore[arg-type]
    written = generate({"input_ids": prompts, "attention_mask": torch.ones_like(prompts)})
    said = torch.as_tensor(getattr(written, "sequences", written)).to(device)
    if said.shape[1] > length and bool((said[:, :length] == prompts).all()):  # most repeat what they were given
        said = said[:, length:]
    rests = [row[length : length + NUM_NEW_IDS].tolist() for row in rows]
    texts = [decoded_inputs(preprocessor, part) for part in (prompts.tolist(), said.tolist(), rests)]
    names = ("input", "prediction", "target")
    return [dict(zip(names, row, strict=True)) for row in zip(*(text or [] for text in texts), strict=True)]


def _has_ids(sample: Any) -> bool:
    return isinstance(sample, Mapping) and "input_ids" in sample


def _length_for(generate: Callable[..., Any]) -> dict[str, int]:
    """Return how long a text should be, if `generate` takes that."""
    named = inspect.signature(generate).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in named.values())
    return {LENGTH_OPTION: NUM_NEW_IDS} if takes_any or LENGTH_OPTION in named else {}
