"""What will a model of seven billion parameters need, on 8 and on 64 GPUs? Computed, and the formulas tried out here.

    python benchmarks/paper.py [--num-processes 2 3] [--bus 25] [--disk 2]

Each formula is that of the page `docs/explanation/scale.md`. It is compared with a small network of six blocks that
really trains here, on processes that talk through gloo: the bytes of parameters, gradients and Adam that each process
holds, the bytes that each sends in an update (as the kernel counts what it writes into its sockets), and the files of
its checkpoint, with a copy of the model each (DDP) and with a share each (FSDP2). Exits with 1 if one of them is off by
more than 2 %, or if training stands still for a background save for more than twice as long as its copy takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 0.02
STALL_LIMIT = 2.0
FULL, HALF = 4, 2
"""Bytes of a number in full precision, and in bf16."""


@dataclass(frozen=True)
class Model:
    """How many parameters a model has: in its repeated blocks, and outside of them."""

    in_blocks: int
    outside: int
    num_blocks: int

    @property
    def all(self) -> int:
        return self.in_blocks + self.outside


LLAMA_7B = Model(32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096), 2 * 32_000 * 4096 + 4096, 32)


def held_by_copies(model: Model) -> float:
    """Bytes on each process with DDP: weights, gradients (they are DDP's buckets), two moments of Adam."""
    return 4 * FULL * model.all


def held_by_shares(model: Model, count: int) -> float:
    """Bytes on each process with FSDP2: the same, shared out."""
    return 4 * FULL * model.all / count


def gathered_at_once(model: Model, number_bytes: int) -> float:
    """Bytes that FSDP2 holds besides, at the worst: what is outside of the blocks, this block and the next one."""
    return number_bytes * (model.outside + 2 * model.in_blocks / model.num_blocks)


def sent_by_copies(model: Model, count: int) -> float:
    """Bytes that each process sends in an update with DDP: a ring sends a sum once, and its parts once."""
    return 2 * (count - 1) / count * FULL * model.all


def sent_by_shares(model: Model, count: int, number_bytes: int, sums: float = 1) -> float:
    """Bytes that each process sends in a micro-batch with FSDP2.

    Blocks are gathered for the forward and again for the backward, the rest once; gradients are summed in full
    precision, each process's share once. Gloo sends such `sums` like a whole DDP exchange, which is twice as much.
    """
    gathered = number_bytes * (2 * model.in_blocks + model.outside)
    return (count - 1) / count * (gathered + sums * FULL * model.all)


def saved_by_each(model: Model, count: int = 1) -> float:
    """Bytes of a checkpoint's tensors that each process writes, and copies first: weights and two moments."""
    return 3 * FULL * model.all / count


# ------------------------------------------------------------------------------- tried out


def train_here(folder: Path, sharding: str) -> None:
    """Train the small network on one of several processes; leave what it held, sent and saved in a file."""
    import torch
    from torch import nn

    from hezar_train import Hook, Trainer, TrainerConfig
    from hezar_train.checkpoint.shard_files import local_part

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(64, 192)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192)) for _ in range(6)
            )
            self.head = nn.Linear(192, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    class Count(Hook):
        """What this process has written by the start of each step, into sockets and files."""

        def __init__(self) -> None:
            self.written: list[int] = []

        def on_batch_start(self, ctx: Any) -> None:
            del ctx
            self.written.append(int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0]))

    def held(tensors: Iterator[Any]) -> int:
        return sum(local_part(one).nbytes for one in tensors if isinstance(one, torch.Tensor) and one.numel() > 1)

    config = TrainerConfig(
        folder / sharding, batch_size=4, max_steps=10, num_epochs=1, criterion="MSELoss", optimizer="adamw",
        log_steps=10, save_steps=10, async_save=False, use_cpu=True, trackers=[], sharding=sharding,
    )  # fmt: skip
    net = Net()
    sizes = {name: one.numel() for name, one in net.named_parameters()}
    in_blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    trainer = Trainer(config, net, torch.utils.data.TensorDataset(torch.randn(400, 64), torch.randn(400, 1)))
    count, gradients = Count(), []
    trainer.register_hooks([count])
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(held(one.grad for one in trainer.model.parameters()))
    )
    trainer.train()
    states = [one for state in trainer.optimizer.state.values() for one in state.values()]
    runtime = trainer.runtime
    found = {
        "model": [in_blocks, sum(sizes.values()) - in_blocks, 6],
        "held": held(iter([*trainer.model.parameters(), *states])) + max(gradients),
        "sent": count.written[8] - count.written[7],
    }
    (folder / f"{sharding}-{runtime.rank}.json").write_text(json.dumps(found))


