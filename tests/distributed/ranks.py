"""Run a function on several processes that find each other as under a launcher, and see what became of each.

The processes are forked, so a function and its arguments need no name that can be imported. The parent holds the
store at which they meet: no port has to be guessed. Each writes what it returns and what it prints to files of its
own. Nothing outlives `Group`: what is not done in time is killed, after its stack was printed.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from accelerate.state import AcceleratorState, PartialState
from torch.distributed import TCPStore

__all__ = ["Group", "Outcome", "on_ranks", "outcomes_on"]

LAUNCHERS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one process."""

    rank: int
    exit_code: int | None
    """As `Process.exitcode`: negative for a signal; None if it had to be killed because its time was over."""

    value: Any
    error: str
    """The traceback, empty where there was none."""

    output: str
    seconds: float


class Group:
    """Processes that run one function; used as a context manager."""

    def __init__(self, count: int, work: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> None:
        self._count, self._work, self._arguments, self._seconds = count, work, arguments, seconds

    def __enter__(self) -> Group:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if self._count > 1 else None
        self._began = time.monotonic()
        context = multiprocessing.get_context("fork")
        self.processes = [context.Process(target=self._run, args=(rank,)) for rank in range(self._count)]
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(self.folder)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one of the processes."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self) -> list[Outcome]:
        """Wait until all have ended or the time is over; return what became of each."""
        ends: dict[int, float] = {}
        while len(ends) < self._count and time.monotonic() - self._began < self._seconds:
            for rank, process in enumerate(self.processes):
                if rank not in ends and not process.is_alive():
                    ends[rank] = time.monotonic() - self._began
            time.sleep(0.01)
        for rank, process in enumerate(self.processes):
            if rank not in ends:
                process.kill()
                process.join()
        return [self._outcome(rank, ends.get(rank)) for rank in range(self._count)]

    def _outcome(self, rank: int, seconds: float | None) -> Outcome:
        code = self.processes[rank].exitcode if seconds is not None else None
        path = self.folder / f"{rank}.pickle"
        value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
        output = (self.folder / f"{rank}.txt").read_text()
        return Outcome(rank, code, value, error, output, self._seconds if seconds is None else seconds)

    def _run(self, rank: int) -> None:
        """Be the process: never return, so that nothing of the parent's runs on in it."""
        code = 1
        try:
            self._enter_world(rank)
            self._note(rank, self._work(*self._arguments), "")
            code = 0
        except SystemExit as error:
            self._note(rank, None, traceback.format_exc())
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - whatever it was, the parent tells
            self._note(rank, None, traceback.format_exc())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _note(self, rank: int, value: Any, error: str) -> None:
        (self.folder / f"{rank}.pickle").write_bytes(pickle.dumps((value, error)))

    def _enter_world(self, rank: int) -> None:
        """Look like a process that a launcher has just started."""
        descriptor = os.open(self.folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(descriptor, number)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(file=2)
        faulthandler.dump_traceback_later(max(1.0, self._seconds - 2.0), file=2)
        for name in ("", "hezar_train"):
            logging.getLogger(name).handlers.clear()
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared.clear()
        torch.set_num_threads(1)
        for name in LAUNCHERS_VARIABLES:
            os.environ.pop(name, None)
        os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self._store is not None:
            number, count = str(rank), str(self._count)
            os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            # the store is there already: nobody opens one
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def outcomes_on(count: int, work: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Outcome]:
    """Run a function on so many processes; return what became of each."""
    with Group(count, work, *arguments, seconds=seconds) as group:
        return group.wait()


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
    """Run a function on so many processes, none of which may fail; return what each returned."""
    outcomes = outcomes_on(count, work, *arguments, seconds=seconds)
    for one in outcomes:
        if one.exit_code != 0:
            told = "\n".join(f"-- rank {o.rank}, exit {o.exit_code}:\n{o.error}\n{o.output[-4000:]}" for o in outcomes)
            raise AssertionError(f"{count} processes were to succeed:\n{told}")
    return [one.value for one in outcomes]
