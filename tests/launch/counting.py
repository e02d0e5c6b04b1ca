"""A stand-in for a training: all processes add up together, the main one saves, a signal ends all after one addition.

Arguments: the number of additions, seconds for each, and what to do on the way (`fail:1:3` is: rank 1 raises at 3).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hezar_train.launch import join_group, num_restarts, reported_exit

SAVED = Path("saved")


def main() -> None:
    total, seconds, *deeds = int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
    Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    count = int(SAVED.read_text()) if SAVED.exists() else 0
    add_up(count, total, seconds, deeds)


def add_up(count: int, total: int, seconds: float, deeds: list[str]) -> None:
    import torch
    import torch.distributed as dist

    join_group(on_cpu=True)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    rank = dist.get_rank()
    print(f"rank {rank} of {dist.get_world_size()} begins at {count}, restart {num_restarts()}", flush=True)
    while count < total:
        do(deeds, rank, count)
        time.sleep(seconds)
        stop = torch.tensor([1, max(asked, default=0)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        count += int(stop[0])
        if rank == 0:
            SAVED.write_text(str(count))
        if stop[1]:
            time.sleep(seconds * rank)  # the main process is not the last to leave
            print(f"rank {rank} stopped at {count}", flush=True)
            raise SystemExit(128 + int(stop[1]))
    dist.destroy_process_group()


def do(deeds: list[str], rank: int, count: int) -> None:
    for deed in deeds:
        kind, who, when = deed.split(":")[:3]
        if (rank, count) != (int(who), int(when)):
            continue
        if kind == "fail":
            raise RuntimeError(f"rank {rank} cannot count past {count}")
        if kind == "refuse":
            print(f"error: rank {rank} refuses", file=sys.stderr)
            raise SystemExit(2)
        if kind == "die" and num_restarts() < int(deed.split(":")[3]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with reported_exit():
        main()
