"""Compare the pace of the trainer with that of a loop written by hand, and fail if it falls behind its limit.

    python benchmarks/pace.py [tiny|ordinary|small|all] [--rounds 7] [--profile]

Every contestant runs in a fresh process, on one thread and on a pseudo-terminal, one after another, several rounds
over. Each stamps the time after its first log period and after its last step, so that imports and set-up count for
nobody.
What is judged is the ratio of minima over all rounds; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import os
import pstats
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_STEPS = 50
RATE = 1e-3
MAX_GRAD_NORM = 1.0
PROFILE_LINES = 40
MUCH_NOISE = 0.05
LABELS = 10
TOKENS, VOCABULARY, WIDTH = 32, 1000, 128
FLOOR, FLOOR_AGAIN, TRAINER = "bare", "bare-again", "hezar_train"


@dataclass(frozen=True)
class Workload:
    """What is trained, for how long, and how much slower than the bare loop the trainer may be."""

    batch_size: int
    num_steps: int
    limit: float


WORKLOADS = {
    "tiny": Workload(batch_size=8, num_steps=6000, limit=1.10),
    "ordinary": Workload(batch_size=8, num_steps=6000, limit=1.25),  # reached: 1.18; the aim is 1.00
    "small": Workload(batch_size=16, num_steps=200, limit=1.02),
}


class Clock:
    """Measure from the end of the first log period to the end of the last step."""

    def __init__(self, num_steps: int, profiler: cProfile.Profile | None = None) -> None:
        self._first, self._last, self._profiler = LOG_STEPS, num_steps, profiler
        self._step = 0
        self._start = 0.0
        self.seconds: float | None = None

    def tick(self) -> None:
        """Count a step that has just ended."""
        self._step += 1
        if self._step == self._first:
            if self._profiler:
                self._profiler.enable()
            self._start = time.perf_counter()
        elif self._step == self._last:
            self.seconds = time.perf_counter() - self._start
            if self._profiler:
                self._profiler.disable()


def make_model(workload: str) -> Any:
    """Build the network of a workload; it returns logits."""
    from torch import nn

    if workload == "tiny":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, LABELS))
    if workload == "ordinary":

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, LABELS))

            def forward(self, inputs: Any) -> Any:
                return self.layers(inputs)

        return Net()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=512, batch_first=True)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2)
            self.head = nn.Linear(WIDTH, LABELS)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))

    return Encoder()


def make_dataset(workload: str) -> Any:
    """Make random samples for one epoch."""
    import torch
    from torch.utils.data import TensorDataset

    size = WORKLOADS[workload].batch_size * WORKLOADS[workload].num_steps
    if workload == "ordinary":
        return Rows(torch.randn(size, 32), torch.randint(LABELS, (size,)))
    inputs = torch.randn(size, 32) if workload == "tiny" else torch.randint(VOCABULARY, (size, TOKENS))
    return TensorDataset(inputs, torch.randint(LABELS, (size,)))


class Rows:
    """A dataset as people write it: a dict of tensors for each index."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self._inputs[index], "labels": self._labels[index]}


def stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch, as people write it."""
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def collate_of(workload: str) -> Callable[[list[Any]], Any] | None:
    """Return the collate function of a workload; None: torch's own."""
    return stack if workload == "ordinary" else None


def pair_of(batch: Any) -> Any:
    """Return the inputs and labels of a batch."""
    return (batch["inputs"], batch["labels"]) if isinstance(batch, dict) else batch


def make_parts(workload: str) -> tuple[Any, Any, Any, Any, Any]:
    """Make what a loop written by hand is made of: model, loader, criterion, optimizer, scheduler."""
    from torch import nn
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LinearLR
    from torch.utils.data import DataLoader

    model = make_model(workload)
    collate = collate_of(workload)
    loader = DataLoader(
        make_dataset(workload), batch_size=WORKLOADS[workload].batch_size, shuffle=True, collate_fn=collate
    )
    optimizer = AdamW(model.parameters(), lr=RATE, fused=True)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=len(loader))
    return model, loader, nn.CrossEntropyLoss(), optimizer, scheduler


