"""The documented commands give one world of two processes; the wrong ones are refused or made right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORLD = Path(__file__).with_name("world.py")
PAGE = (ROOT / "docs" / "how_to" / "several_processes.md").read_text(encoding="utf-8")
BOTH = ["rank 0 of 2 sees [0, 1]", "rank 1 of 2 sees [0, 1]"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="these are the commands for a machine without"),
]


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Run a line of the shell in `tmp_path`, with `world.py` in the place of `train.py`."""
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def call(line: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = line.replace("train.py", shlex.join([str(WORLD), *flags]))
        return subprocess.run(
            command, shell=True, cwd=tmp_path, env={**environment, "PATH": path}, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip

    return call


def documented(*words: str) -> str:
    """Return the one line of the page that has all the words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [line for block in blocks for line in block.splitlines() if all(word in line for word in words)]
    return str(found)


COMMANDS = {
    "A": documented("ACCELERATE_USE_CPU=true"),
    "B": documented("--config_file cpu2.yaml"),
    "C": documented("--nproc_per_node 2 train.py", "OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 t"),
    "C with restarts": documented("--max-restarts 3"),
}


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)
def test_a_documented_command_makes_one_world_of_two(run: Run, tmp_path: Path, line: str) -> None:
    (content,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "cpu2.yaml").write_text(content)
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == BOTH


def test_two_worlds_of_one_are_refused_where_the_script_brings_its_accelerator(run: Run) -> None:
    done = run(COMMANDS["A"].removeprefix("ACCELERATE_USE_CPU=true "), "own")
    assert done.returncode == 1
    assert "refused: the launcher started 2 processes (WORLD_SIZE) but Accelerate sees one" in done.stderr
    assert "set ACCELERATE_USE_CPU=true" in done.stderr


def test_the_trainers_own_accelerator_takes_the_cpu_for_granted(run: Run) -> None:
    done = run(COMMANDS["A"].removeprefix("ACCELERATE_USE_CPU=true "))
    assert (done.returncode, sorted(done.stdout.split("\n"))[-2:]) == (0, BOTH)


@pytest.mark.parametrize("option", ["--num_processes 2", "--num_processes=2", "--num-processes 2"])
def test_a_launcher_that_silently_starts_one_process_is_refused(run: Run, option: str) -> None:
    done = run(f"accelerate launch --cpu {option} train.py")
    assert done.returncode == 1
    assert "refused: accelerate launch was asked for 2 processes and has started one" in done.stderr


def test_a_launcher_that_was_asked_for_one_process_is_not(run: Run) -> None:
    assert run("accelerate launch --cpu --num_processes 1 train.py").returncode == 0


def test_a_distributed_config_wants_more_than_one_process(run: Run) -> None:
    done = run("accelerate launch --cpu train.py", "distributed")
    assert done.returncode == 1
    assert "refused: distributed=True, but there is one process." in done.stderr
