"""`hezar-train config validate`, and how errors look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]

FIVE_MISTAKES = """\
output_dir: runs/x
learning_rte: 0.1
num_epochs: three
batch_size: 0
optimizer: adamv
device: gpu
"""


def test_a_good_file_is_said_to_have_no_problems(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("output_dir: runs/x\nlearning_rate: 1e-3\n")
    done = invoke("config", "validate", "good.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "good.yaml: no problems\n", "")


def test_five_mistakes_are_five_problems_in_one_block(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(FIVE_MISTAKES)
    done = invoke("config", "validate", "bad.yaml")
    first, *problems = done.stderr.splitlines()
    assert (done.exit_code, done.stdout, first) == (2, "", "error: 5 problems:")
    assert [line[:5] for line in problems] == [f"  {number}. " for number in range(1, 6)]
    assert "'learning_rte' is not a field. Did you mean 'learning_rate'?" in problems[0]


def test_the_sections_of_a_recipe_are_checked_together(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("import torch\ndef build(width, depth=2):\n    raise RuntimeError('not run')\n")
    (tmp_path / "config.yaml").write_text("recipe:\n  widht: 3\ntrainer:\n  output_dir: x\n  batch_size: 0\n")
    done = invoke("config", "validate", "config.yaml")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 3 problems:")
    assert "recipe.widht is not an option of this recipe. Its build() takes: depth, width. Did you mean 'width'?" in (
        done.stderr
    )
    assert "recipe.width is missing" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- a\n", "bad.yaml, line 1: expected a mapping"),
        ("a: [\n", "bad.yaml, line 2"),
        ("trainer: 3\n", "the section 'trainer' is a int"),
        (
            "recipe: {}\ntrianer: {}\n",
            "'trianer' is not a section: expected recipe and trainer. Did you mean 'trainer'?",
        ),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_place(
    invoke: Invoke, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    done = invoke("config", "validate", "bad.yaml")
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_refused(invoke: Invoke) -> None:
    done = invoke("config", "validate", "nothing.yaml")
    assert (done.exit_code, done.stderr) == (2, "error: nothing.yaml: there is no such file\n")


def test_what_works_but_may_not_be_meant_is_a_warning(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("output_dir: x\ngradient_accumulation_steps: 2\nsave_steps: 3\n")
    done = invoke("config", "validate", "odd.yaml")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: save_steps=3 is not a multiple of gradient_accumulation_steps=2")


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(invoke: Invoke, where: str) -> None:
    arguments = ["config", "validate", "nothing.yaml"]
    done = invoke(*(["--debug", *arguments] if where == "before" else [*arguments, "--debug"]))
    assert done.exit_code == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "ConfigError: nothing.yaml: there is no such file" in done.stderr


def test_the_version_is_the_packages(invoke: Invoke) -> None:
    assert invoke("--version").stdout == "hezar-train, version 0.1.0\n"
