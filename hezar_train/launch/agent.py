"""The launcher: torchrun's agent for one machine, with signals passed on, restarts, exit codes and messages.

The agent's documented points of extension are overridden, its supervision is used as it is. Its rendezvous is not:
torch's store over TCP listens on all interfaces, has no password and reads pickles, so that any user of the machine
could run code in the processes. Here the agent's own store is memory, and the processes meet in a file below a folder
that only this user can open (`process.join_group`). A restart needs processes that find nothing of the last attempt:
hence a file of their own for each attempt.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from hezar_train.errors import ConfigError, printable
from hezar_train.launch.process import ENDS_ON_PURPOSE, LAUNCHER_PID, REPORTS, STORES, Report, read_report

__all__ = ["launch_group"]

MONITOR_SECONDS = 0.5
NUM_LAST_LINES = 30
# whoever signals the launcher wants the run to be saved: a terminal that closes and a batch system's warning, too
PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
}


def launch_group(
    command: Sequence[str], num_processes: int, max_restarts: int, progress: Callable[[], Any], *, on_cpu: bool
) -> int:
    """Start the processes, watch over them, return the exit code when none of them is left."""
    on_cpu = on_cpu or not torch.accelerator.is_available()
    if not on_cpu and num_processes > torch.accelerator.device_count():
        raise ConfigError(
            f"--num-processes {num_processes}, but this machine has {torch.accelerator.device_count()} accelerators, "
            "and each process needs its own. Ask for fewer, or train on the CPU with use_cpu=true."
        )
    _silence_torch()
    with tempfile.TemporaryDirectory(prefix="hezar_train_") as folder:
        os.environ.update(_needed_variables(Path(folder)))
        for name, value in _default_variables(num_processes, on_cpu=on_cpu).items():
            os.environ.setdefault(name, value)
        group = _Group(_spec(command, num_processes, max_restarts), Path(folder), progress)
        with group.passing_signals_on():
            return group.run_to_the_end()


def _silence_torch() -> None:
    """Drop what the agent logs, whatever level its modules set for themselves: the launcher says what happens."""
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())
    log.propagate = False


def _needed_variables(folder: Path) -> dict[str, str]:
    """Return the variables without which restarts and signals are not reliable."""
    return {
        REPORTS: str(folder),
        STORES: str(folder),
        LAUNCHER_PID: str(os.getpid()),
        **_loopback_variables(),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # Ctrl-\\ ends all at once; other signals are passed on by us
    }


def _loopback_variables() -> dict[str, str]:
    """Keep what the processes send each other on this machine, whatever a profile says for several machines."""
    if sys.platform != "linux":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _default_variables(num_processes: int, *, on_cpu: bool) -> dict[str, str]:
    """Return the variables that the processes find unless the user has set them."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {"OMP_NUM_THREADS": str(max(1, num_cores // num_processes))}
    if on_cpu:
        found["ACCELERATE_USE_CPU"] = "true"
    return found


def _spec(command: Sequence[str], num_processes: int, max_restarts: int) -> WorkerSpec:
    return WorkerSpec(
        role="train",
        local_world_size=num_processes,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=_OneMachine(),
        max_restarts=max_restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr="127.0.0.1",
    )


