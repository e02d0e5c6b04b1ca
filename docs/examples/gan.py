"""A GAN: two models that learn from each other, each with its own loss and optimizer, saved and resumed as one run.

    python docs/examples/gan.py [--output runs/gan] [--resume]

Modules and optimizers are attributes of the trainer, as in lernomatic; every checkpoint has all of them. The losses of
both are logged, as `train.g_loss` and `train.d_loss`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from command import run
from digits import NUM_PIXELS, distance_from_digits, labelled
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam

from hezar_train.compat.lernomatic import Trainer

NUM_NOISE, NUM_HIDDEN, NUM_JUDGED = 16, 128, 1000


class GanTrainer(Trainer):
    """Train a generator against a discriminator."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module, **kwargs: Any) -> None:
        self.generator, self.discriminator = generator, discriminator
        super().__init__(None, **kwargs)

    def _init_optimizer(self) -> None:
        self.optim_g = Adam(self.generator.parameters(), lr=self.learning_rate, betas=(0.5, 0.999))
        self.optim_d = Adam(self.discriminator.parameters(), lr=self.learning_rate, betas=(0.5, 0.999))

    def _init_history(self) -> None:
        self.loss_iter, size = 0, len(self.train_loader) * self.num_epochs
        self.g_loss_history, self.d_loss_history = np.zeros(size), np.zeros(size)

    def train_epoch(self) -> None:
        """Let the discriminator learn to tell real from made, then the generator to deceive it."""
        for real, _ in self.train_loader:
            made = self.generator(torch.randn(len(real), NUM_NOISE))
            d_loss = _says(self.discriminator(real), 1.0) + _says(self.discriminator(made.detach()), 0.0)
            self.optim_d.zero_grad()
            d_loss.backward()
            self.optim_d.step()
            g_loss = _says(self.discriminator(made), 1.0)
            self.optim_g.zero_grad()
            g_loss.backward()
            self.optim_g.step()
            self.g_loss_history[self.loss_iter] = g_loss.item()
            self.d_loss_history[self.loss_iter] = d_loss.item()
            self.loss_iter += 1


def build(output_dir: Path, **overrides: Any) -> GanTrainer:
    """Build the trainer; overrides are its keywords."""
    settings = {"num_epochs": 100, "batch_size": 32, "learning_rate": 1e-3, "save_every": 500, "save_total_limit": 2}
    torch.manual_seed(0)
    generator = nn.Sequential(*_hidden(NUM_NOISE), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid())
    discriminator = nn.Sequential(*_hidden(NUM_PIXELS), nn.Linear(NUM_HIDDEN, 1))
    return GanTrainer(
        generator, discriminator, train_dataset=labelled()[0], checkpoint_dir=output_dir.parent,
        checkpoint_name=output_dir.name, **settings | overrides,
    )  # fmt: skip


def measure(trainer: GanTrainer) -> float:
    """Return the Frechet distance of made digits from held-out ones."""
    noise = torch.randn(NUM_JUDGED, NUM_NOISE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return distance_from_digits(trainer.generator(noise))


def _hidden(num_inputs: int) -> list[nn.Module]:
    return [nn.Linear(num_inputs, NUM_HIDDEN), nn.LeakyReLU(0.2), nn.Linear(NUM_HIDDEN, NUM_HIDDEN), nn.LeakyReLU(0.2)]


def _says(logits: torch.Tensor, answer: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))


if __name__ == "__main__":
    run("gan", build, measure, "Frechet distance")
