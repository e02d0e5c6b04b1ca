"""A contract for every recipe: its files, its config's header, and that its smoke run trains."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hezar_train.recipes import build_trainer, check_file, load_recipe

RECIPES = sorted(path.parent for path in (Path(__file__).parents[2] / "recipes").glob("*/recipe.py"))


def _name(folder: Path) -> str:
    return folder.name


@pytest.mark.parametrize("folder", RECIPES, ids=_name)
def test_a_recipe_has_its_files_and_good_configs(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= {"recipe.py", "config.yaml", "smoke.yaml", "README.md"}
    for config in folder.glob("*.yaml"):
        assert check_file(config).resume_from_checkpoint is True


@pytest.mark.parametrize("folder", RECIPES, ids=_name)
def test_a_config_opens_with_purpose_command_time_and_score(folder: Path) -> None:
    lines = (folder / "config.yaml").read_text(encoding="utf-8").splitlines()
    header = [line for line in lines[: lines.index("recipe:")] if line.startswith("#")]
    assert any(f"hezar-train train {folder.name}" in line for line in header)
    assert all(any(line.startswith(f"# {word}:") for line in header) for word in ("For", "Command", "Time", "Score"))


@pytest.mark.parametrize("folder", RECIPES, ids=_name)
def test_a_recipe_is_data_and_a_model_and_never_a_loop(folder: Path) -> None:
    source = (folder / "recipe.py").read_text(encoding="utf-8")
    of_a_loop = (r"\.backward\(", r"optimizer", r"\bargparse\b", r"\bTrainer\(")
    assert not [word for word in of_a_loop if re.search(word, source)]


@pytest.mark.parametrize("folder", RECIPES, ids=_name)
def test_the_smoke_run_of_a_recipe_trains_and_is_done_the_second_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    monkeypatch.chdir(tmp_path)
    trainer = build_trainer(load_recipe(copy / "smoke.yaml"))
    result = trainer.train()
    assert result.num_samples > 0
    assert [name for name in result.metrics if name.startswith("evaluation.") and name.endswith("loss")]
    assert trainer.folder.best.exists()
    assert build_trainer(load_recipe(copy / "smoke.yaml")).train().num_samples == 0


def test_the_digits_are_split_in_the_same_way_in_every_run_and_share_no_sample() -> None:
    build = _build_of("image_classification")
    first, second = build(), build(dropout=0.0)
    assert (len(first.train_dataset), len(first.eval_dataset)) == (1437, 360)
    assert first.eval_dataset.tensors[0].equal(second.eval_dataset.tensors[0])
    kept = {bytes(pixels.numpy()) for pixels in first.train_dataset.tensors[0]}
    assert not [pixels for pixels in first.eval_dataset.tensors[0] if bytes(pixels.numpy()) in kept]


def _build_of(name: str):  # type: ignore[no-untyped-def]
    from hezar_train.recipes import import_recipe

    return import_recipe(next(folder for folder in RECIPES if folder.name == name) / "recipe.py").build


@pytest.mark.slow
def test_the_digits_are_read_with_the_accuracy_that_the_readme_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = build_trainer(load_recipe("image_classification")).train()
    assert result.metrics["evaluation.accuracy"] > 0.97
