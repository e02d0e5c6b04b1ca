"""The record of a run's starts, `RUN/environment.json`: what each was made of, where its time went, how it ended.

Owns the file's form and the words for an end. A start that was killed has no end. What cannot be read counts as not
there: the record is for looking, a run goes on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hezar_train.config.files import read_json, to_json, write_atomically

__all__ = [
    "FAILED",
    "FINISHED",
    "INTERRUPTED",
    "STARTS_FILE",
    "add_start",
    "amend_start",
    "end_of",
    "ended_for_good",
    "read_starts",
    "starts_in",
]

STARTS_FILE = "environment.json"
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"


def read_starts(run_folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first."""
    return starts_in(read_json(run_folder / STARTS_FILE))


def starts_in(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the starts that the content of a record tells of."""
    starts = content.get("starts")
    return [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []


def add_start(run_folder: Path, start: Mapping[str, Any]) -> Path:
    """Append a start; return the file."""
    return _write(run_folder, [*read_starts(run_folder), start])


def amend_start(run_folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to the newest start; without one there is nothing to add to."""
    if starts := read_starts(run_folder):
        _write(run_folder, [*starts[:-1], {**starts[-1], **facts}])


def end_of(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a start ended; empty while it goes on, and if it was killed."""
    end = start.get("end")
    return end if isinstance(end, dict) else {}


def ended_for_good(end: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Tell whether an end is that of the run; with `local_update_steps` it may be that of one call among many."""
    return end.get("how") == FINISHED and settings.get("local_update_steps") is None


def _write(run_folder: Path, starts: list[Any]) -> Path:
    return write_atomically(run_folder / STARTS_FILE, to_json({"starts": starts}))
