"""A file that only grows at its end, and the cut that takes it back to an earlier size.

Owns what metrics, CSV, TensorBoard and ledger files share: a write happens whole or not at all, a full disk delays it
instead of stopping the run, and a cut keeps what it takes away in a sibling named `*.dropped`. Knows nothing of what
the bytes mean, except that a text file ends with a newline.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

from hezar_train.config.files import fsync_folder, is_disk_full

__all__ = ["DROPPED_SUFFIX", "AppendFile", "keep_until"]

DROPPED_SUFFIX = ".dropped"

_CHUNK_BYTES = 1 << 16

_logger = logging.getLogger(__name__)


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
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
    with path.open("r+b") as file:
        length = file.seek(0, os.SEEK_END)
        kept = _end_of_last_line(file, min(size, length))
        if kept < length:
            _move_tail(file, kept, path.with_name(path.name + DROPPED_SUFFIX))
    return length - size


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _end_of_last_line(file: BinaryIO, limit: int) -> int:
    """Return the offset just after the last newline among the first `limit` bytes."""
    while limit > 0:
        start = max(0, limit - _CHUNK_BYTES)
        file.seek(start)
        newline = file.read(limit - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        limit = start
    return 0


def _move_tail(file: BinaryIO, start: int, dropped_path: Path) -> None:
    file.seek(start)
    with dropped_path.open("ab") as dropped:
        shutil.copyfileobj(file, dropped)
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            dropped.write(b"\n")  # the next cut must not continue a torn line
        dropped.flush()
        os.fsync(dropped.fileno())
    fsync_folder(dropped_path.parent)
    file.truncate(start)
    os.fsync(file.fileno())
