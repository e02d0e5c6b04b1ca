from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError, DataError
from hezar_train.federated import DittoTrainer, wrap_DittoTrainer
from hezar_train.federated.ditto import GLOBAL, PERSONAL
from hezar_train.loop import Context
from hezar_train.multi_model import MultiModelTrainer

WEIGHT = 0.7
FIELDS = {
    "batch_size": 4, "learning_rate": 0.1, "optimizer": "sgd", "momentum": 0.9, "criterion": "CrossEntropyLoss",
    "task": "text_classification",
}  # fmt: skip
Build = Callable[..., DittoTrainer]


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def vector_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@pytest.fixture
def data(rows: Any) -> list[tuple[torch.Tensor, int]]:
    return [(row["x"], row["labels"]) for row in rows()]


@pytest.fixture
def ditto(tmp_path: Path, data: Any) -> Build:
    """Return a function that builds a worker: two batches in a round, of twenty rows in fours."""

    def build(out: str = "run", weight: float = WEIGHT, personal_steps: int | None = None, **settings: Any) -> Any:
        config = TrainerConfig(tmp_path / out, **FIELDS | {"local_update_steps": 2} | settings)
        ditto = {"regular_weight": weight, "personal_steps": personal_steps}
        return DittoTrainer(config, make_model(), data, data[:7], **ditto)

    return build


def test_the_personal_gradient_is_the_plain_one_and_the_distance_from_the_global_model(ditto: Build) -> None:
    trainer, found = ditto(gradient_accumulation_steps=2, local_update_steps=6), []

    def plain(ctx: Context) -> None:
        ctx.plain = ctx.model[0].weight.grad.clone()

    def drawn(ctx: Context) -> None:
        own, other = (trainer.models[name][0].weight.detach() for name in (PERSONAL, GLOBAL))
        expected = WEIGHT * (own - other) if ctx.closes_window else torch.zeros_like(own)
        found.append((ctx.model[0].weight.grad - ctx.plain, expected))

    trainer.register_hook_in_train(plain, "on_batch_backward", PERSONAL, base_hook="draw_to_global")
    trainer.register_hook_in_train(drawn, "on_batch_backward", PERSONAL)
    trainer.train()
    assert any(expected.abs().sum() > 0 for _, expected in found)
    for pull, expected in found:
        assert torch.allclose(pull, expected, atol=1e-6)


def test_both_models_learn_and_only_the_personal_one_feels_the_pull(ditto: Build) -> None:
    free, drawn = ditto("free", weight=0.0), ditto("drawn")
    free.train()
    drawn.train()
    for trainer in (free, drawn):
        assert not torch.equal(vector_of(trainer.models[PERSONAL]), vector_of(trainer.models[GLOBAL]))
        assert not torch.equal(vector_of(trainer.models[GLOBAL]), vector_of(make_model()))
    assert torch.equal(vector_of(free.models[GLOBAL]), vector_of(drawn.models[GLOBAL]))
    assert not torch.equal(vector_of(free.models[PERSONAL]), vector_of(drawn.models[PERSONAL]))


def test_a_strong_pull_keeps_the_personal_model_near(ditto: Build) -> None:
    far = {}
    for weight in (0.0, 0.1, 1.0):
        trainer = ditto(str(weight), weight=weight, local_update_steps=1, personal_steps=20, momentum=0.0)
        trainer.train()
        far[weight] = float((vector_of(trainer.models[PERSONAL]) - vector_of(make_model())).norm())
    assert far[1.0] < far[0.1] < far[0.0]


def test_the_personal_model_is_the_one_that_is_evaluated(ditto: Build, data: Any) -> None:
    trainer = ditto(local_update_steps=20)
    trainer.train()
    found = trainer.evaluate()["loss"]
    inputs, labels = torch.stack([x for x, _ in data[:7]]), torch.tensor([label for _, label in data[:7]])
    losses = {name: _loss_of(model, inputs, labels) for name, model in trainer.models.items()}
    assert found == pytest.approx(losses[PERSONAL])
    assert found != pytest.approx(losses[GLOBAL])


def _loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(inputs), labels))


@pytest.mark.parametrize(
    ("settings", "personal_steps", "personal", "shared"),
    [
        ({"local_update_steps": 2}, None, 8, 8),
        ({"local_update_steps": 2}, 5, 20, 8),
        ({"local_update_steps": 3, "batch_or_epoch": "epoch"}, 1, 20, 60),
    ],
)
def test_samples_of_the_global_model_are_counted_apart_from_the_personal_ones(
    ditto: Build, settings: dict[str, Any], personal_steps: int | None, personal: int, shared: int
) -> None:
    trainer = ditto(personal_steps=personal_steps, **settings)
    for _ in range(2):
        num_samples, _, metrics = trainer.train()
        assert (metrics["train_total_local_model"], num_samples) == (personal, shared)
    assert trainer.state.samples_seen == 2 * (personal + shared)