class _OneMachine(RendezvousHandler):
    """The rendezvous of one agent with itself, without a socket.

    The processes get no MASTER_ADDR, without which torch makes no store over TCP either: whatever does not join the
    group through our file stops with torch's own sentence instead of opening a port.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._is_closed = False

    def get_backend(self) -> str:
        return "one_machine"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(master_addr="", master_port=0))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class _EndedError(Exception):
    """The group is not started again."""


class _Group(LocalElasticAgent):
    """All processes of a run."""

    def __init__(self, spec: WorkerSpec, folder: Path, progress: Callable[[], Any]) -> None:
        self._output = folder / "output"
        logs = DefaultLogsSpecs(str(self._output), redirects=dict.fromkeys(range(1, spec.local_world_size), Std.ALL))
        super().__init__(spec, logs)
        self._folder = folder
        self._progress = progress
        self._progress_before: Any = None
        self._pids: list[int] = []
        self._restarts = -1
        self._result = RunResult(WorkerState.INIT)
        self._asked: signal.Signals | None = None

    def run_to_the_end(self) -> int:
        """Run all attempts; return the exit code of the last."""
        try:
            self._result = self.run()
        except _EndedError:
            pass
        except SignalException as end:
            return 128 + end.sigval
        finally:
            self.get_worker_group().spec.rdzv_handler.shutdown()
        if self._result.is_failed() and self._asked is None:
            self._report_death()
        return self._exit_code()

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Hand every signal to the processes, which save and leave, instead of dying of it."""
        has_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        watched = [number for number in PASSED_ON if not (has_nohup and number == signal.SIGHUP)]
        before = {number: signal.signal(number, self._pass_on) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None = None) -> None:
        self._asked = PASSED_ON[signal.Signals(number)]
        for pid in self._pids:  # not their process groups: loader workers have a batch to finish
            with suppress(ProcessLookupError):
                os.kill(pid, self._asked)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._restarts += 1
        self._progress_before = self._progress()
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = list(started.values())
        if self._asked is not None:  # it came while they were being started
            self._pass_on(self._asked)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._result = super()._monitor_workers(worker_group)
        return self._result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._pids = []
        if self._asked is not None or not self._is_worth_a_restart():
            raise _EndedError
        self._report_death()
        count = f"restart {self._restarts + 1} of {worker_group.spec.max_restarts}"
        _print(f"starting all processes again ({count})")
        super()._restart_workers(worker_group)

    def _is_worth_a_restart(self) -> bool:
        """Tell a death that may not come again from an error that will."""
        if self._refusals():
            return False
        return bool(self._killed()) or self._progress() != self._progress_before

    def _exit_code(self) -> int:
        if not self._result.is_failed():
            return next((report.code for report in self._reports().values() if report.code), 0)
        if refusals := self._refusals():
            return refusals[0].code
        if self._asked is not None and self._died_of_the_signal():
            return 128 + self._asked
        return 1

    def _died_of_the_signal(self) -> bool:
        """Return whether the signal met a process that was not ready to save yet, and nothing else went wrong."""
        errors = [one for one in self._reports().values() if not (one.is_handled or one.has_lost_a_peer)]
        codes = {failure.exitcode for failure in self._result.failures.values()}
        return not errors and bool(codes & {-signal.SIGTERM, -signal.SIGINT})

    def _reports(self) -> dict[int, Report]:
        """Return what the processes of this attempt reported of their ends, by rank."""
        ranks = range(self.get_worker_group().spec.local_world_size)
        found = {rank: read_report(self._folder, self._restarts, rank) for rank in ranks}
        return {rank: report for rank, report in found.items() if report is not None}

    def _refusals(self) -> list[Report]:
        """Return the ends that a program chose and that the same command would meet again."""
        return [one for one in self._reports().values() if one.is_handled and one.code not in ENDS_ON_PURPOSE]

    def _killed(self) -> dict[int, int]:
        """Return who died of a signal, and of which; SIGTERM is how the agent ends those that outlive the first."""
        codes = {rank: failure.exitcode for rank, failure in self._result.failures.items()}
        return {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}

    def _report_death(self) -> None:
        """Say who died first and of what; what the main process has said itself is not repeated."""
        of = f"of {self.get_worker_group().spec.local_world_size}"
        named = {rank: report.message for rank, report in self._reports().items() if report.has_named_it}
        if named and 0 not in named:  # the main process may be the one that is missing
            _print(next(iter(named.values())))
        if killed := self._killed():
            rank, number = next(iter(killed.items()))
            _print(f"process {rank} {of} was killed by {signal.Signals(number).name}")
            return
        reports = self._reports()
        ended = {rank: report for rank, report in reports.items() if report.code not in ENDS_ON_PURPOSE}
        if not ended:
            codes = {rank: failure.exitcode for rank, failure in self._result.failures.items()}
            _print("; ".join(f"process {rank} {of} left with exit code {code}" for rank, code in codes.items()))
            return
        first = min(ended, key=lambda rank: ended[rank].at_seconds)
        said_by_main = ended[0].message if 0 in ended else None
        if first != 0 and ended[first].message != said_by_main:
            _print(f"process {first} {of} failed first. Its last words:\n{self._last_words(first)}")

    def _last_words(self, rank: int) -> str:
        """Return the end of what a process other than the main one wrote to its standard error."""
        paths = self._output.glob(f"*/attempt_{self._restarts}/{rank}/stderr.log")
        lines = [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        return "\n".join(lines[-NUM_LAST_LINES:])


def _print(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)  # noqa: T201
