"""A process that leaves its group at its end, while a thread of gloo's still holds something of Python's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hezar_train

SCRIPT = """
import atexit, os, sys, threading, time
import torch
import torch.distributed as dist
from hezar_train.runtime.group import leave_group_at_exit

peer = os.fork()
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=int(peer == 0), world_size=2)
if sys.argv[1] == "leave":
    leave_group_at_exit()
else:
    atexit.register(dist.destroy_process_group)
if sys.argv[2] == "held":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
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
print("done", flush=True)
"""


def end_of(tmp_path: Path, *how: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(hezar_train.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT, *how]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120, check=False
    )


@pytest.mark.parametrize("holder", ["held", "free"])
def test_a_process_that_is_done_does_not_abort_because_gloo_is_not(holder: str, tmp_path: Path) -> None:
    ended = end_of(tmp_path, "leave", holder)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
