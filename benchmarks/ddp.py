"""Compare the pace of the trainer on two processes with that of a DDP loop written by hand; fail if it falls behind.

    python benchmarks/ddp.py [wide|small|all] [--accumulation 1 4] [--rounds 7]

Two gloo processes with one thread each. The contestants, each in fresh processes, take turns for several rounds: the
bare loop twice (what it differs from itself by is the machine's noise), a plain Accelerate loop, and the trainer. The
main process stamps the time after every update. What is judged is the ratio of the best stretches of `STRETCH` updates
over all rounds: other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pace import FLOOR, FLOOR_AGAIN, LABELS, MAX_GRAD_NORM, MUCH_NOISE, RATE, TOKENS, TRAINER, VOCABULARY
from pace import make_model as make_encoder

NUM_PROCESSES = 2
BATCH_SIZE = 16
LAYERS, WIDTH = 12, 1024
WARM_UPDATES = 8
STRETCH = 4
LOG_STEPS = 50
LIMIT = 1.05
LONGEST_SECONDS = 180.0
"""For one contestant to train; who is not done by then hangs, and is ended and named."""

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Workload:
    """What is trained; how many updates with one micro-batch each."""

    num_updates: int


WORKLOADS = {"wide": Workload(num_updates=40), "small": Workload(num_updates=100)}


def make_model(workload: str) -> Any:
    """Build the network of a workload."""
    from torch import nn

    if workload == "small":
        return make_encoder("small")
    layers = [layer for _ in range(LAYERS - 1) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def make_dataset(workload: str, accumulation: int) -> Any:
    """Make random samples for one epoch of all processes."""
    import torch
    from torch.utils.data import TensorDataset

    size = BATCH_SIZE * NUM_PROCESSES * accumulation * num_updates(workload, accumulation)
    if workload == "small":
        return TensorDataset(torch.randint(VOCABULARY, (size, TOKENS)), torch.randint(LABELS, (size,)))
    return TensorDataset(torch.randn(1, WIDTH).expand(size, -1), torch.randint(WIDTH, (size,)))


def num_updates(workload: str, accumulation: int) -> int:
    """Return how many updates are measured, and those before."""
    return WARM_UPDATES + max(3 * STRETCH, WORKLOADS[workload].num_updates // accumulation)


def make_parts(workload: str, accumulation: int) -> tuple[Any, Any, Any, Any, Any]:
    """Make what a loop written by hand is made of: model, data, criterion, optimizer, scheduler."""
    from torch import nn
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LinearLR

    model = make_model(workload)
    optimizer = AdamW(model.parameters(), lr=RATE, fused=True)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_updates(workload, accumulation))
    return model, make_dataset(workload, accumulation), nn.CrossEntropyLoss(), optimizer, scheduler


def run_bare(workload: str, accumulation: int, tick: Callable[[], None]) -> None:
    """Train with DDP as one would write it by hand."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    bare, data, criterion, optimizer, scheduler = make_parts(workload, accumulation)
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    for step, (inputs, labels) in enumerate(loader, start=1):
        is_last = step % accumulation == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = criterion(model(inputs), labels)
            (loss / accumulation).backward()
        if is_last:
            clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            tick()
        if step % LOG_STEPS == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")


def run_accelerate(workload: str, accumulation: int, tick: Callable[[], None]) -> None:
    """Train as Accelerate's documentation writes it."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    model, data, criterion, optimizer, scheduler = make_parts(workload, accumulation)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for step, (inputs, labels) in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = criterion(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        if step % accumulation == 0:
            tick()
        if step % LOG_STEPS == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")


def run_trainer(workload: str, accumulation: int, tick: Callable[[], None]) -> None:
    """Train with this library: progress, JSON lines, CSV, TensorBoard, ledger and all."""
    from hezar_train import Hook, Trainer, TrainerConfig

    class Watch(Hook):
        def on_batch_end(self, ctx: Any) -> None:
            if ctx.closes_window:
                tick()

    config = TrainerConfig(
        os.environ["FOLDER"], num_epochs=1, batch_size=BATCH_SIZE, gradient_accumulation_steps=accumulation,
        use_cpu=True, optimizer="adamw", learning_rate=RATE, weight_decay=0.01, max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler="linear", lr_scheduler_kwargs={"start_factor": 1.0, "end_factor": 0.0}, lr_scheduling_steps=1,
        log_steps=LOG_STEPS, criterion="CrossEntropyLoss", save_enabled=False,
    )  # fmt: skip
    Trainer(config, make_model(workload), make_dataset(workload, accumulation), hooks=[Watch()]).train()


CONTESTANTS: dict[str, Callable[[str, int, Callable[[], None]], None]] = {
    FLOOR: run_bare,
    FLOOR_AGAIN: run_bare,
    "accelerate": run_accelerate,
    TRAINER: run_trainer,
}


def run_child(contestant: str, workload: str, accumulation: int, report: Path) -> None:
    """Be one process of a contestant: train, and write down when each update ended."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    stamps: list[float] = []
    CONTESTANTS[contestant](workload, accumulation, lambda: stamps.append(time.perf_counter()))
    if os.environ["RANK"] == "0":
        report.write_text(json.dumps(stamps), encoding="utf-8")
    leave()


