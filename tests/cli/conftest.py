"""Ways to run the command line: in this process, which is fast, or in one of its own, as a user does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import hezar_train
from hezar_train.cli import root
from hezar_train.recipes import load_recipe
from hezar_train.recipes.trust import remember

ROOT = Path(hezar_train.__file__).parents[1]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Invoke = Callable[..., Result]
COMMAND = [sys.executable, "-m", "hezar_train"]

RECIPE = """\
import torch

from hezar_train import Recipe


def build(width: int = 2) -> Recipe:
    xs = torch.arange(24.0).reshape(12, 2) / 24
    data = torch.utils.data.TensorDataset(xs, xs.sum(dim=1, keepdim=True))
    return Recipe(torch.nn.Linear(width, 1), data, {"even": data, "odd": data})


def read(given, preprocessor):
    return (torch.tensor([float(part) for part in given.split()] if isinstance(given, str) else given),)
"""
CONFIG = """\
# For: sums of two numbers,
#   in no time
# Score: none
recipe:
  width: 2
trainer:
  output_dir: runs/sums
  task: regression
  batch_size: 4
  num_epochs: 2
  criterion: MSELoss
  learning_rate: 0.1
  metric_for_best_model: even.loss
"""


@pytest.fixture
def environment() -> dict[str, str]:
    """One thread, and the package of this source tree."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Run `hezar-train` with arguments in `tmp_path`, as a process of its own."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return call


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `hezar-train` with arguments in `tmp_path`, in this process; an unexpected error is the test's."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(root, arguments, input=stdin, catch_exceptions=False, prog_name="hezar-train")

    return call


@pytest.fixture
def smoke() -> str:
    """The config of a run of seconds."""
    return str(ROOT / "recipes" / "image_classification" / "smoke.yaml")


def write_recipe(folder: Path) -> Path:
    """Write a recipe that trains in a moment."""
    home = folder / "recipes" / "sums"
    home.mkdir(parents=True)
    (home / "recipe.py").write_text(RECIPE)
    (home / "config.yaml").write_text(CONFIG)
    return home


@pytest.fixture(scope="session")
def once_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its finished run, made once."""
    folder = tmp_path_factory.mktemp("trained")
    write_recipe(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(root, ["train", "sums"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def trained(once_trained: Path, tmp_path: Path) -> Path:
    """The folder of a finished run `runs/sums` in `tmp_path`, with its recipe beside; a copy to do anything with."""
    shutil.copytree(once_trained, tmp_path, dirs_exist_ok=True)
    remember(load_recipe(tmp_path / "recipes" / "sums"))  # as if it had been trained here
    return tmp_path / "runs" / "sums"
