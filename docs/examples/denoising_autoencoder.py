"""A denoising autoencoder: clean images from noisy ones, with the trainer for a single model.

    python docs/examples/denoising_autoencoder.py [--output runs/denoising_autoencoder] [--resume]

Encoder and decoder are two modules under one model, so one optimizer trains both and a checkpoint holds both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, images
from torch import nn
from torch.nn.functional import mse_loss

from hezar_train import Trainer, TrainerConfig

NUM_CODES, NUM_HIDDEN, NOISE = 32, 256, 0.3


class DenoisingAutoencoder(nn.Module):
    """An encoder and a decoder that never see a clean image."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a noisy image, what it was cleaned to, and how far that is from the image itself."""
        noisy = pixels + NOISE * torch.randn_like(pixels)
        cleaned = self.decoder(self.encoder(noisy))
        return {"noisy": noisy, "cleaned": cleaned, "loss": mse_loss(cleaned, pixels)}


def build(output_dir: Path, **overrides: Any) -> Trainer:
    """Build the trainer; overrides are config fields."""
    settings = {"num_epochs": 40, "batch_size": 32, "learning_rate": 1e-3, "save_steps": 300, "save_total_limit": 2}
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(NUM_PIXELS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_CODES), nn.ReLU())
    decoder = nn.Sequential(
        nn.Linear(NUM_CODES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()
    )
    config = TrainerConfig(output_dir, **settings | overrides)
    return Trainer(config, DenoisingAutoencoder(encoder, decoder), *images())


def measure(trainer: Trainer) -> float:
    """Return the error that is left on held-out digits, as a share of the noise: 1 is no better than not cleaning."""
    return trainer.evaluate()["loss"] / NOISE**2


if __name__ == "__main__":
    run("denoising_autoencoder", build, measure, "error left of the noise")
