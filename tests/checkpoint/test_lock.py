from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hezar_train.checkpoint import RunLock
from hezar_train.errors import RunLockedError


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 10 seconds"
        time.sleep(0.005)


def hold_for_ever(path: Path, ready: Path) -> None:
    with RunLock(path):
        ready.touch()
        time.sleep(60)


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path, fork: Any) -> None:
    holder = fork(lambda: hold_for_ever(tmp_path / "lock", tmp_path / "ready"))
    wait_for((tmp_path / "ready").exists)
    with pytest.raises(RunLockedError) as caught:
        RunLock(tmp_path / "lock").acquire()
    assert f"process {holder.pid} on {socket.gethostname()} since 2" in str(caught.value)
    assert "choose another output_dir" in str(caught.value)


def test_a_killed_process_holds_nothing(tmp_path: Path, fork: Any) -> None:
    holder = fork(lambda: hold_for_ever(tmp_path / "lock", tmp_path / "ready"))
    wait_for((tmp_path / "ready").exists)
    holder.kill()
    with RunLock(tmp_path / "lock"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_forked_worker_of_a_killed_holder_does_not_keep_the_lock(tmp_path: Path, fork: Any) -> None:
    def hold_with_a_worker() -> None:
        with RunLock(tmp_path / "lock"):
            worker = os.fork()
            if worker:
                (tmp_path / "worker").write_text(f"{worker}\n")
            time.sleep(60)

    holder = fork(hold_with_a_worker)
    wait_for(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text().endswith("\n"))
    worker = int((tmp_path / "worker").read_text())
    try:
        holder.kill()
        os.kill(worker, 0)
        with RunLock(tmp_path / "lock"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_that_leaves_does_not_release_the_holders_lock(tmp_path: Path, fork: Any) -> None:
    lock = RunLock(tmp_path / "lock")
    with lock:
        assert fork(lock.release).wait() == 0
        assert (tmp_path / "lock").stat().st_size > 0
        assert fork(RunLock(tmp_path / "lock").acquire).wait() == 1


def test_the_same_process_is_refused_too_and_by_any_spelling_of_the_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with RunLock(tmp_path / "lock"):
        with pytest.raises(RunLockedError, match="another trainer of this very process"):
            RunLock(tmp_path / "link" / "lock").acquire()
    with RunLock(tmp_path / "link" / "lock"):
        pass


def test_the_folder_is_made_and_the_lock_is_free_again_after_an_error(tmp_path: Path, fork: Any) -> None:
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path / "new" / "run" / "lock"):
        raise ZeroDivisionError
    assert (tmp_path / "new" / "run" / "lock").read_bytes() == b""
    assert fork(RunLock(tmp_path / "new" / "run" / "lock").acquire).wait() == 0


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with RunLock(tmp_path / "lock"), pytest.raises(RunLockedError):
        RunLock(tmp_path / "lock").acquire()
    assert "has no locks" in caplog.text
