"""A run goes on from the repository alone, on a machine that has nothing of it, and ends as if it had never moved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Trainer, TrainerConfig
from hezar_train.checkpoint import CheckpointStore, initial_weights, read_tensors
from hezar_train.hub import Pace, Pusher, PushTarget, fetch_checkpoint, fetch_records, fetch_weights
from tests.hub.server import LoopbackHub

REPO = "tester/travel"
LAST_STEP, MOVING_STEP = 12, 8


@pytest.fixture
def trainer_of() -> Callable[..., Trainer]:
    def build(root: Path, **settings: object) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
        given = {"batch_size": 4, "num_epochs": 2, "criterion": "CrossEntropyLoss", "save_steps": 4, "log_steps": 1}
        return Trainer(TrainerConfig(root, **given | settings), model, data)  # type: ignore[arg-type]

    return build


def rows(root: Path) -> list[dict[str, float]]:
    (path,) = root.glob("logs/*/metrics.json")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in ("step", "train.loss", "train.learning_rate")} for row in found]


def test_a_run_continues_from_the_repository_alone_bit_by_bit(
    hub: LoopbackHub, tmp_path: Path, trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    trainer_of(tmp_path / "unbroken").train()
    trainer_of(tmp_path / "first").train()
    shutil.rmtree(tmp_path / "first" / "checkpoints" / f"{LAST_STEP:08d}")  # as if it had ended before this save
    pusher = Pusher(tmp_path / "first", PushTarget(REPO, strategy="every_save"), Pace(first_seconds=0.05))
    pusher.start()
    assert pusher.close(wait_seconds=60)
    shutil.rmtree(tmp_path / "first")

    found = fetch_checkpoint(f"hub://{REPO}", tmp_path / "second" / "checkpoints")
    fetch_records(f"hub://{REPO}", tmp_path / "second")
    assert found.name == f"{MOVING_STEP:08d}"
    trainer_of(tmp_path / "second", resume_from_checkpoint=str(found)).train()

    ends = [CheckpointStore(tmp_path / name / "checkpoints").path(LAST_STEP) for name in ("unbroken", "second")]
    weights, others = (read_tensors(end / "model.safetensors") for end in ends)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert rows(tmp_path / "second") == rows(tmp_path / "unbroken")


def test_weights_of_a_repository_start_another_model(
    hub: LoopbackHub, tmp_path: Path, trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    pusher = Pusher(tmp_path / "run", PushTarget(REPO))
    pusher.start()
    assert pusher.close(wait_seconds=60)
    other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    report = initial_weights(other, fetch_weights(REPO))
    assert not report.missing
    assert torch.equal(other[0].weight, trainer.model[0].weight)  # type: ignore[index]