def tried_out(count: int) -> Iterator[tuple[str, float, float]]:
    """Yield what each formula says of the small network on so many processes, and what was found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for sharding in ("none", "full"):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={count}",
                __file__,
            ]
            variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
            command += ["--train", sharding, "--folder", name]
            subprocess.run(command, check=True, capture_output=True, env=variables)
            ranks = [json.loads((folder / f"{sharding}-{rank}.json").read_text()) for rank in range(count)]
            model = Model(*ranks[0]["model"])
            kind = "copies (DDP)" if sharding == "none" else "shares (FSDP2)"
            held = held_by_copies(model) if sharding == "none" else held_by_shares(model, count)
            sent = sent_by_copies(model, count) if sharding == "none" else sent_by_shares(model, count, FULL, sums=2)
            yield f"{kind}: held by each", held, sum(one["held"] for one in ranks) / count
            yield f"{kind}: sent by each in an update", sent, sum(one["sent"] for one in ranks) / count
            (checkpoint,) = (folder / sharding / "checkpoints").glob("0*")
            files = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
            yield f"{kind}: tensors of a checkpoint", saved_by_each(model), sum(files.values())
            if sharding == "full":
                last = sum(size for name, size in files.items() if f"shard-{count:05d}" in name)
                yield f"{kind}: of these by the last process", saved_by_each(model, count), last


def stall() -> tuple[float, float]:
    """Return how long a background save of 300 MB makes training wait, and how long a bare copy of as much takes."""
    import torch

    from hezar_train.checkpoint import CheckpointStore, CheckpointWriter, Contents

    model = torch.nn.ParameterList(torch.ones(1 << 20) for _ in range(72))
    copies = [torch.ones_like(one) for one in model]
    saves, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(CheckpointStore(folder), background=True, keep=1)
        parts = Contents.gather(model, {}, {}, {"train_config.yaml": "{}\n"})
        writer.reserve(parts)
        for step in range(1, 6):
            start = time.perf_counter()
            with torch.no_grad():
                torch._foreach_copy_(copies, list(model))
            bare.append(time.perf_counter() - start)
            start = time.perf_counter()
            writer.save(step, parts)
            saves.append(time.perf_counter() - start)
            writer.wait()
        writer.close()
    return min(saves), min(bare)


# ------------------------------------------------------------------------------- shown


def size(count: float) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def print_on_paper(model: Model, bus: float, disk: float) -> None:
    """Print what the model needs on 8 and on 64 GPUs, in bf16 with AdamW, a share on each."""
    print(f"\n{model.all:,} parameters, bf16, AdamW; each process {bus:g} GB/s to the host, {disk:g} GB/s to disk\n")
    print(f"| {'for each GPU':58} | {'8 GPUs':>10} | {'64 GPUs':>10} |\n| {'-' * 58} | {'-' * 9}: | {'-' * 9}: |")
    counts = (8, 64)
    rows = {
        "weights, gradients, Adam, as copies: 16 P": [size(held_by_copies(model))] * 2,
        "weights, gradients, Adam, as shares: 16 P / n": [size(held_by_shares(model, n)) for n in counts],
        "gathered besides, at the worst": [size(gathered_at_once(model, HALF))] * 2,
        "sent in an update as copies: 8 P (n - 1) / n": [size(sent_by_copies(model, n)) for n in counts],
        "sent in a micro-batch as shares: about 8 P (n - 1) / n": [
            size(sent_by_shares(model, n, HALF)) for n in counts
        ],
        "its part of a checkpoint, and host memory: 12 P / n": [size(saved_by_each(model, n)) for n in counts],
        "training stands still for a save": [f"{saved_by_each(model, n) / bus / 1e9:.2f} s" for n in counts],
        "written in the background in": [f"{saved_by_each(model, n) / disk / 1e9:.1f} s" for n in counts],
        "checkpoint, all of it: 12 P": [size(saved_by_each(model))] * 2,
    }
    for what, (first, second) in rows.items():
        print(f"| {what:58} | {first:>10} | {second:>10} |")


def main() -> int:
    """Compare, print; return 1 if a formula is off."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--num-processes", type=int, nargs="+", default=[2, 3])
    asked.add_argument("--bus", type=float, default=25.0, help="GB/s from a GPU to the host's memory")
    asked.add_argument("--disk", type=float, default=2.0, help="GB/s that one process writes")
    asked.add_argument("--train", help=argparse.SUPPRESS)
    asked.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.train is not None:
        train_here(options.folder, options.train)
        return 0
    off = []
    print(f"| {'processes':>9} | {'what':46} | {'formula':>10} | {'found':>10} | ratio |")
    print(f"| {'-' * 8}: | {'-' * 46} | {'-' * 9}: | {'-' * 9}: | ----: |")
    for count in options.num_processes:
        for what, expected, found in tried_out(count):
            off += [what] if abs(found / expected - 1) > LIMIT else []
            print(f"| {count:>9} | {what:46} | {size(expected):>10} | {size(found):>10} | {found / expected:5.3f} |")
    waited, copied = stall()
    off += ["the stall of a save"] if waited > STALL_LIMIT * copied else []
    print(
        f"\na background save of 302 MB: training waits {waited * 1e3:.1f} ms; a bare copy takes {copied * 1e3:.1f} ms"
    )
    print_on_paper(LLAMA_7B, options.bus, options.disk)
    print(f"\nOff: {', '.join(off)}" if off else "\nAll formulas hold.")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
