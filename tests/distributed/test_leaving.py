"""A process that leaves its group while a thread of gloo's still holds something of Python's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hezar_train

SCRIPT = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # else DDP imports it, whose arguments by default would hold the group for ever
from hezar_train.runtime.gradient_exchange import GradientExchange
from hezar_train.runtime.group import leave_group_at_exit

peer = os.fork()
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=int(peer == 0), world_size=2)
leave_group_at_exit()
if sys.argv[1] == "held":
    holder = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
if sys.argv[1] == "dropped":
    holder = GradientExchange(list(torch.nn.Linear(2, 1).parameters()))
is_going = threading.Event()

class Busy:
    def __del__(self):  # in gloo's thread, which lets go of the tensor last
        is_going.set()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass

tensor = torch.zeros(1)
if peer == 0:
    time.sleep(1)
    dist.all_reduce(tensor)
    os._exit(0)
tensor.busy = Busy()
dist.all_reduce(tensor, async_op=True)
del tensor
assert is_going.wait(20)
if sys.argv[1] == "dropped":
    dist.destroy_process_group()
    del holder
print("done", flush=True)
"""


def end_of(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(hezar_train.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT, how]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize("how", ["held", "free"])
def test_a_process_that_is_done_does_not_abort_because_gloo_is_not(how: str, tmp_path: Path) -> None:
    ended = end_of(tmp_path, how)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_an_exchange_that_goes_after_its_group_does_not_wait_for_gloo_for_ever(tmp_path: Path) -> None:
    ended = end_of(tmp_path, "dropped")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_the_benchmark_ends_and_names_a_contestant_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(hezar_train.__file__).parents[1] / "benchmarks"))
    benchmark = importlib.import_module("ddp")
    monkeypatch.setattr(benchmark, "LONGEST_SECONDS", 0.3)  # too short for any of them
    with pytest.raises(SystemExit, match=r"accelerate did not finish 'small', accumulation 4: .*\[None, None\]"):
        benchmark.measure("accelerate", "small", 4)
