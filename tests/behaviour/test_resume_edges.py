"""Resuming where a user's own code or another folder is involved."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.events import Ledger
from hezar_train.types import Mode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Trip(Hook):
    def __init__(self, step: int) -> None:
        self.step, self.is_armed = step, True

    def before_step(self) -> None:
        if self.is_armed and self.trainer.state.global_step == self.step:
            self.is_armed = False
            raise RuntimeError("tripped")


def data(size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def build(folder: Path, trainer: type[Trainer] = Trainer, hooks: list[Hook] | None = None, **given: Any) -> Trainer:
    torch.manual_seed(0)
    own = {"train_dataset": data(), "eval_dataset": None} | {k: given.pop(k) for k in list(given) if "dataset" in k}
    settings: dict[str, Any] = {
        "num_epochs": 2, "batch_size": 4, "learning_rate": 0.1, "optimizer": "sgd", "save_steps": 2, "use_cpu": True,
        "criterion": "CrossEntropyLoss", "resume_from_checkpoint": True, "trackers": [],
    } | given  # fmt: skip
    return trainer(TrainerConfig(str(folder), **settings), Net(), hooks=hooks or [], **own)  # type: ignore[arg-type]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def tripped_and_resumed(folder: Path, **given: Any) -> Trainer:
    with pytest.raises(RuntimeError, match="tripped"):
        build(folder, hooks=[Trip(5)], **given).train()
    again = build(folder, **given)
    assert again.state.global_step == 4
    again.train()
    return again


class Noisy(Trainer):
    """Draws from all three generators before the model does."""

    def prepare_input_batch(self, batch: Any) -> Any:
        x, y = batch
        return [x + random.random() + float(np.random.rand()) + torch.rand(1), y]


class OwnStep(Trainer):
    def training_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.forward(batch)
        loss = nn.functional.cross_entropy(outputs["logits"], batch[1])
        loss.backward()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("kind", [Noisy, OwnStep])
def test_what_overridden_methods_draw_is_the_same_after_a_resume(kind: type[Trainer], tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", kind)
    whole.train()
    broken = tripped_and_resumed(tmp_path / "broken", trainer=kind)
    assert all(map(torch.equal, weights(whole), weights(broken)))


def test_a_checkpoint_of_another_folder_starts_a_run_of_its_own(tmp_path: Path) -> None:
    build(tmp_path / "first", eval_dataset=data(8), max_steps=6).train()
    build(tmp_path / "second", eval_dataset=data(8), max_steps=6, seed=7).train()
    foreign = tmp_path / "first/checkpoints/00000004"
    trainer = build(
        tmp_path / "second", eval_dataset=data(8), max_steps=6, resume_from_checkpoint=str(foreign), learning_rate=0.1
    )
    trainer.train()
    record = json.loads((tmp_path / "second/evaluations/00000006.json").read_text())
    assert (
        record["metrics"]["loss"]
        == json.loads((tmp_path / "first/evaluations/00000006.json").read_text())["metrics"]["loss"]
    )
    assert (tmp_path / "second/previous/0001/checkpoints/00000006").exists()
    assert [line.update for line in Ledger.read(tmp_path / "second/ledger.jsonl")] == [5, 6]


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.place = 0
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        rows = data(24)
        while self.place < 24:
            self.place += 1
            yield rows[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_failed_call_loses_no_window_of_a_stream(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", train_dataset=Stream(), max_steps=6)
    whole.train()
    failed = build(tmp_path / "failed", train_dataset=Stream(), max_steps=6, hooks=[Trip(3)])
    with pytest.raises(RuntimeError, match="tripped"):
        failed.train()
    failed.train()
    assert all(map(torch.equal, weights(whole), weights(failed)))


class Impatient(Hook):
    modes = frozenset({Mode.VAL})

    def on_fit_end(self, _: Any) -> None:
        self.trainer.request_stop("patience")


def test_a_stop_asked_for_in_an_evaluation_is_remembered(tmp_path: Path) -> None:
    build(tmp_path / "run", eval_dataset=data(8), hooks=[Impatient()]).train()
    again = build(tmp_path / "run", eval_dataset=data(8))
    again.train()
    assert again.state.global_step == 6  # the first of two epochs


def test_an_accepted_learning_rate_is_put_into_force(tmp_path: Path) -> None:
    build(tmp_path / "run", num_epochs=1, lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5}).train()
    schedule = {"lr_scheduler": "exponential", "lr_scheduler_kwargs": {"gamma": 0.5}}
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.1 in the checkpoint, 0\.02 now"):
        build(tmp_path / "run", learning_rate=0.02, **schedule)
    trainer = build(tmp_path / "run", learning_rate=0.02, weight_decay=0.3, accept_changes=True, **schedule)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.3
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_loader_that_no_longer_shuffles_and_other_units_are_refused(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    build(tmp_path / "run", train_dataset=loader, max_steps=3).train()
    with pytest.raises(ConfigError, match="shuffle: True in the checkpoint, False now"):
        build(tmp_path / "run", train_dataset=DataLoader(data(), batch_size=4))
    with pytest.raises(ConfigError, match="units of the loss: samples in the checkpoint, labels now"):
        build(tmp_path / "run", train_dataset=loader, task="sequence_labeling")


def test_a_window_that_max_steps_cut_short_is_told(tmp_path: Path) -> None:
    build(tmp_path / "run", gradient_accumulation_steps=3, save_steps=None, max_steps=2).train()
    with pytest.raises(ConfigError, match="inside an update that would now be whole"):
        build(tmp_path / "run", gradient_accumulation_steps=3, save_steps=None, max_steps=5)


def test_a_set_name_with_a_dot_keeps_the_objective_of_its_metric(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", eval_dataset={"v1.0": data(8)}, metric_for_best_model="v1.0.loss")
    assert trainer.setup.objective == "minimize"


def test_a_lost_ledger_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "run", num_epochs=1).train()
    (tmp_path / "run/ledger.jsonl").unlink()
    build(tmp_path / "run").train()
    assert "ledger.jsonl lacks" in caplog.text
