"""Pages that repeat the source say what the source says."""

from __future__ import annotations

import itertools
import re
import runpy
import tomllib
from pathlib import Path

from hezar_train import run_layout
from hezar_train.cli import EXIT_CODES

ROOT = Path(__file__).parents[2]


def test_the_config_page_is_what_the_source_makes() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["make_page"]()
    assert (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8") == made, "run make docs"


def test_the_exit_codes_of_the_help_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for line in re.sub(r"\n {7}", " ", EXIT_CODES).splitlines()[2:]:
        code, meaning = line.split(maxsplit=1)
        assert f"| {code} | {meaning} |" in page


def test_the_pages_about_the_folder_and_its_checkpoints_name_all_that_can_lie_there() -> None:
    pages = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("run_folder", "checkpoint_format")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = [name for name in run_layout.__all__ if name.endswith(("_FILE", "_FOLDER", "_PREFIX", "_SUFFIX"))]
    assert [name for name in names if getattr(run_layout, name) not in text] == []


def test_the_changelog_has_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = (ROOT / "README.md").read_text(encoding="utf-8").replace("`", " ").split()
    named = {after for word, after in itertools.pairwise(words) if word == "make" and after.isalpha()}
    assert {"train", "test", "pace", "kill"} <= named
    assert all(f"\n{target}:" in makefile for target in named)
