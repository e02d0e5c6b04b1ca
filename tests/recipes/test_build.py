"""From a recipe to a trainer: seeds, the record that a run keeps, restarts, and trainers of a recipe's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hezar_train import MultiModelTrainer
from hezar_train.errors import ConfigError
from hezar_train.recipes import (
    build_trainer,
    load_recipe,
    load_run,
    open_run,
    resumed,
    saved_checkpoints,
)
from tests.recipes.line import CONFIG, RECIPE


def test_a_build_that_returns_something_else_is_refused(folder: Path) -> None:
    (folder / "recipe.py").write_text("def build(**options):\n    return 3\n")
    with pytest.raises(ConfigError, match=r"build\(\) returned an int; expected a hezar_train.Recipe.*return Recipe\("):
        build_trainer(load_recipe("line"))


def test_generators_are_seeded_with_the_trainers_seed_before_build(folder: Path) -> None:
    def first_weights(seed: int) -> torch.Tensor:
        trainer = build_trainer(load_recipe("line", [f"seed={seed}", f"output_dir=run{seed}"]))
        return trainer.model.weight.detach().clone()  # type: ignore[union-attr,operator]

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


def test_a_run_keeps_the_path_hash_and_options_of_its_recipe(folder: Path) -> None:
    build_trainer(load_recipe("line", ["recipe.rate=0.5"])).train()
    record = json.loads(Path("run/recipe.json").read_text())
    assert record["path"] == "recipes/line"
    assert record["options"] == {"width": 3, "rate": 0.5}


def test_going_on_with_other_options_is_refused_unless_changes_are_accepted(folder: Path) -> None:
    build_trainer(load_recipe("line", ["recipe.rate=0.5"])).train()
    more = ["num_epochs=2"]
    with pytest.raises(ConfigError, match=r"recipe.rate: 0.5 when the run began, not given now"):
        build_trainer(load_recipe("line", more))
    build_trainer(load_recipe("line", [*more, "accept_changes=true"])).train()
    assert json.loads(Path("run/recipe.json").read_text())["options"] == {"width": 3}


def test_another_shape_of_model_is_refused_as_a_changed_option(folder: Path) -> None:
    build_trainer(load_recipe("line")).train()
    with pytest.raises(ConfigError, match=r"recipe.width: 3 when the run began, 4 now"):
        build_trainer(load_recipe("line", ["recipe.width=4"]))


def test_other_options_are_fine_while_nothing_was_saved_and_at_a_fresh_start(folder: Path) -> None:
    build_trainer(load_recipe("line", ["save_enabled=false"])).train()
    build_trainer(load_recipe("line", ["recipe.width=4"])).train()
    build_trainer(load_recipe("line", ["recipe.width=5", "resume_from_checkpoint=false"])).train()
    assert json.loads(Path("run/recipe.json").read_text())["options"] == {"width": 5}


def test_a_changed_recipe_is_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_trainer(load_recipe("line")).train()
    (folder / "recipe.py").write_text(RECIPE + "# changed\n")
    build_trainer(load_recipe("line", ["num_epochs=2"]))
    assert "recipes/line has changed since this run began (recipe.py)" in caplog.text


@pytest.mark.parametrize("wish", ["false", "elsewhere", "best", "true"])
def test_a_restarted_run_goes_on_from_its_own_checkpoints_and_until_then_begins_as_it_was_asked_to(
    folder: Path, wish: str
) -> None:
    build_trainer(load_recipe("line")).train()
    loaded = load_recipe("line", [f"resume_from_checkpoint={wish}"])
    before = saved_checkpoints(loaded.config)
    assert resumed(loaded, before) == loaded, "what lies there is an earlier run's"
    build_trainer(load_recipe("line", ["resume_from_checkpoint=false", "seed=1"])).train()
    assert resumed(loaded, before).config.resume_from_checkpoint is True


def test_a_restarted_run_whose_folder_is_empty_begins_as_it_was_asked_to(folder: Path) -> None:
    build_trainer(load_recipe("line")).train()
    loaded = load_recipe("line", ["resume_from_checkpoint=false"])
    before = saved_checkpoints(loaded.config)
    Path("run/checkpoints").rename("aside")
    assert resumed(loaded, before) == loaded


SEVERAL = """\
from functools import partial

import torch

from hezar_train import MultiModelTrainer, Recipe


def build(trains: str = "own") -> Recipe:
    data = torch.utils.data.TensorDataset(torch.ones(6, 2), torch.ones(6, 1))
    models = {"small": torch.nn.Linear(2, 1), "large": torch.nn.Linear(2, 1)}
    own = {
        "own": partial(MultiModelTrainer, interact="parallel", eval_model="large"),
        "plain": None,
        "other": lambda *_, **__: "a trainer",
    }
    return Recipe(models, data, data, trainer_class=own[trains])


def read(given: list[float], preprocessor: object) -> tuple[torch.Tensor]:
    return (torch.tensor(given),)
"""


@pytest.fixture
def several(folder: Path) -> Path:
    """The recipe `line`, with two models that a trainer of its own trains."""
    (folder / "recipe.py").write_text(SEVERAL)
    (folder / "config.yaml").write_text(CONFIG.replace("recipe:\n  width: 3\n", ""))
    return folder


def test_a_trainer_of_the_recipes_own_trains_its_models_and_goes_on(several: Path) -> None:
    trainer = build_trainer(load_recipe("line"))
    assert isinstance(trainer, MultiModelTrainer)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    assert "evaluation.loss" in trainer.train().metrics
    assert not any(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))
    assert json.loads(Path("run/recipe.json").read_text())["path"] == "recipes/line"
    assert build_trainer(load_recipe("line")).train().num_samples == 0


def test_a_run_of_several_models_is_opened_with_its_own_trainer(several: Path) -> None:
    trained = build_trainer(load_recipe("line"))
    trained.train()
    opened = open_run(load_run("run"))
    assert isinstance(opened.trainer, MultiModelTrainer)
    assert opened.evaluate() == opened.evaluate("train") == trained.evaluate()
    given = torch.tensor([1.0, 2.0])
    assert opened.predict([given.tolist()]) == [trained.models["large"](given).tolist()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("trains", "words"),
    [
        ("plain", r"several models \(large, small\), and the plain trainer trains one"),
        ("other", "trainer_class made a str; expected a subclass of hezar_train.Trainer"),
    ],
)
def test_several_models_without_a_trainer_for_them_are_refused(several: Path, trains: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_trainer(load_recipe("line", [f"recipe.trains={trains}"]))
