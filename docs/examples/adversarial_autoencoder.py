"""An adversarial autoencoder: a discriminator makes the codes of an autoencoder look like a normal distribution.

    python docs/examples/adversarial_autoencoder.py [--output runs/adversarial_autoencoder] [--resume]

Three modules and four optimizers: the encoder learns to reconstruct with one and to deceive with another. All are
attributes of the trainer, as in lernomatic, and in every checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, distance_from_digits, labelled
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import Adam, Optimizer

from hezar_train.compat.lernomatic import Trainer

NUM_CODES, NUM_HIDDEN, NUM_JUDGED = 8, 128, 1000


class AdversarialTrainer(Trainer):
    """Train an encoder (q), a decoder (p) and a discriminator of codes (d)."""

    def __init__(self, q_net: nn.Module, p_net: nn.Module, d_net: nn.Module, **kwargs: Any) -> None:
        self.q_net, self.p_net, self.d_net = q_net, p_net, d_net
        super().__init__(None, **kwargs)

    def _init_optimizer(self) -> None:
        self.q_encoder_optim, self.p_decoder_optim, self.d_optim, self.q_deceiver_optim = (
            Adam(net.parameters(), lr=rate * self.learning_rate)
            for net, rate in ((self.q_net, 1.0), (self.p_net, 1.0), (self.d_net, 1.0), (self.q_net, 0.5))
        )

    def train_epoch(self) -> None:
        """Reconstruct; tell codes from normal noise; deceive."""
        for pixels, _ in self.train_loader:
            reconstruction = mse_loss(self.p_net(self.q_net(pixels)), pixels)
            _descend(reconstruction, self.q_encoder_optim, self.p_decoder_optim)
            codes = self.q_net(pixels)
            told = _says(self.d_net(torch.randn_like(codes)), 1.0) + _says(self.d_net(codes.detach()), 0.0)
            _descend(told, self.d_optim)
            _descend(_says(self.d_net(codes), 1.0), self.q_deceiver_optim)
            self.loss_history[self.loss_iter] = reconstruction.item()
            self.loss_iter += 1


def build(output_dir: Path, **overrides: Any) -> AdversarialTrainer:
    """Build the trainer; overrides are its keywords."""
    settings = {"num_epochs": 60, "batch_size": 32, "learning_rate": 1e-3, "save_every": 500, "save_total_limit": 2}
    torch.manual_seed(0)
    encoder, discriminator = _layers(NUM_PIXELS, NUM_CODES), _layers(NUM_CODES, 1)
    decoder = nn.Sequential(_layers(NUM_CODES, NUM_PIXELS), nn.Sigmoid())
    return AdversarialTrainer(
        encoder, decoder, discriminator, train_dataset=labelled()[0], checkpoint_dir=output_dir.parent,
        checkpoint_name=output_dir.name, **settings | overrides,
    )  # fmt: skip


def measure(trainer: AdversarialTrainer) -> float:
    """Return the Frechet distance of images decoded from normal noise from held-out digits."""
    codes = torch.randn(NUM_JUDGED, NUM_CODES, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return distance_from_digits(trainer.p_net(codes))


def _layers(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, num_outputs))


def _says(logits: torch.Tensor, answer: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))


def _descend(loss: torch.Tensor, *optimizers: Optimizer) -> None:
    """Step optimizers on a loss that their parameters share; no other parameter gets a gradient."""
    trained = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    loss.backward(inputs=trained)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run("adversarial_autoencoder", build, measure, "Frechet distance")
