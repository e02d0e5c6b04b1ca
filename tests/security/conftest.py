"""A small trained run for every test here."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.security.hostile import make_trainer


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained to its end; only `run` hands out copies that may be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    make_trainer(folder).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, with checkpoints at the steps 4, 8 and 12."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO)
    return lambda: caplog.text
