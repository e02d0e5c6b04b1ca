"""A variational autoencoder: an autoencoder that draws its codes at random, with an epoch of one's own.

    python docs/examples/vae.py [--output runs/vae] [--resume]

What the model draws is a function of the seed and the step, so a run that was killed draws the same again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, labelled
from torch import nn
from torch.nn.functional import binary_cross_entropy

from hezar_train.compat.lernomatic import Trainer

NUM_CODES, NUM_HIDDEN = 8, 128


class VariationalAutoencoder(nn.Module):
    """An encoder to the mean and the variance of each code, and a decoder back to pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_PIXELS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, 2 * NUM_CODES))
        self.decoder = nn.Sequential(
            nn.Linear(NUM_CODES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()
        )

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the drawing, and the codes' means and logarithms of variances."""
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


class VaeTrainer(Trainer):
    """Train by the evidence bound."""

    def train_epoch(self) -> None:
        """Go over the batches of an epoch."""
        self.model.train()
        for pixels, _ in self.train_loader:
            drawn, mean, log_variance = self.model(pixels)
            loss = vae_loss(drawn, pixels, mean, log_variance)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss_history[self.loss_iter] = loss.item()
            self.loss_iter += 1


def vae_loss(drawn: torch.Tensor, pixels: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Return the negative evidence bound per pixel: the cross-entropy, and the divergence from a standard normal."""
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
    return binary_cross_entropy(drawn, pixels) + divergence / pixels.numel()


def build(output_dir: Path, **overrides: Any) -> VaeTrainer:
    """Build the trainer; overrides are its keywords."""
    settings = {"num_epochs": 60, "batch_size": 32, "learning_rate": 2e-3, "weight_decay": 0.0, "save_total_limit": 2}
    torch.manual_seed(0)
    return VaeTrainer(
        VariationalAutoencoder(), train_dataset=labelled()[0], checkpoint_dir=output_dir.parent,
        checkpoint_name=output_dir.name, **settings | overrides,
    )  # fmt: skip


def measure(trainer: VaeTrainer) -> float:
    """Return the negative evidence bound on held-out digits, in nats per pixel."""
    pixels = labelled()[1].tensors[0]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        drawn, mean, log_variance = trainer.model(pixels)
    return float(vae_loss(drawn, pixels, mean, log_variance))


if __name__ == "__main__":
    run("vae", build, measure, "held-out negative evidence bound")
