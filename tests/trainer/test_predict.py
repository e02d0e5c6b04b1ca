"""Predictions: in the order of the data, to memory or to a file that is whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Trainer
from hezar_train.errors import ConfigError, DataError

Build = Callable[..., Trainer]


@pytest.fixture
def trainer(toy: Build, rows: Any) -> Trainer:
    return toy(task="text_classification", eval_dataset=rows(11), eval_batch_size=4)


def by_hand(trainer: Trainer, data: list[dict[str, Any]]) -> list[int]:
    with torch.no_grad():
        logits = trainer.model(torch.stack([row["x"] for row in data]))
    found: list[int] = logits.argmax(1).tolist()
    return found


def test_predictions_come_in_the_order_of_the_data(trainer: Trainer, rows: Any) -> None:
    assert trainer.predict() == by_hand(trainer, rows(11))
    assert trainer.predict(rows(5, seed=8)) == by_hand(trainer, rows(5, seed=8))


def test_a_named_set_can_be_asked_for(toy: Build, rows: Any) -> None:
    trainer = toy(task="text_classification", eval_dataset={"dev": rows(3), "test": rows(5, seed=8)})
    assert trainer.predict("test") == by_hand(trainer, rows(5, seed=8))


def test_json_lines_hold_the_number_of_each_sample(trainer: Trainer, rows: Any, tmp_path: Path) -> None:
    path = trainer.predict(path=tmp_path / "new" / "out.jsonl")
    lines = [json.loads(line) for line in Path(str(path)).read_text().splitlines()]
    predicted = by_hand(trainer, rows(11))
    assert lines == [{"sample": number, "prediction": value} for number, value in enumerate(predicted)]
    assert os.listdir(tmp_path / "new") == ["out.jsonl"]


def test_parquet_holds_the_same(trainer: Trainer, rows: Any, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("datasets")
    path = trainer.predict(path=tmp_path / "new" / "out.parquet")
    table = pandas.read_parquet(path)
    assert table["sample"].tolist() == list(range(11))
    assert table["prediction"].tolist() == by_hand(trainer, rows(11))
    assert os.listdir(tmp_path / "new") == ["out.parquet"]


def test_another_suffix_is_refused_before_anything_runs(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out\.csv: expected a name that ends in \.json, \.jsonl, \.parquet"):
        trainer.predict(path=tmp_path / "out.csv")
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_failure_leaves_the_earlier_file_and_nothing_else(
    trainer: Trainer, rows: Any, tmp_path: Path, name: str
) -> None:
    class Bad(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 6:
                raise OSError("gone")
            return super().__getitem__(index)

    folder = tmp_path / "new"
    folder.mkdir()
    (folder / name).write_text("earlier")
    with pytest.raises(OSError, match="gone"):
        trainer.predict(Bad(rows(11)), path=folder / name)
    assert os.listdir(folder) == [name]
    assert (folder / name).read_text() == "earlier"


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.embedding(tokens)
        return logits


@pytest.mark.parametrize("task", ["sequence_labeling", "mask_filling", "language_modeling"])
def test_data_need_no_labels_where_they_would_be_counted(toy: Build, task: str) -> None:
    tokens = torch.arange(24).reshape(6, 4) % 9
    labelled = [{"tokens": row, "labels": row % 4} for row in tokens]
    trainer = toy(task=task, model=Tokens(), train_dataset=labelled)
    with torch.no_grad():
        expected = trainer.model(tokens).argmax(2).tolist()
    assert trainer.predict([{"tokens": row} for row in tokens]) == expected


def test_data_need_no_labels(toy: Build, rows: Any) -> None:
    bare = [{"x": row["x"]} for row in rows(7)]
    classes = toy(task="text_classification")
    assert classes.predict(bare) == by_hand(classes, rows(7))
    line = toy(task="regression", criterion="MSELoss", model=nn.Sequential(nn.Linear(4, 1)), train_dataset=[
        (row["x"], torch.tensor(float(row["labels"]))) for row in rows()
    ])  # fmt: skip
    with torch.no_grad():
        expected = line.model(torch.stack([row["x"] for row in bare]))[:, 0].tolist()
    assert line.predict([(row["x"],) for row in bare]) == pytest.approx(expected)


def test_there_must_be_data_and_something_to_predict_from(toy: Build, rows: Any) -> None:
    with pytest.raises(DataError, match="there is no evaluation data"):
        toy().predict()

    class LossOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (x * self.weight).sum()}

    with pytest.raises(DataError, match=r"no 'logits' to predict from; they are: loss"):
        toy(model=LossOnly(), criterion=None, task="text_classification").predict(rows(3))


def test_predicting_changes_neither_the_model_nor_its_mode(trainer: Trainer) -> None:
    trainer.model.train()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.predict()
    assert trainer.model.training
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
