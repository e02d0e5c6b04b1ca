"""A small run, and ways to make a checkpoint of it say something else with every hash in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Trainer, TrainerConfig
from hezar_train.checkpoint.manifest import Manifest, hash_file


def data() -> TensorDataset:
    numbers = torch.linspace(-1, 1, 24).reshape(12, 2)
    return TensorDataset(numbers, numbers.sum(1, keepdim=True))


def make_trainer(folder: Path, trainer_class: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    given = {"num_epochs": 2, "batch_size": 2, "save_steps": 4, "log_steps": 1, "criterion": "MSELoss"}
    config = TrainerConfig(str(folder), **{**given, **settings})
    return trainer_class(config, nn.Linear(2, 1), data())


def sealed(checkpoint: Path) -> Path:
    """Write the manifest that fits what lies in a checkpoint now, as whoever made it up would."""
    names = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    files = {name: hash_file(checkpoint / name) for name in names if name != "manifest.json"}
    (checkpoint / "manifest.json").write_bytes(Manifest(int(checkpoint.name), files).to_bytes())
    return checkpoint


def edit_state(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the sections of a checkpoint's state, and seal it."""
    path = checkpoint / "trainer_state.json"
    sections = json.loads(path.read_text())
    change(sections)
    path.write_text(json.dumps(sections))
    return sealed(checkpoint)


def add_tensor(checkpoint: Path, name: str, tensor: torch.Tensor) -> None:
    path = checkpoint / "optimizer.safetensors"
    save_file({**load_file(path), name: tensor}, path, {"format": "pt", "complex128": "[]"})


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("[0-9]*"))
