"""The fixtures that the rows' checks are written against: a linear classifier on twenty rows, and a recorder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.loop import Moment
from hezar_train.types import Mode

NUM_FEATURES, NUM_CLASSES = 4, 3
MOMENTS = frozenset(moment.value for moment in Moment)


class Classifier(nn.Module):
    """One linear layer whose weights a seed fixes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x)
        return logits


class Recorder(Hook):
    """Note (mode, moment) at every moment of every mode."""

    modes = frozenset(Mode)

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        if name in MOMENTS:
            return lambda ctx: self.events.append((str(ctx.mode), name))
        raise AttributeError(name)


@pytest.fixture
def classifier() -> type[Classifier]:
    return Classifier


@pytest.fixture
def rec() -> Recorder:
    return Recorder()


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    """Return a function that makes labelled samples as a plain list of dicts."""

    def make(count: int = 20, seed: int = 1) -> list[dict[str, Any]]:
        points = torch.randn(count, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
        return [{"x": point, "labels": int(point[:NUM_CLASSES].argmax())} for point in points]

    return make


@pytest.fixture
def toy(tmp_path: Path, rows: Any) -> Callable[..., Trainer]:
    """Return a function that builds a trainer of five steps an epoch; what is not in `arguments` is config."""

    def build(cls: type[Trainer] = Trainer, out: str | Path = "run", **given: Any) -> Trainer:
        arguments = {"model": Classifier(), "train_dataset": rows(), **given.pop("arguments", {})}
        settings = {"batch_size": 4, "learning_rate": 0.1, "criterion": "CrossEntropyLoss", "use_cpu": True, **given}
        return cls(TrainerConfig(tmp_path / out, **settings), **arguments)

    return build


@pytest.fixture
def weights_of() -> Callable[[Any], list[float]]:
    """Return a function that lists all weights of a trainer or a model."""

    def read(owner: Any) -> list[float]:
        model = getattr(owner, "model", owner)
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]

    return read
