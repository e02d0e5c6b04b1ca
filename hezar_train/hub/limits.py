"""Limits for what a server sends: how many bytes, for how long, and how long it may be silent.

The client library waits for each answer on its own and tries again on its own; a server that sends one byte now and
then, or more than it announced, would keep a program for ever or fill its disk. So its calls run in a thread, whose
caller watches the bytes arrive, and leaves with a sentence when a limit is reached. The thread ends by itself: the next
bytes that it receives are refused, and where none come, by the client's own timeouts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = [
    "ANSWER_BYTES",
    "ANSWER_SECONDS",
    "SILENT_SECONDS",
    "SMALL_BYTES",
    "LimitError",
    "Meter",
    "download_seconds",
    "files_seconds",
    "limited",
    "upload_seconds",
    "within",
]

T = TypeVar("T")

SMALL_BYTES = 16 << 20
"""The most that a config, a record, a manifest or a card may have."""
BLOCK_BYTES = 80 << 20
ANSWER_BYTES = 64 << 20
"""The most that the list of a repository's files may have: some 200,000 files."""
ANSWER_SECONDS = 30.0
SILENT_SECONDS = 30.0
FILE_SECONDS = 3.0
"""What each of many files may last on an average, besides the time for its bytes."""
COMMIT_SECONDS = 120.0
LEAST_BYTES_PER_SECOND = 50_000
WATCH_SECONDS = 0.05


class LimitError(RuntimeError):
    """A server went beyond a limit."""


class Meter:
    """The bytes of one download; far more than `most_bytes` are refused, and all after the caller has left.

    Not each one too many: of a small file, Xet sends the block that it lies in.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._is_closed = False
        self._most_counted = 0
        self.last_seconds = time.monotonic()

    def note(self, num_bytes: int) -> None:
        """Note how many bytes have arrived, as one of the client's counters has it."""
        self._most_counted = max(self._most_counted, num_bytes)
        self.last_seconds = time.monotonic()
        if self._is_closed:
            raise LimitError("nobody waits for this download any more")
        self.check()

    def check(self) -> None:
        """Raise if there are too many."""
        if self._most_counted > self._most_bytes + BLOCK_BYTES:
            raise LimitError(f"it sends more than the {self._most_bytes:,} bytes that were expected")

    def close(self) -> None:
        """Refuse all that comes from now on."""
        self._is_closed = True

    def progress_class(self) -> type[Any]:
        """Return a class for the client's progress bars that shows nothing and counts here."""
        from huggingface_hub.utils.tqdm import tqdm

        meter = self

        class Counted(tqdm):
            counted = 0

            def update(self, n: float | None = 1) -> bool | None:
                self.counted += int(n or 0)
                meter.note(self.counted)
                return super().update(n)  # type: ignore[no-any-return]

        return Counted


def limited(pieces: Iterable[bytes]) -> bytes:
    """Return an answer that arrives in pieces; refuse one that is too long, or that nobody waits for any more."""
    found, end = bytearray(), time.monotonic() + ANSWER_SECONDS
    for piece in pieces:
        found += piece
        if len(found) > ANSWER_BYTES:
            raise LimitError(f"it answers with more than the {ANSWER_BYTES:,} bytes that were expected")
        if time.monotonic() > end:
            raise LimitError(f"it did not come to an end within {ANSWER_SECONDS:.0f} seconds")
    return bytes(found)


def download_seconds(num_bytes: int) -> float:
    """Return how long a download may last as a whole."""
    return ANSWER_SECONDS + num_bytes / LEAST_BYTES_PER_SECOND


def files_seconds(num_files: int, num_bytes: int) -> float:
    """Return how long the downloads of many files may last together."""
    return download_seconds(num_bytes) + FILE_SECONDS * num_files


def upload_seconds(num_bytes: int) -> float:
    """Return how long a commit may last as a whole, its files included."""
    return COMMIT_SECONDS + num_bytes / LEAST_BYTES_PER_SECOND


def within(seconds: float, call: Callable[[], T], meter: Meter | None = None) -> T:
    """Return what a call returns or raise what it raises; raise a `LimitError` if it goes beyond a limit."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            errors.append(error)

    thread = threading.Thread(target=run, name=f"{threading.current_thread().name}-call", daemon=True)
    thread.start()
    try:
        _watch(thread, time.monotonic() + seconds, seconds, meter)
    finally:
        if meter is not None:
            meter.close()
    if errors:
        raise errors[0]
    return results[0]


def _watch(thread: threading.Thread, end: float, seconds: float, meter: Meter | None) -> None:
    while thread.is_alive():
        thread.join(timeout=WATCH_SECONDS)
        now = time.monotonic()
        if meter is not None:
            meter.check()
            if now - meter.last_seconds > SILENT_SECONDS:
                raise LimitError(f"it has been silent for {SILENT_SECONDS:.0f} seconds")
        if now > end:
            raise LimitError(f"it did not come to an end within {seconds:.0f} seconds")
