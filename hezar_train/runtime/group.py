"""Join the processes of one machine without a port: they meet in a file, and prove to each other that they can read it.

torch's own meeting point, a store over TCP, listens on all interfaces and has no password. A file below a folder that
only its user can open has neither fault. What the processes send each other afterwards still goes over sockets, to
which any user of the machine can connect: hence the proof. A further group has connections of its own, and is proven,
too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from hezar_train.errors import HezarTrainError

__all__ = ["KEY", "join_through_file", "verify_group", "verify_peers"]

KEY = "hezar_train.key"

_stores: list[Any] = []  # that of the group which this process has joined through a file, while there is one


def join_through_file(path: Path, *, on_cpu: bool) -> None:
    """Make the process group of this process, whose number is in the environment, with a file as its store."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(path), count)  # type: ignore[attr-defined]
    cpu = on_cpu or not torch.accelerator.is_available()
    PartialState(cpu=cpu, store=store, rank=rank, world_size=count)
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
