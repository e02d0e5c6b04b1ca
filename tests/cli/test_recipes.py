"""`hezar-train recipes list` and `copy`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Invoke = Callable[..., Result]


def test_recipes_are_listed_with_what_their_headers_say(invoke: Invoke, trained: Path) -> None:
    lines = [line.split() for line in invoke("recipes", "list").stdout.splitlines()]
    assert ["sums", "Sums", "of", "two", "numbers,", "in", "no", "time", "None"] in lines
    assert "image_classification" in {line[0] for line in lines if line}


def test_a_copied_recipe_is_one_of_ones_own_and_is_never_overwritten(invoke: Invoke, tmp_path: Path) -> None:
    assert "hezar-train train image_classification" in invoke("recipes", "copy", "image_classification").stdout
    copied = {path.name for path in (tmp_path / "recipes/image_classification").iterdir()}
    assert copied >= {"recipe.py", "config.yaml", "smoke.yaml"}
    assert "__pycache__" not in copied
    done = invoke("recipes", "copy", "image_classification")
    assert (done.exit_code, "recipes/image_classification is there already" in done.stderr) == (2, True)
    assert "hezar-train train other" in invoke("recipes", "copy", "image_classification", "other").stdout
    assert "Did you mean 'image_classification'?" in invoke("recipes", "copy", "image_clasification").stderr


def test_a_copy_under_another_name_trains_into_a_folder_of_its_own(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("recipes", "copy", "image_classification", "mine/letters").exit_code == 0
    config = (tmp_path / "mine/letters/config.yaml").read_text()
    smoke = (tmp_path / "mine/letters/smoke.yaml").read_text()
    assert "output_dir: runs/letters\n" in config
    assert "output_dir: runs/letters-smoke\n" in smoke
    assert "# Command: hezar-train train mine/letters" in config
    assert "hezar-train train mine/letters/smoke.yaml" in smoke
    assert "task: image_classification\n" in config
