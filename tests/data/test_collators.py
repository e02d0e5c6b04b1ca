from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from hezar_train.data import (
    CharLevelOCRDataCollator,
    ImageCaptioningDataCollator,
    SequenceLabelingDataCollator,
    SpeechRecognitionDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
    default_collator,
)
from hezar_train.errors import ConfigError, DataError

TOKENIZER = SimpleNamespace(pad_token_id=9)
EXTRACTOR = SimpleNamespace(config=SimpleNamespace(padding_value=-1.0, padding_side="right"))

TEXTS = [
    {"token_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "token_type_ids": [0, 1, 1], "labels": 1},
    {"token_ids": [5], "attention_mask": [1], "token_type_ids": [0], "labels": 0},
]
PAIRS = [
    {"token_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [3]},
    {"token_ids": [5], "attention_mask": [1], "labels": [3, 4]},
]
TAGGED = [
    {"token_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "word_ids": [None, 0, None], "labels": [-100, 2, -100]},
    {"token_ids": [5, 6], "attention_mask": [1, 1], "word_ids": [0, 1], "labels": [1, 2]},
]
CAPTIONS = [
    {
        "pixel_values": torch.zeros(3, 2, 2),
        "labels": [1, 2],
        "decoder_input_ids": [0, 1],
        "decoder_attention_mask": [1, 1],
    },
    {"pixel_values": torch.ones(3, 2, 2), "labels": [1], "decoder_input_ids": [0], "decoder_attention_mask": [1]},
]
SPEECH = [
    {"input_features": np.ones((2, 4), dtype=np.float32), "labels": [1, 2], "attention_mask": [1, 1]},
    {"input_features": np.ones((3, 4), dtype=np.float32), "labels": [1], "attention_mask": [1]},
]
LINES = [
    {"pixel_values": torch.zeros(1, 2, 8), "labels": [4, 5, 6]},
    {"pixel_values": torch.ones(1, 2, 8), "labels": [4]},
]
COLLATORS: list[tuple[Callable[[Any], Any], list[dict[str, Any]]]] = [
    (default_collator, LINES[:1]),
    (TextPaddingDataCollator(TOKENIZER), TEXTS),
    (TextGenerationDataCollator(TOKENIZER), PAIRS),
    (SequenceLabelingDataCollator(TOKENIZER), TAGGED),
    (ImageCaptioningDataCollator(TOKENIZER), CAPTIONS),
    (SpeechRecognitionDataCollator(EXTRACTOR, TOKENIZER), SPEECH),
    (CharLevelOCRDataCollator(), LINES),
]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor | np.ndarray):
        return bool((left == right).all())
    return bool(left == right)


@pytest.mark.parametrize(("collate", "samples"), COLLATORS)
def test_samples_are_never_changed(collate: Callable[[Any], Any], samples: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(samples)
    batch = collate(samples)
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.fill_(77)  # what is done to a batch must not reach a sample either
    for old, new in zip(before, samples, strict=True):
        assert old.keys() == new.keys()
        assert all(same(old[key], new[key]) for key in old)


@pytest.mark.parametrize(("collate", "samples"), COLLATORS)
def test_no_samples_are_refused(collate: Callable[[Any], Any], samples: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="no samples"):
        collate([])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ([np.array([1, 2]), np.array([3, 4])], torch.tensor([[1, 2], [3, 4]])),
        ([3, 4], torch.tensor([3, 4])),
        ([0.5, 1.5], torch.tensor([0.5, 1.5], dtype=torch.float64)),
        ([True, False], torch.tensor([True, False])),
        ([np.float32(1), np.float32(2)], torch.tensor([1.0, 2.0])),
        ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
        ([(1.5, 2), (3, 4)], torch.tensor([[1.5, 2.0], [3.0, 4.0]])),
        ([[[1], [2]], [[3], [4]]], torch.tensor([[[1], [2]], [[3], [4]]])),
        ([[], []], torch.empty(2, 0)),
    ],
)
def test_numbers_of_one_shape_are_stacked(values: list[Any], expected: torch.Tensor) -> None:
    batch = default_collator([{"x": value} for value in values])
    assert batch["x"].dtype == expected.dtype
    assert torch.equal(batch["x"], expected)


@pytest.mark.parametrize("values", [["a", "b"], [["a"], ["b", "c"]], [[None, 0], [0, 1, None]], [b"a", b"b"]])
def test_what_is_no_number_stays_a_list(values: list[Any]) -> None:
    assert default_collator([{"x": value} for value in values]) == {"x": values}


def test_mappings_of_any_kind_and_depth_become_dicts() -> None:
    samples = [UserDict(x={"y": 1, "z": "a"}), UserDict(x={"y": 2, "z": "b"})]
    batch = default_collator(samples)
    assert type(batch) is dict
    assert batch["x"]["y"].tolist() == [1, 2]
    assert batch["x"]["z"] == ["a", "b"]


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.ones(2), 1), (torch.zeros(2), 0)],
        [[torch.ones(2), 1.5], [torch.zeros(2), 0.5]],
        [torch.ones(2), torch.zeros(2)],
        [1, 2, 3],
        ["a", "b"],
    ],
)
def test_other_samples_are_collated_as_torch_does(samples: list[Any]) -> None:
    batch, expected = default_collator(samples), default_collate(samples)
    assert type(batch) is type(expected)
    assert all(same(left, right) for left, right in zip(batch, expected, strict=True))


