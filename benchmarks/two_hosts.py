"""Train on two hosts again and again, and count the runs that end as they should.

    python benchmarks/two_hosts.py [--runs 100] [--seconds 120] [--late]

The hosts are two network namespaces with a cable between them (root and iproute2 are needed), each with torchrun's
agent and one process, which trains a few updates and leaves. A process that aborts in its exit would be started again
by its agent, which then waits for another that has left for good: a run that is not over in time hangs. With `--late`
a thread of gloo's is busy for two seconds with letting go of a tensor while its process leaves: what is a matter of
luck on a busy machine then happens in every run. Exits with 1 if a run hangs or fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDRESSES = ("10.79.0.1", "10.79.0.2")
NEW_NETWORK = 0x40000000
"""Linux's CLONE_NEWNET."""

SCRIPT = """
import os, sys, time
import torch
from hezar_train import Hook, Trainer, TrainerConfig

class Busy:
    def __del__(self):  # in gloo's thread, if that lets go of the tensor last
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            pass

def leave_late():
    tensor = torch.zeros(1)
    tensor.busy = Busy()
    if os.environ["RANK"] == "0":
        time.sleep(0.5)  # so that the other one's thread waits, and has the tensor alone
        torch.distributed.all_reduce(tensor)
        del tensor.busy
    else:
        torch.distributed.all_reduce(tensor, async_op=True)
        del tensor
        time.sleep(0.6)

pairs = torch.rand(16, 2)
data = torch.utils.data.TensorDataset(pairs, pairs.prod(dim=1, keepdim=True))
config = TrainerConfig("run", batch_size=4, num_epochs=2, criterion="MSELoss", learning_rate=0.1, use_cpu=True)
trainer = Trainer(config, torch.nn.Linear(2, 1), data)
trainer.train()
if "late" in sys.argv:
    leave_late()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_networks() -> Iterator[list[str]]:
    """Yield two namespaces; the device in each has its name."""
    names = [f"hz{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_host(name: str, number: int, run: int, folder: Path, words: list[str]) -> int:
    """Start torchrun in a namespace, in a fork that has loaded it already; return its pid."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        with Path("/run/netns", name).open() as network, Path(f"{number}.log").open("w") as log:
            if ctypes.CDLL(None).setns(network.fileno(), NEW_NETWORK) != 0:
                raise OSError(f"no way into the namespace {name}")
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        os.environ["GLOO_SOCKET_IFNAME"] = name
        from torch.distributed.run import main

        main([
            "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--max_restarts", "3",
            "--rdzv_endpoint", f"{ADDRESSES[0]}:29400", "--rdzv_id", f"run{run}", "--monitor_interval", "0.1",
            "--local_addr", ADDRESSES[number], "--rdzv_conf", f"is_host={int(number == 0)}", *words,
        ])  # fmt: skip
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def one_run(names: list[str], run: int, seconds: float, words: list[str]) -> str:
    """Train once on both hosts; return what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [start_host(name, number, run, Path(folder), words) for number, name in enumerate(names)]
        ends: dict[int, int] = {}
        until = time.monotonic() + seconds
        while len(ends) < len(pids) and time.monotonic() < until:
            for pid in set(pids) - set(ends):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    ends[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        for pid in set(pids) - set(ends):
            end_host(names, pid)
        said = "".join(path.read_text(errors="replace") for path in Path(folder).glob("*.log"))
    verdict = "hung" if len(ends) < len(pids) else "ended" if not any(ends.values()) else "failed"
    if verdict != "ended":
        print(said[-4000:], file=sys.stderr)
    return f"{verdict}, with an abort" if "terminate called" in said or "SIGABRT" in said else verdict


def end_host(names: list[str], pid: int) -> None:
    """Kill what is left in the namespaces, of which this is the agent of one."""
    for name in names:
        left = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout
        for one in left.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(one), signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a run counts as hung")
    parser.add_argument("--late", action="store_true", help="let a thread of gloo's be busy while its process leaves")
    asked = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    import torch.distributed.run  # noqa: F401 - before the forks, which need not load it again

    counts: collections.Counter[str] = collections.Counter()
    with two_networks() as names, tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for run in range(asked.runs):
            began = time.monotonic()
            verdict = one_run(names, run, asked.seconds, [str(script), *(["late"] if asked.late else [])])
            counts[verdict] += 1
            print(f"run {run + 1}: {verdict} after {time.monotonic() - began:.1f} s", flush=True)
    print("; ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"of {asked.runs}")
    return 0 if counts == {"ended": asked.runs} else 1


if __name__ == "__main__":
    sys.exit(main())
