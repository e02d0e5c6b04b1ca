"""A run that is killed with SIGKILL, again and again, and started with the same command ends like the unbroken run.

The script that does it fifty times is `benchmarks/kill.py`.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"


@pytest.fixture(scope="module")
def kill() -> ModuleType:
    """The script, as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


@pytest.mark.parametrize(("workers", "kinds"), [(0, ["trains", "saves", "saves", "trains"]), (2, ["saves", "trains"])])
def test_a_killed_run_ends_like_the_unbroken_run(
    tmp_path: Path, kill: ModuleType, workers: int, kinds: list[str]
) -> None:
    unbroken = tmp_path / "unbroken"
    kill.load_workload().make_long_trainer(unbroken, ballast=kill.BALLAST, num_dataloader_workers=workers).train()
    found = kill.kill_and_compare(kill.Command(workers), tmp_path / "killed", unbroken, kinds, random.Random(workers))
    assert (found.kills, found.differences) == (len(kinds), [])
    assert found.inside_save >= kinds.count("saves")
