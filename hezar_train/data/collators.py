"""Collators: from a list of samples to one batch, stacked by `default_collator` or padded by Hezar's collators.

What has one shape is stacked, key by key. What differs in length is padded, where there is a rule (`PadRule`): with
what it is filled, to what length, on which side. Hezar's collators, by their own names and arguments, say which key is
padded by which rule. `PackingDataCollator` pads nothing: it joins samples to one row.

None of them changes a sample, draws a random number, or guesses: values of unequal lengths without a rule are an error
that names the key. None truncates: a row longer than the stated maximum is an error, cut it where it is tokenized.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Number
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from hezar_train.errors import ConfigError, DataError, a_kind, choices

__all__ = [
    "IGNORED_LABEL",
    "NUMBER_KINDS",
    "TOKEN_ID_ENDINGS",
    "CharLevelOCRDataCollator",
    "Columns",
    "ImageCaptioningDataCollator",
    "PackingDataCollator",
    "PadRule",
    "SequenceLabelingDataCollator",
    "SpeechRecognitionDataCollator",
    "TextGenerationDataCollator",
    "TextPaddingDataCollator",
    "TokenRules",
    "columns_of",
    "default_collator",
    "pad_rows",
    "padded",
    "setting_of",
    "shape_text",
    "stacked",
    "tensor_of",
]

Columns: TypeAlias = dict[str, list[Any]]
"""Each key with its values, one a sample."""

IGNORED_LABEL = -100
"""The label that torch's losses leave out, and that does not count as a unit of the loss."""

SAMPLE = "a sample"
UNSTACKABLE = (RuntimeError, TypeError, ValueError, AttributeError)
NUMBER_KINDS = "biuf"  # numpy's letters for bool, int, unsigned, float
TEXT_KINDS = "SU"
MOST_SHOWN = 40
TEXT_ARRAY = "a text in a NumPy array"
SPARSE = "a sparse tensor"
BEYOND = 1 << 63
PICTURE = "an image of PIL"
LARGE = "a whole number of more than 64 bits"
REMEDIES_BY_FORM = {
    SPARSE: "Return dense tensors: tensor.to_dense().",
    PICTURE: (
        "Make an array of it in the dataset, of one size for all, channels first: "
        "np.asarray(image.convert('RGB'), dtype='float32').transpose(2, 0, 1) / 255, or ToTensor() of torchvision."
    ),
    LARGE: (
        "Expected -2**63 to 2**63 - 1: correct it in the dataset. A value to predict that is no class may be a float: "
        "return float(value)."
    ),
    "a Decimal": "Return float(value).",
    "a Fraction": "Return float(value).",
    TEXT_ARRAY: "Return numbers instead: for a label, the number of its class (0, 1, ...).",
}
PADDINGS = ("longest", "max_length")
SIDES = ("left", "right")
TENSOR_KINDS = ("list", "numpy", "torch")
TOKEN_ID_ENDINGS = ("token_ids", "input_ids")
AUDIO_KEYS = ("input_features", "input_values")


def default_collator(samples: list[Any]) -> Any:
    """Make a batch: a dict by key for mappings, else as torch's `default_collate` does."""
    if not samples:
        raise DataError("a batch of no samples cannot be collated.")
    if isinstance(samples[0], Mapping):
        return {key: stacked(key, values) for key, values in columns_of(samples).items()}
    try:
        return default_collate(samples)
    except UNSTACKABLE as error:
        raise misfit(SAMPLE, samples, error) from error


def columns_of(samples: Sequence[Mapping[str, Any]]) -> Columns:
    """Gather each key's values over the samples, which must all have the same keys."""
    first = samples[0]
    try:
        columns = {key: [sample[key] for sample in samples] for key in first}
    except KeyError:
        columns = {}
    except (TypeError, IndexError) as error:  # one of them is no mapping
        raise misfit(SAMPLE, samples, error) from error
    if not columns or any(len(sample) != len(first) for sample in samples):
        _refuse_keys(samples)
    return columns


def _refuse_keys(samples: Sequence[Mapping[str, Any]]) -> NoReturn:
    """Say which sample's keys are not those of the first."""
    usual, _ = Counter(frozenset(sample) for sample in samples).most_common(1)[0]
    for number, sample in enumerate(samples):
        if lacking := usual - sample.keys():
            words = f"one sample of a batch has no {choices(map(repr, lacking))}, which the others have"
        elif beyond := sample.keys() - usual:
            words = f"one sample of a batch has {choices(map(repr, beyond))}, which the others have not"
        else:
            continue
        raise DataError(f"{words}. Give every sample the same keys, or pass data_collator=.", (number, len(samples)))
    raise DataError(
        "the samples are empty mappings: expected the model's arguments by name, and 'labels'. Return them."
    )