SHAPE = "(shape )?"


@pytest.mark.parametrize(
    ("values", "lengths", "remedy"),
    [
        ([[1, 2, 3], [1, 2]], "23", r"data_collator=.*TextPadding"),
        ([torch.ones(2, 4), torch.ones(3, 4)], ["3x4", "2x4"], r"resize, crop or pad.*data_collator="),
        ([[[1]], [[1], [2]]], "21", r"data_collator=.*TextPadding"),
    ],
)
def test_unequal_lengths_are_refused_with_key_lengths_and_remedy(
    values: list[Any], lengths: Sequence[str], remedy: str
) -> None:
    odd, usual = lengths
    words = rf"'text\.ids' is .* of {SHAPE}{odd} in one sample .* of {SHAPE}{usual} in another.*{remedy}"
    with pytest.raises(DataError, match=words):
        default_collator([{"text": {"ids": value}} for value in values])


def test_values_that_fit_into_no_tensor_are_refused_with_their_type() -> None:
    with pytest.raises(DataError, match=r"'x' is an object in every sample.*Return numbers"):
        default_collator([{"x": object()}])
    with pytest.raises(DataError, match=r"'x' is None in every sample.*Return a value"):
        default_collator([{"x": None}])


def test_tuples_of_unequal_shapes_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"entry 0 is a tensor of shape 3 .* shape 2 in another.*data_collator="):
        default_collator([(torch.ones(2), 1), (torch.ones(3), 1)])


@pytest.mark.parametrize("other", [{"x": 1}, {"x": 1, "y": 2, "z": 3}, {"x": 1, "z": 2}])
def test_samples_with_other_keys_are_refused_with_the_difference(other: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"one sample of a batch has (no )?'[yz]'.*same keys") as raised:
        default_collator([{"x": 1, "y": 2}, {"x": 1, "y": 2}, other])
    assert raised.value.place == (2, 3)


def test_a_sample_of_another_kind_than_the_first_is_refused() -> None:
    with pytest.raises(DataError, match=r"one sample of a batch is a tuple of 2, and another a dict") as raised:
        default_collator([{"x": 1}, {"x": 1}, (1, 2)])
    assert raised.value.place == (2, 3)