def test_only_the_global_model_is_exchanged(ditto: Build) -> None:
    trainer = ditto()
    before = vector_of(trainer.models[PERSONAL])
    trainer.update({"0.bias": [5.0] * 8})
    assert torch.equal(vector_of(trainer.models[PERSONAL]), before)
    assert trainer.get_model_para()["0.bias"].tolist() == [5.0] * 8
    assert {*trainer.get_model_para()} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    with pytest.raises(DataError, match="no parameter"):
        trainer.update({"nothing": 1.0})


def test_what_the_result_of_a_round_unpacks_to_is_the_global_model(ditto: Build) -> None:
    trainer = ditto()
    _, parameters, _ = trainer.train()
    assert torch.equal(parameters["3.bias"], trainer.models[GLOBAL][3].bias)


@pytest.mark.parametrize("step", range(10, 20))
def test_a_round_that_was_killed_goes_on_like_the_unbroken_one(ditto: Build, step: int) -> None:
    settings = {"local_update_steps": 4, "personal_steps": 6, "save_steps": 3, "resume_from_checkpoint": True}

    def kill(ctx: Context) -> None:
        if ctx.state.global_step == step:
            raise RuntimeError("killed")

    unbroken, broken = ditto("unbroken", **settings), ditto("broken", **settings)
    unbroken.train()
    broken.train()
    given = {name: value + 0.1 for name, value in unbroken.get_model_para().items()}
    unbroken.update(given)
    whole = unbroken.train()
    broken.update(given)
    broken.register_hook_in_train(kill, "on_batch_start", None)
    with pytest.raises(RuntimeError, match="killed"):
        broken.train()
    resumed = ditto("broken", **settings)
    if resumed.state.global_step == 10:  # nothing of the second round was saved: the first one is finished first
        resumed.train()
        resumed.update(given)
    rest = resumed.train()
    for name in (PERSONAL, GLOBAL):
        assert torch.equal(vector_of(resumed.models[name]), vector_of(unbroken.models[name]))
    assert rest.num_samples == whole.num_samples
    assert rest.metrics["train_total_local_model"] == whole.metrics["train_total_local_model"]


def test_a_run_is_not_resumed_with_another_pull(ditto: Build) -> None:
    ditto(resume_from_checkpoint=True).train()
    with pytest.raises(ConfigError, match=r"regular_weight: 0.7 in the checkpoint, 0.2 now"):
        ditto(weight=0.2, resume_from_checkpoint=True)


def test_a_trainer_is_wrapped_with_its_data_and_hooks(tmp_path: Path, data: Any) -> None:
    class Count(Hook):
        steps = 0

        def after_step(self) -> None:
            self.steps += 1

    count = Count()
    config = TrainerConfig(tmp_path, **FIELDS, local_update_steps=2)
    base = Trainer(config, make_model(), {"train": data, "val": data[:7], "test": data[7:]}, hooks=[count])
    trainer = wrap_DittoTrainer(base, regular_weight=WEIGHT, personal_steps=3)
    trainer.train()
    assert count.steps == 5
    assert trainer.evaluate("test")["loss"] != trainer.evaluate("val")["loss"]
    assert [*trainer.models] == [PERSONAL, GLOBAL]


def test_a_trainer_with_methods_of_its_own_is_not_wrapped(tmp_path: Path, data: Any) -> None:
    class Own(Trainer):
        pass

    base = Own(TrainerConfig(tmp_path, **FIELDS, local_update_steps=2), make_model(), data)
    with pytest.raises(ConfigError, match=r"given a Own.*Write a subclass of DittoTrainer"):
        wrap_DittoTrainer(base)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "much", True])
def test_a_weight_that_is_none_is_refused(ditto: Build, weight: Any) -> None:
    with pytest.raises(ConfigError, match="Ditto has regular_weight="):
        ditto(weight=weight)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_that_are_none_are_refused(ditto: Build, steps: Any) -> None:
    with pytest.raises(ConfigError, match="Ditto has personal_steps="):
        ditto(personal_steps=steps)


def test_a_run_without_rounds_is_refused(ditto: Build) -> None:
    with pytest.raises(ConfigError, match="set local_update_steps"):
        ditto(local_update_steps=None)


def test_a_missing_model_is_told(tmp_path: Path, data: Any) -> None:
    with pytest.raises(ConfigError, match="DittoTrainer needs the global model"):
        DittoTrainer(TrainerConfig(tmp_path, **FIELDS, local_update_steps=2), None, data)


def test_a_subclass_may_build_the_model(tmp_path: Path, data: Any) -> None:
    class Own(DittoTrainer):
        def build_model(self) -> nn.Module:
            return make_model()

    trainer = Own(TrainerConfig(tmp_path, **FIELDS, local_update_steps=2), train_dataset=data)
    assert isinstance(trainer, MultiModelTrainer)
    assert torch.equal(vector_of(trainer.models[PERSONAL]), vector_of(trainer.models[GLOBAL]))
