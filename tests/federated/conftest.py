"""A worker: a linear classifier on twenty rows of its own, five steps an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Trainer, TrainerConfig

NUM_FEATURES, NUM_CLASSES = 4, 3


class Classifier(nn.Module):
    """One linear layer whose weights a seed fixes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x)
        return logits


def make_rows(count: int = 20, seed: int = 1) -> list[dict[str, Any]]:
    """Return labelled samples."""
    points = torch.randn(count, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
    return [{"x": point, "labels": int(point[:NUM_CLASSES].argmax())} for point in points]


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    return make_rows


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., Trainer]:
    """Return a function that builds a worker's trainer; what is not in `arguments` is config."""

    def build(out: str = "run", arguments: dict[str, Any] | None = None, **settings: Any) -> Trainer:
        given = {"model": Classifier(), "train_dataset": make_rows(), **(arguments or {})}
        fields = {"batch_size": 4, "learning_rate": 0.1, "optimizer": "sgd", "criterion": "CrossEntropyLoss"}
        return Trainer(TrainerConfig(tmp_path / out, **fields | settings), **given)

    return build


@pytest.fixture
def weights_of() -> Callable[[Trainer], torch.Tensor]:
    """Return a function that copies all weights of a trainer's model into one vector."""

    def read(trainer: Trainer) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])

    return read
