"""Errors on the command line: one readable block, a traceback only on request."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from hezar_train.cli.exit_codes import folded, show_unexpected

Invoke = Callable[..., Result]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


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
        "This was raised while build() ran with recipe.width=2. Is that what it should be?",
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


def test_a_long_error_is_folded_between_words_and_keeps_its_lines() -> None:
    words = "2 problems:\n  1. " + "a word and " * 12 + "\n  2. " + "x" * 90
    lines = folded(words, 60).split("\n")
    assert (lines[0], lines[-1]) == ("2 problems:", "     " + "x" * 90)  # a word is never cut
    assert max(map(len, lines[:-1])) <= 60
    assert all(line.startswith("     ") for line in (*lines[2:4], lines[-1]))
    assert " ".join(" ".join(lines).split()) == " ".join(words.split())
    assert len("error: ") + len(folded("word " * 30, 60).split("\n")[0]) <= 60


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(invoke: Invoke, where: str) -> None:
    arguments = ["config", "validate", "nothing.yaml"]
    done = invoke(*(["--debug", *arguments] if where == "before" else [*arguments, "--debug"]))
    assert done.exit_code == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "ConfigError: nothing.yaml: there is no such file" in done.stderr
