"""A variational autoencoder of digits: a few numbers say what a digit looks like, and draw it again.

`dataset` puts pictures of the Hub, or of a folder, in their place: made small and grey, as the digits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from hezar_train import Recipe, Trainer
from hezar_train.errors import ConfigError, MissingDependencyError
from hezar_train.launch import PictureSize, asked_for, load_pictures, path_of, small_greys

DIGITS = "digits"
SIDE, LARGEST_PIXEL = 8, 16  # a pixel says how many of 16 points are ink
NUM_GREYS = LARGEST_PIXEL + 1
NUM_SHOWN = 10
SPLIT_SEED = 0  # not the run's: every run is tested on the same digits


class VariationalAutoencoder(nn.Module):
    """An encoder to a normal distribution over codes, and a decoder to the chances of the 17 greys of each pixel."""

    def __init__(self, num_codes: int, hidden: int, side: int = SIDE) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(side * side, hidden), nn.ReLU(), nn.Linear(hidden, 2 * num_codes)
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_codes, hidden), nn.ReLU(), nn.Linear(hidden, NUM_GREYS * side * side),
            nn.Unflatten(1, (NUM_GREYS, side, side)),
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


class Vae(Trainer):
    """A trainer whose report shows held-out digits beside what the network makes of them."""

    def pictures(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Draw the first held-out digits again."""
        held_out = [self.eval_dataset[number][0] for number in range(min(NUM_SHOWN, len(self.eval_dataset)))]
        pixels = torch.stack(held_out).to(self.runtime.device)
        redrawn = self.evaluation_step((pixels, pixels))["logits"].to(pixels)
        between = torch.ones_like(pixels[:, :, :1])
        errors = (pixels - redrawn).square().mean(dim=(1, 2)).tolist()
        for pair, error in zip(torch.cat([pixels, between, redrawn], dim=2), errors, strict=True):
            yield pair, {"left": "held out", "right": "drawn", "mse": f"{error:.4f}"}


def build(
    num_codes: int = 8,
    hidden: int = 256,
    test_share: float = 0.2,
    dataset: str = DIGITS,
    image_column: str = "image",
    image_size: int = SIDE,
) -> Recipe:
    """Build the network; a picture is its own label, for it is to be drawn again."""
    if dataset == DIGITS and image_size != SIDE:
        raise ConfigError(f"recipe.image_size={image_size} is for a recipe.dataset; the digits have {SIDE}")
    train, test = digits(test_share) if dataset == DIGITS else hub_parts(dataset, image_column, image_size, test_share)
    return Recipe(
        model=VariationalAutoencoder(num_codes, hidden, image_size),
        train_dataset=TensorDataset(train, train),
        eval_dataset=TensorDataset(test, test),
        preprocessor=None if dataset == DIGITS else PictureSize(image_size),
        trainer_class=Vae,
    )


def digits(test_share: float) -> list[torch.Tensor]:
    """Split the digits, with every class in the same share in both parts."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "recipes", "the recipe 'vae'") from error
    found = load_digits()
    parts = train_test_split(found.images, test_size=test_share, stratify=found.target, random_state=SPLIT_SEED)
    return [torch.tensor(part / LARGEST_PIXEL, dtype=torch.float32) for part in parts]


def hub_parts(name: str, image_column: str, side: int, test_share: float) -> list[torch.Tensor]:
    """Read the pictures of a dataset."""
    rows = load_pictures(name, test_share, image_column)
    with asked_for(f"recipe.dataset={name}"):
        return [small_greys(part[image_column], side) for part in rows]


def read(given: Any, preprocessor: Any) -> tuple[torch.Tensor]:
    """Turn a picture into a sample; of a digit, cut to its edges, the ink may be light or dark."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError("pillow", "recipes", "reading pictures") from error
    with Image.open(path_of(given)) as picture:
        if preprocessor is not None:
            return (small_greys([picture], preprocessor.side)[0],)
        grey = ImageOps.autocontrast(ImageOps.grayscale(picture).resize((SIDE, SIDE), Image.Resampling.BOX))
    pixels = torch.from_numpy(np.array(grey, dtype=np.float32) / 255)
    return (pixels if pixels.mean() < 0.5 else 1 - pixels,)
