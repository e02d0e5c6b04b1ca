"""Kill a save everywhere: at every call that changes the disk, at random moments, and at every system call."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hezar_train.checkpoint import CheckpointStore, CheckpointWriter

CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
# How often a save of the prepared store makes each call, at the least: proof that a sweep did not end early.
SYSTEM_CALLS = {"mkdir": 2, "openat": 20, "write": 20, "fsync": 10, "rename": 2, "unlinkat": 7}


@pytest.fixture
def prepared(store: CheckpointStore, new_run: type) -> CheckpointStore:
    """A store with the steps 1 and 2; the save of step 3 with keep=2 then deletes step 1."""
    run = new_run()
    for step in (1, 2):
        run.update()
        store.publish(step, run.parts().write)
    return store


def save_third(store: CheckpointStore, new_run: type, background: bool = True) -> CheckpointWriter:
    run = new_run()
    run.update(3)
    writer = CheckpointWriter(store, background, keep=2)
    writer.save(3, run.parts())
    writer.close()
    return writer


def assert_loadable(store: CheckpointStore, new_run: type) -> int:
    """Assert that every checkpoint is whole and the newest is right, and that leftovers go."""
    newest, rejected = store.newest()
    assert newest is not None
    assert rejected == []
    resumed, unbroken = new_run(seed=1), new_run()
    resumed.load(newest)
    unbroken.update(newest.step)
    assert resumed.bits() == unbroken.bits()
    assert [store.open(store.path(step)).step for step in store.steps()] == store.steps()
    store.clean()
    assert not any(path.name.startswith((".tmp-", ".trash-")) for path in store.root.iterdir())
    return newest.step


def kill_at_call(number: int) -> None:
    """Arrange for this process to die right before its `number`-th call that changes the disk."""
    counter = itertools.count(1)

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if next(counter) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))


def test_a_kill_before_any_call_that_changes_the_disk_leaves_a_whole_checkpoint(
    prepared: CheckpointStore, new_run: type, fork: Any, tmp_path: Path
) -> None:
    def job(store: CheckpointStore, number: int) -> None:
        kill_at_call(number)
        save_third(store, new_run)

    newest_steps = []
    for number in itertools.count(1):
        store = CheckpointStore(shutil.copytree(prepared.root, tmp_path / f"{number}"))
        status = fork(lambda store=store, number=number: job(store, number)).wait()
        newest_steps.append(assert_loadable(store, new_run))
        shutil.rmtree(store.root)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    commit = newest_steps.index(3)
    assert newest_steps == [2] * commit + [3] * (len(newest_steps) - commit)
    # The save has dozens of such calls on both sides of the rename: the sweep did sweep.
    assert commit > 20
    assert len(newest_steps) - commit > 8


def test_kills_at_random_moments_of_a_run_that_saves_all_the_time(
    store: CheckpointStore, new_run: type, fork: Any
) -> None:
    def job() -> None:
        logging.disable()
        store.clean()
        run, writer = new_run(), CheckpointWriter(store, keep=2)
        newest, _ = store.newest()
        if newest is not None:
            run.load(newest)
        while True:
            run.update()
            writer.save(run.step, run.parts(), protect={1})

    moments, reached = random.Random(0), 0
    for _ in range(10):
        child = fork(job)
        while reached >= max(store.steps(), default=0):
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.1))
        child.kill()
        step = assert_loadable(store, new_run)
        assert step > reached
        reached = step
    assert 1 in store.steps()


def traced(job: Callable[[], Any], injection: str, fork: Any, tmp_path: Path) -> tuple[int, str]:
    """Run a job in a child under strace; return its exit code and what strace saw of the injected calls."""
    go, log = tmp_path / "go", tmp_path / "strace"
    go.unlink(missing_ok=True)

    def wait_and_run() -> None:
        while not go.exists():
            time.sleep(0.002)
        job()

    child = fork(wait_and_run)
    command = ["strace", "-f", "-p", str(child.pid), "-o", str(log), "-e", f"inject={injection}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        if "attached" not in (line := tracer.stderr.readline()):
            pytest.skip(f"strace cannot attach here: {line}")
        # Whatever follows on stderr must not fill the pipe.
        threading.Thread(target=tracer.stderr.read, daemon=True).start()
        go.touch()
        return child.wait(), log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("call", SYSTEM_CALLS)
def test_a_kill_at_any_system_call_of_a_save_leaves_a_whole_checkpoint(
    prepared: CheckpointStore, new_run: type, fork: Any, tmp_path: Path, call: str
) -> None:
    for number in itertools.count(1):
        store = CheckpointStore(shutil.copytree(prepared.root, tmp_path / f"{number}"))
        injection = f"{call}:signal=KILL:when={number}"
        status, _ = traced(lambda store=store: save_third(store, new_run), injection, fork, tmp_path)
        assert_loadable(store, new_run)
        if status == 0:
            break
    assert number > SYSTEM_CALLS[call]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
def test_a_disk_that_is_full_at_any_system_call_of_a_save_never_stops_the_run(
    prepared: CheckpointStore, new_run: type, fork: Any, tmp_path: Path, call: str
) -> None:
    def job(store: CheckpointStore) -> None:
        logging.disable()
        writer = save_third(store, new_run)
        assert writer.failed_saves in {0, 1}

    for number in itertools.count(1):
        store = CheckpointStore(shutil.copytree(prepared.root, tmp_path / f"{number}"))
        injection = f"{call}:error=ENOSPC:when={number}"
        status, log = traced(lambda store=store: job(store), injection, fork, tmp_path)
        assert status == 0
        assert_loadable(store, new_run)
        if "INJECTED" not in log:
            break
    assert number > SYSTEM_CALLS[call]
