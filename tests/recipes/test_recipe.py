"""A recipe is found, overridden and checked before anything of it is run, and a run knows it by its hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hezar_train.errors import ConfigError
from hezar_train.recipes import (
    Recipe,
    build_trainer,
    check_file,
    load_recipe,
    load_run,
    recipe_names,
    refuse_changed_recipe,
)
from hezar_train.recipes.recipe import changed_parts, hash_of, overridden
from tests.recipes.line import CONFIG, RECIPE

TYPED = """\
def build(width: int, rate: float = 0.0, names: list[str] | None = None, mark: "str" = "", old: int = None,
          other: tuple[int, ...] = (), any=0): ...
"""


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


def test_a_recipe_needs_a_model_and_data_only() -> None:
    recipe = Recipe(torch.nn.Linear(1, 1), [1])
    assert (recipe.eval_dataset, recipe.data_collator, recipe.preprocessor, recipe.metrics_handler) == (None,) * 4
    assert recipe.trainer_class is None


def test_of_two_values_the_last_counts_and_neither_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    fields, options = overridden({}, {}, ["batch_size=8", "recipe.token=hf_one", "batch_size=8", "recipe.token=hf_two"])
    assert fields == {"batch_size": 8}
    assert options == {"token": "hf_two"}
    assert [one.getMessage() for one in caplog.records] == [
        "recipe.token is given more than once: the last one counts."
    ]
