"""A small honest recipe and a small trainer, parts of which a test replaces by a mistake, answered in this process."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import IterableDataset, TensorDataset

from hezar_train import Hook, Mode, Trainer, TrainerConfig
from hezar_train.cli import root
from hezar_train.cli.exit_codes import EXIT_FAILED, show_unexpected
from hezar_train.recipes import load_recipe
from hezar_train.recipes.trust import remember
from hezar_train.runtime import logger

Answer = tuple[int, str]
Ask = Callable[..., Answer]

PARTS = {
    "before": "",
    "width": "width: int = 4",
    "layers": "torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))",
    "forward": "return self.net(x)",
    "own": "pass",
    "length": "return 32",
    "get": "return torch.ones(2) * i / 32, i % 2",
    "building": "pass",
    "model": "Net(width)",
    "train": "Data()",
    "eval": "Data()",
    "other": "",
    "read": "return (torch.tensor([float(part) for part in given.split()]),)",
}
RECIPE = """\
import os, sys
import numpy as np
import torch
from hezar_train import Recipe
{before}
class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = {layers}
    def forward(self, x):
        {forward}
    {own}
class Good:
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.ones(2) * i / 32, i % 2
class Data:
    def __len__(self):
        {length}
    def __getitem__(self, i):
        {get}
def build({width}):
    {building}
    return Recipe(model={model}, train_dataset={train}, eval_dataset={eval}{other})
def read(given, preprocessor):
    {read}
"""
CONFIG = """\
trainer:
  output_dir: runs/tiny
  batch_size: 8
  num_epochs: 1
  criterion: CrossEntropyLoss
"""


def write(**parts: str) -> None:
    """Write the recipe below the present folder, with some parts other than they should be."""
    home = Path("recipes/tiny")
    home.mkdir(parents=True, exist_ok=True)
    (home / "recipe.py").write_text(RECIPE.format(**PARTS | parts))
    (home / "config.yaml").write_text(CONFIG)


@pytest.fixture
def write_recipe() -> Callable[..., None]:
    """How to write the recipe, with mistakes."""
    return write


@contextmanager
def without_pytests_log() -> Iterator[None]:
    """Let the package speak as to a user who has not set up logging: pytest's handlers keep its warnings to the log."""
    everyone = logging.getLogger()
    kept, own, level = everyone.handlers, logger.handlers, logger.level
    everyone.handlers, logger.handlers = [], []
    try:
        yield
    finally:
        everyone.handlers, logger.handlers = kept, own
        logger.setLevel(level)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `hezar-train` with arguments; return its exit code and all that it wrote, as a user meets them."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: str | None = None) -> Answer:
        with without_pytests_log():
            done = CliRunner().invoke(root, arguments, input=stdin, prog_name="hezar-train")
        if done.exc_info is None or isinstance(done.exception, SystemExit | None):
            return done.exit_code, done.output
        show_unexpected(*done.exc_info)
        return EXIT_FAILED, done.output + capsys.readouterr().err

    return call


@pytest.fixture(scope="session")
def once_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe and its finished run, made once."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write()
        done = CliRunner().invoke(root, ["train", "tiny"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def trained(once_trained: Path, tmp_path: Path) -> Path:
    """A copy of the recipe and its finished run, in the test's own folder."""
    shutil.copytree(once_trained, tmp_path, dirs_exist_ok=True)
    remember(load_recipe(tmp_path / "recipes" / "tiny"))  # as if it had been trained here
    return tmp_path / "runs" / "tiny"


@pytest.fixture
def open_to_all(tmp_path: Path) -> Iterator[None]:
    """Let every user come to the test's folder, and read what is in it."""
    closed = [folder for folder in tmp_path.parents if folder.stat().st_mode & 0o005 != 0o005]
    modes = [(folder, folder.stat().st_mode) for folder in closed]
    for folder in closed:
        folder.chmod(0o755)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    yield
    for folder, mode in modes:
        folder.chmod(mode)


class Net(torch.nn.Module):
    """Two numbers in, two classes out."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Data:
    """Sixteen samples."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(2) * index / 16, index % 2


def config(**fields: Any) -> TrainerConfig:
    """Return a config of a small run in the present folder."""
    return TrainerConfig(**{"output_dir": "run", "batch_size": 4, "criterion": "CrossEntropyLoss"} | fields)


def trainer(**arguments: Any) -> Trainer:
    """Return a trainer of all three, some of which a row replaces by a mistake."""
    given = {"config": config(), "model": Net(), "train_dataset": Data()} | arguments
    return Trainer(**given)


@pytest.fixture
def call_names() -> dict[str, Any]:
    """What the rows of `calls.toml` are written with: a small model, its data, a config, and a trainer of all three."""
    kinds = (Data, Hook, IterableDataset, Mode, Net, TensorDataset, Trainer, TrainerConfig)
    return {kind.__name__: kind for kind in kinds} | {"config": config, "trainer": trainer, "torch": torch}
