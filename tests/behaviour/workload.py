"""One run that uses everything that could break a resume, as a script and as parts; and how two such runs are compared.

    python tests/behaviour/workload.py OUT [--workers 2] [--step-seconds 0.01] [--ballast 1000000]

Shuffled data, augmentation that draws from python, numpy and torch, dropout, batch norm, windows of three micro-batches
with a short last one, a schedule per update, clipping, logs, saves and evaluations in the middle of epochs, retention.
The same command starts it and resumes it.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.events import Ledger
from hezar_train.types import Mode

NUM_FEATURES, NUM_LABELS = 6, 3
UNEQUAL_NAMES = ("time", "samples_per_second", "memory", "seconds")  # what a clock or the machine decides

torch.set_num_threads(1)  # bits depend on the number of threads: the same in the script and in the tests


class NoisyPoints(Dataset[dict[str, torch.Tensor]]):
    """Labelled points, seen through noise from all three global generators; notes which were fetched."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.points = torch.randn(num_samples, NUM_FEATURES, generator=generator)
        self.labels = torch.randint(0, NUM_LABELS, (num_samples,), generator=generator)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self.points):
            raise IndexError(index)
        self.fetched.append(index)
        noise = 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.normal())
        return {"x": self.points[index] + noise + 0.1 * torch.randn(NUM_FEATURES), "labels": self.labels[index]}


class Net(nn.Module):
    """A small network with dropout, buffers, and, if asked for, many parameters that make a save slow."""

    def __init__(self, ballast: int = 0, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, NUM_LABELS)
        )
        self.ballast = nn.Parameter(torch.full((ballast,), 0.01)) if ballast else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits if self.ballast is None else logits + self.ballast.mean()


class Slow(Hook):
    """Make each step take a while, so that a signal from outside can hit every place."""

    modes = frozenset({Mode.TRAIN, Mode.VAL})

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def after_step(self) -> None:
        time.sleep(self._seconds)


def make_net(seed: int = 0, **options: Any) -> Net:
    """Build the network with weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options)


def make_config(out: str | os.PathLike[str], **changes: Any) -> TrainerConfig:
    """Return the config of the run."""
    settings: dict[str, Any] = {
        "task": "text_classification",
        "num_epochs": 3,
        "batch_size": 4,
        "gradient_accumulation_steps": 3,
        "criterion": "CrossEntropyLoss",
        "learning_rate": 0.02,
        "lr_scheduler": "one_cycle",
        "lr_scheduling_steps": 1,
        "max_grad_norm": 1.0,
        "log_steps": 3,
        "save_steps": 6,
        "eval_steps": 15,
        "save_total_limit": 3,
        "resume_from_checkpoint": True,
    }
    return TrainerConfig(out, **settings | changes)


class Crash(RuntimeError):  # noqa: N818 - what happens, not what went wrong
    """What a test's hook raises."""


class CrashAt(Hook):
    """Raise at a moment of the step that follows `step` finished ones, in training or in an evaluation."""

    def __init__(self, step: int, moment: str, mode: Mode = Mode.TRAIN) -> None:
        self.modes = frozenset({mode})
        self._step = step
        setattr(self, moment, self._raise)

    def _raise(self, _: Any) -> None:
        if self.trainer.state.global_step == self._step:
            raise Crash(f"at step {self._step}")


class Words:
    """A preprocessor: something that is saved beside the model."""

    def save(self, folder: str) -> None:
        """Write two files."""
        Path(folder, "words.txt").write_text("one two three")
        Path(folder, "settings.json").write_text('{"lower": true}')


def make_trainer(
    out: str | os.PathLike[str], *, hooks: Iterable[Hook] = (), data: Any = None, ballast: int = 0, **changes: Any
) -> Trainer:
    """Build a trainer of a shorter run: 2 epochs of 30 samples, 8 steps and 3 updates each."""
    settings = {"num_epochs": 2, "log_steps": 2, "save_steps": 3, "eval_steps": None, "save_total_limit": None}
    return Trainer(
        make_config(out, **settings | changes),
        make_net(ballast=ballast),
        NoisyPoints(30) if data is None else data,
        NoisyPoints(10),
        preprocessor=Words(),
        hooks=hooks,
    )


