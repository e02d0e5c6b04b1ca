"""A GAN: two models that learn from each other, each with its own loss and optimizer, saved and resumed as one run.

    python docs/examples/gan.py [--output runs/gan] [--resume]

`learn(name, loss)` gives gradients to the named model alone: the generator's loss goes through the discriminator and
leaves it as it is. The losses of both are logged as `train.generator.loss` and `train.discriminator.loss`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from command import run
from digits import NUM_PIXELS, distance_from_digits, images
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from hezar_train import TrainerConfig
from hezar_train.compat.lernomatic import MultiModelTrainer

NUM_NOISE, NUM_HIDDEN, NUM_JUDGED = 16, 128, 1000


class GanTrainer(MultiModelTrainer):
    """Train a "generator" against a "discriminator"."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Let the discriminator learn to tell real from made, then the generator to deceive it."""
        (real,) = batch
        made = self.models["generator"](torch.randn(len(real), NUM_NOISE))
        judge = self.models["discriminator"]
        judge_loss = _says(judge(real), 1.0) + _says(judge(made.detach()), 0.0)
        self.learn("discriminator", judge_loss)
        maker_loss = _says(judge(made), 1.0)
        self.learn("generator", maker_loss)
        return {"loss": judge_loss.detach() + maker_loss.detach()}

    def get_loss_history(self) -> tuple[list[float], list[float]]:
        """Return the losses of generator and discriminator, one per step."""
        generator, discriminator = (
            [value for value, _ in self.storage.history(f"train.{name}.loss").values()] for name in self.models
        )
        return generator, discriminator


def build(output_dir: Path, **overrides: Any) -> GanTrainer:
    """Build the trainer; overrides are config fields."""
    settings = {
        "num_epochs": 100,
        "batch_size": 32,
        "optimizer": "adam",
        "optimizer_kwargs": {"betas": [0.5, 0.999]},
        "learning_rate": 1e-3,
        "save_steps": 500,
        "save_total_limit": 2,
    }
    torch.manual_seed(0)
    models = {
        "generator": nn.Sequential(*_hidden(NUM_NOISE), nn.Linear(NUM_HIDDEN, NUM_PIXELS), nn.Sigmoid()),
        "discriminator": nn.Sequential(*_hidden(NUM_PIXELS), nn.Linear(NUM_HIDDEN, 1)),
    }
    config = TrainerConfig(output_dir, **settings | overrides)
    return GanTrainer(config, models, images()[0], interact="parallel")


def measure(trainer: GanTrainer) -> float:
    """Return the Frechet distance of made digits from held-out ones."""
    noise = torch.randn(NUM_JUDGED, NUM_NOISE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made = trainer.models["generator"](noise)
    return distance_from_digits(made)


def _hidden(num_inputs: int) -> list[nn.Module]:
    return [nn.Linear(num_inputs, NUM_HIDDEN), nn.LeakyReLU(0.2), nn.Linear(NUM_HIDDEN, NUM_HIDDEN), nn.LeakyReLU(0.2)]


def _says(logits: torch.Tensor, answer: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))


if __name__ == "__main__":
    run("gan", build, measure, "Frechet distance")
