"""A GAN that draws digits: two networks that learn from each other, and a figure for how well they do.

`dataset` puts pictures of the Hub, or of a folder, in their place: made small and grey, as the digits are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from hezar_train import MultiModelTrainer, Recipe
from hezar_train.errors import ConfigError, MissingDependencyError
from hezar_train.launch import asked_for, load_pictures, small_greys
from hezar_train.metrics import AdditiveMetric, MetricsHandler

DIGITS = "digits"
SIDE, LARGEST_PIXEL = 8, 16
NUM_PIXELS = SIDE * SIDE
NUM_NOISE = 16
NUM_SHOWN = 20
SPLIT_SEED = 0  # not the run's: every run is measured against the same digits


class Gan(MultiModelTrainer):
    """Train a "generator" against a "discriminator"."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Let the discriminator learn to tell real from drawn, then the generator to deceive it."""
        real, _ = batch
        drawn = self.draw(real)
        judge_loss = self.judge_loss(real, drawn.detach())
        self.learn("discriminator", judge_loss)
        maker_loss = self.maker_loss(drawn)
        self.learn("generator", maker_loss)
        return {"loss": judge_loss.detach() + maker_loss.detach()}

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """Draw as many digits as there are real ones, with the same noise in every evaluation."""
        real, _ = batch
        with torch.no_grad():
            drawn = self.draw(real)
            return {"logits": drawn, "loss": self.judge_loss(real, drawn) + self.maker_loss(drawn)}

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Draw as many digits as a batch has."""
        return self.models["generator"](torch.randn(len(like), NUM_NOISE, device=like.device))

    def judge_loss(self, real: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Return how badly the discriminator tells them apart."""
        judge = self.models["discriminator"]
        return says(judge(real), 1.0) + says(judge(drawn), 0.0)

    def maker_loss(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return how little the discriminator is deceived."""
        return says(self.models["discriminator"](drawn), 1.0)

    def pictures(self) -> Iterator[tuple[torch.Tensor, dict[str, str]]]:
        """Draw for the report what `predict` draws of the texts "0", "1" and so on."""
        texts = [str(number) for number in range(NUM_SHOWN)]
        noise = torch.stack([read(text, None)[0] for text in texts]).to(self.runtime.device)
        for text, drawn in zip(texts, self.models["generator"](noise), strict=True):
            yield drawn, {"noise of": f'"{text}"'}


def says(logits: torch.Tensor, answer: float) -> torch.Tensor:
    """Return the cross-entropy of verdicts to an answer."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))


class FrechetDistance(AdditiveMetric):
    """Compare the means and covariances of 8 x 8 pixels: |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2))."""

    name = "frechet"
    output_keys = ("frechet",)
    minimized = frozenset(output_keys)

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        """Return 1, and the pixels of both images with their products, for each pair of images."""
        both = [in_digit_size(images).flatten(1).double() for images in (predictions, targets)]
        products = [torch.einsum("ni,nj->nij", pixels, pixels).flatten(1) for pixels in both]
        return torch.cat([torch.ones_like(both[0][:, :1]), both[0], products[0], both[1], products[1]], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        """Return the distance of the normal distributions that have these moments."""
        count, *moments = sums
        drawn, real = torch.tensor(moments, dtype=torch.float64).chunk(2)
        (mean, spread), (real_mean, real_spread) = of_moments(drawn / count), of_moments(real / count)
        values, vectors = torch.linalg.eigh(spread)
        root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
        shared = torch.linalg.eigvalsh(root @ real_spread @ root).clamp(min=0).sqrt().sum()
        gap = (mean - real_mean).square().sum()
        return {self.name: float(gap + spread.trace() + real_spread.trace() - 2 * shared)}


def in_digit_size(images: torch.Tensor) -> torch.Tensor:
    """Bring larger images to the digits' size: of more pixels there would be too many products."""
    return images if images.shape[1:] == (SIDE, SIDE) else adaptive_avg_pool2d(images, SIDE)


def of_moments(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and covariance, of the means of pixels and of their products."""
    mean, products = moments.split([NUM_PIXELS, NUM_PIXELS**2])
    return mean, products.view(NUM_PIXELS, NUM_PIXELS) - mean.outer(mean)


def generator(hidden: int, side: int) -> nn.Module:
    """Build the network that draws a digit from noise."""
    return nn.Sequential(
        nn.Linear(NUM_NOISE, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, side * side), nn.Sigmoid(), nn.Unflatten(1, (side, side)),
    )  # fmt: skip


def discriminator(hidden: int, dropout: float, side: int) -> nn.Module:
    """Build the network that says, by a positive number, that a digit is real."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(side * side, 2 * hidden), nn.LeakyReLU(0.2), nn.Dropout(dropout),
        nn.Linear(2 * hidden, hidden), nn.LeakyReLU(0.2), nn.Dropout(dropout), nn.Linear(hidden, 1),
    )  # fmt: skip


def build(
    hidden: int = 128,
    dropout: float = 0.3,
    test_share: float = 0.2,
    dataset: str = DIGITS,
    image_column: str = "image",
    image_size: int = SIDE,
) -> Recipe:
    """Build both networks; a picture is its own label, for what is drawn is compared with it."""
    if dataset == DIGITS and image_size != SIDE:
        raise ConfigError(f"recipe.image_size={image_size} is for a recipe.dataset; the digits have {SIDE}")
    train, test = digits(test_share) if dataset == DIGITS else hub_parts(dataset, image_column, image_size, test_share)
    return Recipe(
        model={
            "generator": generator(hidden, image_size),
            "discriminator": discriminator(hidden, dropout, image_size),
        },
        train_dataset=TensorDataset(train, train),
        eval_dataset=TensorDataset(test, test),
        metrics_handler=MetricsHandler([FrechetDistance()]),
        trainer_class=partial(Gan, interact="parallel", eval_model="generator"),
    )


def digits(test_share: float) -> list[torch.Tensor]:
    """Split the digits, with every class in the same share in both parts."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "recipes", "the recipe 'gan'") from error
    found = load_digits()
    parts = train_test_split(found.images, test_size=test_share, stratify=found.target, random_state=SPLIT_SEED)
    return [torch.tensor(part / LARGEST_PIXEL, dtype=torch.float32) for part in parts]


def hub_parts(name: str, image_column: str, side: int, test_share: float) -> list[torch.Tensor]:
    """Read the pictures of a dataset."""
    rows = load_pictures(name, test_share, image_column)
    with asked_for(f"recipe.dataset={name}"):
        return [small_greys(part[image_column], side) for part in rows]


def read(given: Any, preprocessor: Any) -> tuple[torch.Tensor]:  # noqa: ARG001
    """Make noise of a text, always the same for the same text; a list of numbers is noise already."""
    if not isinstance(given, list):
        seeded = torch.Generator().manual_seed(zlib.crc32(str(given).encode()))
        return (torch.randn(NUM_NOISE, generator=seeded),)
    if len(given) != NUM_NOISE:
        raise ValueError(f"expected {NUM_NOISE} numbers, not {len(given)}")
    return (torch.tensor(given, dtype=torch.float32),)
