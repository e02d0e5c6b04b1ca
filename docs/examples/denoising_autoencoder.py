"""A denoising autoencoder: clean images from noisy ones, with two modules and one optimizer over both.

    python docs/examples/denoising_autoencoder.py [--output runs/denoising_autoencoder] [--resume]

The trainer has no `model`: what it keeps as attributes is what it trains and saves. The noise is a function of the seed
and the step, so a run that was killed draws the same again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, labelled
from torch import nn
from torch.nn.functional import mse_loss

from hezar_train.compat.lernomatic import Trainer

NUM_CODES, NUM_HIDDEN, NOISE = 32, 256, 0.3


class DenoisingTrainer(Trainer):
    """Train an encoder and a decoder that never see a clean image."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, **kwargs: Any) -> None:
        self.encoder, self.decoder = encoder, decoder
        super().__init__(None, **kwargs)

    def _init_optimizer(self) -> None:
        trained = [*self.encoder.parameters(), *self.decoder.parameters()]
        self.optimizer = torch.optim.Adam(trained, lr=self.learning_rate)

    def train_epoch(self) -> None:
        """Go over the batches of an epoch."""
        for pixels, _ in self.train_loader:
            noisy = pixels + NOISE * torch.randn_like(pixels)
            loss = mse_loss(self.decoder(self.encoder(noisy)), pixels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss_history[self.loss_iter] = loss.item()
            self.loss_iter += 1


def build(output_dir: Path, **overrides: Any) -> DenoisingTrainer:
    """Build the trainer; overrides are its keywords."""
    settings = {"num_epochs": 40, "batch_size": 32, "learning_rate": 1e-3, "save_total_limit": 2}
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(NUM_PIXELS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_CODES), nn.ReLU())
    decoder = nn.Sequential(
        nn.Linear(NUM_CODES, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()
    )
    return DenoisingTrainer(
        encoder, decoder, train_dataset=labelled()[0], checkpoint_dir=output_dir.parent,
        checkpoint_name=output_dir.name, **settings | overrides,
    )  # fmt: skip


def measure(trainer: DenoisingTrainer) -> float:
    """Return the error that is left on held-out digits, as a share of the noise: 1 is no better than not cleaning."""
    pixels = labelled()[1].tensors[0]
    noisy = pixels + NOISE * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(mse_loss(trainer.decoder(trainer.encoder(noisy)), pixels)) / NOISE**2


if __name__ == "__main__":
    run("denoising_autoencoder", build, measure, "error left of the noise")
