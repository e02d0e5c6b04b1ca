"""Write docs/reference/contract.md: what users of four trainers rely on, and the test that proves each.

    python docs/make_contract.py [--check]

The rows are those of tests/contract/rows.toml. With --check nothing is written; the exit code is 1 if the page is not
current.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "contract.md"
ROWS = ROOT / "tests" / "contract" / "rows.toml"

SYSTEMS = {
    "HZ-": "Hezar",
    "FS-": "FederatedScope",
    "LM-": "lernomatic",
    "LB-": "LiBai",
    "A": "Not repeated: defects of FederatedScope",
    "B": "Not repeated: defects of lernomatic",
    "C": "Not repeated: defects of LiBai",
    "D": "Not repeated: defects of Hezar",
}

INTRODUCTION = """\
# The contract

What users of Hezar, FederatedScope, lernomatic and LiBai rely on, row by row, each with the tests that prove it here;
then the defects of those four that are not repeated. Where a row of theirs contradicts this trainer's own rules
(unknown names raise, other trainers' fields are answered with ours), ours win and the row says so. This page is made
from `tests/contract/rows.toml` by `docs/make_contract.py`.
"""


def make_page() -> str:
    """Return the page."""
    rows = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    lines = [INTRODUCTION, *_summary(rows)]
    for prefix, title in SYSTEMS.items():
        lines += [f"## {title}", "", "| row | what | proof |", "| --- | --- | --- |"]
        lines += [_line(name, row) for name, row in rows.items() if name.startswith(prefix)]
        lines.append("")
    return "\n".join(lines)


def _summary(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    kinds = {"proven": "tests", "waiting for a part to come": "due", "left out": "left_out"}
    yield "| rows | " + " | ".join(kinds) + " |"
    yield "| --- |" + " --- |" * len(kinds)
    counts = [sum(key in row for row in rows.values()) for key in kinds.values()]
    yield f"| {len(rows)} | " + " | ".join(map(str, counts)) + " |"
    yield ""


def _line(name: str, row: dict[str, Any]) -> str:
    proof = _status(row)
    if note := row.get("note"):
        proof = f"{proof}. {note}" if proof else note
    return f"| {name} | {_cell(row['feature'])} | {_cell(proof)} |"


def _status(row: dict[str, Any]) -> str:
    if "left_out" in row:
        return f"left out: {row['left_out']}"
    if "due" in row:
        so_far = _links(row.get("so_far", []))
        return f"comes with: {row['due']}" + (f"; so far {so_far}" if so_far else "")
    return _links(row["tests"])


def _links(tests: list[str]) -> str:
    return ", ".join(f"[{_short(test)}](../../{test.partition('::')[0]})" for test in tests)


def _short(test: str) -> str:
    return test.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write or check the page."""
    page = make_page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/reference/contract.md is not current: run make docs")


if __name__ == "__main__":
    main()