def test_text_padding_pads_each_key_with_its_own_value_and_stacks_labels() -> None:
    batch = TextPaddingDataCollator(TOKENIZER)(TEXTS)
    assert batch["token_ids"].tolist() == [[5, 6, 7], [5, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_text_padding_pads_on_the_left_when_asked() -> None:
    batch = TextPaddingDataCollator(TOKENIZER, padding_side="left")(TEXTS)
    assert batch["token_ids"].tolist() == [[5, 6, 7], [9, 9, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_text_padding_pads_to_the_maximum_when_asked() -> None:
    batch = TextPaddingDataCollator(TOKENIZER, padding="max_length", max_length=5)(TEXTS)
    assert batch["token_ids"].tolist() == [[5, 6, 7, 9, 9], [5, 9, 9, 9, 9]]


@pytest.mark.parametrize(("kind", "kept"), [("torch", torch.Tensor), ("numpy", np.ndarray), ("list", list)])
def test_text_padding_returns_the_kind_asked_for(kind: str, kept: type) -> None:
    batch = TextPaddingDataCollator(TOKENIZER, return_tensors=kind)(TEXTS)
    assert {type(value) for value in batch.values()} == {kept}


def test_text_padding_takes_lists_arrays_and_tensors_alike() -> None:
    expected = TextPaddingDataCollator(TOKENIZER)(TEXTS)["token_ids"]
    for make in (np.array, torch.tensor, tuple):
        samples = [{**text, "token_ids": make(text["token_ids"])} for text in TEXTS]
        assert torch.equal(TextPaddingDataCollator(TOKENIZER)(samples)["token_ids"], expected)


def test_text_padding_leaves_strings_and_numbers_among_tokens_alone() -> None:
    samples = [{"input_ids": [1, 2], "tokens": ["a", "b"], "id": 7}, {"input_ids": [1], "tokens": ["a"], "id": 8}]
    batch = TextPaddingDataCollator(TOKENIZER)(samples)
    assert batch["input_ids"].tolist() == [[1, 2], [1, 9]]
    assert batch["tokens"] == [["a", "b"], ["a"]]
    assert batch["id"].tolist() == [7, 8]


def test_text_padding_works_without_labels_and_with_an_empty_text() -> None:
    batch = TextPaddingDataCollator(TOKENIZER)([{"token_ids": [1, 2]}, {"token_ids": []}])
    assert batch["token_ids"].tolist() == [[1, 2], [9, 9]]
    assert batch["token_ids"].dtype == torch.int64


def test_pad_ids_are_found_in_the_tokenizer_or_its_config() -> None:
    in_config = SimpleNamespace(config=SimpleNamespace(pad_token_id=4, pad_token_type_id=2))
    batch = TextPaddingDataCollator(in_config)(TEXTS)
    assert batch["token_ids"].tolist()[1] == [5, 4, 4]
    assert batch["token_type_ids"].tolist()[1] == [0, 2, 2]


def test_a_tokenizer_without_pad_token_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"no pad_token_id.*tokenizer\.pad_token = tokenizer\.eos_token"):
        TextPaddingDataCollator(SimpleNamespace(pad_token_id=None))


@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_rows_longer_than_the_maximum_are_refused_not_cut(padding: str) -> None:
    with pytest.raises(DataError, match=r"'token_ids' has a row of 3, longer than the 2 allowed\. Truncate"):
        TextPaddingDataCollator(TOKENIZER, padding=padding, max_length=2)(TEXTS)


def test_without_padding_only_rows_of_one_length_are_taken() -> None:
    collate = TextPaddingDataCollator(TOKENIZER, padding=None)
    assert collate([TEXTS[0], TEXTS[0]])["token_ids"].tolist() == [[5, 6, 7], [5, 6, 7]]
    with pytest.raises(DataError, match=r"rows of \[1, 3\] and padding=None"):
        collate(TEXTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding": "widest"}, "padding='widest' is not known.*longest, max_length"),
        ({"padding": "max_length"}, "needs a max_length"),
        ({"padding_side": "top"}, "padding_side='top' is not known.*left, right"),
        ({"return_tensors": "tf"}, "return_tensors='tf' is not known.*list, numpy, torch"),
    ],
)
def test_settings_that_do_not_exist_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextPaddingDataCollator(TOKENIZER, **settings)


def test_text_generation_pads_labels_by_themselves_and_out_of_the_loss() -> None:
    batch = TextGenerationDataCollator(TOKENIZER)(PAIRS)
    assert batch["token_ids"].tolist() == [[5, 6, 7], [5, 9, 9]]
    assert batch["labels"].tolist() == [[3, -100], [3, 4]]


def test_text_generation_pads_labels_to_their_own_maximum() -> None:
    collate = TextGenerationDataCollator(TOKENIZER, padding="max_length", max_length=4, labels_max_length=3)
    batch = collate(PAIRS)
    assert batch["token_ids"].shape == (2, 4)
    assert batch["labels"].tolist() == [[3, -100, -100], [3, 4, -100]]


@pytest.mark.parametrize(
    ("side", "tokens", "labels"),
    [("right", [5, 6, 9], [1, 2, -100]), ("left", [9, 5, 6], [-100, 1, 2])],
)
def test_sequence_labels_are_padded_beside_their_tokens(side: str, tokens: list[int], labels: list[int]) -> None:
    batch = SequenceLabelingDataCollator(TOKENIZER, padding_side=side)(TAGGED)
    assert batch["token_ids"].tolist() == [[5, 6, 7], tokens]
    assert batch["labels"].tolist() == [[-100, 2, -100], labels]
    assert "word_ids" not in batch


def test_sequence_labels_are_as_wide_as_the_tokens() -> None:
    samples = [{"token_ids": [5, 6, 7], "labels": [1]}, {"token_ids": [5], "labels": [2]}]
    collate = SequenceLabelingDataCollator(TOKENIZER, label_pad_token_id=-1, padding="max_length", max_length=4)
    batch = collate(samples)
    assert batch["labels"].tolist() == [[1, -1, -1, -1], [2, -1, -1, -1]]
    assert batch["token_ids"].shape == batch["labels"].shape


def test_sequence_labels_longer_than_any_text_are_refused() -> None:
    with pytest.raises(DataError, match="'labels' has a row of 2, longer than the 1 allowed"):
        SequenceLabelingDataCollator(TOKENIZER)([{"token_ids": [5], "labels": [1, 2]}])


def test_image_captioning_stacks_images_and_pads_captions() -> None:
    batch = ImageCaptioningDataCollator(TOKENIZER, padding="max_length", max_length=3)(CAPTIONS)
    assert batch["pixel_values"].shape == (2, 3, 2, 2)
    assert batch["labels"].tolist() == [[1, 2, -100], [1, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, 1, 9], [0, 9, 9]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("make", [np.asarray, torch.Tensor.tolist])
def test_images_may_be_arrays_or_lists(make: Callable[[torch.Tensor], Any]) -> None:
    samples = [{**line, "pixel_values": make(line["pixel_values"])} for line in LINES]
    assert torch.equal(
        CharLevelOCRDataCollator()(samples)["pixel_values"], torch.stack([torch.zeros(1, 2, 8), torch.ones(1, 2, 8)])
    )


def test_speech_recognition_pads_features_in_time_and_labels() -> None:
    batch = SpeechRecognitionDataCollator(EXTRACTOR, TOKENIZER)(SPEECH)
    assert batch["input_features"].shape == (2, 3, 4)
    assert batch["input_features"].dtype == torch.float32
    assert batch["input_features"][:, 2].tolist() == [[-1.0] * 4, [1.0] * 4]
    assert batch["labels"].tolist() == [[1, 2], [1, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_speech_recognition_pads_each_part_to_its_own_maximum() -> None:
    collate = SpeechRecognitionDataCollator(EXTRACTOR, TOKENIZER, "max_length", 6, "max_length", 5)
    batch = collate(SPEECH)
    assert batch["input_features"].shape == (2, 6, 4)
    assert batch["labels"].shape == (2, 5)


def test_features_that_differ_across_time_are_refused() -> None:
    samples = [{"input_features": np.ones((4, width)), "labels": [1]} for width in (2, 3)]
    with pytest.raises(DataError, match="shapes 4x2, 4x3: only their first dimension may differ"):
        SpeechRecognitionDataCollator(EXTRACTOR, TOKENIZER)(samples)


def test_char_level_ocr_pads_characters_with_its_pad_id() -> None:
    assert CharLevelOCRDataCollator()(LINES)["labels"].tolist() == [[4, 5, 6], [4, 0, 0]]
    assert CharLevelOCRDataCollator(pad_token_id=8)(LINES)["labels"].tolist() == [[4, 5, 6], [4, 8, 8]]
