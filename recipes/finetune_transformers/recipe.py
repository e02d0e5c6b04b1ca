"""A model of transformers in this trainer: an image classifier with its own forward, loss and processor.

By default a small vision transformer is built from a config and learns handwritten digits, offline. `model` and
`dataset` put pretrained weights and a dataset of the Hub in their places; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from hezar_train import Recipe
from hezar_train.errors import MissingDependencyError
from hezar_train.launch import asked_for, load_splits, path_of, refuse_missing_columns, with_held_out

LARGEST_PIXEL = 16
SPLIT_SEED = 0  # not the run's: every run is tested on the same pictures, and the digits of `image_classification`
TEST_SHARE = 0.2

Rows = Sequence[Mapping[str, Any]]
Names = dict[Any, str]
"""What each label is called, by the value it has in the rows; the model's classes are in this order."""


def build(
    model: str | None = None,
    dataset: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    max_shift: int = 0,
    image_size: int = 8,
    patch_size: int = 2,
    width: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    dropout: float = 0.1,
) -> Recipe:
    """Read the pictures; build the model and its processor from configs, or fetch both."""
    train, test, names = hub_rows(dataset, image_column, label_column) if dataset else digit_rows()
    if model is None:
        classifier, processor = from_config(names, image_size, patch_size, width, num_layers, num_heads, dropout)
    else:
        classifier, processor = pretrained(model, names)
    columns = (image_column, label_column) if dataset else ("image", "label")
    return Recipe(
        model=classifier,
        train_dataset=Pictures(train, columns, names, processor, max_shift),
        eval_dataset=Pictures(test, columns, names, processor),
        preprocessor=processor,
    )


def read(given: Any, preprocessor: Any) -> dict[str, torch.Tensor]:
    """Turn a picture, or the path of one, into a sample without a label."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("pillow", "recipes", "reading pictures") from error
    if not isinstance(given, Image.Image):
        with Image.open(path_of(given)) as picture:
            given = picture.convert("RGB")
    return {"pixel_values": preprocessor(given.convert("RGB"), return_tensors="pt")["pixel_values"][0]}


class Pictures(Dataset[dict[str, Any]]):
    """Rows with a picture and a label as samples for the model, moved a little at random where that is asked for.

    The trainer seeds torch for each sample it fetches: how far one is moved follows from seed, epoch and sample alone.
    """

    def __init__(self, rows: Rows, columns: tuple[str, str], names: Names, processor: Any, max_shift: int = 0) -> None:
        self.rows, (self.image_column, self.label_column) = rows, columns
        self.numbers = {label: number for number, label in enumerate(names)}
        self.processor, self.max_shift = processor, max_shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        pixels = read(row[self.image_column], self.processor)["pixel_values"]
        return {"pixel_values": shifted(pixels, self.max_shift), "labels": self.numbers[row[self.label_column]]}


def shifted(pixels: torch.Tensor, most: int) -> torch.Tensor:
    """Move a picture by at most so many pixels each way; what comes in at the edge repeats it."""
    if not most:
        return pixels
    down, right = torch.randint(2 * most + 1, (2,)).tolist()
    height, width = pixels.shape[-2:]
    padded = functional.pad(pixels, (most,) * 4, mode="replicate")
    return padded[..., down : down + height, right : right + width]


def digit_rows() -> tuple[Rows, Rows, Names]:
    """Return scikit-learn's digits as pictures, dark on white: those to train on, those to test on, their names."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "recipes", "the recipe 'finetune_transformers'") from error
    digits = load_digits()
    greys = (255 - digits.images * 255 / LARGEST_PIXEL).round().astype("uint8")
    rows = [
        {"image": Image.fromarray(grey), "label": int(label)} for grey, label in zip(greys, digits.target, strict=True)
    ]
    train, test = train_test_split(rows, test_size=TEST_SHARE, stratify=digits.target, random_state=SPLIT_SEED)
    return train, test, {digit: str(digit) for digit in range(10)}


def hub_rows(name: str, image_column: str, label_column: str) -> tuple[Rows, Rows, Names]:
    """Read a dataset of the Hub, or a folder with a folder of pictures for each class; one that is whole is split."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name), TEST_SHARE)
    train, held_out = found["train"], found["held_out"]
    refuse_missing_columns(override, train, image_column=image_column, label_column=label_column)
    if names := getattr(train.features[label_column], "names", None):
        return train, held_out, dict(enumerate(names))
    labels = sorted({*train[label_column], *held_out[label_column]})
    return train, held_out, {label: str(label) for label in labels}


def from_config(
    names: Names, image_size: int, patch_size: int, width: int, num_layers: int, num_heads: int, dropout: float
) -> tuple[nn.Module, Any]:
    """Build a vision transformer with random weights, and the processor that cuts pictures to its size."""
    try:
        from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", "the recipe 'finetune_transformers'") from error
    config = ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        hidden_dropout_prob=dropout,
        initializer_range=width**-0.5,  # the default is for models ten times as wide, and so small a one hardly starts
        **label_names(names),
    )
    processor = ViTImageProcessorPil(size={"height": image_size, "width": image_size})
    return ViTForImageClassification(config), processor


def pretrained(name: str, names: Names) -> tuple[nn.Module, Any]:
    """Fetch a model with a new head for the labels, and its processor, from the Hub or a local folder."""
    try:
        from transformers import AutoImageProcessor, AutoModelForImageClassification
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", f"recipe.model={name}") from error
    with asked_for(f"recipe.model={name}"):
        model = AutoModelForImageClassification.from_pretrained(
            name, ignore_mismatched_sizes=True, **label_names(names)
        )
        return model, AutoImageProcessor.from_pretrained(name)


def label_names(names: Names) -> dict[str, Any]:
    """Return the labels' names as transformers' configs have them."""
    id2label = dict(enumerate(names.values()))
    return {"id2label": id2label, "label2id": {name: number for number, name in id2label.items()}}
