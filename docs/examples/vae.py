"""A variational autoencoder: an autoencoder that draws its codes at random, with the trainer for a single model.

    python docs/examples/vae.py [--output runs/vae] [--resume]

What the model draws is a function of the seed and the step, so a run that was killed draws the same again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, images
from torch import nn
from torch.nn.functional import binary_cross_entropy

from hezar_train import Trainer, TrainerConfig

NUM_CODES, NUM_HIDDEN = 8, 128


class VariationalAutoencoder(nn.Module):
    """An encoder to the mean and the variance of each code, and a decoder back to pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_PIXELS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, 2 * NUM_CODES))
        self.decoder = nn.Sequential(
            nn.Linear(NUM_CODES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()
        )

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the drawing, the codes' means and variances, and the loss."""
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        drawn = self.decoder(codes)
        return {"drawn": drawn, "mean": mean, "loss": vae_loss(drawn, pixels, mean, log_variance)}


def vae_loss(drawn: torch.Tensor, pixels: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Return the negative evidence bound per pixel: the cross-entropy, and the divergence from a standard normal."""
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
    return binary_cross_entropy(drawn, pixels) + divergence / pixels.numel()


def build(output_dir: Path, **overrides: Any) -> Trainer:
    """Build the trainer; overrides are config fields."""
    settings = {"num_epochs": 60, "batch_size": 32, "learning_rate": 2e-3, "save_steps": 500, "save_total_limit": 2}
    torch.manual_seed(0)
    config = TrainerConfig(output_dir, **settings | overrides)
    return Trainer(config, VariationalAutoencoder(), *images())


def measure(trainer: Trainer) -> float:
    """Return the negative evidence bound on held-out digits, in nats per pixel."""
    return trainer.evaluate()["loss"]


if __name__ == "__main__":
    run("vae", build, measure, "held-out negative evidence bound")
