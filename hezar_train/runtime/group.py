"""How a process joins the others of its run, and leaves them.

The processes of one machine meet in a file, without a port, and prove to each other that they can read it.

torch's own meeting point, a store over TCP, listens on all interfaces and has no password. A file below a folder that
only its user can open has neither fault. What the processes send each other afterwards still goes over sockets, to
which any user of the machine can connect: hence the proof. A further group has connections of its own, and is proven,
too.

Who leaves does so before Python ends. A thread of gloo's wakes the caller of a collective before it lets go of the
tensors, for which it needs Python's lock; if the interpreter has begun to end by then, Python ends the thread, and C++
takes that for an error and aborts the whole process ("terminate called without an active exception"), after all is
done and saved. Destroying the group waits for such threads, but only where nobody else holds it, and DDP does.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import hmac
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from hezar_train.errors import HezarTrainError

__all__ = [
    "KEY",
    "join_through_file",
    "leave_group",
    "leave_group_at_exit",
    "limit_waiting",
    "verify_group",
    "verify_peers",
]

KEY = "hezar_train.key"
THREADS = Path("/proc/self/task")
GLOO_THREAD = "pt_gloo_runloop"
LOOK_SECONDS, MOST_SECONDS = 0.005, 10.0
"""How long a thread that rests is watched, and how long one that does not is waited for, on a busy machine."""

_stores: list[Any] = []  # that of the group which this process has joined through a file, while there is one


def join_through_file(path: Path, *, on_cpu: bool) -> None:
    """Make the process group of this process, whose number is in the environment, with a file as its store."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(path), count)  # type: ignore[attr-defined]
    cpu = on_cpu or not torch.accelerator.is_available()
    PartialState(cpu=cpu, store=store, rank=rank, world_size=count)
    leave_group_at_exit()
    _stores[:] = [store]
    if dist.get_backend() == "gloo":  # NCCL's identifier of a group, which goes through the store, is a secret already
        verify_peers(store, rank, count)


def verify_group(group: Any) -> None:
    """Prove a further gloo group of all processes, if they have joined through a file; all of them call this."""
    for store in _stores:
        verify_peers(store, dist.get_rank(), dist.get_world_size(), group)


def verify_peers(store: Any, rank: int, count: int, group: Any = None) -> None:
    """Raise unless each connection of this process leads to the process of the group that it should.

    Gloo takes the first to connect for the peer it waits for. Who has the key can read the store. A word for one pair,
    in one direction, is of no use to anybody who overhears or returns it.
    """
    name = KEY if group is None else f"{KEY}.{group.group_name}"  # what was overheard in one is of no use in another
    if rank == 0:
        store.set(name, secrets.token_hex(32))
    key = store.get(name)
    for peer in (other for other in range(count) if other != rank):
        said = torch.empty(hashlib.sha256().digest_size, dtype=torch.uint8)
        own = torch.frombuffer(bytearray(_word(key, rank, peer)), dtype=torch.uint8)
        sending = dist.isend(own, peer, group)
        dist.recv(said, peer, group)
        if not hmac.compare_digest(bytes(said.tolist()), _word(key, peer, rank)):
            raise HezarTrainError(
                f"process {rank} was connected to something that is not process {peer} of this run: somebody else on "
                "this machine took its place. Nothing was trained; tell whoever runs the machine, and start again."
            )
        if sending is not None:
            sending.wait()


def _word(key: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"{sender} to {receiver}".encode(), "sha256")


def limit_waiting(seconds: float) -> None:
    """Let every collective of this process, in any group that there is now, end with an error after so long."""
    for group in list(_world.pg_map):
        _set_pg_timeout(timedelta(seconds=seconds), group)


@functools.cache
def leave_group_at_exit() -> None:
    """Leave the group when this process ends, before Python does."""
    atexit.register(leave_group)


def leave_group() -> None:
    """Destroy the process group, and wait until no thread of gloo's holds anything of Python's."""
    if dist.is_initialized():
        dist.destroy_process_group()
    end, before = time.monotonic() + MOST_SECONDS, None
    while (resting := _gloo_threads()) and resting != before and time.monotonic() < end:
        before = resting if all(state == "S" for state, _ in resting.values()) else None
        time.sleep(LOOK_SECONDS)  # without Python's lock: who waits for it gets it


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return the state of each thread that does gloo's work, and how often it has gone to sleep; none without /proc."""
    found = {}
    for task in THREADS.glob("*"):
        try:
            lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # it has ended meanwhile
            continue
        values = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if values.get("Name") == GLOO_THREAD:
            found[task.name] = values["State"][:1], values["voluntary_ctxt_switches"]
    return found
