"""What commands share: what a shell completes, and places that cannot be written to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hezar-train re", {"resume", "report", "recipes", "reproduce"}),
        ("hezar-train train sum", {"sums"}),
        (
            "hezar-train train sums save_",
            {"save_enabled=", "save_freq=", "save_steps=", "save_total_limit=", "save_trained_only="},
        ),
        ("hezar-train config explain see", {"seed"}),
        ("hezar-train train sums seed=1 recipe.", {"recipe.width="}),
        ("hezar-train train runs/sums/train_config.yaml recipe.w", {"recipe.width="}),
        ("hezar-train resume runs/sums recipe.", {"recipe.width="}),
        ("hezar-train config show recipes/sums recipe.", {"recipe.width="}),
        ("hezar-train train nothing recipe.", set()),
    ],
)
def test_the_shell_completes_commands_recipes_fields_and_options(
    trained: Path, tmp_path: Path, environment: dict[str, str], words: str, expected: set[str]
) -> None:
    variables = {"_HEZAR_TRAIN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "hezar_train"], cwd=tmp_path, env={**environment, **variables, "PATH": os.defpath},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert {line.split(",")[1] for line in done.stdout.splitlines() if line} == expected


@pytest.mark.parametrize(
    "command",
    [["predict", "runs/sums", "mine.txt"], ["find-lr", "sums"], ["report", "runs/sums"]],
    ids=lambda command: command[0],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    invoke: Invoke, trained: Path, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "mine.txt").write_text("0.1 0.2\n")
    (tmp_path / "recipes/sums/recipe.py").write_text("def build(width):\n    raise AssertionError\n")
    done = invoke(*command, "--out", "/proc/x/y.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "/proc/x/y.png cannot be written: No such file or directory. Name another file: --out FILE" in done.stderr
    assert invoke(*command, "--out", "mine.txt/y.png").exit_code == 2


def test_trying_a_place_leaves_no_trace(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    assert invoke("predict", "runs/sums", "nothing.txt", "--out", "new/below/y.jsonl").exit_code == 2
    assert not (tmp_path / "new").exists()