def run_bare(workload: str, clock: Clock) -> None:
    """Train as one would write it by hand."""
    from torch.nn.utils import clip_grad_norm_

    model, loader, criterion, optimizer, scheduler = make_parts(workload)
    model.train()
    for step, batch in enumerate(loader, start=1):
        inputs, labels = pair_of(batch)
        loss = criterion(model(inputs), labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % LOG_STEPS == 0:
            print(f"step {step} loss {loss.item():.4f}")
        clock.tick()


def run_accelerate(workload: str, clock: Clock) -> None:
    """Train as Accelerate's documentation writes it."""
    from accelerate import Accelerator

    model, loader, criterion, optimizer, scheduler = make_parts(workload)
    accelerator = Accelerator(cpu=True)
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    model.train()
    for step, batch in enumerate(loader, start=1):
        inputs, labels = pair_of(batch)
        loss = criterion(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % LOG_STEPS == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")
        clock.tick()


def run_trainer(workload: str, clock: Clock) -> None:
    """Train with this library: progress bar, JSON lines, CSV, TensorBoard, ledger and all."""
    from hezar_train import Hook, Trainer, TrainerConfig

    class Watch(Hook):
        def after_step(self) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            output_dir=folder,
            num_epochs=1,
            batch_size=WORKLOADS[workload].batch_size,
            use_cpu=True,
            optimizer="adamw",
            learning_rate=RATE,
            weight_decay=0.01,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler="linear",
            lr_scheduler_kwargs={"start_factor": 1.0, "end_factor": 0.0},
            lr_scheduling_steps=1,
            log_steps=LOG_STEPS,
            criterion="CrossEntropyLoss",
        )
        data = make_dataset(workload)
        Trainer(config, make_model(workload), data, data_collator=collate_of(workload), hooks=[Watch()]).train()


CONTESTANTS: dict[str, Callable[[str, Clock], None]] = {
    FLOOR: run_bare,
    FLOOR_AGAIN: run_bare,
    "accelerate": run_accelerate,
    TRAINER: run_trainer,
}


def run_child(contestant: str, workload: str, report: Path, *, profile: bool) -> None:
    """Be one contestant: train, and write down the seconds."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    profiler = cProfile.Profile() if profile else None
    clock = Clock(WORKLOADS[workload].num_steps, profiler)
    CONTESTANTS[contestant](workload, clock)
    text = io.StringIO()
    if profiler:
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
    report.write_text(json.dumps({"seconds": clock.seconds, "profile": text.getvalue()}), encoding="utf-8")


def on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Run a command on a pseudo-terminal; return its exit code and what it showed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = bytearray()
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while chunk := os.read(ours, 65536):
                shown += chunk
    os.close(ours)
    return process.returncode, shown.decode(errors="replace")


def measure(contestant: str, workload: str, *, profile: bool = False) -> dict[str, Any]:
    """Run one contestant in a fresh process and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, __file__, workload, "--child", contestant, "--report", str(report)]
        code, shown = on_a_terminal(command + ["--profile"] * profile)
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if code != 0 or found.get("seconds") is None:
        sys.exit(f"{contestant} did not finish {workload!r} (exit code {code}). It showed:\n{shown[-4000:]}")
    return dict(found)


def compare(workload: str, contestants: list[str], num_rounds: int) -> bool:
    """Run all rounds of a workload, print the table, and tell whether the trainer keeps its limit."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(num_rounds):
        turn = round_number % len(contestants)  # so that nobody always follows the same neighbour
        for name in contestants[turn:] + contestants[:turn]:
            seconds[name].append(measure(name, workload)["seconds"])
        print(f"{workload}: round {round_number + 1} of {num_rounds}", file=sys.stderr)
    return judge(workload, {name: min(values) for name, values in seconds.items()})


def judge(workload: str, best: dict[str, float]) -> bool:
    """Print the table of minima and compare the trainer with its limit."""
    setting = WORKLOADS[workload]
    steps = setting.num_steps - LOG_STEPS
    floor = min(best[FLOOR], best[FLOOR_AGAIN])  # the faster of the two, so that a slow floor flatters nobody
    print(f"\n{workload}: {steps} steps of {setting.batch_size}")
    print(f"{'contestant':<14}{'seconds':>9}{'us/step':>10}{'ratio':>8}")
    for name, value in best.items():
        print(f"{name:<14}{value:>9.3f}{value / steps * 1e6:>10.1f}{value / floor:>8.3f}")
    noise = max(best[FLOOR], best[FLOOR_AGAIN]) / floor - 1
    allowed = setting.limit + noise
    print(f"floor against itself {1 + noise:.3f}; limit {setting.limit:.2f} + {noise:.3f} = {allowed:.3f}")
    if noise > MUCH_NOISE:
        print("the machine is busy with other work, so this says little: run it again")
    if TRAINER not in best:
        return True
    ratio = best[TRAINER] / floor
    passed = ratio <= allowed
    print(f"{TRAINER} {ratio:.3f}: {'PASS' if passed else 'FAIL'}")
    return passed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="all", choices=[*WORKLOADS, "all"])
    parser.add_argument("--rounds", type=int, default=7, help="times that every contestant runs")
    parser.add_argument(
        "--only", nargs="+", default=[*CONTESTANTS], choices=[*CONTESTANTS], help="besides the bare loop"
    )
    parser.add_argument("--profile", action="store_true", help="profile the steps of the trainer instead")
    parser.add_argument("--child", choices=[*CONTESTANTS], help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    asked = parse()
    if asked.child:
        run_child(asked.child, asked.workload, asked.report, profile=asked.profile)
        return 0
    workloads = [*WORKLOADS] if asked.workload == "all" else [asked.workload]
    if asked.profile:
        for workload in workloads:
            print(measure(TRAINER, workload, profile=True)["profile"])
        return 0
    contestants = [name for name in CONTESTANTS if name in {FLOOR, FLOOR_AGAIN, *asked.only}]
    passed = [compare(workload, contestants, asked.rounds) for workload in workloads]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
