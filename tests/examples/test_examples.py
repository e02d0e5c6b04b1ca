"""A contract for every example: it improves its own measure, and a run that was killed ends like the unbroken one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from hezar_train import Hook, Trainer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
Import = Callable[[str], ModuleType]
Read = Callable[[Any], dict[str, Any]]


class Promise(NamedTuple):
    """What an example promises of a short run and of its whole one: a factor of the measure, or its least value."""

    short: dict[str, Any]
    short_factor: float
    whole_factor: float


PROMISES = {
    "gan": Promise({"num_epochs": 20, "save_steps": 100}, 0.8, 0.2),
    "adversarial_autoencoder": Promise({"num_epochs": 4, "save_steps": 50}, 0.7, 0.1),
    "autoencoder": Promise({"num_epochs": 3, "save_steps": 40}, 0.5, 0.1),
    "denoising_autoencoder": Promise({"num_epochs": 3, "save_steps": 40}, 0.5, 0.15),
    "vae": Promise({"num_epochs": 4, "save_steps": 50}, 0.8, 0.6),
    "ditto": Promise({"num_rounds": 2, "save_steps": 10}, 10, 25),
    "fedprox": Promise({"num_rounds": 2, "save_steps": 20}, 8, 20),
}
LOSERS = {name for name, promise in PROMISES.items() if promise.whole_factor < 1}  # the smaller the measure, the better


class Killed(RuntimeError):  # noqa: N818 - what happens, not what went wrong
    """What the test's hook raises."""


class Kill(Hook):
    """Raise in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self) -> None:
        if self.trainer.state.global_step == self._step:
            raise Killed


def test_every_example_has_a_promise() -> None:
    runnable = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    tested_elsewhere = {"train_net", "plain_loop", "ray_train"}  # behind its door, beside the Trainer, with Ray
    assert runnable - tested_elsewhere == set(PROMISES)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.parametrize("name", PROMISES)
def test_a_short_run_improves_the_measure(name: str, example: Import, tmp_path: Path) -> None:
    module, promise = example(name), PROMISES[name]
    run = module.build(tmp_path, **promise.short)
    before = module.measure(run)
    run.train()
    _expect_factor(name, before, module.measure(run), promise.short_factor)


@pytest.mark.parametrize("name", PROMISES)
def test_a_run_that_was_killed_twice_ends_like_the_unbroken_one(
    name: str, example: Import, contents: Read, tmp_path: Path
) -> None:
    module, settings = example(name), PROMISES[name].short | {"resume_from_checkpoint": True}
    if "num_epochs" in settings:
        settings["num_epochs"] = 3
    unbroken = module.build(tmp_path / "unbroken", **settings)
    unbroken.train()
    last_step = _last_trainer(unbroken).state.global_step
    for step in (last_step // 3, last_step - 5):
        broken = module.build(tmp_path / "broken", **settings)
        _last_trainer(broken).register_hooks([Kill(step)])
        with pytest.raises(Killed):
            broken.train()
    resumed = module.build(tmp_path / "broken", **settings)
    assert _last_trainer(resumed).state.global_step < last_step
    resumed.train()
    assert contents(resumed) == contents(unbroken)
    assert module.measure(resumed) == module.measure(unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISES)
def test_the_whole_run_keeps_its_promise_within_a_minute(name: str, example: Import, tmp_path: Path) -> None:
    module = example(name)
    run = module.build(tmp_path)
    before, start = module.measure(run), time.process_time()
    run.train()
    assert time.process_time() - start < 60
    _expect_factor(name, before, module.measure(run), PROMISES[name].whole_factor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan", "ditto"])
def test_a_command_killed_by_a_signal_and_resumed_ends_like_the_unbroken_one(
    name: str, example: Import, contents: Read, tmp_path: Path
) -> None:
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    assert _start(name, unbroken).wait() == 0
    running = _start(name, broken)
    _wait_for_checkpoints(running, broken)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert _start(name, broken, "--resume").wait() == 0
    module = example(name)
    runs = [module.build(folder, resume_from_checkpoint=True) for folder in (broken, unbroken)]
    assert contents(runs[0]) == contents(runs[1])
    assert module.measure(runs[0]) == module.measure(runs[1])


def _expect_factor(name: str, before: float, after: float, factor: float) -> None:
    assert after < factor * before if name in LOSERS else after > factor * before, f"{name}: {before} -> {after}"


def _last_trainer(run: Any) -> Trainer:
    return getattr(run, "clients", [run])[-1]


def _start(name: str, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--output", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for_checkpoints(running: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until there are some, so that the run is well under way."""
    while running.poll() is None and len(list(folder.rglob("checkpoints/[0-9]*/manifest.json"))) < 2:
        time.sleep(0.05)
    assert running.poll() is None, "the command ended before it was killed"
