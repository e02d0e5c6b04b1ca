"""From a recipe's folder to a trainer: finding, overriding, checking, building, recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hezar_train import MultiModelTrainer
from hezar_train.errors import ConfigError
from hezar_train.recipes import (
    Recipe,
    build_trainer,
    check_file,
    load_recipe,
    load_run,
    open_run,
    recipe_names,
    refuse_changed_recipe,
    resumed,
    saved_checkpoints,
)
from hezar_train.recipes.recipe import changed_parts, hash_of

RECIPE = """\
import random

import numpy as np
import torch

from hezar_train import Recipe

drawn = []


def build(width: int = 2, rate: float = 0.0, names: list | None = None) -> Recipe:
    drawn.append((random.random(), np.random.random()))
    data = torch.utils.data.TensorDataset(torch.zeros(6, width), torch.zeros(6, 1))
    return Recipe(model=torch.nn.Linear(width, 1), train_dataset=data)
"""
TYPED = """\
def build(width: int, rate: float = 0.0, names: list[str] | None = None, mark: "str" = "", old: int = None,
          other: tuple[int, ...] = (), any=0): ...
"""
CONFIG = """\
recipe:
  width: 3
trainer:
  output_dir: run
  batch_size: 2
  criterion: MSELoss
  resume_from_checkpoint: true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe `line` in ./recipes."""
    monkeypatch.chdir(tmp_path)
    found = Path("recipes") / "line"
    found.mkdir(parents=True)
    (found / "recipe.py").write_text(RECIPE)
    (found / "config.yaml").write_text(CONFIG)
    return found


@pytest.mark.parametrize("given", ["line", "recipes/line", "recipes/line/config.yaml", Path("recipes/line")])
def test_a_recipe_is_found_by_name_folder_and_config_file(folder: Path, given: str | Path) -> None:
    loaded = load_recipe(given)
    assert (loaded.source, loaded.options) == (folder / "recipe.py", {"width": 3})
    assert loaded.config.batch_size == 2


def test_a_name_in_the_folder_at_hand_comes_before_the_shipped_one(folder: Path) -> None:
    folder.rename(folder.with_name("image_classification"))
    assert load_recipe("image_classification").options == {"width": 3}
    assert recipe_names().count("image_classification") == 1


def test_the_shipped_recipes_are_found_from_anywhere(folder: Path) -> None:
    assert {"image_classification", "line"} <= set(recipe_names())
    assert load_recipe("image_classification").config.task == "image_classification"


def test_overrides_are_yaml_and_go_to_the_trainer_or_the_recipe(folder: Path) -> None:
    loaded = load_recipe(
        "line",
        ["learning_rate=1e-3", "device=cpu", "max_steps=", "metrics=[]", "recipe.rate=0.5", "recipe.names=[a, 1]"],
    )
    config = loaded.config
    assert (config.learning_rate, config.device, config.max_steps, config.metrics) == (1e-3, "cpu", None, [])
    assert loaded.options == {"width": 3, "rate": 0.5, "names": ["a", 1]}


def test_an_override_may_hold_an_equals_sign(folder: Path) -> None:
    assert load_recipe("line", ["output_dir=runs/a=b"]).config.output_dir == "runs/a=b"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch_size", "'batch_size' is not an override: expected key=value"),
        ("=3", "'=3' is not an override"),
        ("metrics=[a", "cannot be read as YAML"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(folder: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load_recipe("line", [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("recipe.width=abc", "recipe.width: expected int, got str 'abc'"),
        ("recipe.width=1e3", "recipe.width: expected int, got float 1000.0"),
        ("recipe.width=true", "recipe.width: expected int, got bool True"),
        ("recipe.width=", "recipe.width: expected int, got None"),
        ("recipe.rate=much", "recipe.rate: expected float, got str 'much'"),
        ("recipe.names=a", "recipe.names: expected list[str] | None, got str 'a'"),
        ("recipe.names=[a, 1]", "recipe.names: expected list[str] | None, got list ['a', 1]"),
        ("recipe.mark=1", "got int 1. Text is quoted for YAML, too: recipe.mark='\"1\"'"),
    ],
)
def test_an_option_of_another_type_is_told_together_with_the_configs_problems(
    folder: Path, override: str, words: str
) -> None:
    (folder / "recipe.py").write_text(TYPED)
    with pytest.raises(ConfigError) as caught:
        load_recipe("line", [override, "batch_size=0"])
    first, second = caught.value.problems
    assert (words in first, second[:12]) == (True, "batch_size=0"), first


def test_values_that_fit_and_types_that_are_not_known_here_pass(folder: Path) -> None:
    (folder / "recipe.py").write_text(TYPED)
    given = ["width=3", "rate=1", "names=", "names=[a]", "mark=no", 'mark="1"', "old=", "old=2", "other=[1]", "any=x"]
    for override in given:
        load_recipe("line", [f"recipe.{override}"])


def test_problems_of_options_and_fields_are_told_together(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("line", ["recipe.wdth=1", "batch_size=0", "bach_size=1"])
    assert [problem.split("=")[0][:12] for problem in caught.value.problems] == [
        "recipe.wdth ",
        "'bach_size' ",
        "batch_size",
    ]


def test_a_config_without_a_recipe_beside_it_is_refused(folder: Path) -> None:
    Path("alone.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"alone.yaml has no recipe.py beside it"):
        load_recipe("alone.yaml")
    assert check_file("alone.yaml").batch_size == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [("def build(:\n", "cannot be read as Python"), ("build = 3\n", r"expected a function build\(\*\*options\)")],
)
def test_a_recipe_without_build_is_refused(folder: Path, source: str, words: str) -> None:
    (folder / "recipe.py").write_text(source)
    with pytest.raises(ConfigError, match=words):
        load_recipe("line")


def test_a_build_that_returns_something_else_is_refused(folder: Path) -> None:
    (folder / "recipe.py").write_text("def build(**options):\n    return 3\n")
    with pytest.raises(ConfigError, match=r"build\(\) returned a int; expected a hezar_train.Recipe"):
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


@pytest.mark.parametrize(
    "name", ["recipe.py", "templates.txt", "fonts/a.ttf", "data.json", "pictures/a.png", "nested/more.yaml", "linked"]
)
def test_the_hash_of_a_recipe_is_that_of_everything_it_may_read(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_text("before")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(RECIPE)
    record = load_recipe("line").record()
    (folder / name).write_text("changed")
    assert changed_parts(record, folder) == [name.partition("/")[0]]
    (folder / name).write_text(RECIPE)
    assert changed_parts(record, folder) == []


@pytest.mark.parametrize(
    "name",
    ["README.md", "curve.png", "smoke.yaml", ".notes", "__pycache__/x.pyc", "runs/a/b", "out/first/train_config.yaml"],
)
def test_what_cannot_change_what_is_built_does_not_count(folder: Path, name: str) -> None:
    before = hash_of(folder)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("there now")
    assert hash_of(folder) == before


def test_a_link_to_a_folder_counts_as_where_it_leads(folder: Path, tmp_path: Path) -> None:
    (folder / "data").symlink_to(tmp_path, target_is_directory=True)  # round in a circle
    (folder / "lost").symlink_to(tmp_path / "nowhere")
    before = hash_of(folder)
    (tmp_path / "new").write_text("in the folder that the link leads to")
    assert hash_of(folder) == before
    (folder / "data").unlink()
    (folder / "data").symlink_to(tmp_path / "recipes", target_is_directory=True)
    assert hash_of(folder) != before


@pytest.mark.parametrize("place", ["recipes/line/out", "recipes/line/runs/first", "recipes/line"])
def test_a_run_inside_its_recipes_folder_does_not_change_the_recipe(folder: Path, place: str) -> None:
    build_trainer(load_recipe("line", [f"output_dir={place}"])).train()
    refuse_changed_recipe(load_run(place))
    (folder / "recipe.py").write_text(RECIPE + "# changed\n")
    with pytest.raises(ConfigError, match=r"recipes/line has changed since this run began \(recipe.py\)"):
        refuse_changed_recipe(load_run(place))


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


def test_a_recipe_needs_a_model_and_data_only() -> None:
    recipe = Recipe(torch.nn.Linear(1, 1), [1])
    assert (recipe.eval_dataset, recipe.data_collator, recipe.preprocessor, recipe.metrics_handler) == (None,) * 4
    assert recipe.trainer_class is None


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
        ("other", "trainer_class made a str; expected a hezar_train.Trainer"),
    ],
)
def test_several_models_without_a_trainer_for_them_are_refused(several: Path, trains: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_trainer(load_recipe("line", [f"recipe.trains={trains}"]))
