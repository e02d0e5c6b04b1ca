"""One process of a group: how it joins the others, reports its exit to the launcher, and does not outlive it.

Without the launcher's variables in the environment everything here does nothing: torchrun and `accelerate launch` start
the same programs. Nothing here needs torch before the group is joined.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hezar_train.config.files import write_atomically
from hezar_train.errors import LostProcessError

__all__ = [
    "ENDS_ON_PURPOSE",
    "LAUNCHER_PID",
    "REPORTS",
    "RESTARTS",
    "STORES",
    "Report",
    "join_group",
    "num_restarts",
    "read_report",
    "reported_exit",
]

REPORTS = "HEZAR_TRAIN_REPORTS"
STORES = "HEZAR_TRAIN_STORES"
LAUNCHER_PID = "HEZAR_TRAIN_FRONT_PID"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
TRY_AGAIN_LATER = 75  # reserved: sysexits' EX_TEMPFAIL, for a run that asks its scheduler to be queued again
ENDS_ON_PURPOSE = frozenset({0, TRY_AGAIN_LATER, 128 + signal.SIGINT, 128 + signal.SIGTERM})
SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl()


@dataclass(frozen=True)
class Report:
    """How a process ended, as it reported it."""

    code: int
    is_handled: bool
    """Whether the program chose the code, rather than dying of an error that nobody expected."""
    message: str
    at_seconds: float
    has_lost_a_peer: bool = False
    """Whether it died because another one had."""
    has_named_it: bool = False
    """Whether its message says which one, and where that was."""


def num_restarts() -> int:
    """Return how often an elastic agent has started this process again."""
    return int(os.environ.get(RESTARTS, "0"))


def join_group(*, on_cpu: bool) -> None:
    """Join the other processes of our launcher, through a file that only this user can open; without one, do nothing.

    This comes before anything else that needs the group: torch's own way would be a store that any user can reach.
    """
    folder = os.environ.get(STORES)
    if folder is not None:
        from hezar_train.runtime.group import join_through_file

        join_through_file(Path(folder, f"store-{num_restarts()}"), on_cpu=on_cpu)


@contextmanager
def reported_exit() -> Iterator[None]:
    """Report to the launcher, if there is one, how this process ends.

    Whoever ends on purpose (done, or stopped by a signal and saved) leaves with 0. The agent takes any other code for a
    death: it would end the other processes 30 seconds later, also one that is still writing a checkpoint.
    """
    folder = os.environ.pop(REPORTS, None)
    if folder is None:
        yield
        return
    _end_with_the_launcher()
    path = _report_path(Path(folder), num_restarts(), int(os.environ["RANK"]))
    try:
        yield
    except SystemExit as end:
        code = _code(end)
        if isinstance(end.__cause__, LostProcessError):  # the program has said it; where that one ended matters more
            _write(path, Report(code, False, str(end.__cause__), time.time(), True, True))
            raise
        if _write(path, Report(code, True, str(end), time.time())) and code in ENDS_ON_PURPOSE:
            raise SystemExit(0) from end
        raise
    except BaseException as error:
        has_lost_a_peer = _is_loss_of_a_peer(error)
        _write(path, Report(1, False, f"{type(error).__name__}: {error}", time.time(), has_lost_a_peer))
        if has_lost_a_peer:  # where that one died is what matters, and the launcher says it
            raise SystemExit("this process cannot go on: another one of the run has ended") from None
        raise


def read_report(folder: Path, restart: int, rank: int) -> Report | None:
    """Return what a process reported of its end; None where it had no time to."""
    path = _report_path(folder, restart, rank)
    return Report(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _report_path(folder: Path, restart: int, rank: int) -> Path:
    return folder / f"{restart}-{rank}.json"


def _write(path: Path, report: Report) -> bool:
    """Write a report; return False where the disk refuses, which must not hide how the process ended."""
    try:
        write_atomically(path, json.dumps(asdict(report)))
    except OSError:
        return False
    return True


def _is_loss_of_a_peer(error: BaseException) -> bool:
    if isinstance(error, LostProcessError):
        return True
    return isinstance(error, RuntimeError) and "by peer" in str(error)  # gloo has no class for it


def _code(end: SystemExit) -> int:
    """Return the code that Python would leave with."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def _end_with_the_launcher() -> None:
    """Ask the system for SIGTERM when the launcher dies, however it dies, so that this process saves and leaves."""
    launcher = int(os.environ.pop(LAUNCHER_PID))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the system was asked
        raise SystemExit(128 + signal.SIGTERM)
