"""Handwritten digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn, and a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Recipe
from hezar_train.errors import MissingDependencyError

NUM_CLASSES = 10
SIDE = 8
LARGEST_PIXEL = 16
SPLIT_SEED = 0  # not the run's: every run is tested on the same digits


class DigitNet(nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
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
            nn.Linear(2 * channels * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, NUM_CLASSES),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(pixels))


def build(channels: int = 16, dropout: float = 0.3, test_share: float = 0.2) -> Recipe:
    """Build the network and split the digits, with every class in the same share in both parts."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "recipes", "the recipe 'image_classification'") from error
    digits = load_digits()
    train, test = train_test_split(
        range(len(digits.target)), test_size=test_share, stratify=digits.target, random_state=SPLIT_SEED
    )
    pixels = torch.tensor(digits.images / LARGEST_PIXEL, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    return Recipe(
        model=DigitNet(channels, dropout),
        train_dataset=TensorDataset(pixels[train], labels[train]),
        eval_dataset=TensorDataset(pixels[test], labels[test]),
    )


def read(given: Path, preprocessor: Any) -> tuple[torch.Tensor]:  # noqa: ARG001
    """Turn a picture of one digit, cut to its edges, into a sample without a label; ink may be light or dark."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError("pillow", "recipes", "reading pictures") from error
    with Image.open(given) as picture:
        grey = ImageOps.autocontrast(ImageOps.grayscale(picture).resize((SIDE, SIDE), Image.Resampling.BOX))
    pixels = torch.from_numpy(np.array(grey, dtype=np.float32) / 255).unsqueeze(0)
    return (pixels if pixels.mean() < 0.5 else 1 - pixels,)
