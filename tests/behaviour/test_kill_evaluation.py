"""A run killed inside an evaluation and started again ends with the same metrics and the same best checkpoint."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent
SETTINGS = {
    "metrics": ["accuracy", "f1"],
    "metric_for_best_model": "f1",
    "bootstrap_samples": 50,
    "eval_batch_size": 2,
    "eval_steps": 6,
}
SCRIPT = f"""
import sys, time
from pathlib import Path

sys.path.insert(0, {str(FOLDER)!r})
import workload
from hezar_train import Hook
from hezar_train.types import Mode


class Linger(Hook):
    '''Stay inside the chosen evaluation, and leave a note.'''

    modes = frozenset({{Mode.VAL}})
    num_batches = 0

    def after_step(self):
        self.num_batches += 1
        if self.trainer.state.global_step == int(sys.argv[2]) and self.num_batches % 5 == 3:
            Path(sys.argv[1] + ".inside").touch()
            time.sleep(60)


hooks = [Linger()] if int(sys.argv[2]) else []
workload.make_trainer(sys.argv[1], hooks=hooks, **{SETTINGS!r}).train()
"""


@pytest.fixture(scope="module")
def workload() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("workload")


def start(run: Path, kill_step: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(run), str(kill_step)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_inside(run: Path, step: int) -> None:
    """Start or resume the run and kill it in the middle of the evaluation after `step`."""
    note = run.with_name(f"{run.name}.inside")
    process = start(run, step)
    try:
        while not note.exists():
            assert process.poll() is None, "the run ended before the evaluation that was to be killed"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    note.unlink()


def records(run: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted((run / "evaluations").glob("*.json"))}


def test_a_run_killed_inside_evaluations_is_the_unbroken_run(tmp_path: Path, workload: ModuleType) -> None:
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    trainer = workload.make_trainer(unbroken, **SETTINGS)
    trainer.train()
    steps = [int(name.removesuffix(".json")) for name in records(unbroken)]
    assert len(steps) >= 3
    for step in (steps[0], steps[-1]):  # in the middle of an epoch, and the last of all
        kill_inside(killed, step)
        assert f"{step:08d}.json" not in records(killed)
    assert start(killed, 0).wait(60) == 0
    assert records(killed) == records(unbroken)
    assert json.loads((killed / "best.json").read_text()) == json.loads((unbroken / "best.json").read_text())
    assert workload.differences(unbroken, killed) == []
