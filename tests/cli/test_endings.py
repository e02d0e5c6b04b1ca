"""How commands end: the block of an unexpected error, help, and what a shell completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from hezar_train.cli import root
from hezar_train.cli.exit_codes import folded, show_unexpected

Invoke = Callable[..., Result]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(_commands(root)), ids=" ".join)
def test_every_command_has_an_example_of_itself_and_shows_tracebacks_on_request(
    invoke: Invoke, path: tuple[str, ...]
) -> None:
    shown = invoke(*path, "--help").stdout
    assert re.search(r"Examples?:\n", shown)
    assert f"hezar-train {' '.join(path)}" in shown
    assert "--debug" in shown


@pytest.mark.parametrize("path", list(_commands(root)), ids=" ".join)
def test_every_command_is_on_the_page(path: tuple[str, ...]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert f"hezar-train {' '.join(path)}" in page


def test_the_help_has_the_exit_codes(invoke: Invoke) -> None:
    assert "Exit codes:" in invoke("--help").stdout


def test_an_unexpected_error_is_a_block_and_a_traceback_only_on_request(run: Run) -> None:
    command = ["recipes", "copy", "image_classification", "/proc/nowhere/digits"]
    done, asked = run(*command), run(*command, "--debug")
    assert (done.returncode, asked.returncode) == (1, 1)
    assert done.stderr.startswith("error: FileNotFoundError: [Errno 2] No such file or directory: '/proc/nowhere")
    assert "Traceback" not in done.stderr
    assert "Traceback (most recent call last)" in asked.stderr
    Path(re.findall(r"The traceback is in (\S+)\.", done.stderr)[0]).unlink()


def test_an_unexpected_error_names_the_line_of_the_recipe_and_keeps_its_traceback(
    invoke: Invoke, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipes/sums/recipe.py").write_text("def build(width):\n    return [][width]\n")
    with pytest.raises(IndexError) as caught:
        invoke("train", "sums", "output_dir=runs/other")
    show_unexpected(caught.type, caught.value, caught.tb)
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: IndexError: list index out of range",
        "  in recipes/sums/recipe.py, line 2, build:",
        "    return [][width]",
    ]
    kept = Path(re.findall(r"The traceback is in (\S+)\.", last)[0])
    assert "Traceback (most recent call last)" in kept.read_text()
    kept.unlink()


def test_the_script_that_starts_the_program_is_nobodys_own_code(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "bin/hezar-train"
    script.parent.mkdir()
    script.write_text("import sys\nfrom hezar_train.cli import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "recipes", "copy", "image_classification", "/proc/nowhere/digits"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("error: FileNotFoundError")
    assert "bin/hezar-train" not in done.stderr
    Path(re.findall(r"The traceback is in (\S+)\.", done.stderr)[0]).unlink()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hezar-train re", {"resume", "report", "recipes", "reproduce"}),
        ("hezar-train train sum", {"sums"}),
        ("hezar-train train sums save_", {"save_enabled=", "save_freq=", "save_steps=", "save_total_limit="}),
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


def test_a_long_error_is_folded_between_words_and_keeps_its_lines() -> None:
    words = "2 problems:\n  1. " + "a word and " * 12 + "\n  2. " + "x" * 90
    lines = folded(words, 60).split("\n")
    assert (lines[0], lines[-1]) == ("2 problems:", "     " + "x" * 90)  # a word is never cut
    assert max(map(len, lines[:-1])) <= 60
    assert all(line.startswith("     ") for line in (*lines[2:4], lines[-1]))
    assert " ".join(" ".join(lines).split()) == " ".join(words.split())
    assert len("error: ") + len(folded("word " * 30, 60).split("\n")[0]) <= 60
