"""Rows of the Hezar table, and defects of its source, that no test beside the code proves."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hezar_train import Hook
from hezar_train.compat.hezar import MetricsHandler, Trainer
from hezar_train.metrics import TextHandler

Build = Callable[..., Trainer]


def test_two_workers_give_the_run_of_none_and_keep_tokenizers_from_forking(
    toy: Build, weights_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    alone, helped = toy(out="alone"), toy(out="helped", num_dataloader_workers=2)
    alone.train()
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    helped.train()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert weights_of(helped) == weights_of(alone)


def test_the_logs_of_a_run_are_in_a_folder_named_by_its_start_and_host(toy: Build, tmp_path: Path) -> None:
    toy().train()
    (folder,) = (tmp_path / "run/logs").iterdir()
    start, _, host = folder.name.rpartition("_")
    assert host == re.sub(r"[^\w.-]", "-", socket.gethostname())
    assert re.search(r"\d{4}.*\d{2}.*\d{2}", start)


def test_only_the_main_process_shows_the_facts(toy: Build, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = toy()
    trainer.print_info()
    assert "Classifier" in capsys.readouterr().out
    vars(trainer)["runtime"] = dataclasses.replace(trainer.runtime, rank=1)
    trainer.print_info()
    assert capsys.readouterr().out == ""


def test_a_handlers_subclass_with_compute_metrics_alone_is_given_the_whole_set(toy: Build, rows: Any) -> None:
    class Hits(MetricsHandler):
        def compute_metrics(self, predictions: Any, labels: Any) -> dict[str, float]:
            assert len(labels) == 9
            return {"hits": float((predictions.argmax(1) == labels).mean())}

    found = toy(eval_batch_size=2, arguments={"eval_dataset": rows(9), "metrics_handler": Hits()}).evaluate()
    theirs = toy(task="text_classification", arguments={"eval_dataset": rows(9)}).evaluate()
    assert found["hits"] == theirs["accuracy"]


def test_a_wrapped_models_own_protocol_is_read_from_the_model_inside(toy: Build, rows: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = nn.Linear(4, 3), 0

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.layer(x)}

        def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.losses += 1
            return functional.cross_entropy(logits, labels)

    model = Own()
    extra = [{**row, "id": number} for number, row in enumerate(rows())]
    wrapped = torch.compile(model, backend="eager")
    toy(criterion=None, arguments={"model": wrapped, "train_dataset": extra}).train()
    assert model.losses == 5


def test_a_wrapped_model_still_generates_in_evaluations(toy: Build) -> None:
    class Echo(nn.Module):
        is_generative = True

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Embedding(9, 9), 0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(ids)
            return logits

        def generate(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return ids

    model, data = Echo(), [{"ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}] * 6
    handler = TextHandler(["cer"])
    handler.decode = lambda ids: [" ".join(map(str, row)) for row in ids.tolist()]
    arguments = {"train_dataset": data, "eval_dataset": data, "metrics_handler": handler}
    wrapped = torch.compile(model, backend="eager")
    trainer = toy(task="text_generation", eval_batch_size=4, arguments={"model": wrapped, **arguments})
    assert trainer.evaluate()["cer"] == 0.0
    assert model.calls == 2


class Masks(Hook):
    """Note which places the dropout of a constant input left alone."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, ...]] = []

    def on_batch_backward(self, ctx: Any) -> None:
        self.seen.append(tuple((ctx.outputs["logits"] != 0).flatten().tolist()))


def test_dropout_differs_between_steps_and_epochs_and_not_between_runs(toy: Build) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.dropout(torch.ones(len(x), 3))

    def masks(out: str) -> list[tuple[bool, ...]]:
        watch = Masks()
        toy(out=out, num_epochs=2, arguments={"model": Dropped(), "hooks": [watch]}).train()
        return watch.seen

    found = masks("one")
    assert len(set(found)) == 10
    assert masks("other") == found