def leave() -> None:
    """Let go of the group together, and of what gloo holds, before Python ends.

    A plain `destroy_process_group()` or `accelerator.end_training()`, while DDP still holds the group, hangs or aborts
    now and then: the group ends with DDP, which waits, with Python's lock, for threads that need it.
    """
    import torch.distributed as dist

    from hezar_train.runtime.group import leave_group

    dist.barrier()  # nobody leaves who has still to send something
    leave_group()


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes, which meet at a port of the first; end those that are left."""
    import socket

    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = str(chosen.getsockname()[1])
    shared = {
        **os.environ, "WORLD_SIZE": str(NUM_PROCESSES), "LOCAL_WORLD_SIZE": str(NUM_PROCESSES), "MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
        "FOLDER": str(folder / "run"),
    }  # fmt: skip
    running = []
    try:
        for rank in range(NUM_PROCESSES):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"{rank}.txt").open("w") as output:
                running.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def ends_of(running: list[subprocess.Popen[str]]) -> list[int | None]:
    """Return the exit codes once all have ended, one has failed, or the time is over; None of who has not ended."""
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        codes = [process.poll() for process in running]
        if None not in codes or any(codes):
            break
        time.sleep(POLL_SECONDS)
    return [process.poll() for process in running]


def measure(contestant: str, workload: str, accumulation: int) -> float:
    """Run one contestant in fresh processes; return the seconds of an update in its best stretch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        command = [sys.executable, __file__, workload, "--accumulation", str(accumulation), "--child", contestant]
        with started([*command, "--report", str(report)], folder) as running:
            codes = ends_of(running)
        if codes != [0] * NUM_PROCESSES or not report.exists():
            shown = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.txt")))
            sys.exit(
                f"{contestant} did not finish {workload!r}, accumulation {accumulation}: exit codes {codes} (None: it "
                f"was ended after {LONGEST_SECONDS:.0f} s, or because the other had failed). It showed:\n{shown}"
            )
        stamps = json.loads(report.read_text(encoding="utf-8"))[WARM_UPDATES - 1 :]
    return float(min(last - first for first, last in zip(stamps, stamps[STRETCH:], strict=False)) / STRETCH)


def compare(workload: str, accumulation: int, num_rounds: int) -> bool:
    """Run all rounds of a workload, print the table, and tell whether the trainer keeps its limit."""
    names = list(CONTESTANTS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)  # so that nobody always follows the same neighbour
        for name in names[turn:] + names[:turn]:
            seconds[name].append(measure(name, workload, accumulation))
        print(f"{workload}, accumulation {accumulation}: round {number + 1} of {num_rounds}", file=sys.stderr)
    return judge(workload, accumulation, {name: min(values) for name, values in seconds.items()})


def judge(workload: str, accumulation: int, best: dict[str, float]) -> bool:
    """Print the table of minima and compare the trainer with its limit."""
    floor = min(best[FLOOR], best[FLOOR_AGAIN])  # the faster of the two, so that a slow floor flatters nobody
    print(f"\n{workload}, accumulation {accumulation}, {NUM_PROCESSES} processes")
    print(f"{'contestant':<14}{'ms/update':>11}{'ratio':>8}")
    for name, value in best.items():
        print(f"{name:<14}{value * 1e3:>11.2f}{value / floor:>8.3f}")
    noise = max(best[FLOOR], best[FLOOR_AGAIN]) / floor - 1
    allowed, ratio = LIMIT + noise, best[TRAINER] / floor
    print(f"floor against itself {1 + noise:.3f}; limit {LIMIT:.2f} + {noise:.3f} = {allowed:.3f}")
    if noise > MUCH_NOISE:
        print("the machine is busy with other work, so this says little: run it again")
    print(f"{TRAINER} {ratio:.3f}: {'PASS' if ratio <= allowed else 'FAIL'}", flush=True)
    return ratio <= allowed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", nargs="?", default="all", choices=[*WORKLOADS, "all"])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=7, help="times that every contestant runs")
    parser.add_argument("--child", choices=[*CONTESTANTS], help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(options.child, options.workload, options.accumulation[0], options.report)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the way that ends what was started
    workloads = [*WORKLOADS] if options.workload == "all" else [options.workload]
    kept = [compare(workload, count, options.rounds) for workload in workloads for count in options.accumulation]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
