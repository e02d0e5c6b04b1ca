"""How rows of unequal lengths become one tensor: with what they are filled, to what length, on which side.

This module owns the one function that pads (`pad_rows`) and what a tokenizer's outputs are padded with. It never
truncates: a row longer than the stated maximum is an error, cut it where it is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from hezar_train.data.stacking import NUMBER_KINDS, shape_text, stacked, tensor_of
from hezar_train.errors import ConfigError, DataError, choices

__all__ = ["IGNORED_LABEL", "TOKEN_ID_ENDINGS", "PadRule", "TokenRules", "pad_rows", "padded", "setting_of"]

IGNORED_LABEL = -100
"""The label that torch's losses leave out, and that does not count as a unit of the loss."""

PADDINGS = ("longest", "max_length")
SIDES = ("left", "right")
TOKEN_ID_ENDINGS = ("token_ids", "input_ids")


@dataclass(frozen=True)
class PadRule:
    """How the rows of one key become equally long: with what, to what length, on which side."""

    value: float
    padding: str | None = "longest"
    side: str = "right"
    max_length: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.padding is not None and self.padding not in PADDINGS:
            problems.append(f"padding={self.padding!r} is not known. Expected one of: {choices(PADDINGS)}, or None.")
        if self.padding == "max_length" and self.max_length is None:
            problems.append("padding='max_length' needs a max_length.")
        if self.side not in SIDES:
            problems.append(f"padding_side={self.side!r} is not known. Expected one of: {choices(SIDES)}.")
        if problems:
            raise ConfigError(problems)

    def width(self, key: str, lengths: list[int]) -> int:
        """Return the common length, or say which row does not fit."""
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise DataError(
                f"key {key!r} has a row of {longest}, longer than the {self.max_length} allowed. Truncate where the "
                "samples are made (a tokenizer's truncation=True, max_length=...), or raise the maximum."
            )
        if self.padding is None and min(lengths) < longest:
            raise DataError(f"key {key!r} has rows of {sorted(set(lengths))} and padding=None. Pass padding='longest'.")
        return self.max_length if self.padding == "max_length" and self.max_length is not None else longest


class TokenRules:
    """What a tokenizer's outputs are padded with, key by key."""

    def __init__(self, tokenizer: Any, padding: str | None, side: str, max_length: int | None) -> None:
        pad_token_id = setting_of(tokenizer, "pad_token_id", None)
        if pad_token_id is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no pad_token_id, so its tokens cannot be padded. Give it a pad token "
                "(for example tokenizer.pad_token = tokenizer.eos_token)."
            )

        def filled_with(value: float) -> PadRule:
            return PadRule(value, padding, side, max_length)

        self._tokens, self._others = filled_with(pad_token_id), filled_with(0)
        self._named = {
            "labels": filled_with(IGNORED_LABEL),
            "special_tokens_mask": filled_with(1),
            "token_type_ids": filled_with(setting_of(tokenizer, "pad_token_type_id", 0)),
        }

    def of(self, key: str) -> PadRule:
        """Return the rule of one key: token ids get the pad token, those with a name here their own, all others 0."""
        if key.endswith(TOKEN_ID_ENDINGS):
            return self._tokens
        return self._named.get(key, self._others)


def setting_of(owner: Any, name: str, default: Any) -> Any:
    """Read a setting from a tokenizer or feature extractor, or from its config, where Hezar keeps some."""
    for place in (owner, getattr(owner, "config", None)):
        value = getattr(place, name, None)
        if value is not None:
            return value
    return default


def padded(key: str, values: list[Any], rule: PadRule | None) -> Any:
    """Pad one key's values if there is a rule and they are rows of numbers, else stack them."""
    if rule is None:
        return stacked(key, values)
    rows = [row for row in map(_row, values) if row is not None]
    return pad_rows(key, rows, rule) if len(rows) == len(values) else stacked(key, values)


def _row(value: Any) -> torch.Tensor | None:
    """Return a sequence of numbers as a tensor, and None for anything else, which cannot be padded."""
    if isinstance(value, list | tuple):
        return tensor_of(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBER_KINDS:
        value = torch.as_tensor(value)
    return value if isinstance(value, torch.Tensor) and value.ndim else None


def pad_rows(key: str, rows: Sequence[torch.Tensor], rule: PadRule) -> torch.Tensor:
    """Stack rows that may differ in their first dimension, in a new tensor."""
    filled = [row for row in rows if row.numel()] or [torch.empty(0, dtype=torch.long)]
    if len({row.shape[1:] for row in filled}) > 1:
        raise DataError(
            f"key {key!r} has rows of the shapes {', '.join(map(shape_text, rows))}: only their first dimension may "
            "differ. Transpose them, or pass another data_collator."
        )
    width = rule.width(key, [len(row) for row in rows])
    dtype = reduce(torch.promote_types, (row.dtype for row in filled))
    batch = torch.full((len(rows), width, *filled[0].shape[1:]), rule.value, dtype=dtype)
    for target, row in zip(batch, rows, strict=True):
        if length := len(row):
            (target[:length] if rule.side == "right" else target[width - length :]).copy_(row)
    return batch
