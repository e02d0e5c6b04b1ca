"""Compare the time from the start of a process to its first batch with that of a loop written by hand.

    python benchmarks/start.py [--rounds 9] [--only accelerate hezar_train]

Every contestant is a fresh process on one thread that imports what it needs, makes a network, data, an optimizer and a
loader, and says when the network is called for the first time. They take turns; the ratio is that of the minima.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

MUCH_NOISE = 0.05
LIMIT = 1.2
FLOOR, FLOOR_AGAIN, TRAINER = "bare", "bare-again", "hezar_train"

NETWORK = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs):
        print("first batch", time.monotonic_ns(), flush=True)
        return self.layers(inputs)

data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
"""

LOOP = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 8)
loader = DataLoader(data, batch_size=8, shuffle=True)
criterion = nn.CrossEntropyLoss()
model.train()
for inputs, labels in loader:
    model(inputs)
    break
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 8)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
criterion = nn.CrossEntropyLoss()
model.train()
for inputs, labels in loader:
    model(inputs)
    break
"""

TRAINED = """
import sys
from hezar_train import Trainer, TrainerConfig
config = TrainerConfig(
    sys.argv[1], num_epochs=1, batch_size=8, optimizer="adamw", learning_rate=1e-3, lr_scheduler="linear", use_cpu=True,
    criterion="CrossEntropyLoss", save_enabled=False,
)
Trainer(config, Net(), data).train()
"""

CONTESTANTS = {
    FLOOR: NETWORK + LOOP,
    FLOOR_AGAIN: NETWORK + LOOP,
    "accelerate": NETWORK + ACCELERATE,
    TRAINER: NETWORK + TRAINED,
}

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    "OMP_NUM_THREADS": "1",
}
"""Compiled modules are kept, as they are wherever a package was installed; the first start of each compiles them."""


def measure(contestant: str) -> float:
    """Return the seconds from the start of a process to its first batch."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CONTESTANTS[contestant], folder]
        began = time.monotonic_ns()
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    stamps = [line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("first batch")]
    if ended.returncode or not stamps:
        sys.exit(
            f"{contestant} did not reach its first batch (exit code {ended.returncode}). It showed:\n{ended.stderr}"
        )
    return (int(stamps[0]) - began) / 1e9


def compare(contestants: list[str], num_rounds: int) -> bool:
    """Run all rounds, print the table, and tell whether the trainer keeps its limit."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for name in contestants:  # once for the files' sake: compiled modules, the system's cache
        measure(name)
    for round_number in range(num_rounds):
        turn = round_number % len(contestants)  # so that nobody always follows the same neighbour
        for name in contestants[turn:] + contestants[:turn]:
            seconds[name].append(measure(name))
    best = {name: min(values) for name, values in seconds.items()}
    floor = min(best[FLOOR], best[FLOOR_AGAIN])
    noise = max(best[FLOOR], best[FLOOR_AGAIN]) / floor - 1
    print(f"{'contestant':<14}{'seconds':>9}{'ratio':>8}")
    for name, value in best.items():
        print(f"{name:<14}{value:>9.3f}{value / floor:>8.3f}")
    print(f"floor against itself {1 + noise:.3f}; limit {LIMIT:.2f} + {noise:.3f} = {LIMIT + noise:.3f}")
    if noise > MUCH_NOISE:
        print("the machine is busy with other work, so this says little: run it again")
    passed = TRAINER not in best or best[TRAINER] / floor <= LIMIT + noise
    print("PASS" if passed else "FAIL")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="times that every contestant starts")
    parser.add_argument(
        "--only", nargs="+", default=[*CONTESTANTS], choices=[*CONTESTANTS], help="besides the bare loop"
    )
    asked = parser.parse_args()
    return (
        0 if compare([name for name in CONTESTANTS if name in {FLOOR, FLOOR_AGAIN, *asked.only}], asked.rounds) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
