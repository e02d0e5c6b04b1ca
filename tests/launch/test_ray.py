"""A run under Ray Train is torchrun's, and stays it when workers are killed; what ends one worker, Ray gets to see."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hezar_train.events.run_records import read_starts

ROOT = Path(__file__).parents[2]
BEHAVIOUR = ROOT / "tests" / "behaviour"
EXAMPLE = ROOT / "docs" / "examples" / "ray_train.py"
STEPS_OF_EPOCH = 13  # of three workers
RAY = importlib.util.find_spec("ray")
Finish = Callable[..., str]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(RAY is None, reason="ray is not installed: pip install -c constraints.txt '.[ray]'"),
]


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Finish:
    """Return a function that runs a script to its end and returns its output."""
    home = tmp_path_factory.mktemp("home")  # where Ray puts the token of its cluster
    found = str(Path(RAY.origin).parents[1]) if RAY is not None and RAY.origin else ""
    variables = {
        "HOME": str(home), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(BEHAVIOUR), found]),
    }  # fmt: skip

    def call(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)], env={**os.environ, **variables}, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    return call


@pytest.fixture(scope="module")
def unbroken(finish: Finish, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on three processes that torchrun has started and nothing happened to."""
    out: Path = tmp_path_factory.mktemp("unbroken") / "run"
    finish("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 3, BEHAVIOUR / "workload.py", out)
    return out


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], list[str]]:
    monkeypatch.syspath_prepend(str(BEHAVIOUR))
    found: Callable[[Path, Path], list[str]] = importlib.import_module("workload").differences
    return found


def train(finish: Finish, out: Path, workers: int, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return what the run under Ray has found, and all that was said."""
    said = finish(Path(__file__).with_name("ray_run.py"), out, workers, *arguments)
    (found,) = re.findall(r"^FOUND (.*)$", said, re.MULTILINE)
    return json.loads(found), said


def test_a_run_under_ray_is_that_of_torchrun_in_the_group_that_ray_has_made(
    finish: Finish, unbroken: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    found, said = train(finish, tmp_path / "run", 3)
    assert found == {"own_group": False, "backend": "gloo", "device": "cpu"}
    assert "SIGTERM and Ctrl-C will not be followed by a save" in said
    assert differences(unbroken, tmp_path / "run") == []


def test_workers_that_are_killed_inside_an_epoch_are_made_up_for_bit_by_bit(
    finish: Finish, unbroken: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    train(finish, tmp_path / "run", 3, "0:10:SIGKILL", "2:24:SIGKILL")
    _, first, second = (start["step"] for start in read_starts(tmp_path / "run"))
    assert 0 < first <= 10 < second <= 24
    assert first % STEPS_OF_EPOCH
    assert second % STEPS_OF_EPOCH
    assert differences(unbroken, tmp_path / "run") == []


def test_a_worker_that_is_stopped_is_named_and_the_run_goes_on_without_it(
    finish: Finish, unbroken: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    _, said = train(finish, tmp_path / "run", 3, "1:10:SIGSTOP")
    assert re.search(r"LostProcessError: process [02] of 3 got no answer .*: process 1 gives no sign of life", said)
    assert len(read_starts(tmp_path / "run")) == 2
    assert differences(unbroken, tmp_path / "run") == []


def test_an_error_of_a_worker_reaches_whoever_called_fit_as_it_was(finish: Finish, tmp_path: Path) -> None:
    found, _ = train(finish, tmp_path / "run", 1, "--bad-sample")
    assert found["error"] == "NonFiniteError"
    assert 7 in found["samples"]


def test_the_example_learns_and_is_done_when_it_is_typed_again(finish: Finish, tmp_path: Path) -> None:
    def accuracy() -> list[float]:
        said = finish(EXAMPLE, "--output", tmp_path / "run")
        return [float(one) for one in re.findall(r"accuracy (\S+) -> (\S+) with 2 workers", said)[0]]

    before, after = accuracy()
    assert before < 0.3
    assert after > 0.9
    assert accuracy() == [after, after]
