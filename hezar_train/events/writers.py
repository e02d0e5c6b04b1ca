"""Writers: they turn logged rows into files (JSON lines, CSV), printed lines, or calls of an Accelerator's trackers.

Owns the file formats and how they are read back. Refuses to decide what is logged and when (the loop does). Every file
only grows at its end, so a resume can cut it back to the size that the checkpoint recorded (`keep_until`); the CSV is a
view of `metrics.json` and is rebuilt from its rows. TensorBoard has a module of its own.

`AppendFile` is what metrics, CSV, TensorBoard and ledger files share: a write happens whole or not at all, a full disk
delays it instead of stopping the run, and a cut keeps what it takes away in a sibling named `*.dropped`. It knows
nothing of what the bytes mean, except that a text file ends with a newline.

`flatten_results_dict` and `print_csv_format` show results as people pass them on.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TextIO

from hezar_train.config.files import fsync_folder, is_disk_full
from hezar_train.errors import DataError
from hezar_train.events.storage import RESERVED_NAMES, EventStorage, Histogram, Image, Row, get_event_storage
from hezar_train.run_folder import RunFolderError, open_file
from hezar_train.run_layout import CSV_FILE, DROPPED_SUFFIX, METRICS_FILE

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hezar_train.config import TrainerConfig

__all__ = [
    "CSV_FILE",
    "DROPPED_SUFFIX",
    "METRICS_FILE",
    "AppendFile",
    "CSVLogger",
    "CSVWriter",
    "CommonMetricPrinter",
    "EventWriter",
    "FileWriter",
    "JSONLinesWriter",
    "JSONWriter",
    "TrackerWriter",
    "flatten_results_dict",
    "keep_until",
    "load_csv",
    "print_csv_format",
    "read_rows",
]

_INTEGER_COLUMNS = ("step", "epoch")
_RATE_NAMES = ("train.learning_rate", "lr")
_DATA_TIME_NAMES = ("train.data_seconds", "data_time")

_CHUNK_BYTES = 1 << 16
_MOST_LINE_BYTES = 16 << 20
_MOST_STEPS = 1 << 63
_MOST_DROPPED_BYTES = 1 << 30
"""What a run has logged since a checkpoint is less; a file with holes can claim any size, and a copy of it has none."""
_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024

_logger = logging.getLogger(__name__)


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

    def cut(self, size: int) -> int:
        """Cut the file back to `size` bytes; return its length before minus `size`."""
        return self._file.cut(size)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            record = {"step": row.step, "epoch": row.epoch, "time": row.time, **row.values}
            self._file.append(json.dumps(record, ensure_ascii=False).encode() + b"\n")


JSONWriter = JSONLinesWriter
"""LiBai's name for it."""


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Return the rows of a JSON lines file; none if there is no file. A last line cut short by a kill is left out."""
    path = Path(path)
    if not path.exists():
        return []
    with os.fdopen(open_file(path, follow_links=True), "rb") as file:
        lines = iter(lambda: file.readline(_MOST_LINE_BYTES), b"")
        return [
            _row_of(path, number, line)
            for number, line in enumerate(lines, start=1)
            if line.endswith(b"\n") or len(line) == _MOST_LINE_BYTES
        ]


def _row_of(path: Path, number: int, line: bytes) -> Row:
    try:
        record = json.loads(line)
        step, epoch, seconds = (record.pop(name) for name in RESERVED_NAMES)
        numbers = (seconds, *record.values())
        is_row = _are_of(int, (step, epoch)) and abs(step) < _MOST_STEPS and _are_of(int | float, numbers)
        list(map(float, numbers))  # which an integer of many digits cannot be
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        is_row = False
    if not is_row:
        raise DataError(f"{path}, line {number} is not a logged row: {line[:80]!r}")
    return Row(step, epoch, seconds, record)


def _are_of(kind: Any, values: Iterable[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)


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
        # As bytes: no number is parsed and printed anew, so every old cell stays as it was written.
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
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}.tmp")
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


def load_csv(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Return each column of a CSV log as a list; a value that was not logged in a row is NaN."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    columns = itertools.zip_longest(*lines, fillvalue="") if lines else ([] for _ in header)
    return {name: [_cell(name, text) for text in cells] for name, cells in zip(header, columns, strict=True)}


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
        try:
            return next(csv.reader(iter(lambda: file.readline(_MOST_LINE_BYTES), "")), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path} is no table of logged values: {error}. Move it away.") from error


def _cell(name: str, text: str) -> int | float:
    if not text:
        return math.nan
    return int(float(text)) if name in _INTEGER_COLUMNS else float(text)


class TrackerWriter(EventWriter):
    """Pass rows on to an Accelerator's trackers; whoever started them ends them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._has_started = False

    @classmethod
    def following(cls, accelerator: Accelerator, run_name: str, config: TrainerConfig) -> Self | None:
        """Start the trackers that an Accelerator was asked for, unless the user has; None if there are none."""
        writer = cls(accelerator)
        if accelerator.log_with and not accelerator.trackers:
            shown = dict(_flat_settings(config.to_dict()))
            accelerator.init_trackers(run_name, config=shown)
            writer._has_started = True
        return writer if accelerator.trackers else None

    def write(self, rows: Sequence[Row]) -> None:
        if not self._accelerator.trackers:
            return
        for row in rows:
            self._accelerator.log(dict(row.values), step=row.step)

    def close(self) -> None:
        if not self._has_started:
            return
        started, self._accelerator.trackers = self._accelerator.trackers, []
        for tracker in started:
            tracker.finish()


