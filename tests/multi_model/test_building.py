"""What several models are built from, what is refused, and whose checkpoints are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Plain, make_plain, plain_config, plain_pair, same_bits
from torch import nn
from workload import NoisyPoints

from hezar_train import MultiModelTrainer, Trainer
from hezar_train.compat.federatedscope import CopiedModelsTrainer as GeneralMultiModelTrainer
from hezar_train.errors import CheckpointError, ConfigError, DataError, HookError

SHARED = Plain(0)

MISGIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"models": {"a": None}}, "models must be torch modules by name"),
    "a name with a dot": ({"models": {"a.b": Plain(0)}}, "a model is named 'a.b'; expected a word without dots"),
    "a number for a name": ({"models": {0: Plain(0)}}, "a model is named 0; expected a word"),
    "a method for a name": ({"models": {"keys": Plain(0)}}, "no method of torch's ModuleDict"),
    "one model twice": ({"models": {"a": SHARED, "b": SHARED}}, "optimizers of 'a' and 'b' share parameters"),
    "a way that is none": ({"interact": "paralel"}, "interact='paralel' is not known.*Did you mean 'parallel'"),
    "another model to evaluate": ({"eval_model": "wider"}, "there is no model wider.*Did you mean 'wide'"),
    "an optimizer of no model": ({"optimizers": {"x": None}}, "there is no model x. There are: small, wide"),
}


@pytest.mark.parametrize("case", MISGIVEN)
def test_what_cannot_be_trained_is_refused_when_it_is_built(tmp_path: Path, case: str) -> None:
    given, words = MISGIVEN[case]
    with pytest.raises(ConfigError, match=words):
        make_plain(tmp_path, **given)


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_what_is_one_models_is_refused_for_several(tmp_path: Path, name: str) -> None:
    models = plain_pair()
    optimizer = torch.optim.SGD(models["small"].parameters(), 0.1)
    given: Any = optimizer if name == "optimizer" else torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match="for several"):
        MultiModelTrainer(plain_config(tmp_path), models, NoisyPoints(20), **{name: given})


def test_optimizers_that_were_swapped_are_refused(tmp_path: Path) -> None:
    models = plain_pair()
    small, wide = (torch.optim.SGD(models[name].parameters(), 0.1) for name in ("small", "wide"))
    with pytest.raises(ConfigError, match="holds none of the model's parameters"):
        make_plain(tmp_path, models=models, optimizers={"small": wide, "wide": small})


def test_without_models_the_trainer_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs models by name, such as"):
        MultiModelTrainer(plain_config(tmp_path), None, NoisyPoints(20))


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_number_of_models_that_is_none_is_refused(tmp_path: Path, number: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number of models, at least 1"):
        GeneralMultiModelTrainer(number, model=Plain(0), data=NoisyPoints(20), config=plain_config(tmp_path))


@pytest.mark.parametrize("missing", ["model", "data", "config"])
def test_model_data_and_config_are_all_needed(tmp_path: Path, missing: str) -> None:
    given = {"model": Plain(0), "data": NoisyPoints(20), "config": plain_config(tmp_path), missing: None}
    with pytest.raises(ConfigError, match="give model, data and config, or a base_trainer"):
        GeneralMultiModelTrainer(2, **given)


def test_the_first_model_is_the_one_given_and_the_others_are_copies(tmp_path: Path) -> None:
    model = Plain(0)
    trainer = GeneralMultiModelTrainer(3, "parallel", model, NoisyPoints(20), "cpu", plain_config(tmp_path))
    assert trainer.ctx.models[0] is model
    assert len({id(one) for one in trainer.ctx.models}) == len(trainer.ctx.optimizers) == 3
    assert all(same_bits(one, model) for one in trainer.ctx.models)


def test_a_trainer_is_copied_with_its_data_and_stays_as_it_is(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([one["x"] for one in samples]), torch.stack([one["labels"] for one in samples])

    splits = {"train": NoisyPoints(20), "val": NoisyPoints(6), "test": NoisyPoints(5)}
    base = Trainer(plain_config(tmp_path), Plain(0), splits, data_collator=collate)
    before = base.get_model_para()
    trainer = GeneralMultiModelTrainer(2, base_trainer=base)
    trainer.train()
    assert trainer.evaluate("test").keys() >= {"loss", "accuracy"}
    assert isinstance(trainer.prepare_input_batch(trainer.setup.source.fetch(1, [0])), tuple)  # type: ignore[attr-defined]
    assert all(torch.equal(base.get_model_para()[name], value) for name, value in before.items())
    assert not any(same_bits(model, base.model) for model in trainer.models.values())


@pytest.mark.parametrize("interact", ["sequential", "parallel"])
def test_different_models_are_made_by_an_override(tmp_path: Path, interact: str) -> None:
    class Made(GeneralMultiModelTrainer):
        def init_multiple_models(self) -> list[nn.Module]:
            return [Plain(1), Plain(2, width=5)]

    trainer = Made(2, interact, data=NoisyPoints(20), config=plain_config(tmp_path))
    trainer.train()
    assert [sum(p.numel() for p in model.parameters()) for model in trainer.ctx.models] == [21, 53]
    assert not any(
        same_bits(model, old) for model, old in zip(trainer.ctx.models, [Plain(1), Plain(2, 5)], strict=True)
    )
    with pytest.raises(ConfigError, match="model_nums=3, but init_multiple_models"):
        Made(3, interact, data=NoisyPoints(20), config=plain_config(tmp_path))


def test_half_precision_with_a_scaler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scales the loss of one optimizer; use 'bf16'"):
        make_plain(tmp_path, mixed_precision="fp16")


def test_every_model_is_compiled_and_checkpointed_or_it_is_told(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path, compile=True)
    assert all(model._compiled_call_impl is not None for model in trainer.models.values())
    with pytest.raises(ConfigError, match=r"the model 'small' \(Plain\) has no gradient_checkpointing_enable"):
        make_plain(tmp_path, gradient_checkpointing=True)


@pytest.mark.parametrize("wrong", [2, -1, "midle"])
def test_a_hook_for_a_model_that_is_not_there_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(HookError, match=r"there is no model .*There are: small, wide, numbered from 0"):
        make_plain(tmp_path).register_hook_in_train(print, "on_batch_end", wrong)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "other names": ({"models": {"small": Plain(1), "broad": Plain(2, 8)}}, "models: small, wide in the checkpoint"),
    "another order": ({"models": dict(reversed(plain_pair().items()))}, "models: small, wide in the checkpoint"),
    "another way": ({"interact": "parallel"}, "interact: sequential in the checkpoint, parallel now"),
    "fewer models": ({"models": {"small": Plain(1)}}, "models: small, wide in the checkpoint, small now"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_checkpoints_of_other_models_are_refused(tmp_path: Path, case: str) -> None:
    given, words = OTHERS[case]
    make_plain(tmp_path).train()
    with pytest.raises(ConfigError, match=words):
        make_plain(tmp_path, resume_from_checkpoint=True, **given)


def test_models_of_other_shapes_are_refused(tmp_path: Path) -> None:
    make_plain(tmp_path).train()
    with pytest.raises(CheckpointError, match=r"does not fit the model.*\n.*wide"):
        make_plain(tmp_path, resume_from_checkpoint=True, models={"small": Plain(1), "wide": Plain(2, 9)})


def test_a_checkpoint_of_one_model_is_not_one_of_several_and_the_other_way_round(tmp_path: Path) -> None:
    Trainer(plain_config(tmp_path / "one"), Plain(1), NoisyPoints(20)).train()
    with pytest.raises(ConfigError, match="models: None in the checkpoint, small, wide now"):
        make_plain(tmp_path / "one", resume_from_checkpoint=True)
    make_plain(tmp_path / "two").train()
    with pytest.raises(CheckpointError, match="does not fit the model Plain"):
        Trainer(plain_config(tmp_path / "two", resume_from_checkpoint=True), Plain(1), NoisyPoints(20))


def test_parameters_go_out_and_in_as_lists_all_or_nothing(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path)
    before = trainer.get_model_para()
    assert [sorted(one) for one in before] == [sorted(model.state_dict()) for model in trainer.models.values()]
    more = [{name: value + 1 for name, value in one.items()} for one in before]
    for wrong, words in (
        (more[:1], "parameters of 2 models are expected, as a list; given: 1"),
        (more[0], "given: dict"),
        ("ab", "given: str"),
        ([more[0], {"nothing": 1.0}], "no parameter wide.nothing.*Nothing was changed"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.update(wrong)
        assert all(torch.equal(now[name], one[name]) for now, one in _paired(trainer, before) for name in one)
    trainer.update(more)
    assert all(torch.equal(now[name], one[name]) for now, one in _paired(trainer, more) for name in one)


def _paired(trainer: MultiModelTrainer, others: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(trainer.get_model_para(), others, strict=True))


def test_another_config_leaves_the_models_where_hooks_find_them(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path)
    trainer.reconfigure(plain_config(tmp_path, num_epochs=3))
    assert trainer.ctx.models == list(trainer.models.values())
    assert trainer.ctx.model is trainer.models["small"]


def test_a_trainer_without_training_data_evaluates_each_model(tmp_path: Path) -> None:
    trainer = MultiModelTrainer(plain_config(tmp_path), plain_pair(), None, NoisyPoints(6))
    first = trainer.evaluate()["loss"]
    trainer.eval_model = "wide"
    assert trainer.evaluate()["loss"] != first