def stacked(key: str, values: list[Any]) -> Any:
    """Stack one key's values, or leave them a list if they are not numbers."""
    first = values[0]
    if isinstance(first, str | bytes):
        return values
    if isinstance(first, Mapping):
        return {inner: stacked(f"{key}.{inner}", column) for inner, column in columns_of(values).items()}
    if isinstance(first, list | tuple):
        return _stacked_lists(key, values)
    try:
        return default_collate(values)
    except UNSTACKABLE as error:
        raise misfit(f"key {key!r}", values, error) from error


def _stacked_lists(key: str, values: list[Any]) -> torch.Tensor | list[Any]:
    """Stack lists of numbers; leave lists of other things as they are."""
    tensor = tensor_of(values)
    if tensor is not None:
        return tensor
    if _holds_numbers(values):
        raise misfit(f"key {key!r}", values, None)
    return values


def tensor_of(numbers: Sequence[Any]) -> torch.Tensor | None:
    """Make a tensor of nested lists as `torch.tensor` would, or None if they are ragged or hold no numbers."""
    try:
        array = np.array(numbers)  # three times as fast as torch.tensor
    except ValueError:
        return None
    if array.dtype.kind not in NUMBER_KINDS:
        return None
    tensor = torch.from_numpy(array)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _holds_numbers(value: Any) -> bool:
    """Tell whether all leaves of nested lists are numbers."""
    return all(map(_holds_numbers, value)) if isinstance(value, list | tuple) else isinstance(value, Number)


def misfit(what: str, values: Sequence[Any], error: Exception | None) -> DataError:
    """Return the refusal of values that make no batch: which of them is odd, or that all are of a kind without rows."""
    forms = [_form(value) for value in values]
    usual, num_usual = Counter(forms).most_common(1)[0]
    odd = next((number for number, form in enumerate(forms) if form != usual), None)
    if odd is not None:
        other = usual if num_usual > 1 else forms[0 if odd else 1]
        words = f"{what} is {forms[odd]} in one sample of a batch, and {other} in another"
        if what == SAMPLE:
            words = f"one sample of a batch is {forms[odd]}, and another {other}"
        return DataError(f"{words}. {_remedy(what, forms[odd], usual)}", (odd, len(values)))
    if isinstance(values[0], list | tuple):
        for number, column in enumerate(zip(*values, strict=True)):
            try:
                default_collate(list(column))
            except UNSTACKABLE as inner:
                return misfit(f"entry {number}" if what == SAMPLE else f"{what}, entry {number}", column, inner)
    is_told = values[0] is None or usual.startswith(tuple(REMEDIES_BY_FORM))
    if usual == TEXT_ARRAY:
        usual = f"{usual} ({str(values[0])[:MOST_SHOWN]!r})"
    reason = "" if error is None or is_told else f" ({str(error).rstrip('.')})"
    words = f"every sample of a batch is {usual}" if what == SAMPLE else f"{what} is {usual} in every sample of a batch"
    remedy = (
        "Return tensors without a gradient: tensor.detach()." if "requires grad" in reason else _remedy(what, usual)
    )
    return DataError(f"{words}, which cannot be stacked{reason}. {remedy}")


def _form(value: Any) -> str:
    """Say of which kind a value is, by which it fits into a batch with others or not."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if isinstance(value, np.ndarray) and value.dtype.kind in TEXT_KINDS:
            return f"{TEXT_ARRAY}, of shape {shape_text(value)}" if value.ndim else TEXT_ARRAY
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            kind = SPARSE
        return f"{kind} of shape {shape_text(value)}" if value.ndim else f"{kind} of a single value"
    if isinstance(value, str | bytes):
        return "a text"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int | float | np.number):
        return LARGE if type(value) is int and not -BEYOND <= value < BEYOND else "a number"
    return PICTURE if type(value).__module__.startswith("PIL.") else a_kind(value)


def _remedy(what: str, *forms: str) -> str:
    if "None" in forms:
        return "Return a value for every sample, or leave the sample out of the dataset."
    for beginning, remedy in REMEDIES_BY_FORM.items():
        if any(form.startswith(beginning) for form in forms):
            return remedy
    if what == SAMPLE and len(forms) > 1:
        return "Return samples of one kind, with as many entries, from the dataset; or pass data_collator=."
    if all(re.search(r" of shape \d+x\d", form) for form in forms) and len(forms) > 1:
        return (
            "Bring all to one shape in the dataset (resize, crop or pad them), or pass data_collator= with a function "
            "that does it for a list of samples."
        )
    if all(re.search(r" of (shape )?\d", form) for form in forms) and len(forms) > 1:
        return (
            "Bring all to one length or shape in the dataset, or pass data_collator= to pad them: "
            "hezar_train.data.TextPaddingDataCollator(tokenizer) pads token ids."
        )
    return (
        "Return numbers, or tensors and arrays of numbers, of one kind; or pass data_collator= with a function that "
        "makes a batch of a list of samples."
    )


def shape_text(value: Any) -> str:
    """Say in an error what shape a value has."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return "x".join(map(str, value.shape)) or "a number"
    return str(len(value)) if isinstance(value, list | tuple) else type(value).__name__


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
        if isinstance(tokenizer, str):
            raise ConfigError(
                f"the tokenizer is {tokenizer!r}, a text; expected a tokenizer. Load it first: "
                f"transformers.AutoTokenizer.from_pretrained({tokenizer!r})."
            )
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