def _flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as trackers take them: one plain value for each name, `group.name` for one inside another."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        elif isinstance(value, str | int | float | bool):
            yield f"{prefix}{name}", value


class CommonMetricPrinter(EventWriter):
    """Print a line per training row in the words of LiBai's printer, and put `eta_seconds` into the run's storage.

    For those who read such logs; the trainer's own display shows place, loss, rate, pace and time left without it.
    Each line has the iteration, the samples consumed, the losses (the median of the last `window_size` values where
    they were put with a smoothing hint), the learning rate and the peak of memory; from the second line on also the
    time left, the seconds per iteration and the samples per second since the line before.
    """

    def __init__(
        self, batch_size: int, max_iter: int | None = None, window_size: int = 200, stream: TextIO | None = None
    ) -> None:
        self._batch_size, self._max_iter, self._window_size = batch_size, max_iter, window_size
        self._stream = sys.stdout if stream is None else stream
        self._mark: tuple[float, int] | None = None

    def write(self, rows: Sequence[Row]) -> None:
        storage = get_event_storage()
        for row in rows:
            if any(not name.startswith("evaluation.") for name in row.values):
                self._stream.write("  ".join(self._parts(row, storage)) + "\n")

    def flush(self) -> None:
        self._stream.flush()

    def _parts(self, row: Row, storage: EventStorage) -> Iterator[str]:
        seconds = self._seconds_per_iteration(row)
        if seconds is not None and self._max_iter is not None:
            eta_seconds = seconds * max(0, self._max_iter - row.step)
            storage.put_scalar("eta_seconds", eta_seconds, smoothing_hint=False)
            yield f"eta: {timedelta(seconds=round(eta_seconds))}"
        yield f"iteration: {row.step}" if self._max_iter is None else f"iteration: {row.step}/{self._max_iter}"
        yield f"consumed_samples: {storage.samples}"
        smooth = storage.latest_with_smoothing_hint(self._window_size)
        yield from (f"{name}: {value:.4g}" for name, (value, _) in smooth.items() if _is_training_loss(name))
        if seconds is not None:
            yield f"time: {seconds:.4g} s/iter"
        yield from (f"data_time: {row.values[name]:.4g} s/iter" for name in _DATA_TIME_NAMES if name in row.values)
        if seconds:
            yield f"total_throughput: {self._batch_size / seconds:.2f} samples/s"
        yield from (f"lr: {row.values[name]:.2e}" for name in _RATE_NAMES if name in row.values)
        yield f"max_mem: {_peak_bytes() / 2**20:.0f}M"

    def _seconds_per_iteration(self, row: Row) -> float | None:
        before, self._mark = self._mark, (row.time, row.step)
        if before is None or row.step <= before[1]:
            return None
        return (row.time - before[0]) / (row.step - before[1])


def _is_training_loss(name: str) -> bool:
    return name.endswith("loss") and not name.startswith("evaluation.")


def _peak_bytes() -> int:
    """Return the most memory held so far: of the GPU if torch uses one, else of this process."""
    torch = sys.modules.get("torch")  # looked up, not imported: a logger without torch stays light
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested results as one mapping: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in _leaves(results, ""):
        if name in flat:
            raise DataError(f"two results flatten to the name {name!r}; rename one of them")
        flat[name] = value
    return flat


