"""The Slurm script, with stand-ins for `srun` and `scontrol`: warned, saved, queued again, resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "how_to" / "slurm.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""

Start = Callable[..., "subprocess.Popen[str]"]
Wait = Callable[..., None]
pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path, recipe: str, start: Start, environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Run the script as Slurm would on one machine, with two processes."""
    for name, content in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "NUM_PROCESSES": "2"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{environment['PATH']}"
    return lambda *overrides: start("bash", str(SCRIPT), recipe, *overrides, PATH=path, **given)


def test_a_warned_job_saves_is_queued_again_and_goes_on(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path, wait_for: Wait
) -> None:
    first = job("recipe.seconds=0.05", "save_steps=1000")
    wait_for((tmp_path / "run/ledger.jsonl").exists)
    time.sleep(1)
    first.send_signal(signal.SIGUSR1)
    first.communicate(timeout=120)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("[0-9]*"))
    assert (first.returncode, (tmp_path / "requeued").read_text()) == (0, "requeue 4711\n")
    second = job("recipe.seconds=0.05", "save_steps=1000")
    _, errors = second.communicate(timeout=200)
    assert second.returncode == 0, errors
    assert f"resuming from run/checkpoints/{saved[-1]}" in errors
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"


def test_a_job_that_fails_by_itself_is_not_queued_again(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    failed = job("mixed_precision=fp16")
    failed.communicate(timeout=200)
    assert failed.returncode == 1
    assert not (tmp_path / "requeued").exists()
