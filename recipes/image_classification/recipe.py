"""Handwritten digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn, and a small network.

`dataset` puts pictures of the Hub, or of a folder, in their place: made small and grey, as the digits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Recipe
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices
from hezar_train.launch import PictureSize, asked_for, load_pictures, path_of, small_greys

DIGITS = "digits"
NUM_CLASSES = 10
SIDE = 8
LARGEST_PIXEL = 16
SPLIT_SEED = 0  # not the run's: every run is tested on the same digits

Parts = tuple[TensorDataset, TensorDataset]


class DigitNet(nn.Module):
    """Two convolutions and two dense layers; the classes of a dataset have names."""

    def __init__(self, channels: int, dropout: float, side: int = SIDE, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(id2label=dict(enumerate(names))) if names else None
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(2 * channels * (side // 2) ** 2, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, len(names) if names else NUM_CLASSES),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(pixels))


def build(
    channels: int = 16,
    dropout: float = 0.3,
    test_share: float = 0.2,
    dataset: str = DIGITS,
    image_column: str = "image",
    label_column: str = "label",
    image_size: int = SIDE,
) -> Recipe:
    """Read the pictures, and build the network for their size and their classes."""
    if dataset != DIGITS:
        (train, test), names = hub_parts(dataset, image_column, label_column, image_size, test_share)
        return Recipe(DigitNet(channels, dropout, image_size, names), train, test, preprocessor=PictureSize(image_size))
    if image_size != SIDE:
        raise ConfigError(f"recipe.image_size={image_size} is for a recipe.dataset; the digits have {SIDE}")
    train, test = digits(test_share)
    return Recipe(model=DigitNet(channels, dropout), train_dataset=train, eval_dataset=test)


def digits(test_share: float) -> Parts:
    """Split the digits, with every class in the same share in both parts."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "recipes", "the recipe 'image_classification'") from error
    found = load_digits()
    train, test = train_test_split(
        range(len(found.target)), test_size=test_share, stratify=found.target, random_state=SPLIT_SEED
    )
    pixels = torch.tensor(found.images / LARGEST_PIXEL, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(found.target)
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def hub_parts(
    name: str, image_column: str, label_column: str, side: int, test_share: float
) -> tuple[Parts, Sequence[str]]:
    """Read the pictures of a dataset, and what its classes are called; labels without names are in their order."""
    rows = load_pictures(name, test_share, image_column, label_column=label_column)
    labels = [list(part[label_column]) for part in rows]
    names = getattr(rows[0].features[label_column], "names", None)
    values = list(range(len(names))) if names else sorted({*labels[0], *labels[1]})
    if strange := {*labels[0], *labels[1]}.difference(values):
        raise DataError(f"recipe.dataset={name} has labels without a class: {choices(map(str, strange))}")
    with asked_for(f"recipe.dataset={name}"):
        pixels = [small_greys(part[image_column], side).unsqueeze(1) for part in rows]
    numbers = [torch.tensor([values.index(label) for label in part]) for part in labels]
    train, test = (TensorDataset(*pair) for pair in zip(pixels, numbers, strict=True))
    return (train, test), names or [str(value) for value in values]


def read(given: Any, preprocessor: Any) -> tuple[torch.Tensor]:
    """Turn a picture into a sample without a label; of a digit, cut to its edges, the ink may be light or dark."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError("pillow", "recipes", "reading pictures") from error
    with Image.open(path_of(given)) as picture:
        if preprocessor is not None:
            return (small_greys([picture], preprocessor.side),)
        grey = ImageOps.autocontrast(ImageOps.grayscale(picture).resize((SIDE, SIDE), Image.Resampling.BOX))
    pixels = torch.from_numpy(np.array(grey, dtype=np.float32) / 255).unsqueeze(0)
    return (pixels if pixels.mean() < 0.5 else 1 - pixels,)
