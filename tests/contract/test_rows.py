"""The table of rows is whole: every row once, each with a proof that exists, a reason, or what it waits for."""

from __future__ import annotations

import ast
import functools
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# every row of the four systems, then every defect that is not to be repeated; both ends of a range belong to it
RANGES: dict[str, list[tuple[int, int]]] = {
    "HZ-": [(1, 29), (40, 50), (60, 75), (80, 86), (90, 95), (100, 104), (110, 119), (130, 135)],
    "FS-": [(1, 18), (20, 33), (40, 48), (50, 57), (60, 75), (80, 85), (90, 101), (110, 116)],
    "LM-": [(1, 21), (30, 49), (50, 61), (70, 74), (80, 88)],
    "LB-": [(1, 16), (20, 35), (40, 48), (50, 64), (70, 81)],
    "A": [(1, 25)],
    "B": [(1, 20)],
    "C": [(1, 21)],
    "D": [(1, 34)],
}
NUM_ROWS, NUM_DEFECTS = 315, 100

MAY_BE_LEFT_OUT = {
    *("FS-55", "FS-57", "FS-92", "FS-93", "FS-94", "FS-95", "FS-96", "FS-99"),
    *("LM-45", "LM-84", "LM-86", "LM-87", "LM-88", "LB-55", "LB-56", "LB-81"),
}
VERDICTS = {"tests", "left_out", "due"}
FIELDS = VERDICTS | {"feature", "note", "so_far"}


def _expected() -> list[str]:
    return [
        f"{prefix}{number:02}" if prefix.endswith("-") else f"{prefix}{number}"
        for prefix, ranges in RANGES.items()
        for first, last in ranges
        for number in range(first, last + 1)
    ]


def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads((ROOT / "tests/contract/rows.toml").read_text(encoding="utf-8"))


@functools.cache
def _tests_of(path: Path) -> set[str]:
    """Return the tests of a file as pytest writes them, without what parameters add."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_every_row_is_there_once_and_in_order() -> None:
    assert list(_rows()) == _expected()
    assert sum("-" in name for name in _expected()) == NUM_ROWS
    assert sum("-" not in name for name in _expected()) == NUM_DEFECTS


@pytest.mark.parametrize("name", _expected())
def test_a_row_has_one_verdict_and_its_tests_exist(name: str) -> None:
    row = _rows()[name]
    assert row.keys() <= FIELDS
    assert len(row.keys() & VERDICTS) == 1
    assert row["feature"]
    assert "so_far" not in row or "due" in row
    assert "left_out" not in row or name in MAY_BE_LEFT_OUT
    tests = row.get("tests", row.get("so_far", []))
    assert tests or "tests" not in row
    for test in tests:
        path, _, inside = test.partition("::")
        assert (ROOT / path).is_file(), f"{path} does not exist"
        assert inside in _tests_of(ROOT / path), f"{path} has no {inside}"


def test_no_row_names_a_test_twice() -> None:
    for name, row in _rows().items():
        tests = row.get("tests", row.get("so_far", []))
        assert len(tests) == len(set(tests)), name


def test_the_page_is_what_the_rows_make() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_contract.py"))["make_page"]()
    assert (ROOT / "docs/reference/contract.md").read_text(encoding="utf-8") == made, "run make docs"
