"""What the pages point to is there: pages, files, headings, modules and names of the package."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("docs", "recipes", "benchmarks", "tests", "hezar_train", ".github")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]
SOURCES = [
    *PAGES,
    *(ROOT / name for name in ("Makefile", "pyproject.toml", ".pre-commit-config.yaml", ".ci/run")),
    *(
        file
        for name in FOLDERS
        for file in (ROOT / name).rglob("*")
        if file.suffix in {".py", ".toml", ".yaml", ".yml"}
    ),
]

CHANGELOG = ROOT / "CHANGELOG.md"
"""It names what is gone, too."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?) *$", re.MULTILINE)
PAGE_IN_WORDS = re.compile(r"\bdocs/[\w/.-]+\.(?:md|py|png|yaml|sbatch)\b")
PATH_IN_QUOTES = re.compile(r"`((?:hezar_train|tests|docs|recipes|benchmarks)/[\w/.-]*)`")
NAME_IN_QUOTES = re.compile(r"`(hezar_train(?:\.\w+)+)")
IMPORT = re.compile(r"^from (hezar_train[\w.]*) import ([\w, ]+)", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _without_code(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in HEADING.findall(_without_code(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def _is_name(dotted: str) -> bool:
    """Tell whether a dotted name is a module of the package, or something in one."""
    module, *rest = dotted.split(".")
    found = importlib.import_module(module)
    while rest:
        head = rest.pop(0)
        try:
            found = importlib.import_module(f"{module}.{head}")
            module = f"{module}.{head}"
        except ModuleNotFoundError:
            if not hasattr(found, head):
                return False
            found = getattr(found, head)
    return True


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(_without_code(page)):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{_name(page)} links to {target}"
        assert linked.is_relative_to(ROOT), f"{_name(page)} links out of the repository: {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{_name(page)} links to {target}; there are: {sorted(_anchors(linked))}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHANGELOG], ids=_name)
def test_the_paths_and_names_that_a_page_quotes_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in PATH_IN_QUOTES.findall(text):
        assert (ROOT / path).exists(), f"{_name(page)} names {path}"
    for name in NAME_IN_QUOTES.findall(text):
        assert _is_name(name), f"{_name(page)} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_a_page_imports_is_there_also_where_its_code_is_not_run(page: Path) -> None:
    for module, names in IMPORT.findall(page.read_text(encoding="utf-8")):
        for name in names.replace(" ", "").split(","):
            assert _is_name(f"{module}.{name}"), f"{_name(page)} imports {name} from {module}"


def test_the_pages_that_the_source_names_exist() -> None:
    missing = {
        f"{_name(file)}: {page}"
        for file in SOURCES
        for page in PAGE_IN_WORDS.findall(file.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    }
    assert not missing


def test_every_page_is_in_the_map() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in LINK.findall(index)}
    assert {page for page in DOCS.rglob("*.md") if page.name != "index.md"} <= linked
