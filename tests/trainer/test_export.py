"""The model for others, and what a person reads about a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hezar_train import Trainer, TrainerConfig
from hezar_train.errors import ConfigError

Build = Callable[..., Trainer]


class OwnConfig:
    """A config that writes itself, as Hezar's do."""

    def __init__(self, text: str) -> None:
        self._text = text

    def save(self, folder: str, filename: str) -> None:
        (Path(folder) / filename).write_text(self._text)


class Tokenizer:
    """A tokenizer that writes itself, as those of transformers do."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


class Rows(list):  # type: ignore[type-arg]
    """A dataset with a config."""

    config = OwnConfig("name: digits\n")


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class TestSave:
    @pytest.fixture
    def trainer(self, toy: Build, classifier: Any, rows: Any) -> Trainer:
        model = classifier()
        model.config = OwnConfig("width: 4\n")
        built = toy(model=model, train_dataset=Rows(rows()), preprocessor=Tokenizer())
        built.train()
        return built

    def test_weights_and_configs_are_at_the_root_and_the_trainers_files_below(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        assert trainer.save(tmp_path / "out") == tmp_path / "out"
        assert files_of(tmp_path / "out") == [
            "model.safetensors",
            "model_config.yaml",
            "tokenizer.json",
            "train/dataset_config.yaml",
            "train/optimizer.safetensors",
            "train/train_config.yaml",
            "train/trainer_state.json",
        ]

    def test_the_files_hold_what_they_say(self, trainer: Trainer, tmp_path: Path) -> None:
        out = trainer.save(tmp_path / "out")
        assert torch.equal(load_file(out / "model.safetensors")["layer.weight"], trainer.model.layer.weight)  # type: ignore[union-attr, arg-type]
        assert (out / "model_config.yaml").read_text() == "width: 4\n"
        assert (out / "train/dataset_config.yaml").read_text() == "name: digits\n"
        assert TrainerConfig.load(out / "train") == trainer.config
        assert json.loads((out / "train/trainer_state.json").read_text())["state"]["global_step"] == 5
        assert len(load_file(out / "train/optimizer.safetensors")) == 6  # step and two moments of two parameters

    def test_every_name_may_be_given(self, trainer: Trainer, tmp_path: Path) -> None:
        trainer.save(
            tmp_path / "out", config_filename="t.yaml", model_filename="m.safetensors", model_config_filename="m.yaml",
            subfolder="below", dataset_config_file="d.yaml", optimizer_file="o.safetensors",
        )  # fmt: skip
        assert files_of(tmp_path / "out") == [
            "below/d.yaml", "below/o.safetensors", "below/t.yaml", "below/trainer_state.json", "m.safetensors",
            "m.yaml", "tokenizer.json",
        ]  # fmt: skip

    def test_nothing_in_a_run_or_an_export_is_a_pickle(self, trainer: Trainer, tmp_path: Path) -> None:
        trainer.save(tmp_path / "out")
        paths = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(paths) > 15
        for path in paths:
            assert path.suffix not in {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
            assert path.read_bytes()[:2] not in {b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}

    def test_it_can_be_trained_on_from(self, trainer: Trainer, tmp_path: Path, toy: Build) -> None:
        out = trainer.save(tmp_path / "out")
        other = toy(out="other", init_weights_from=out)
        assert torch.equal(other.model.layer.weight, trainer.model.layer.weight)  # type: ignore[union-attr, arg-type]

    def test_a_second_save_replaces_the_first(self, trainer: Trainer, tmp_path: Path) -> None:
        out = trainer.save(tmp_path / "out")
        before = files_of(out)
        with torch.no_grad():
            trainer.model.layer.weight.zero_()  # type: ignore[union-attr, operator]
        trainer.save(out)
        assert files_of(out) == before
        assert not load_file(out / "model.safetensors")["layer.weight"].any()

    def test_a_schedule_is_written_as_json(self, toy: Build, tmp_path: Path) -> None:
        toy(lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5}).save(
            tmp_path / "out", lr_scheduler_file="s.json"
        )
        assert json.loads((tmp_path / "out/train/s.json").read_text())["class"] == "ExponentialLR"

    def test_a_plain_module_gives_a_plain_export(self, toy: Build, tmp_path: Path) -> None:
        toy().save(tmp_path / "out")
        assert files_of(tmp_path / "out") == [
            "model.safetensors", "train/optimizer.safetensors", "train/train_config.yaml", "train/trainer_state.json",
        ]  # fmt: skip

    def test_tied_weights_are_written_once(self, toy: Build, tmp_path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one = nn.Linear(4, 4)
                self.other = nn.Linear(4, 4)
                self.other.weight = self.one.weight

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = self.other(self.one(x))
                return logits

        out = toy(model=Tied()).save(tmp_path / "out")
        assert sorted(load_file(out / "model.safetensors")) == ["one.bias", "one.weight", "other.bias"]


class TestPrintInfo:
    def test_it_shows_the_facts_of_the_run(self, toy: Build, rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
        trainer = toy(
            task="text_classification", eval_dataset=rows(7), num_epochs=3, gradient_accumulation_steps=2,
            optimizer="sgd", lr_scheduler="one_cycle", save_steps=4, log_steps=2, metric_for_best_model="accuracy",
            seed=9,
        )  # fmt: skip
        trainer.print_info()
        shown = dict(line.rstrip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
        facts = {name.strip(): value.strip() for name, value in shown.items()}
        expected = {
            "Task": "text_classification",
            "Model": "Classifier",
            "Parameters": "15 (15 trained)",
            "Device": "cpu",
            "Processes": "1",
            "Precision": "fp32",
            "Training samples": "20",
            "Evaluation samples": "7",
            "Epochs": "3",
            "Batch size": "4",
            "Gradient accumulation": "2",
            "Samples per update": "8",
            "Steps per epoch": "5",
            "Total steps": "15",
            "Total updates": "9",
            "Optimizer": "SGD",
            "Schedule": "OneCycleLR, ticks at epoch ends",
            "Best model by": "evaluation.accuracy",
            "Saves": "every 2 updates and at epoch ends",
            "Logs": "every 1 updates and at epoch ends",
            "Seed": "9",
            "Starts at": "the beginning",
        }
        assert expected.items() <= facts.items()
        assert len(facts) >= 23

    @pytest.mark.parametrize(
        ("settings", "shown"),
        [
            ({}, "0.002"),
            ({"lr_scheduler": "one_cycle", "lr_scheduling_steps": 1}, "0.002 (now 8e-05)"),
            ({"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}}, "0.002"),
            ({"weight_decay": 0.1, "weight_decay_bias": 0.0}, "0.002"),
        ],
    )
    def test_the_learning_rate_is_that_of_the_config_then_that_of_the_moment(
        self, toy: Build, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], shown: str
    ) -> None:
        toy(learning_rate=0.002, **settings).print_info()
        assert re.search(r"^Learning rate +(.*)$", capsys.readouterr().out, re.MULTILINE)[1] == shown

    def test_a_resumed_schedule_tells_both_rates(self, toy: Build, capsys: pytest.CaptureFixture[str]) -> None:
        settings = {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "learning_rate": 0.002}
        toy(num_epochs=1, **settings).train()
        capsys.readouterr()
        toy(num_epochs=2, resume_from_checkpoint=True, **settings).print_info()
        assert "0.002 (now 0.0002)\n" in capsys.readouterr().out

    def test_rates_of_ones_own_groups_are_told_as_they_are(self, toy: Build, classifier: Any, capsys: Any) -> None:
        model = classifier()
        groups = [{"params": [one], "lr": rate} for one, rate in zip(model.parameters(), (0.1, 0.2), strict=True)]
        toy(model=model, optimizer=torch.optim.SGD(groups, lr=0.3)).print_info()
        assert re.search(r"^Learning rate +0\.1, 0\.2$", capsys.readouterr().out, re.MULTILINE)

    def test_frozen_parameters_are_told_apart(self, toy: Build, classifier: Any, capsys: Any) -> None:
        model = classifier()
        model.layer.weight.requires_grad_(False)
        toy(model=model).print_info()
        assert "15 (3 trained)" in capsys.readouterr().out

    def test_train_shows_it_first(self, toy: Build, capsys: pytest.CaptureFixture[str]) -> None:
        toy().train()
        assert capsys.readouterr().out.startswith("Output folder")

    def test_a_resumed_run_says_where_it_starts(self, toy: Build, capsys: pytest.CaptureFixture[str]) -> None:
        toy(num_epochs=1).train()
        capsys.readouterr()
        toy(num_epochs=2, resume_from_checkpoint=True).print_info()
        assert "epoch 2, after step 5" in capsys.readouterr().out  # the next step is the second epoch's


class TestHezarFormat:
    @pytest.fixture(scope="class")
    def models(self) -> Any:
        return pytest.importorskip("hezar.models")

    @pytest.fixture
    def trainer(self, toy: Build, models: Any) -> Trainer:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = models.BertTextClassificationConfig(id2label={0: "a", 1: "b", 2: "c"}, vocab_size=50, **sizes)
        rows = [{"token_ids": torch.full((6,), number), "labels": number % 3} for number in range(8)]
        return toy(model=models.BertTextClassification(config), train_dataset=rows, criterion=None)

    def test_hezar_loads_the_export_without_arguments(self, trainer: Trainer, models: Any, tmp_path: Path) -> None:
        out = trainer.save(tmp_path / "out", hezar_format=True)
        loaded = models.Model.load(str(out))
        assert type(loaded) is models.BertTextClassification
        ours = trainer.model.state_dict()
        assert all(torch.equal(value, ours[name]) for name, value in loaded.state_dict().items())

    def test_what_hezar_saved_is_what_a_run_begins_with(
        self, trainer: Trainer, models: Any, toy: Build, tmp_path: Path
    ) -> None:
        trainer.model.save(str(tmp_path / "theirs"))  # type: ignore[operator]
        other = models.BertTextClassification(trainer.model.config)
        begun = toy(out="other", model=other, train_dataset=trainer.train_dataset, criterion=None,
                    init_weights_from=tmp_path / "theirs")  # fmt: skip
        ours = trainer.model.state_dict()
        assert all(torch.equal(value, ours[name]) for name, value in begun.model.state_dict().items())

    def test_it_is_written_only_where_asked_for(self, trainer: Trainer, tmp_path: Path) -> None:
        assert "model.pt" not in files_of(trainer.save(tmp_path / "out"))

    def test_a_model_that_is_not_hezars_is_refused_before_anything_is_written(self, toy: Build, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="hezar_format=True, but Classifier is no model of hezar"):
            toy().save(tmp_path / "out", hezar_format=True)
        assert not (tmp_path / "out").exists()
