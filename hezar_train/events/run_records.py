"""Records that a run keeps of itself: the ledger of its updates, and the record of its starts.

`ledger.jsonl` says of each update which samples it took, so that anyone can prove each was trained once. Updates that
follow one another and take equally many samples share a line, up to the next flush: what is in the file only grows, so
a kill loses what was not flushed and nothing else, and a resume can cut the file where a checkpoint was saved. This
module owns the line format and its reading back; it does not know the data order, positions are the sampler's.

`environment.json` says of each start what it was made of, where its time went and how it ended. This module owns the
file's form and the words for an end. A start that was killed has no end. What cannot be read counts as not there: the
record is for people to look at, a run goes on without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hezar_train.config.files import read_json, to_json, write_atomically
from hezar_train.errors import DataError
from hezar_train.events.writers import AppendFile
from hezar_train.run_folder import open_file
from hezar_train.run_layout import LEDGER_FILE, STARTS_FILE

__all__ = [
    "FAILED",
    "FEWER_ROWS",
    "FINISHED",
    "INTERRUPTED",
    "LEDGER_FILE",
    "STARTS_FILE",
    "Ledger",
    "LedgerLine",
    "add_start",
    "amend_start",
    "end_of",
    "ended_for_good",
    "read_starts",
    "starts_in",
]

FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
FEWER_ROWS = "fewer_rows"
"""Of a start: rows and samples of a batch whose collator made fewer rows than it was given samples."""

_MAX_UPDATES_IN_MEMORY = 4096
_MOST_UPDATES = 4096  # of a line: few bytes of a stranger's must not stand for an endless run
_MAX_LINE_BYTES = 4096
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The samples of one update, or of several in a row: `count` positions of `epoch` for each, from `first` on."""

    update: int
    epoch: int
    first: int
    count: int
    """Positions that one update took."""
    updates: int = 1

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self.count * self.updates

    def each(self) -> Iterator[LedgerLine]:
        """Yield a line for each update."""
        for number in range(self.updates):
            yield LedgerLine(self.update + number, self.epoch, self.first + number * self.count, self.count)


class Ledger:
    """Append the samples of each update; lines wait in memory until `flush`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path)
        self._lines: list[str] = []
        self._num_waiting = 0
        # The line that may still grow, in plain numbers: this is the path of every update.
        self._update = self._epoch = self._first = self._count = self._updates = 0

    @property
    def path(self) -> Path:
        """Where the lines go."""
        return self._file.path

    @property
    def size(self) -> int:
        """Bytes in the file after the last flush."""
        return self._file.size

    @property
    def has_pending(self) -> bool:
        """Tell whether lines wait for room on the disk."""
        return self._file.has_pending

    def add(self, update: int, epoch: int, first: int, count: int) -> None:
        """Note that `update` took the `count` positions of `epoch` from `first` on."""
        updates = self._updates
        if (
            count == self._count
            and first == self._first + count * updates
            and update == self._update + updates
            and epoch == self._epoch
            and 0 < updates < _MOST_UPDATES
        ):
            self._updates = updates + 1
            return
        self._end_line()
        self._update, self._epoch, self._first, self._count, self._updates = update, epoch, first, count, 1

    def flush(self) -> None:
        """Hand all lines to the operating system; the next update begins a line."""
        self._end_line()
        self._write()

    def sync(self) -> None:
        """Make what was flushed survive a power cut; safe to call from another thread."""
        self._file.sync()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Iterator[LedgerLine]:
        """Yield a line for each update of a ledger; a last line cut short by a kill is left out."""
        for line in Ledger.read_lines(path):
            yield from line.each()

    @staticmethod
    def read_lines(path: str | os.PathLike[str]) -> Iterator[LedgerLine]:
        """Yield the lines of a ledger as they are written, each of one update or of several."""
        with os.fdopen(open_file(path, follow_links=True), "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
                if line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES:
                    yield _parse_line(path, number, line)

    def _end_line(self) -> None:
        """Let the line that may grow be as it is."""
        if not self._updates:
            return
        more = f', "updates": {self._updates}' if self._updates > 1 else ""
        self._lines.append(
            f'{{"update": {self._update}, "epoch": {self._epoch}, "first": {self._first}, "count": {self._count}'
            f"{more}}}\n"
        )
        self._num_waiting += self._updates
        self._updates = 0
        if self._num_waiting >= _MAX_UPDATES_IN_MEMORY:
            self._write()

    def _write(self) -> None:
        if self._lines:
            self._file.append("".join(self._lines).encode())
            self._lines.clear()
            self._num_waiting = 0
        self._file.flush()


def _parse_line(path: str | os.PathLike[str], number: int, line: bytes) -> LedgerLine:
    try:
        found = LedgerLine(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        found = None
    if found is None or any(type(one) is not int or not 0 <= one < _MOST for one in dataclasses.astuple(found)):
        raise DataError(f"{path}, line {number} is not a line of a ledger: {line[:80]!r}")
    if not 1 <= found.updates <= _MOST_UPDATES:
        raise DataError(f"{path}, line {number} tells of {found.updates} updates; expected 1 to {_MOST_UPDATES}")
    return found


def read_starts(run_folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first."""
    return starts_in(read_json(run_folder / STARTS_FILE))


def starts_in(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the starts that the content of a record tells of."""
    starts = content.get("starts")
    return [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []


def add_start(run_folder: Path, start: Mapping[str, Any]) -> Path:
    """Append a start; return the file."""
    return _write_starts(run_folder, [*read_starts(run_folder), start])


def amend_start(run_folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to the newest start; without one there is nothing to add to."""
    if starts := read_starts(run_folder):
        _write_starts(run_folder, [*starts[:-1], {**starts[-1], **facts}])


def end_of(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a start ended; empty while it goes on, and if it was killed."""
    end = start.get("end")
    return end if isinstance(end, dict) else {}


def ended_for_good(end: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Tell whether an end is that of the run; with `local_update_steps` it may be that of one call among many."""
    return end.get("how") == FINISHED and settings.get("local_update_steps") is None


def _write_starts(run_folder: Path, starts: list[Any]) -> Path:
    return write_atomically(run_folder / STARTS_FILE, to_json({"starts": starts}))
