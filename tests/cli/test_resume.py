"""`hezar-train resume`: a run goes on from its folder alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"{step:08d}" / "model.safetensors").read_bytes()


def test_a_run_goes_on_from_another_folder_and_ends_like_the_unbroken_one(
    invoke: Invoke, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("train", "sums", "num_epochs=4", "output_dir=runs/unbroken").exit_code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    done = invoke("resume", str(trained), "num_epochs=4")
    assert (done.exit_code, list(elsewhere.iterdir())) == (0, [])
    assert weights(trained, 12) == weights(tmp_path / "runs/unbroken", 12)


def test_a_run_that_was_moved_goes_on_where_it_is_now(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    trained.rename(tmp_path / "moved")
    assert invoke("resume", "moved", "num_epochs=3").exit_code == 0
    assert (tmp_path / "moved/checkpoints/00000009").is_dir()
    assert not trained.exists()


def test_a_changed_recipe_is_refused_unless_changes_are_accepted_and_then_only_once(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    source = tmp_path / "recipes/sums/recipe.py"
    source.write_text(source.read_text() + "# changed\n")
    refused = invoke("resume", "runs/sums", "num_epochs=3")
    assert refused.exit_code == 2
    assert "recipes/sums/recipe.py has changed since this run began" in refused.stderr
    assert invoke("resume", "runs/sums", "num_epochs=3", "accept_changes=true").exit_code == 0
    source.write_text(source.read_text() + "# again\n")
    assert invoke("resume", "runs/sums", "num_epochs=4").exit_code == 2


def test_an_unchanged_copy_of_a_changed_recipe_may_be_named(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    home = tmp_path / "recipes/sums"
    shutil.copytree(home, tmp_path / "kept")
    (home / "recipe.py").write_text("def build(): ...\n")
    assert invoke("resume", "runs/sums", "num_epochs=3", "--recipe", "kept").exit_code == 0
    assert json.loads((trained / "recipe.json").read_text())["path"] == "kept"


def test_other_options_are_refused(invoke: Invoke, trained: Path) -> None:
    done = invoke("resume", "runs/sums", "recipe.width=3")
    assert done.exit_code == 2
    assert "recipe.width: 2 when the run began, 3 now" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/sum"], "runs/sum is not the folder of a run: it has no train_config.yaml. Did you mean 'sums'?"),
        (["runs/sums", "output_dir=x"], "hezar-train train runs/sums/train_config.yaml output_dir=..."),
        (["runs/sums", "bach_size=1"], "'bach_size' is not a field. Did you mean 'batch_size'?"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(invoke: Invoke, trained: Path, arguments: list[str], words: str) -> None:
    done = invoke("resume", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_run_without_a_recipe_and_one_whose_recipe_is_gone_are_refused(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "recipes")
    assert "Say where it is: --recipe FOLDER" in invoke("resume", "runs/sums").stderr
    (trained / "recipe.json").unlink()
    assert "was not started from a recipe" in invoke("resume", "runs/sums").stderr


def test_the_config_of_a_run_starts_another_one(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    done = invoke("train", "runs/sums/train_config.yaml", "output_dir=runs/again")
    assert done.exit_code == 0
    assert weights(tmp_path / "runs/again", 6) == weights(trained, 6)
    assert "To go on with it: hezar-train resume runs/sums" in invoke("train", "runs/sums").stderr
