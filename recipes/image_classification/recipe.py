"""Handwritten digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn, and a small network.

`dataset` puts pictures of the Hub, or of a folder, in their place: made small and grey, as the digits are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Recipe
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices
from hezar_train.launch import asked_for, load_splits, path_of, with_held_out

DIGITS = "digits"
NUM_CLASSES = 10
SIDE = 8
LARGEST_PIXEL = 16
BOX = 4  # of PIL.Image.Resampling: a pixel is the mean of those in its place
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
    rows = hub_rows(name, (image_column, label_column), test_share)
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


def hub_rows(name: str, columns: Sequence[str], test_share: float) -> tuple[Any, Any]:
    """Load a dataset's rows to train on and those held out; the first of the columns has pictures."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name), test_share)
    features = found["train"].features
    if missing := [column for column in columns if column not in features]:
        others = " and ".join(f"recipe.{kind}_column=..." for kind in ("image", "label")[: len(columns)])
        raise DataError(
            f"{override} has no {choices(missing)}. Its columns: {choices(features)}. Name others with {others}"
        )
    if type(features[columns[0]]).__name__ != "Image":
        raise DataError(f"{override} has no pictures in its column {columns[0]!r}, but {features[columns[0]]}")
    return found["train"], found["held_out"]


def small_greys(pictures: Iterable[Any], side: int) -> torch.Tensor:
    """Make pictures as small as asked for, and as grey as the digits are: 17 greys, from 0 to 1."""
    small = [np.array(one.convert("L").resize((side, side), resample=BOX)) for one in pictures]
    return (torch.from_numpy(np.stack(small)).float() * LARGEST_PIXEL / 255).round() / LARGEST_PIXEL


@dataclass(frozen=True)
class PictureSize:
    """The side of a dataset's pictures, in pixels: what `read` has to know, kept with each checkpoint."""

    side: int

    def save(self, folder: str) -> None:
        """Write it as JSON."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "picture_size.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


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
