"""Make the runs of one version that later versions must be able to read and to go on with.

    PYTHONPATH=CHECKOUT python tests/data_of_versions/make_run.py tests/data_of_versions/VERSION

In the folder of a version there is, for one model, for two in sequence, and for a schedule that is not told how often
to tick: the folder of a run that failed half way, two steps beyond its newest checkpoint; the weights at the end of the
same run, unbroken, as safetensors; and in `expected.json` what else the unbroken run came to. All of it is made once,
with that version, and kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hezar_train
from hezar_train import Hook, MultiModelTrainer, Trainer, TrainerConfig

FAILS_AFTER = {"one_model": 13, "two_models": 34, "epoch_ticks": 13}  # steps, of 21 for each model: in its second epoch
NUM_FEATURES, NUM_LABELS = 6, 3
MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
UNEQUAL_NAMES = ("time", "samples_per_second", "memory", "seconds")  # what a clock or the machine decides

torch.set_num_threads(1)  # bits depend on the number of threads


class Broken(RuntimeError):  # noqa: N818 - what happens, not what went wrong
    """What ends the runs that are to be gone on with."""


class BreakAfter(Hook):
    """Raise when a step is done with, before the next one."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self) -> None:
        if self.trainer.state.global_step == self._step:
            raise Broken(f"after step {self._step}")


def make_net(seed: int) -> nn.Module:
    """Build a small network with dropout and buffers; its weights depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(NUM_FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25),
            nn.Linear(8, NUM_LABELS),
        )  # fmt: skip


def make_data(num_samples: int) -> TensorDataset:
    """Make points whose label is the largest of their first coordinates."""
    points = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(points, points[:, :NUM_LABELS].argmax(dim=1))


def make_config(out: str | os.PathLike[str], kind: str) -> TrainerConfig:
    """Return the config: 3 epochs of 7 steps and 4 updates, the last of them short."""
    schedule: dict[str, Any] = {"lr_scheduler": "cosine_annealing", "lr_scheduling_steps": 1}
    if kind == "epoch_ticks":  # as this schedule did by default before it ticked after every update
        schedule = {"lr_scheduler": "warmup_cosine", "lr_scheduler_kwargs": {"warmup_ratio": 0.6, "alpha": 0.1}}
    return TrainerConfig(
        out, task="image_classification", num_epochs=3, batch_size=4, gradient_accumulation_steps=2, num_threads=1,
        criterion="CrossEntropyLoss", optimizer="adamw", learning_rate=0.02, weight_decay=0.01, max_grad_norm=1.0,
        **schedule, log_steps=2, save_steps=4, eval_steps=6,
        metric_for_best_model="loss", save_total_limit=1, resume_from_checkpoint=True, use_cpu=True,
    )  # fmt: skip


def make_trainer(kind: str, out: str | os.PathLike[str], hooks: Iterable[Hook] = ()) -> Trainer:
    """Build the trainer that begins a run, or goes on with it."""
    data: dict[str, Any] = {"train_dataset": make_data(27), "eval_dataset": make_data(10), "hooks": hooks}
    if kind != "two_models":
        return Trainer(make_config(out, kind), make_net(1), **data)
    return MultiModelTrainer(make_config(out, kind), {"first": make_net(1), "second": make_net(2)}, **data)


def last_checkpoint(run: Path) -> Path:
    """Return the folder of the newest checkpoint."""
    return max(run.glob("checkpoints/[0-9]*"), key=lambda path: int(path.name))


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return all logged rows, without what a clock decides."""
    (path,) = run.glob("logs/*/metrics.json")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: row[name] for name in row if not any(part in name for part in UNEQUAL_NAMES)} for row in rows]


def outcome_of(run: Path) -> dict[str, Any]:
    """Return what a run has come to, so that two can be compared."""
    checkpoint = last_checkpoint(run)
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["state"]
    return {
        "state": {name: state[name] for name in ("global_step", "update_step", "epoch", "samples_seen")},
        "sha256": {name: _sha256((checkpoint / name).read_bytes()) for name in (MODEL_FILE, OPTIMIZER_FILE)},
        "evaluations": sorted(path.stem for path in run.glob("evaluations/*.json")),
        "ledger": _updates_of(run / "ledger.jsonl"),
        "rows": rows_of(run),
    }


def _updates_of(ledger: Path) -> list[str]:
    """Return a line for each update, as the first versions write them; later ones let several share a line."""
    lines = []
    for line in map(json.loads, ledger.read_text(encoding="utf-8").splitlines()):
        for number in range(line.pop("updates", 1)):
            first = line["first"] + number * line["count"]
            lines.append(json.dumps({**line, "update": line["update"] + number, "first": first}))
    return lines


def arithmetic() -> str:
    """Return a hash of what this machine makes of a loop without a trainer: where it differs, so do a run's bits."""
    net, data = make_net(1).train(), make_data(27)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for points, labels in zip(*(tensor.split(4) for tensor in data.tensors), strict=True):
            nn.functional.cross_entropy(net(points), labels).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return _sha256(b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values()))


def make_runs(target: Path) -> None:
    """Make both runs, broken and unbroken, in the working directory, and put what is kept into the target."""
    expected: dict[str, Any] = {"version": hezar_train.__version__, "arithmetic": arithmetic(), "runs": {}}
    for kind, step in FAILS_AFTER.items():
        make_trainer(kind, f"unbroken-{kind}").train()
        with suppress(Broken):
            make_trainer(kind, kind, [BreakAfter(step)]).train()
        shutil.copytree(kind, target / kind)
        shutil.copy(last_checkpoint(Path(f"unbroken-{kind}")) / MODEL_FILE, target / f"{kind}.safetensors")
        saved_step = int(last_checkpoint(target / kind).name)
        expected["runs"][kind] = {"saved_step": saved_step, **outcome_of(Path(f"unbroken-{kind}"))}
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    """Make the runs of the version that is imported."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target", type=Path, help="a new folder, named after the version")
    target = parser.parse_args().target.resolve()
    target.mkdir()
    socket.gethostname = lambda: "host"  # it is part of the logs' names
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_runs(target)


if __name__ == "__main__":
    main()
