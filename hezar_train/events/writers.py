"""Writers that turn logged rows into files: JSON lines, CSV; and those that pass them to an Accelerator's trackers.

Owns the file formats and how they are read back. Refuses to decide what is logged and when (the loop does). Every file
only grows at its end, so a resume can cut it back to the size that the checkpoint recorded (`keep_until`); the CSV is a
view of `metrics.json` and is rebuilt from its rows. TensorBoard has a module of its own.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.config.files import is_disk_full
from hezar_train.errors import DataError
from hezar_train.events.append_file import AppendFile
from hezar_train.events.media import Histogram, Image
from hezar_train.events.storage import RESERVED_NAMES, Row

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "CSV_FILE",
    "METRICS_FILE",
    "CSVLogger",
    "CSVWriter",
    "EventWriter",
    "FileWriter",
    "JSONLinesWriter",
    "JSONWriter",
    "TrackerWriter",
    "load_csv",
    "read_rows",
]

METRICS_FILE = "metrics.json"
CSV_FILE = "training_logs.csv"

_INTEGER_COLUMNS = ("step", "epoch")


class EventWriter:
    """Receive each logged row once; subclass it and override `write`.

    `storage.writers.append(writer)` makes it one of the run's writers: from then on, `storage.flush()` brings it what
    it has not seen. A writer that raises gets the same again at the next flush.
    """

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows that this writer has not seen."""
        raise NotImplementedError(f"{type(self).__name__} must define write(rows)")

    def write_images(self, images: Sequence[Image]) -> None:
        """Take images that this writer has not seen; without an override they are left out."""

    def write_histograms(self, histograms: Sequence[Histogram]) -> None:
        """Take histograms that this writer has not seen; without an override they are left out."""

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        return

    def sync(self) -> None:
        """Make what was flushed survive a power cut; called from another thread."""
        return

    def close(self) -> None:
        """Flush and let go of the file."""
        return


class FileWriter(EventWriter):
    """A writer of one file that grows at its end; a subclass overrides `write`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path)

    @property
    def path(self) -> Path:
        """Where the rows go."""
        return self._file.path

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class JSONLinesWriter(FileWriter):
    """Append one JSON object per row; numbers are written so that they read back exactly.

    A number that is not finite is written as NaN or Infinity, as Python's `json` writes and reads it.
    """

    @property
    def size(self) -> int:
        """Bytes in the file after the last flush."""
        return self._file.size

    @property
    def has_pending(self) -> bool:
        """Tell whether lines wait for room on the disk."""
        return self._file.has_pending

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            record = {"step": row.step, "epoch": row.epoch, "time": row.time, **row.values}
            self._file.append(json.dumps(record, ensure_ascii=False).encode() + b"\n")


JSONWriter = JSONLinesWriter
"""LiBai's name for it."""


class CSVWriter(FileWriter):
    """Append one line per row; columns are step, epoch and every name logged so far, in order of appearance.

    A name that appears later makes the file anew, in a temporary sibling that then takes its place: the file is whole
    at every moment. A file that is there already is continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._columns = _read_header(self.path)
        self._waiting: list[Mapping[str, Any]] = []

    def write(self, rows: Sequence[Row]) -> None:
        self.write_records([_csv_record(row) for row in rows])

    def write_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add one line per mapping from column to value."""
        self._waiting.extend(records)

    def flush(self) -> None:
        self._file.flush()
        columns = _union(self._columns, self._waiting)
        if columns == self._columns or self._widen(columns):
            self._file.append(_csv_lines(columns, self._waiting))
            self._waiting.clear()
            self._file.flush()

    def rebuild(self, rows: Iterable[Row]) -> None:
        """Make the file anew from `rows`, as after a resume."""
        records = [_csv_record(row) for row in rows]
        columns = _union([], records)
        self._replace(columns, _csv_header(columns) + _csv_lines(columns, records))
        self._waiting.clear()

    def close(self) -> None:
        self.flush()
        super().close()

    def _widen(self, columns: list[str]) -> bool:
        """Give the file more columns; return False while the disk is too full for that."""
        if self._file.has_pending:
            return False
        missing_cells = b"," * (len(columns) - len(self._columns)) + b"\n"
        old_lines = self.path.read_bytes().splitlines()[1:]
        content = _csv_header(columns) + b"".join(line + missing_cells for line in old_lines)
        try:
            self._replace(columns, content)
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._file.warn_disk_full(error)
            return False
        return True

    def _replace(self, columns: list[str], content: bytes) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            temporary.write_bytes(content)  # not synced: the loop waits here, and a resume makes the table anew
        except OSError:
            temporary.unlink(missing_ok=True)  # half a file would only keep the disk full
            raise
        os.replace(temporary, self.path)
        self._file.close()
        self._file = AppendFile(self.path)
        self._columns = columns


class CSVLogger:
    """Write metrics to a CSV file as they come, one line per call; lines of earlier runs stay."""

    def __init__(self, logs_dir: str | os.PathLike[str], csv_filename: str = CSV_FILE) -> None:
        self._writer = CSVWriter(Path(logs_dir) / csv_filename)

    @property
    def save_path(self) -> Path:
        """Where the lines go."""
        return self._writer.path

    def write(self, logs: Mapping[str, float], step: int) -> None:
        """Add a line with the values of `logs` at `step`."""
        values = {name: float(value) for name, value in logs.items() if name != "step"}
        self._writer.write_records([{"step": step, **values}])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class TrackerWriter(EventWriter):
    """Pass rows on to the trackers that an Accelerator was set up with; whoever set them up ends them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def write(self, rows: Sequence[Row]) -> None:
        if not self._accelerator.trackers:
            return
        for row in rows:
            self._accelerator.log(dict(row.values), step=row.step)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Return the rows of a JSON lines file; none if there is no file. A last line cut short by a kill is left out."""
    path = Path(path)
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [_row_of(path, number, line) for number, line in enumerate(file, start=1) if line.endswith(b"\n")]


def load_csv(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Return each column of a CSV log as a list; a value that was not logged in a row is NaN."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    columns = itertools.zip_longest(*lines, fillvalue="") if lines else ([] for _ in header)
    return {name: [_cell(name, text) for text in cells] for name, cells in zip(header, columns, strict=True)}


def _row_of(path: Path, number: int, line: bytes) -> Row:
    try:
        record = json.loads(line)
        step, epoch, seconds = (record.pop(name) for name in RESERVED_NAMES)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}, line {number} is not a logged row: {line[:80]!r}") from None
    return Row(step, epoch, seconds, record)


def _csv_record(row: Row) -> dict[str, Any]:
    return {"step": row.step, "epoch": row.epoch, **row.values}


def _union(columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return `columns` and every further name of `records`, in order of appearance."""
    return list(dict.fromkeys(itertools.chain(columns, *records)))


def _csv_header(columns: Sequence[str]) -> bytes:
    return _csv_lines(columns, [dict(zip(columns, columns, strict=True))]) if columns else b""


def _csv_lines(columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writerows(records)
    return text.getvalue().encode()


def _read_header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _cell(name: str, text: str) -> int | float:
    if not text:
        return math.nan
    return int(float(text)) if name in _INTEGER_COLUMNS else float(text)
