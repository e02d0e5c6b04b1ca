"""The ledger: one line per update that says which samples it took, so that anyone can prove each was trained once.

Owns the line format and its reading back. Does not know the data order; positions are the sampler's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hezar_train.errors import DataError
from hezar_train.events.append_file import AppendFile

__all__ = ["LEDGER_FILE", "Ledger", "LedgerLine"]

LEDGER_FILE = "ledger.jsonl"

_MAX_LINES_IN_MEMORY = 4096


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The samples of one update: `count` positions of `epoch` from `first` on."""

    update: int
    epoch: int
    first: int
    count: int


class Ledger:
    """Append a line per update; lines wait in memory until `flush`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path)
        self._lines: list[str] = []

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
        lines = self._lines
        lines.append(f'{{"update": {update}, "epoch": {epoch}, "first": {first}, "count": {count}}}\n')
        if len(lines) >= _MAX_LINES_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        if self._lines:
            self._file.append("".join(self._lines).encode())
            self._lines.clear()
        self._file.flush()

    def sync(self) -> None:
        """Make what was flushed survive a power cut; safe to call from another thread."""
        self._file.sync()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Iterator[LedgerLine]:
        """Yield the lines of a ledger; a last line cut short by a kill is left out."""
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _parse(path, number, line)


def _parse(path: str | os.PathLike[str], number: int, line: bytes) -> LedgerLine:
    try:
        return LedgerLine(**json.loads(line))
    except (ValueError, TypeError):
        raise DataError(f"{path}, line {number} is not a line of a ledger: {line[:80]!r}") from None
