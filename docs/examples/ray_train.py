"""A run under Ray Train: a TorchTrainer whose loop is a Trainer. What dies is started again, and the run goes on.

    pip install "hezar-train[recipes,ray]"
    python docs/examples/ray_train.py --workers 2 --output runs/ray_train

Ray starts the workers and joins them in a process group, the Trainer does the rest, checkpoints included. Kill a worker
while it runs, or the whole command, which goes on when it is typed again: the weights at the end are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from digits import NUM_CLASSES, NUM_PIXELS, labelled
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from hezar_train import Trainer, TrainerConfig


def build(output_dir: Any, **overrides: Any) -> Trainer:
    """Make the trainer, on each worker; the samples of an update do not depend on how many there are."""
    settings = {
        "global_batch_size": 32, "batch_size": 16, "num_epochs": 10, "learning_rate": 3e-3, "save_steps": 20,
        "criterion": "CrossEntropyLoss", "num_threads": 1, "collective_timeout_seconds": 60.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(NUM_PIXELS, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))
    return Trainer(TrainerConfig(output_dir, **settings | overrides), model, labelled()[0])


def measure(trainer: Trainer) -> float:
    """Return the share of held-out digits that are named rightly."""
    pixels, labels = labelled()[1].tensors
    trainer.model.eval()
    with torch.no_grad():
        return float((trainer.model(pixels.to(trainer.device)).argmax(1).cpu() == labels).float().mean())


def train_on_worker(settings: dict[str, Any]) -> dict[str, float]:
    """Train on one of Ray's workers; all of them call this, and again after one has died."""
    trainer = build(settings["output_dir"], resume_from_checkpoint=True)
    before = measure(trainer)
    trainer.train()
    return {"before": before, "after": measure(trainer)}


def main() -> None:
    """Start Ray on this machine, or take part in the cluster that RAY_ADDRESS names, and train."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits under Ray Train.")
    parser.add_argument("--output", type=Path, default=Path("runs/ray_train"), help="folder of the run, on all hosts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    options = parser.parse_args()
    output = options.output.resolve()  # a worker's own folder is one of Ray's
    ray.init()
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"output_dir": str(output)},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name=output.name, storage_path=str(output.parent / "ray_results"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )  # fmt: skip
    found = trainer.fit().return_value
    print(f"ray_train: accuracy {found['before']:.4g} -> {found['after']:.4g} with {options.workers} workers")


if __name__ == "__main__":
    main()
