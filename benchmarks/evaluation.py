"""Compare an evaluation by the trainer with a loop written by hand: peak memory and pace, with large outputs.

    python benchmarks/evaluation.py [--rounds 5] [--sizes 1000 4000 16000]

Each sample's output is 64 x 2,000 logits, from an embedding of 32 and a linear head, in batches of 16; loss and token
accuracy are measured by both, and both have an optimizer, as a loop that trains has (torch loads 70 MB of its compiler
with the first one; what evaluation adds is the question here). Every contestant runs in a fresh process on one thread,
one after another, several rounds over. At every number of samples the peak must stay within 60 MB of the bare loop's,
and the trainer must do at least 0.9 of the bare loop's samples per second (the best round of each).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

TOKENS, VOCABULARY, WIDTH, BATCH = 64, 2000, 32, 16
MOST_EXTRA_MB = 60.0
LEAST_PACE = 0.9
BARE, TRAINER = "bare", "hezar_train"


def make_model() -> Any:
    """Build the network; it returns logits."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def make_dataset(num_samples: int) -> Any:
    """Make random tokens with a label each."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCABULARY, (num_samples, TOKENS), generator=generator) for _ in range(2))
    return TensorDataset(tokens, labels)


def run_bare(num_samples: int) -> dict[str, float]:
    """Evaluate as one would write it by hand."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    model, criterion = make_model().eval(), nn.CrossEntropyLoss()
    torch.optim.AdamW(model.parameters())
    loader = DataLoader(make_dataset(num_samples), batch_size=BATCH)
    loss, right, total = 0.0, 0, 0
    began = time.perf_counter()
    with torch.no_grad():
        for tokens, labels in loader:
            logits = model(tokens)
            loss += float(criterion(logits.flatten(0, 1), labels.flatten())) * labels.numel()
            right += int((logits.argmax(-1) == labels).sum())
            total += labels.numel()
    return {"seconds": time.perf_counter() - began, "loss": loss / total, "token_accuracy": right / total}


def run_trainer(num_samples: int) -> dict[str, float]:
    """Evaluate with this library."""
    from hezar_train import Trainer, TrainerConfig

    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            output_dir=folder,
            task="sequence_labeling",
            metrics=["token_accuracy"],
            criterion="CrossEntropyLoss",
            eval_batch_size=BATCH,
            use_cpu=True,
        )
        data = make_dataset(num_samples)
        trainer = Trainer(config, make_model(), data, data)
        began = time.perf_counter()
        found = trainer.evaluate()
        return {"seconds": time.perf_counter() - began, **found}


def be_a_child(contestant: str, num_samples: int) -> None:
    """Be one contestant: evaluate, and print what was found."""
    import torch

    torch.set_num_threads(1)
    found = run_bare(num_samples) if contestant == BARE else run_trainer(num_samples)
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


def measure(contestant: str, num_samples: int) -> dict[str, float]:
    """Run one contestant in a fresh process and return its report."""
    command = [sys.executable, __file__, "--child", contestant, "--sizes", str(num_samples)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{contestant} did not finish (exit code {done.returncode}):\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(num_samples: int, num_rounds: int) -> tuple[float, float, bool]:
    """Run all rounds; return the extra memory, the share of the pace, and whether the results agree."""
    reports: dict[str, list[dict[str, float]]] = {BARE: [], TRAINER: []}
    for round_number in range(num_rounds):
        for name in (BARE, TRAINER) if round_number % 2 == 0 else (TRAINER, BARE):
            reports[name].append(measure(name, num_samples))
    seconds = {name: min(one["seconds"] for one in found) for name, found in reports.items()}
    peaks = {name: min(one["peak_mb"] for one in found) for name, found in reports.items()}
    for name in (BARE, TRAINER):
        print(f"{num_samples:>8}  {name:<12}{num_samples / seconds[name]:>11.0f}{peaks[name]:>10.1f}", flush=True)
    ours, theirs = reports[TRAINER][0], reports[BARE][0]
    agree = ours["token_accuracy"] == theirs["token_accuracy"] and abs(ours["loss"] - theirs["loss"]) < 1e-5
    return peaks[TRAINER] - peaks[BARE], seconds[BARE] / seconds[TRAINER], agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="times that each contestant runs at each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--child", choices=[BARE, TRAINER], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        be_a_child(asked.child, asked.sizes[0])
        return 0
    print(f"{'samples':>8}  {'contestant':<12}{'samples/s':>11}{'peak MB':>10}")
    passed = True
    for size in asked.sizes:
        extra, pace, agree = compare(size, asked.rounds)
        good = extra <= MOST_EXTRA_MB and agree and pace >= LEAST_PACE
        passed = passed and good
        shown = f"{extra:+.1f} MB (at most +{MOST_EXTRA_MB:.0f}), pace {pace:.3f} (at least {LEAST_PACE})"
        print(f"{size:>8}  {shown}, results {'agree' if agree else 'DIFFER'}: {'PASS' if good else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
