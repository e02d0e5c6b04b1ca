from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Trainer, TrainerConfig
from hezar_train.errors import ConfigError, DataError
from hezar_train.federated import (
    PLUGIN_ORDER,
    BaseTrainer,
    DittoTrainer,
    Monitor,
    get_trainer,
    register_plugin,
    register_trainer,
    registry,
)


class FourMethods:
    """The least that a worker can drive."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.weight = 0.0

    def train(self) -> tuple[int, dict[str, float], dict[str, float]]:
        self.weight += 1
        return 3, self.get_model_para(), {"train_loss": 0.5}

    def evaluate(self, target_data_split_name: str = "test") -> dict[str, float]:
        return {f"{target_data_split_name}_loss": self.weight}

    def update(self, model_parameters: Mapping[str, Any], strict: bool = False) -> None:
        self.weight = model_parameters["weight"]

    def get_model_para(self) -> dict[str, float]:
        return {"weight": self.weight}


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))
    monkeypatch.setattr(registry, "_PLUGINS", dict(registry._PLUGINS))


@pytest.fixture
def parts(tmp_path: Path, rows: Any) -> tuple[TrainerConfig, nn.Module, dict[str, Any]]:
    config = TrainerConfig(tmp_path, batch_size=4, criterion="CrossEntropyLoss", learning_rate=0.1)

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    return config, Net(4, 3), {"train": rows(), "val": rows(6, seed=2), "test": rows(7, seed=3)}


def one_round(trainer: BaseTrainer, parameters: Any) -> Any:
    """Do what a worker does, with the four methods alone."""
    trainer.update(parameters)
    num_samples, taken, _ = trainer.train()
    return num_samples, taken, trainer.evaluate(target_data_split_name="test")


def test_whatever_has_the_four_methods_can_be_driven(parts: Any) -> None:
    assert isinstance(FourMethods(), BaseTrainer)
    assert one_round(FourMethods(), {"weight": 4.0}) == (3, {"weight": 5.0}, {"test_loss": 5.0})
    num_samples, taken, found = one_round(get_trainer(*parts), {"bias": [0.0] * 3})
    assert (num_samples, set(taken), set(found)) == (20, {"weight", "bias"}, {"loss"})


@pytest.mark.parametrize("lacking", ["train", "evaluate", "update", "get_model_para"])
def test_whatever_lacks_one_of_them_is_no_trainer(lacking: str) -> None:
    methods = {name: len for name in ("train", "evaluate", "update", "get_model_para") if name != lacking}
    assert not isinstance(SimpleNamespace(**methods), BaseTrainer)


def test_the_trainer_and_its_subclasses_are_ones() -> None:
    assert issubclass(Trainer, BaseTrainer)


def test_a_registered_trainer_is_built_by_name_with_what_is_given(parts: Any) -> None:
    class Mine(Trainer):
        pass

    register_trainer("mine", Mine)
    trainer = get_trainer(*parts, trainer_type="mine", preprocessor=None)
    assert type(trainer) is Mine
    register_trainer("four", FourMethods)
    assert type(get_trainer(*parts, trainer_type="four")) is FourMethods


def test_ditto_is_a_trainer_by_name(parts: Any) -> None:
    config, model, data = parts
    config.local_update_steps = 2
    trainer = get_trainer(config, model, data, trainer_type="ditto", regular_weight=0.5)
    assert isinstance(trainer, DittoTrainer)
    with pytest.raises(ConfigError, match="FedProx goes with a Trainer of one model; this one has: personal, global"):
        get_trainer(config, model, data, trainer_type="ditto", plugins={"fedprox": {"mu": 0.1}})


@pytest.mark.parametrize("given", [["sam", "fedprox", "mine"], ["mine", "fedprox", "sam"]])
def test_plug_ins_are_added_in_the_documented_order_whatever_order_they_come_in(parts: Any, given: list[str]) -> None:
    def wrap(trainer: Trainer, word: str) -> Trainer:
        trainer.register_hook_in_train(lambda ctx: None, "on_batch_backward")
        assert word == "x"
        return trainer

    register_plugin("mine", wrap)
    settings: dict[str, dict[str, Any]] = {"fedprox": {"mu": 0.1}, "sam": {"rho": 0.05}, "mine": {"word": "x"}}
    trainer = get_trainer(*parts, plugins={name: settings[name] for name in given})
    assert trainer.hooks_in_train.names("on_batch_backward") == ["backward", "FedProx", "SAM", "<lambda>"]
    assert trainer.train().num_samples == 20


def test_the_order_is_that_of_federatedscope_with_sam_last() -> None:
    theirs = ["nbafl", "sgdmf", "pfedme", "ditto", "fedem", "fedrep", "attack", "fedprox"]
    assert list(PLUGIN_ORDER) == [*theirs, "sam"]


def test_one_that_only_evaluates_gets_no_training_data(parts: Any) -> None:
    trainer = get_trainer(*parts, only_for_eval=True)
    assert set(trainer.evaluate("test")) == {"loss"}
    with pytest.raises(DataError, match="evaluate"):
        trainer.train()
    config, model, data = parts
    with pytest.raises(ConfigError, match="needs data as a dict of splits, not a list"):
        get_trainer(config, model, data["train"], only_for_eval=True)


def test_a_monitor_is_a_hook_of_the_trainer(parts: Any) -> None:
    trainer = get_trainer(*parts, monitor=Monitor("acc"))
    trainer.evaluate("test")
    assert "test_acc" in trainer.ctx.eval_metrics


def test_the_device_is_the_configs_unless_another_is_given(parts: Any) -> None:
    config, model, data = parts
    before = config.to_dict()
    assert get_trainer(config, model, data, device="cpu").config.device == "cpu"
    assert config.to_dict() == before


def test_unknown_names_and_misfits_are_refused(parts: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer_type 'generl' is not registered.*Did you mean 'general'"):
        get_trainer(*parts, trainer_type="generl")
    with pytest.raises(ConfigError, match=r"plug-in 'fedprx' is not registered.*Did you mean 'fedprox'"):
        get_trainer(*parts, plugins={"fedprx": {}})
    register_trainer("none", lambda *_: SimpleNamespace(train=len))
    with pytest.raises(ConfigError, match="built a SimpleNamespace; expected something with the methods train"):
        get_trainer(*parts, trainer_type="none")
    register_trainer("four", FourMethods)
    with pytest.raises(ConfigError, match="plug-ins are hooks, and trainer_type 'four' is no Trainer"):
        get_trainer(*parts, trainer_type="four", plugins={"fedprox": {"mu": 0.1}})
