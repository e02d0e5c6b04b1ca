"""An autoencoder: images squeezed through a few numbers and drawn again, with the trainer for a single model.

    python docs/examples/autoencoder.py [--output runs/autoencoder] [--resume]

The data is labelled, and the labels are ignored: a model that returns its own "loss" needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, labelled
from torch import nn

from hezar_train import Trainer, TrainerConfig

NUM_CODES, NUM_HIDDEN = 8, 128


class Autoencoder(nn.Module):
    """An encoder to a few numbers and a decoder back to pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_PIXELS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_CODES))
        self.decoder = nn.Sequential(
            nn.Linear(NUM_CODES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()
        )

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the drawing and its mean squared error."""
        drawn = self.decoder(self.encoder(pixels))
        return {"drawn": drawn, "loss": nn.functional.mse_loss(drawn, pixels)}


def build(output_dir: Path, **overrides: Any) -> Trainer:
    """Build the trainer; overrides are config fields."""
    settings = {"num_epochs": 30, "batch_size": 32, "learning_rate": 2e-3, "save_steps": 200, "save_total_limit": 2}
    torch.manual_seed(0)
    config = TrainerConfig(output_dir, **settings | overrides)
    return Trainer(config, Autoencoder(), *labelled())


def measure(trainer: Trainer) -> float:
    """Return the mean squared error per pixel on held-out digits."""
    return trainer.evaluate()["loss"]


if __name__ == "__main__":
    run("autoencoder", build, measure, "held-out squared error")
