"""Compare one run on two processes with two separate runs side by side, and fail if it falls behind.

    python benchmarks/processes.py [--rounds 5] [--steps 60] [--limit 0.9]

Both ways keep two cores busy with the same work, one thread each; the difference is what it costs to be one training:
sums of gradients, losses and counts, and waiting for one another. Each stamps the time after every step but the first
ones, so that imports and set-up count for nobody. Rounds are interleaved. What is judged is the ratio of the best
stretches of `STRETCH` steps: other work on the machine disturbs some of them, and slows down most those that wait for
one another, so run this on a machine that has nothing else to do. The processors' own time for a sample is told beside
it: other work does not change that much, and what is waited for is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2
BATCH_SIZE = 32
WARM_STEPS = 10
STRETCH = 16
"""Steps, of both processes together, over which a pace is measured."""

TOKENS, VOCABULARY, WIDTH, LABELS = 64, 1000, 128, 10
LIMIT = 0.9
TOGETHER, APART = "one run on two processes", "two runs side by side"


def make_model() -> Any:
    """Build a small encoder: nearly all of a step's time is arithmetic."""
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, num_layers=4)
            self.head = nn.Linear(WIDTH, LABELS)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
            return logits

    torch.manual_seed(0)
    return Encoder()


def train(num_steps: int, folder: str) -> None:
    """Be one process: train `num_steps` steps of `BATCH_SIZE` samples each, and print when each ended."""
    import torch
    from torch.utils.data import TensorDataset

    from hezar_train import Hook, Trainer, TrainerConfig

    torch.set_num_threads(1)
    stamps: list[float] = []
    busy: list[float] = []

    class Stamps(Hook):
        def after_step(self) -> None:
            if self.trainer.state.global_step >= WARM_STEPS:
                stamps.append(time.time())
                busy.append(time.process_time())

    size = num_steps * BATCH_SIZE * int(os.environ.get("WORLD_SIZE", "1"))
    data = TensorDataset(torch.randint(VOCABULARY, (size, TOKENS)), torch.randint(LABELS, (size,)))
    config = TrainerConfig(
        folder, batch_size=BATCH_SIZE, num_epochs=1, optimizer="adamw", learning_rate=1e-4, log_steps=WARM_STEPS,
        criterion="CrossEntropyLoss", save_enabled=False, trackers=[], use_cpu=True,
    )  # fmt: skip
    Trainer(config, make_model(), data, hooks=[Stamps()]).train()
    print(json.dumps({"stamps": stamps, "busy": (busy[-1] - busy[0]) / (len(busy) - 1) / BATCH_SIZE}), flush=True)


def start(num_steps: int, folder: Path, world: dict[str, str]) -> subprocess.Popen[str]:
    """Start one process."""
    kept = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    command = [sys.executable, __file__, "--one", str(folder), "--steps", str(num_steps)]
    env = {**kept, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **world}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def worlds(way: str) -> list[dict[str, str]]:
    """Return what each process is told of the others."""
    if way == APART:
        return [{} for _ in range(NUM_PROCESSES)]
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = str(chosen.getsockname()[1])
    shared = {"WORLD_SIZE": str(NUM_PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NUM_PROCESSES)]


def paces_of(way: str, num_steps: int) -> tuple[float, float]:
    """Train once in one of the two ways; return the best pace of both together, and the processor's time a sample."""
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / (str(number) if way == APART else "run") for number in range(NUM_PROCESSES)]
        running = [start(num_steps, name, world) for name, world in zip(names, worlds(way), strict=True)]
        try:
            printed = [process.communicate(timeout=600) for process in running]
        finally:
            for process in running:
                process.kill()
    for process, (_, errors) in zip(running, printed, strict=True):
        if process.returncode != 0:
            raise SystemExit(f"{way} failed:\n{errors}")
    told = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    return best_pace([one["stamps"] for one in told]), min(one["busy"] for one in told)


def best_pace(stamps: list[list[float]]) -> float:
    """Return the samples per second of the best stretch, while all processes trained."""
    begin, end = max(one[0] for one in stamps), min(one[-1] for one in stamps)
    shared = sorted(stamp for one in stamps for stamp in one if begin <= stamp <= end)
    seconds = min(last - first for first, last in zip(shared, shared[STRETCH:], strict=False))
    return STRETCH * BATCH_SIZE / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        train(options.steps, options.one)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the way that ends what was started
    paces: dict[str, list[float]] = {TOGETHER: [], APART: []}
    busy: dict[str, list[float]] = {TOGETHER: [], APART: []}
    for number in range(options.rounds):
        for way in (TOGETHER, APART) if number % 2 else (APART, TOGETHER):
            pace, seconds = paces_of(way, options.steps)
            paces[way].append(pace)
            busy[way].append(seconds)
            print(f"round {number + 1}: {way}: {pace:.1f} samples/s, {seconds * 1e3:.2f} ms a sample", flush=True)
    print(f"processor's time: {min(busy[APART]) / min(busy[TOGETHER]):.3f} of its work is training, the rest is talk")
    ratio = max(paces[TOGETHER]) / max(paces[APART])
    verdict = "PASS" if ratio >= options.limit else "FAIL"
    print(f"{TOGETHER} / {APART}: {ratio:.3f} (at least {options.limit:g}): {verdict}")
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
