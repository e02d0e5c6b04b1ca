"""Ways to start processes as a user does, each in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hezar_train

ROOT = Path(hezar_train.__file__).parents[1]
BIN = Path(sys.executable).parent
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "TORCHELASTIC_RESTART_COUNT")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def environment() -> dict[str, str]:
    """One thread, the package of this source tree, and nothing that another launcher left."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"}


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Start:
    """Start a command in `tmp_path`, with both its streams to be read."""

    def call(*command: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(map(str, command)), cwd=tmp_path, env={**environment, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return call


RECIPE = '''\
import time

import torch

from hezar_train import Recipe


class Product(torch.nn.Linear):
    """A line that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(2, 1)
        self.seconds = seconds

    def forward(self, pairs):
        time.sleep(self.seconds)
        return super().forward(pairs)


def build(seconds: float = 0.0) -> Recipe:
    pairs = torch.rand(64, 2)
    return Recipe(Product(seconds), torch.utils.data.TensorDataset(pairs, pairs.prod(dim=1, keepdim=True)))
'''
CONFIG = """\
trainer:
  output_dir: run
  batch_size: 4
  criterion: MSELoss
  learning_rate: 0.1
  num_epochs: 5
  log_steps: 8
  save_steps: 4
  save_total_limit:
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe of 40 steps with two processes, which starts afresh; `recipe.seconds` makes a step last."""
    folder = tmp_path / "product"
    folder.mkdir()
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "config.yaml").write_text(CONFIG)
    return str(folder)


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Wait until something is so, or fail after a while."""

    def wait(condition: Callable[[], object], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)

    return wait
