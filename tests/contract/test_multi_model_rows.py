"""Rows of the FederatedScope table on several models in one trainer, and the defects of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.compat.federatedscope import (
    Context,
    MultiModelTrainer,
    Trainer,
    TrainerConfig,
)
from hezar_train.compat.federatedscope import (
    CopiedModelsTrainer as GeneralMultiModelTrainer,
)
from hezar_train.errors import ConfigError, DataError

Build = Callable[..., MultiModelTrainer]


@pytest.fixture
def two(tmp_path: Path, rows: Any, classifier: Any) -> Build:
    """Return a function that builds a trainer of two classifiers."""

    def build(cls: type[MultiModelTrainer] = MultiModelTrainer, out: str = "run", **given: Any) -> MultiModelTrainer:
        models = {"one": classifier(seed=1), "two": classifier(seed=2)}
        settings = {"batch_size": 4, "learning_rate": 0.1, "criterion": "CrossEntropyLoss", "use_cpu": True}
        arguments = {"models": models, "train_dataset": rows(), **given.pop("arguments", {})}
        interact = given.pop("interact", "sequential")
        return cls(TrainerConfig(tmp_path / out, **settings, **given), interact=interact, **arguments)

    return build


def weights(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def test_a_trainer_is_copied_into_several_models(toy: Callable[..., Trainer], weights_of: Any) -> None:
    single = toy()
    several = GeneralMultiModelTrainer(3, base_trainer=single)
    models = several.ctx.models
    assert [weights(model) for model in models] == [weights_of(single)] * 3
    assert len({id(model) for model in models}) == 3
    assert several.train().num_samples == 20


@pytest.mark.parametrize(
    "given", [{"model_nums": 0}, {"model_nums": 2, "models_interact_mode": "both"}, {"model_nums": 2}]
)
def test_what_cannot_be_built_is_refused(toy: Callable[..., Trainer], given: dict[str, Any]) -> None:
    base = {"base_trainer": toy()} if len(given) == 2 or given["model_nums"] == 0 else {}
    with pytest.raises(ValueError, match=r"model_nums|both|base_trainer"):
        GeneralMultiModelTrainer(**given, **base)


def test_models_may_differ(two: Build) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layers(x)
            return logits

    class Own(MultiModelTrainer):
        def init_multiple_models(self) -> dict[str, nn.Module]:
            return {"wide": Wide(), "wider": Wide()}

    trainer = two(Own, arguments={"models": None})
    before = [weights(model) for model in trainer.models.values()]
    trainer.train()
    assert all(old != weights(model) for old, model in zip(before, trainer.models.values(), strict=True))


def test_a_hook_may_be_for_one_model_only(two: Build) -> None:
    seen: list[int] = []
    trainer = two(interact="parallel")
    trainer.register_hook_in_train(lambda ctx: seen.append(ctx.cur_model_idx), "on_batch_end", model_idx=1)
    trainer.train()
    assert seen == [1] * 5


def order(trainer: MultiModelTrainer) -> list[tuple[str, int]]:
    """Train; return which model was forwarded and stepped backward, in order."""
    found: list[tuple[str, int]] = []
    for index in range(2):
        for word in ("forward", "backward"):
            trainer.register_hook_in_train(
                lambda ctx, word=word: found.append((word, ctx.cur_model_idx)),
                f"on_batch_{word}", model_idx=index,
            )  # fmt: skip
    trainer.train()
    return found


def test_models_train_one_after_the_other(two: Build) -> None:
    trainer = two()
    before = [weights(model) for model in trainer.models.values()]
    assert order(trainer) == [(word, index) for index in range(2) for _ in range(5) for word in ("forward", "backward")]
    assert all(old != weights(model) for old, model in zip(before, trainer.models.values(), strict=True))


def test_models_train_side_by_side_on_the_same_batches(
    two: Build, toy: Callable[..., Trainer], classifier: Any
) -> None:
    batches: list[torch.Tensor] = []
    trainer = two(interact="parallel")
    for index in range(2):
        trainer.register_hook_in_train(lambda ctx: batches.append(ctx.batch["x"]), "on_batch_forward", model_idx=index)
    turns = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    assert order(trainer) == turns * 5
    assert all(one is other for one, other in zip(batches[::2], batches[1::2], strict=True))
    for seed, model in ((1, trainer.models["one"]), (2, trainer.models["two"])):
        alone = toy(out=f"alone{seed}", arguments={"model": classifier(seed=seed)})
        alone.train()
        assert weights(model) == pytest.approx(weights(alone.model), abs=1e-6)  # by its own loss alone


def test_the_model_that_is_trained_goes_round(two: Build) -> None:
    trainer = two(interact="parallel")
    found = []
    for _ in range(3):
        found.append(trainer.ctx.cur_model_idx)
        assert trainer.ctx.model is trainer.ctx.models[found[-1]]
        assert trainer.ctx.optimizer is trainer.ctx.optimizers[found[-1]]
        trainer._switch_model_ctx()
    assert found == [0, 1, 0]


def test_results_are_lists_of_all_models(two: Build) -> None:
    trainer = two()
    num_samples, parameters, metrics = trainer.train()
    assert num_samples == 20
    assert [set(one) for one in parameters] == [{"layer.weight", "layer.bias"}] * 2
    assert "train.loss" in metrics
    trainer.update(list(reversed(parameters)))
    assert torch.equal(trainer.models["one"].layer.weight, parameters[1]["layer.weight"])  # type: ignore[arg-type, union-attr]
    with pytest.raises(DataError, match="2 models"):
        trainer.update(parameters[:1])


def test_what_one_model_leaves_the_next_one_finds(two: Build) -> None:
    found: list[list[str]] = []

    class Talking(MultiModelTrainer):
        def interact(self, ctx: Context) -> None:
            said = self.said = [*getattr(self, "said", []), self.current]
            found.append(list(said))

    two(Talking).train()
    assert found == [["one"], ["one", "two"]]


def test_an_unknown_way_to_interact_is_refused_with_the_known_ones(two: Build) -> None:
    with pytest.raises(ConfigError, match=r"interact='paralel'.*Did you mean 'parallel'"):
        two(interact="paralel")


def test_every_model_and_optimizer_is_saved_and_goes_on_exactly(two: Build) -> None:
    whole = two(out="whole", num_epochs=2, optimizer="adam", interact="parallel")
    whole.train()
    two(num_epochs=1, optimizer="adam", interact="parallel").train()
    resumed = two(num_epochs=2, optimizer="adam", interact="parallel", resume_from_checkpoint=True)
    assert all(len(optimizer.state) == 2 for optimizer in resumed.optimizers.values())
    resumed.train()
    for name in ("one", "two"):
        assert weights(resumed.models[name]) == weights(whole.models[name])
