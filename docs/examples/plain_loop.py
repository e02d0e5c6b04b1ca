"""A loop by hand with the parts of hezar_train: what `Trainer.train()` amounts to, to be read downwards.

    python docs/examples/plain_loop.py

One process, a loss that is a mean over samples, no hooks, no folder, no checkpoints. The order of the samples, the
windows, the seeds, the clipping and the schedule are the parts that a Trainer has, and so are the weights at the end,
bit by bit. Take it to see what a run does, or to begin a loop that is none of the Trainer's business.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from digits import NUM_CLASSES, NUM_PIXELS, labelled
from torch import nn
from torch.nn.functional import cross_entropy

from hezar_train import TrainerConfig
from hezar_train.data import Order, open_source, seed_device, step_seed
from hezar_train.plan import make_plan
from hezar_train.trainer.optimizer_setup import optimizer_for, schedule_for, scheduler_for
from hezar_train.trainer.train_step import Optimization

CPU = torch.device("cpu")


def make_config(output_dir: Any, **overrides: Any) -> TrainerConfig:
    """Return the settings, as a Trainer would take them: micro-batches of 16, three of them in an update."""
    settings = {
        "batch_size": 16, "gradient_accumulation_steps": 3, "num_epochs": 5, "learning_rate": 3e-3,
        "optimizer": "adamw", "lr_scheduler": "cosine_annealing", "max_grad_norm": 1.0,
        "criterion": "CrossEntropyLoss", "use_cpu": True,
    }  # fmt: skip
    return TrainerConfig(output_dir, **settings | overrides)


def make_model() -> nn.Module:
    """Return a network with dropout, which draws: in each step what the seed and the step say."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_PIXELS, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, NUM_CLASSES))


def train(model: nn.Module, data: Any, config: TrainerConfig) -> list[float]:
    """Train a model on (inputs, labels); return the loss of each update."""
    source = open_source(data, None, Order(config.batch_size, config.seed, shuffle=config.dataloader_shuffle))
    plan = make_plan(config, source.num_samples)
    optimizer = optimizer_for(model, config, CPU, default="adam")
    scheduler = scheduler_for(optimizer, config, plan, objective="minimize", default=None)
    schedule = schedule_for(optimizer, scheduler, config, plan, objective="minimize")
    optimization = Optimization(optimizer, schedule, max_grad_norm=config.max_grad_norm)
    losses: list[float] = []
    step = 0
    model.train()
    for epoch in range(1, plan.num_epochs + 1):
        for window in source.windows(plan, epoch, position=0, steps_left=plan.total_steps - step):
            window_loss = torch.zeros(())
            for inputs, labels in window.batches:
                seed_device(step_seed(config.seed, step, 0), CPU)
                loss = cross_entropy(model(inputs), labels)
                share = len(labels) / window.count  # so that micro-batches of any sizes add up to the window's mean
                (loss * share).backward()
                window_loss = window_loss + loss.detach() * share
                step += 1
            norm = float(optimization.gradient_norm())
            if not math.isfinite(norm) or not math.isfinite(float(window_loss)):
                raise ArithmeticError(f"loss {float(window_loss)}, gradient norm {norm} at step {step}: not applied")
            optimization.clip(norm)
            optimization.step()
            optimization.zero_grad()
            losses.append(float(window_loss))
            schedule.after_update(len(losses), window.ends_epoch)
    return losses


def accuracy(model: nn.Module, data: Any) -> float:
    """Return the share of digits that a model names rightly."""
    pixels, labels = data.tensors
    model.eval()
    with torch.no_grad():
        return float((model(pixels).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    training_data, held_out = labelled()
    network = make_model()
    before = accuracy(network, held_out)
    with tempfile.TemporaryDirectory() as folder:  # a config names one; this loop writes nothing
        found = train(network, training_data, make_config(folder))
    print(f"plain_loop: {len(found)} updates, held-out accuracy {before:.4g} -> {accuracy(network, held_out):.4g}")
