"""The example that reads like LiBai's `train_net.py`: it trains, resumes, evaluates, and takes overrides."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hezar_train.compat.libai import default_argument_parser

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def train_net(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_net")


def run(train_net: ModuleType, folder: Path, *words: str) -> Any:
    config = ["--config-file", str(EXAMPLES / "train_net_config.py")]
    return train_net.main(default_argument_parser().parse_args([*config, *words, f"train.output_dir={folder}"]))


def test_it_learns_and_then_evaluates_the_best(train_net: ModuleType, tmp_path: Path) -> None:
    assert run(train_net, tmp_path).num_samples == 400 * 32
    found = run(train_net, tmp_path, "--eval-only", f"train.load_weight={tmp_path / 'model_best'}")
    assert found["Acc@1"] > 90
    assert "output_dir: " in (tmp_path / "config.yaml").read_text()


def test_resuming_an_evaluation_takes_the_last_weights_that_the_run_saved(
    train_net: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(train_net, tmp_path, "train.train_iter=60")
    assert not any("nothing is loaded" in line for line in caplog.messages)
    resumed = run(train_net, tmp_path, "--eval-only", "--resume")
    assert resumed == run(train_net, tmp_path, "--eval-only", f"train.load_weight={tmp_path}")
    assert resumed != run(train_net, tmp_path / "new", "--eval-only", "--resume")
    assert (
        f"nothing is loaded, and the model stays as it is: there is no checkpoint in {tmp_path / 'new'}" in caplog.text
    )


def test_a_trial_run_is_short_and_resuming_goes_on(train_net: ModuleType, tmp_path: Path) -> None:
    assert run(train_net, tmp_path, "--fast-dev-run").num_samples == 20 * 32
    assert run(train_net, tmp_path, "--resume", "--fast-dev-run").num_samples == 0


def test_a_killed_run_ends_as_the_unbroken_one(train_net: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    short = ("train.train_iter=30", "train.checkpointer.period=10", "train.evaluation.eval_period=15")
    run(train_net, tmp_path / "whole", *short)

    before_step = train_net.DefaultTrainer.before_step

    def stop(self: Any) -> None:
        before_step(self)
        if self.iter == 17:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_net.DefaultTrainer, "before_step", stop)
        with pytest.raises(KeyboardInterrupt):
            run(train_net, tmp_path / "cut", *short)
    run(train_net, tmp_path / "cut", "--resume", *short)
    weights = [_weights(tmp_path / name) for name in ("whole", "cut")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "checkpoints" / "00000030" / "model.safetensors")
