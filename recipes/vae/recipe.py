"""A variational autoencoder of digits: a few numbers say what a digit looks like, and draw it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from hezar_train import Recipe
from hezar_train.errors import MissingDependencyError

SIDE, NUM_GREYS = 8, 17  # a pixel says how many of 16 points are ink
NUM_PIXELS = SIDE * SIDE
SPLIT_SEED = 0  # not the run's: every run is tested on the same digits


class VariationalAutoencoder(nn.Module):
    """An encoder to a normal distribution over codes, and a decoder to the chances of the 17 greys of each pixel."""

    def __init__(self, num_codes: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(NUM_PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, 2 * num_codes)
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_codes, hidden), nn.ReLU(), nn.Linear(hidden, NUM_GREYS * NUM_PIXELS),
            nn.Unflatten(1, (NUM_GREYS, SIDE, SIDE)),
        )  # fmt: skip
        self.register_buffer("greys", torch.linspace(0, 1, NUM_GREYS).view(-1, 1, 1), persistent=False)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the negative evidence bound in nats per digit, and the digit as its most likely codes draw it."""
        mean, log_spread = self.encoder(pixels).chunk(2, dim=1)
        posterior = Normal(mean, log_spread.exp())
        greys = (pixels * (NUM_GREYS - 1)).round().long()
        surprise = cross_entropy(self.decoder(posterior.rsample()), greys, reduction="sum") / len(pixels)
        rate = kl_divergence(posterior, Normal(0.0, 1.0)).sum() / len(pixels)
        redrawn = (self.decoder(mean).softmax(dim=1) * self.greys).sum(dim=1)
        return {"loss": surprise + rate, "logits": redrawn}


def build(num_codes: int = 8, hidden: int = 256, test_share: float = 0.2) -> Recipe:
    """Build the network and split the digits; a digit is its own label, for it is to be drawn again."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "recipes", "the recipe 'vae'") from error
    digits = load_digits()
    parts = train_test_split(digits.images, test_size=test_share, stratify=digits.target, random_state=SPLIT_SEED)
    train, test = (torch.tensor(part / (NUM_GREYS - 1), dtype=torch.float32) for part in parts)
    return Recipe(
        model=VariationalAutoencoder(num_codes, hidden),
        train_dataset=TensorDataset(train, train),
        eval_dataset=TensorDataset(test, test),
    )


def read(given: Path, preprocessor: Any) -> tuple[torch.Tensor]:  # noqa: ARG001
    """Turn a picture of one digit, cut to its edges, into a sample; ink may be light or dark."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError("pillow", "recipes", "reading pictures") from error
    with Image.open(given) as picture:
        grey = ImageOps.autocontrast(ImageOps.grayscale(picture).resize((SIDE, SIDE), Image.Resampling.BOX))
    pixels = torch.from_numpy(np.array(grey, dtype=np.float32) / 255)
    return (pixels if pixels.mean() < 0.5 else 1 - pixels,)
