"""Every Python block in the docs and the README runs, each page's blocks in order and in a folder of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _with_code() -> list[Path]:
    return [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", _with_code(), ids=_name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names = {"__name__": "__docs__"}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(1))
        code = compile("\n" * line + match.group(1), str(page), "exec")  # errors then name the page's own line
        exec(code, names)
