"""A run's folder made by hand, in milliseconds: checkpoints, logs, evaluations, config; no trainer is involved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hezar_train import TrainerConfig
from hezar_train.checkpoint import CheckpointStore, Contents
from hezar_train.config.files import to_yaml
from hezar_train.events import CSV_FILE, METRICS_FILE, CSVWriter, JSONLinesWriter, Row, TensorBoardWriter
from hezar_train.trainer.environment import record_environment

REPO = "tester/digits"
LOGS = "2026-01-02_03-04-05_host"
PUSHED_LOGS = "2026-01-02_03-04-05"
METRICS = {"loss": 0.25, "accuracy": 0.8765432101234567, "accuracy.low": 0.81, "accuracy.high": 0.93, "f1": 0.75}


class HandmadeRun:
    """A linear model that is saved at any step; its weights are a function of the step."""

    def __init__(self, root: Path, width: int = 8, **settings: Any) -> None:
        self.root, self.width = root, width
        given = {"task": "image_classification", "num_epochs": 2, "seed": 7, **settings}
        self.config = TrainerConfig(root, **given)
        self.config.save(root)
        self.store = CheckpointStore(root / "checkpoints")

    def save(self, step: int, **changes: Any) -> Path:
        """Write the checkpoint of a step."""
        torch.manual_seed(step)
        model = nn.Linear(self.width, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(2, self.width)).sum().backward()
        optimizer.step()
        given: dict[str, Any] = {
            "state": {"global_step": step},
            "texts": {"train_config.yaml": to_yaml(self.config.to_dict())},
            "extra": {"cursor": torch.arange(step)},
            "folders": {"preprocessor": lambda folder: (folder / "vocab.txt").write_text("a\nb\n")},
        }
        parts = Contents.gather(model, optimizer.state_dict(), **given | changes)
        return self.store.publish(step, parts.write)

    def log(self, *steps: int) -> None:
        """Write rows to all kinds of logs."""
        logs = self.root / "logs" / LOGS
        writers = [JSONLinesWriter(logs / METRICS_FILE), CSVWriter(logs / CSV_FILE), TensorBoardWriter(logs)]
        for writer in writers:
            writer.write([_row(step) for step in steps])
            writer.close()

    def evaluate(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Write the record of an evaluation."""
        (self.root / "evaluations").mkdir(exist_ok=True)
        content = {"step": step, "epoch": 1, "metrics": metrics or METRICS}
        (self.root / "evaluations" / f"{step:08d}.json").write_text(json.dumps(content))

    def note_environment(self, **changes: Any) -> None:
        """Write down where the run was started."""
        given: dict[str, Any] = {
            "device": "cpu", "num_processes": 1, "precision": "no", "num_parameters": 36, "model_class": "Linear",
            "train_data": torch.utils.data.TensorDataset(torch.arange(6)), "eval_data": {"": [1, 2, 3]},
            "command": ["/home/me/bin/hezar-train", "train", "digits", "num_epochs=2"],
        }  # fmt: skip
        record_environment(self.root, **given | changes)


def finished_run(root: Path, **settings: Any) -> HandmadeRun:
    """Return a run of two checkpoints with everything that a run leaves."""
    run = HandmadeRun(root, **settings)
    run.note_environment()
    for step in (5, 10):
        run.save(step)
        run.evaluate(step)
    run.log(1, 5, 10)
    (root / "best.json").write_text(json.dumps({"step": 5, "metric": "evaluation.accuracy", "value": 0.87}))
    (root / "plan.json").write_text(json.dumps({"num_samples": 20, "total_steps": 10, "total_updates": 10}))
    (root / "lock").write_text("{}")
    return run


def _row(step: int) -> Row:
    values = {"train.loss": 1 / step, "evaluation.loss": 2 / step, "evaluation.accuracy": 1 - 1 / step}
    return Row(step, 1, 1e9 + 60 * step, values)