def make_long_trainer(
    out: str | os.PathLike[str], *, hooks: Iterable[Hook] = (), ballast: int = 0, **changes: Any
) -> Trainer:
    """Build the trainer of the script: 3 epochs of 151 samples, 38 steps and 13 updates each."""
    config = make_config(out, **changes)
    return Trainer(config, make_net(ballast=ballast), NoisyPoints(151), NoisyPoints(22), hooks=hooks)


def crash(trainer: Trainer) -> None:
    """Train until the test's hook raises."""
    try:
        trainer.train()
    except Crash:
        return
    raise AssertionError("the run ended without the crash")


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint."""
    return sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*") if path.name.isdigit())


def last_checkpoint(run: Path) -> Path:
    """Return the folder of the newest checkpoint."""
    return max(
        (path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return all logged rows, without what a clock decides."""
    lines = _only_file(run, "metrics.json").read_text().splitlines()
    return [_equal_part(json.loads(line)) for line in lines]


def differences(one: Path, other: Path) -> list[str]:
    """List in what two finished runs differ: state, logged values, records; an empty list means bit by bit the same."""
    found = [name for name in ("model", "optimizer") if _tensors(one, name) != _tensors(other, name)]
    readers = {
        "trainer_state.json": _state_of,
        "metrics.json": rows_of,
        "training_logs.csv": _csv_of,
        "TensorBoard": scalars_of,
        "ledger.jsonl": lambda run: list(Ledger.read(run / "ledger.jsonl")),
        "evaluations": _evaluations_of,
        "best.json": lambda run: (run / "best.json").read_text(),
    }
    found += [name for name, read in readers.items() if read(one) != read(other)]
    twice = [tag for tag, values in scalars_of(other).items() if len(values) != len({step for step, _ in values})]
    return found + [f"TensorBoard holds {tag} twice at a step" for tag in twice]


def _tensors(run: Path, name: str) -> dict[str, tuple[str, bytes]]:
    tensors = load_file(last_checkpoint(run) / f"{name}.safetensors")
    return {key: (str(value.dtype), value.numpy().tobytes()) for key, value in sorted(tensors.items())}


def _state_of(run: Path) -> Any:
    sections = json.loads((last_checkpoint(run) / "trainer_state.json").read_text())
    for name in ("files", "logs_dir"):  # sizes and names of files with times in them
        sections["state"].pop(name)
    del sections["extra"]["data"]  # a stream may describe the same place in several ways
    hooks = sections["extra"]["hooks"]
    sections["extra"]["hooks"] = {name: state for name, state in hooks.items() if state}  # not those that crashed it
    return sections


def _only_file(run: Path, name: str) -> Path:
    found = list((run / "logs").glob(f"*/{name}"))
    assert len(found) == 1, f"one {name} in {run}, found {len(found)}"
    return found[0]


def _equal_part(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(part in name for part in UNEQUAL_NAMES)}


def _csv_of(run: Path) -> list[dict[str, Any]]:
    with _only_file(run, "training_logs.csv").open(newline="") as file:
        return [_equal_part(row) for row in csv.DictReader(file)]


def scalars_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads: (step, value) by name, without what a clock decides."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every purge
    events = EventAccumulator(str(_only_file(run, "metrics.json").parent), size_guidance={"scalars": 0}).Reload()
    tags = _equal_part(dict.fromkeys(events.Tags()["scalars"]))
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(tags)}


def _evaluations_of(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((run / "evaluations").glob("*.json"))}


def main() -> None:
    """Start or resume the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--ballast", type=int, default=0)
    options = parser.parse_args()
    hooks = [Slow(options.step_seconds)]
    make_long_trainer(options.out, hooks=hooks, ballast=options.ballast, num_dataloader_workers=options.workers).train()


if __name__ == "__main__":
    main()
