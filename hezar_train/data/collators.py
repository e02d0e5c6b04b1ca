"""Hezar's collators, by their own names and arguments: from a list of samples to one padded batch.

A collator here says which key is padded by which rule; `padding` does it. None changes a sample, draws a random number,
truncates, or guesses: rows of unequal lengths without a rule for padding are an error that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hezar_train.data.padding import IGNORED_LABEL, TOKEN_ID_ENDINGS, PadRule, TokenRules, padded, setting_of
from hezar_train.data.stacking import Columns, columns_of
from hezar_train.errors import ConfigError, DataError, choices

__all__ = [
    "CharLevelOCRDataCollator",
    "ImageCaptioningDataCollator",
    "SequenceLabelingDataCollator",
    "SpeechRecognitionDataCollator",
    "TextGenerationDataCollator",
    "TextPaddingDataCollator",
]

TENSOR_KINDS = ("list", "numpy", "torch")
AUDIO_KEYS = ("input_features", "input_values")


class _PaddingCollator:
    """Pad the keys that have a rule and hold rows of numbers; stack the others."""

    dropped_keys: frozenset[str] = frozenset()

    def rule(self, key: str) -> PadRule | None:
        """Return how to pad `key`, or None for a key that is stacked."""
        raise NotImplementedError

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        if not samples:
            raise DataError("a batch of no samples cannot be collated.")
        columns = columns_of(samples)
        return {key: self._batched(key, columns) for key in columns if key not in self.dropped_keys}

    def _batched(self, key: str, columns: Columns) -> Any:
        return padded(key, columns[key], self.rule(key))


@dataclass(eq=False, repr=False)
class _TokenCollator(_PaddingCollator):
    """Pad what a tokenizer gives, each key by its own rule."""

    tokenizer: Any
    padding: str | None = "longest"
    padding_side: str = "right"
    max_length: int | None = None

    def __post_init__(self) -> None:
        self._rules = TokenRules(self.tokenizer, self.padding, self.padding_side, self.max_length)

    def rule(self, key: str) -> PadRule | None:
        return self._rules.of(key)


@dataclass(eq=False, repr=False)
class TextPaddingDataCollator(_TokenCollator):
    """Pad every key that holds one number a token, all but the labels, which are stacked."""

    return_tensors: str = "torch"

    def __post_init__(self) -> None:
        if self.return_tensors not in TENSOR_KINDS:
            raise ConfigError(
                f"return_tensors={self.return_tensors!r} is not known. Expected one of: {choices(TENSOR_KINDS)}."
            )
        super().__post_init__()

    def rule(self, key: str) -> PadRule | None:
        return None if key == "labels" else super().rule(key)

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(samples)
        return {key: _converted(value, self.return_tensors) for key, value in batch.items()}


def _converted(value: Any, kind: str) -> Any:
    """Turn a tensor into the kind asked for; leave what is no tensor."""
    if not isinstance(value, torch.Tensor) or kind == "torch":
        return value
    return value.numpy() if kind == "numpy" else value.tolist()


class TextGenerationDataCollator(TextPaddingDataCollator):
    """Pad inputs and labels, each to a length of its own; padded labels do not count in the loss."""

    def __init__(
        self,
        tokenizer: Any,
        padding: str | None = "longest",
        padding_side: str = "right",
        max_length: int | None = None,
        labels_max_length: int | None = None,
        return_tensors: str = "torch",
    ) -> None:
        super().__init__(tokenizer, padding, padding_side, max_length, return_tensors)
        # Without a length of their own, labels go to the longest of them.
        labels_padding = "longest" if padding is not None and labels_max_length is None else padding
        self._labels_rule = PadRule(IGNORED_LABEL, labels_padding, padding_side, labels_max_length)

    def rule(self, key: str) -> PadRule | None:
        return self._labels_rule if key == "labels" else super().rule(key)


class SequenceLabelingDataCollator(_TokenCollator):
    """Pad inputs and, on the same side to the same length, their labels of one a token."""

    dropped_keys = frozenset({"word_ids"})

    def __init__(
        self,
        tokenizer: Any,
        padding: str | None = "longest",
        padding_side: str = "right",
        label_pad_token_id: int = IGNORED_LABEL,
        max_length: int | None = None,
    ) -> None:
        super().__init__(tokenizer, padding, padding_side, max_length)
        self.label_pad_token_id = label_pad_token_id

    def _batched(self, key: str, columns: Columns) -> Any:
        if key != "labels":
            return super()._batched(key, columns)
        # Labels are as wide as the tokens, also where the labels of a batch are all shorter.
        tokens = next((columns[name] for name in columns if name.endswith(TOKEN_ID_ENDINGS)), columns[key])
        width = self._rules.of(key).width(key, [len(row) for row in tokens])
        rule = PadRule(self.label_pad_token_id, "max_length", self.padding_side, width)
        return padded(key, columns[key], rule)


@dataclass(eq=False, repr=False)
class ImageCaptioningDataCollator(_TokenCollator):
    """Stack the images; pad the captions' tokens and labels."""

    def rule(self, key: str) -> PadRule | None:
        return None if key == "pixel_values" else super().rule(key)


class SpeechRecognitionDataCollator(_PaddingCollator):
    """Pad the audio features along time, as the feature extractor says, and the transcripts' tokens and labels."""

    def __init__(
        self,
        feature_extractor: Any,
        tokenizer: Any,
        inputs_padding: str | None = "longest",
        inputs_max_length: int | None = None,
        labels_padding: str | None = "longest",
        labels_max_length: int | None = None,
    ) -> None:
        self.feature_extractor = feature_extractor
        self.tokenizer = tokenizer
        value = setting_of(feature_extractor, "padding_value", 0.0)
        side = setting_of(feature_extractor, "padding_side", "right")
        self._audio_rule = PadRule(value, inputs_padding, side, inputs_max_length)
        self._rules = TokenRules(tokenizer, labels_padding, "right", labels_max_length)

    def rule(self, key: str) -> PadRule | None:
        return self._audio_rule if key in AUDIO_KEYS else self._rules.of(key)


class CharLevelOCRDataCollator(_PaddingCollator):
    """Stack the images; pad the characters of the labels with `pad_token_id`."""

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id
        self._labels_rule = PadRule(pad_token_id)

    def rule(self, key: str) -> PadRule | None:
        return self._labels_rule if key == "labels" else None
