"""An autoencoder: images squeezed through a few numbers and drawn again, with an epoch of one's own.

    python docs/examples/autoencoder.py [--output runs/autoencoder] [--resume]

`train_epoch` is written as users of lernomatic write it; log, checkpoints and exact resume go on around it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, labelled
from torch import nn

from hezar_train.compat.lernomatic import Trainer

NUM_CODES, NUM_HIDDEN = 8, 128


class AutoencoderTrainer(Trainer):
    """Train a model to draw what it was shown; labels are ignored."""

    def train_epoch(self) -> None:
        """Go over the batches of an epoch."""
        self.model.train()
        for pixels, _ in self.train_loader:
            loss = self.criterion(self.model(pixels), pixels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss_history[self.loss_iter] = loss.item()
            self.loss_iter += 1

    def val_epoch(self) -> None:
        """Note the loss of each batch of held-out digits."""
        for pixels, _ in self.val_loader:
            self.val_loss_history[self.val_loss_iter] = self.criterion(self.model(pixels), pixels).item()
            self.val_loss_iter += 1


def build(output_dir: Path, **overrides: Any) -> AutoencoderTrainer:
    """Build the trainer; overrides are its keywords."""
    settings = {"num_epochs": 30, "batch_size": 32, "learning_rate": 2e-3, "weight_decay": 0.0, "save_total_limit": 2}
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(NUM_PIXELS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_CODES))
    decoder = nn.Sequential(
        nn.Linear(NUM_CODES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()
    )
    train, held_out = labelled()
    return AutoencoderTrainer(
        nn.Sequential(encoder, decoder), loss_function="MSELoss", checkpoint_dir=output_dir.parent,
        checkpoint_name=output_dir.name, **{"train_dataset": train, "val_dataset": held_out} | settings | overrides,
    )  # fmt: skip


def measure(trainer: AutoencoderTrainer) -> float:
    """Return the mean squared error per pixel on held-out digits."""
    pixels = labelled()[1].tensors[0]
    with torch.no_grad():
        return float(trainer.criterion(trainer.model(pixels), pixels))


if __name__ == "__main__":
    run("autoencoder", build, measure, "held-out squared error")
