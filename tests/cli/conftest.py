"""A way to run the command line as a user does: in a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hezar_train

ROOT = Path(hezar_train.__file__).parents[1]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
COMMAND = [sys.executable, "-m", "hezar_train"]


@pytest.fixture
def environment() -> dict[str, str]:
    """One thread, and the package of this source tree."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Run `hezar-train` with arguments in `tmp_path`."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return call


@pytest.fixture
def smoke() -> str:
    """The config of a run of seconds."""
    return str(ROOT / "recipes" / "digits" / "smoke.yaml")
