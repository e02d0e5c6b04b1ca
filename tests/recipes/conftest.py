"""A small recipe of one's own, where names are looked up first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.recipes.line import CONFIG, RECIPE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe `line` in ./recipes."""
    monkeypatch.chdir(tmp_path)
    found = Path("recipes") / "line"
    found.mkdir(parents=True)
    (found / "recipe.py").write_text(RECIPE)
    (found / "config.yaml").write_text(CONFIG)
    return found
