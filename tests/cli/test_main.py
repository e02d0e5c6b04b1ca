"""All commands: their help, the page about them, and that what only reads loads nothing heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from hezar_train.cli import root

Invoke = Callable[..., Result]


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


def test_the_version_is_the_packages(invoke: Invoke) -> None:
    assert invoke("--version").stdout == "hezar-train, version 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs"],
        ["recipes", "list"],
        ["config", "show", "runs/sums"],
        ["config", "explain", "seed"],
        ["config", "validate", "sums"],
        ["config", "diff", "sums", "runs/sums"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_what_only_looks_does_not_import_torch(
    trained: Path, tmp_path: Path, environment: dict[str, str], arguments: list[str]
) -> None:
    code = (
        "import sys; from hezar_train.cli import root\n"
        f"try: root.main({arguments!r})\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, *sorted({'torch', 'numpy', 'accelerate', 'huggingface_hub'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.split() == ["0"]
