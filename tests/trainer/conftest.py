"""A toy run: a linear classifier on twenty rows, five steps an epoch, on the CPU; and how to read what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from hezar_train import Trainer, TrainerConfig

NUM_ROWS, NUM_FEATURES, NUM_CLASSES = 20, 4, 3

TRAINER_ARGUMENTS = frozenset(
    {
        "model", "train_dataset", "eval_dataset", "data_collator", "preprocessor", "metrics_handler", "optimizer",
        "lr_scheduler", "accelerator", "hooks",
    }
)  # fmt: skip


class Classifier(nn.Module):
    """One linear layer, its weights fixed by a seed; returns a bare tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x)
        return logits


def make_rows(count: int = NUM_ROWS, seed: int = 1) -> list[dict[str, Any]]:
    """Return samples as a plain list of dicts."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, NUM_FEATURES, generator=generator)
    return [{"x": point, "labels": int(point[:NUM_CLASSES].argmax())} for point in points]


@pytest.fixture
def classifier() -> type[Classifier]:
    return Classifier


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    return make_rows


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Trainer]:
    """Return a function that builds the toy's Trainer; keywords are the Trainer's arguments or fields of the config."""

    def build(cls: type[Trainer] = Trainer, out: str | Path = "run", **given: Any) -> Trainer:
        # "optimizer" and "lr_scheduler" are both: names belong to the config, objects to the trainer
        ours = {k: v for k, v in given.items() if k in TRAINER_ARGUMENTS and not isinstance(v, str)}
        settings: dict[str, Any] = {"batch_size": 4, "learning_rate": 0.1, "criterion": "CrossEntropyLoss"}
        settings |= {key: value for key, value in given.items() if key not in ours}
        arguments: dict[str, Any] = {"model": None, "train_dataset": None} | ours
        if arguments["model"] is None:
            arguments["model"] = Classifier()
        if arguments["train_dataset"] is None:
            arguments["train_dataset"] = make_rows()
        return cls(TrainerConfig(tmp_path / out, **settings), **arguments)

    return build


@pytest.fixture
def with_scaler() -> Iterator[Callable[..., Accelerator]]:
    """Return a function that makes an Accelerator with a real gradient scaler."""

    def make(init_scale: float = 1024.0) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
        return accelerator

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def logged(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that reads all rows of a run's metrics.json."""

    def read(out: str | Path = "run") -> list[dict[str, Any]]:
        (path,) = (tmp_path / out / "logs").glob("*/metrics.json")
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read


@pytest.fixture
def saved_steps(tmp_path: Path) -> Callable[..., list[int]]:
    """Return a function that lists the steps of a run's checkpoints."""

    def read(out: str | Path = "run") -> list[int]:
        folder = tmp_path / out / "checkpoints"
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []

    return read