class PackingDataCollator:
    """Join samples to one row without padding, for a causal language model that is called with the batch's keys.

    A batch has `input_ids`, `labels` and `position_ids` of one row. Positions begin at 0 with each sample, by which the
    models of transformers know where one ends, so that none sees another; they look at them only without a cache, so
    `use_cache` is False in the batch. A sample's first token has no label: else it would be predicted from the last
    one of the sample before. Samples without `labels` are their own. Other keys that have a value for each token are
    joined as well; what is of the sample as a whole is left out, as there are no rows to put it beside.

    `padded` makes rows of the same samples, one each: for evaluation, where every sample is measured by itself.
    """

    packs = True

    def __init__(self, pad_token_id: int = 0) -> None:
        """`pad_token_id` fills the rows of `padded`; behind a sample's end, no causal model sees it."""
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        columns = self._columns(samples)
        lengths = [len(row) for row in columns["input_ids"]]
        batch: dict[str, Any] = {key: torch.cat(rows).unsqueeze(0) for key, rows in columns.items()}
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
        return {**batch, "use_cache": False}

    def padded(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a row of each sample, padded on the right, with an `attention_mask`."""
        columns = self._columns(samples)
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL}
        batch: dict[str, Any] = {key: pad_rows(key, rows, PadRule(fills.get(key, 0))) for key, rows in columns.items()}
        ones = [torch.ones(len(row), dtype=torch.long) for row in columns["input_ids"]]
        return {**batch, "attention_mask": pad_rows("attention_mask", ones, PadRule(0))}

    def _columns(self, samples: list[Mapping[str, Any]]) -> dict[str, list[torch.Tensor]]:
        """Return what has a value for each token, as rows, one a sample."""
        if not samples:
            raise DataError("a batch of no samples cannot be collated.")
        columns = columns_of(samples)
        if "input_ids" not in columns:
            raise DataError(f"samples that are packed need the key 'input_ids'; they have: {choices(columns)}.")
        ids = [self._tokens("input_ids", number, value) for number, value in enumerate(columns["input_ids"])]
        _refuse_padding(columns.get("attention_mask"), ids)
        given = columns.get("labels", ids)
        labels = [self._tokens("labels", number, value).clone() for number, value in enumerate(given)]
        for number, (row, label) in enumerate(zip(ids, labels, strict=True)):
            if len(row) != len(label):
                raise DataError(
                    f"a sample has {len(row)} input_ids and {len(label)} labels; packed ones need a label for each "
                    f"token ({IGNORED_LABEL} where none counts).", (number, len(samples)),
                )  # fmt: skip
            label[:1] = IGNORED_LABEL
        others = {key: rows for key, values in columns.items() if (rows := _beside(key, values, ids)) is not None}
        return {"input_ids": ids, "labels": labels, **others}

    @staticmethod
    def _tokens(key: str, number: int, value: Any) -> torch.Tensor:
        row = torch.as_tensor(np.asarray(value))
        if row.ndim != 1 or not len(row) or row.is_floating_point():
            raise DataError(
                f"key {key!r} of a sample is {_form(value)}; packed ones are lists of at least one whole number.",
                (number, -1),
            )
        return row.long()


def _beside(key: str, values: list[Any], ids: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the rows of a further key that has a value for each token; None for one of which that is not so."""
    if key in {"input_ids", "labels", "attention_mask", "position_ids"}:
        return None
    rows = [row for row in map(_row, values) if row is not None]
    is_by_token = [len(row) for row in rows] == [len(row) for row in ids]
    return rows if is_by_token else None


def _refuse_padding(masks: list[Any] | None, ids: list[torch.Tensor]) -> None:
    """Raise for samples that are padded already: what is masked would be trained on, and seen."""
    for number, mask in enumerate(masks or []):
        if not np.asarray(mask).all():
            raise DataError(
                "a sample has an attention_mask with zeros, as if it were padded already; packed ones are not padded. "
                "Tokenize without padding.", (number, len(ids)),
            )  # fmt: skip
