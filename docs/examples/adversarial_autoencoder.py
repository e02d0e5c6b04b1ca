"""An adversarial autoencoder: a discriminator makes the codes of an autoencoder look like a normal distribution.

    python docs/examples/adversarial_autoencoder.py [--output runs/adversarial_autoencoder] [--resume]

Three models and four optimizers: the encoder learns to reconstruct with one and to deceive with another. The fourth
belongs to no model, so `register_for_checkpointing` keeps it in the checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, distance_from_digits, images
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import Adam, Optimizer

from hezar_train import MultiModelTrainer, TrainerConfig

NUM_CODES, NUM_HIDDEN, NUM_JUDGED = 8, 128, 1000


class AdversarialTrainer(MultiModelTrainer):
    """Train "encoder", "decoder" and "discriminator"."""

    def __init__(self, *args: Any, deceive_rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deceiver = Adam(self.models["encoder"].parameters(), lr=deceive_rate)
        self.register_for_checkpointing("deceiver", self.deceiver)

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Reconstruct; tell codes from normal noise; deceive."""
        (pixels,) = batch
        encoder, decoder, judge = self.models.values()
        reconstruction = mse_loss(decoder(encoder(pixels)), pixels)
        _descend(reconstruction, self.optimizers["encoder"], self.optimizers["decoder"])
        codes = encoder(pixels)
        told = _says(judge(torch.randn_like(codes)), 1.0) + _says(judge(codes.detach()), 0.0)
        self.learn("discriminator", told)
        deceit = _says(judge(codes), 1.0)
        _descend(deceit, self.deceiver)
        self.storage.put_scalar("train.encoder.loss", deceit.detach())
        return {"loss": reconstruction.detach()}


def build(output_dir: Path, **overrides: Any) -> AdversarialTrainer:
    """Build the trainer; overrides are config fields."""
    settings = {"num_epochs": 60, "batch_size": 32, "learning_rate": 1e-3, "save_steps": 500, "save_total_limit": 2}
    torch.manual_seed(0)
    models = {
        "encoder": _layers(NUM_PIXELS, NUM_CODES),
        "decoder": nn.Sequential(_layers(NUM_CODES, NUM_PIXELS), nn.Sigmoid()),
        "discriminator": _layers(NUM_CODES, 1),
    }
    config = TrainerConfig(output_dir, **settings | overrides)
    return AdversarialTrainer(config, models, images()[0], interact="parallel", deceive_rate=5e-4)


def measure(trainer: AdversarialTrainer) -> float:
    """Return the Frechet distance of images decoded from normal noise from held-out digits."""
    codes = torch.randn(NUM_JUDGED, NUM_CODES, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return distance_from_digits(trainer.models["decoder"](codes))


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
