"""What recipes of version 0.1 import from here is still found: a run knows its recipe by a hash, so none may change."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hezar_train import launch, recipes

NAMES_OF_0_1 = [
    *("CONFIG_NAME", "RECIPE_NAME", "RECORD_FILE", "Inputs", "LoadedRecipe", "OpenRun", "PictureSize", "Recipe"),
    *("asked_for", "build_trainer", "check_file", "copy_recipe", "gather_inputs", "import_recipe", "load_any"),
    *("load_pictures", "load_recipe", "load_run", "load_splits", "load_target", "open_run", "option_names", "path_of"),
    *("read_sections", "recipe_folders", "recipe_names", "recipe_of_hash", "refuse_changed_recipe"),
    *("refuse_missing_columns", "refuse_without_checkpoint", "resumed", "run_config", "saved_checkpoints"),
    *("small_greys", "text_of", "with_held_out"),
]
SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.py"))


@pytest.mark.parametrize("name", NAMES_OF_0_1)
def test_a_name_of_the_first_version_is_found_where_it_was(name: str) -> None:
    assert getattr(launch, name) is getattr(recipes, name)


@pytest.mark.parametrize("source", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_recipe_finds_what_it_imports(source: Path) -> None:
    nodes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]
    wanted = [alias.name for node in nodes if node.module == "hezar_train.launch" for alias in node.names]
    assert [name for name in wanted if not hasattr(launch, name)] == []


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'hezar_train\.launch' has no attribute 'load_recipes'"):
        launch.load_recipes  # noqa: B018