def print_csv_format(results: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print for each task of `results` its name, a line of metric names and a line of values."""
    stream = sys.stdout if stream is None else stream
    for task, found in results.items():
        if not isinstance(found, Mapping):
            stream.write(f"{task}={found}\n")
            continue
        flat = flatten_results_dict(found)
        stream.write(f"task: {task}\n{','.join(flat)}\n{','.join(map(_number, flat.values()))}\n")


def _leaves(results: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class AppendFile:
    """Hold bytes until `flush`, then append them all or, on a full disk, keep them for the next flush.

    Only one thread appends and flushes; `sync` may be called from another one. `size` counts the bytes that the
    operating system has.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            keep_until(self.path, self.path.stat().st_size)
        self._descriptor = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.size = os.fstat(self._descriptor).st_size
        self._pending: list[bytes] = []
        self._open = True
        self._is_folder_synced = False
        self._has_warned = False
        # A close must not take the descriptor away from a sync that is under way in the checkpoint's thread.
        self._closing = threading.Lock()

    @property
    def has_pending(self) -> bool:
        """Tell whether some bytes did not reach the operating system yet."""
        return bool(self._pending)

    def append(self, data: bytes) -> None:
        """Add `data` at the end, in memory."""
        self._pending.append(data)

    def flush(self) -> None:
        """Hand everything to the operating system; on a full disk warn once, keep it and try again next time."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        self._pending = [data]
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)  # half a write would be a torn line in the middle later on
            if not is_disk_full(error):
                raise
            self.warn_disk_full(error)
            return
        self.size += len(data)
        self._pending = []
        self._has_warned = False

    def cut(self, size: int) -> int:
        """Cut the file back, as `keep_until` does, and go on from there."""
        surplus = keep_until(self.path, size)
        self.size = os.fstat(self._descriptor).st_size
        return surplus

    def sync(self) -> None:
        """Make what was flushed survive a power cut; safe to call from another thread."""
        with self._closing:
            if not self._open:
                return
            os.fsync(self._descriptor)
            if not self._is_folder_synced:
                fsync_folder(self.path.parent)
                self._is_folder_synced = True

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if not self._open:
            return
        self.flush()
        if self._pending:
            _logger.error("%s: %d bytes were lost, the disk is still full", self.path, len(self._pending[0]))
        with self._closing:
            self._open = False
            os.close(self._descriptor)

    def warn_disk_full(self, error: OSError) -> None:
        """Say once, until a write succeeds again, that the disk is full."""
        if not self._has_warned:
            _logger.warning("%s cannot grow (%s); kept in memory until the next flush", self.path, error.strerror)
            self._has_warned = True


def keep_until(path: str | os.PathLike[str], size: int) -> int:
    """Cut an append-only text file back to `size` bytes; return its length before the cut minus `size`.

    What is cut off is appended to a sibling named `*.dropped` and is on the disk before the file is cut, so a kill in
    between loses nothing (the sibling may then hold a line twice). A last line without its newline goes too. A negative
    result says how many bytes the file, or a file that is not there, lacks; its whole lines are left as they are.
    """
    path = Path(path)
    if not path.exists():
        return -size
    with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        kept = _end_of_last_line(file, min(size, length), max(0, length - _MOST_DROPPED_BYTES))
        if length - kept > _MOST_DROPPED_BYTES:
            raise RunFolderError(
                f"{path} has {length:,} bytes, and more than {_MOST_DROPPED_BYTES:,} would have to be set aside; no "
                "run logs so much between two checkpoints. Look at it, and move it away."
            )
        if kept < length:
            _move_tail(file, kept, path.with_name(path.name + DROPPED_SUFFIX))
    return length - size


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _end_of_last_line(file: BinaryIO, limit: int, least: int) -> int:
    """Return the offset just after the last newline among the first `limit` bytes; not looked for before `least`."""
    while limit > least:
        start = max(0, limit - _CHUNK_BYTES)
        file.seek(start)
        newline = file.read(limit - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        limit = start
    return min(limit, least - 1) if least else 0


def _move_tail(file: BinaryIO, start: int, dropped_path: Path) -> None:
    file.seek(start)
    with os.fdopen(open_file(dropped_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as dropped:
        shutil.copyfileobj(file, dropped)
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            dropped.write(b"\n")  # the next cut must not continue a torn line
        dropped.flush()
        os.fsync(dropped.fileno())
    fsync_folder(dropped_path.parent)  # the copy is durable, name included, before the original is cut
    file.truncate(start)
    os.fsync(file.fileno())
