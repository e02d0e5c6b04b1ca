"""The checkpoint writer: one save at a time, in a background thread or in line, and what happens when it goes wrong.

This module owns the thread and the policy for errors. A full disk is a warning: training goes on and the next save
tries again. Every other error is raised in the training thread of the process that saves (the main one; of a sharded
model all), at the next save, wait or close.
"""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection

from hezar_train.checkpoint.manifest import Draft, free_bytes
from hezar_train.checkpoint.store import CheckpointStore, Contents, SnapshotBuffers
from hezar_train.config.files import is_disk_full

__all__ = ["CheckpointWriter"]

HEADROOM_BYTES = 1 << 20  # headers, the manifest, a small preprocessor
MOMENT_SECONDS = 1.0
UNNOTICED_SECONDS = 0.1  # a wait that is not worth a line

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Write checkpoints into a store and keep the newest `keep` of them (all of them if None)."""

    def __init__(
        self,
        store: CheckpointStore,
        background: bool = True,
        keep: int | None = None,
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        """Call `on_saved` with the step of each checkpoint that is on disk and verified, in the writing thread."""
        self.store = store
        self.background = background
        self.keep = keep
        self._on_saved = on_saved
        self.failed_saves = 0
        self.last_step: int | None = None
        self._buffers = SnapshotBuffers()
        self._thread: threading.Thread | None = None
        self._writing_step = -1
        self._error: BaseException | None = None

    def reserve(self, parts: Contents) -> int:
        """Make the host buffers of background saves; return their bytes (0 if saves are written in line)."""
        if self.background:
            parts.reserve(self._buffers)
        return self._buffers.nbytes

    def save(self, step: int, parts: Contents, protect: Collection[int] = ()) -> None:
        """Write the checkpoint of a step; in the background, return once the tensors are copied."""
        self._wait_and_say_so(step)
        self._writing_step = step
        job = (step, parts.snapshot(self._buffers) if self.background else parts, frozenset(protect))
        if not self.background:
            self._run(*job)
            self._raise_error()
            return
        # A daemon: a program that is told to leave at once leaves a hidden folder behind, not a hanging process.
        self._thread = threading.Thread(target=self._run, args=job, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save under way, and raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_error()

    def abandon(self) -> None:
        """Give the save under way a moment to end, no more: a thread that outlives the program may abort its exit."""
        if self._thread is not None:
            self._thread.join(timeout=MOMENT_SECONDS)

    def close(self) -> None:
        """Finish the save under way, free the buffers, raise what went wrong."""
        try:
            self.wait()
        finally:
            self._buffers = SnapshotBuffers()

    def _wait_and_say_so(self, step: int) -> None:
        start = time.monotonic()
        self.wait()
        if time.monotonic() - start > UNNOTICED_SECONDS:
            logger.warning(
                "The save of step %d waited %.2f seconds for the save of step %d, which was still being written. "
                "Save less often, or to a faster disk.",
                step,
                time.monotonic() - start,
                self._writing_step,
            )

    def _run(self, step: int, parts: Contents, protect: Collection[int]) -> None:
        try:
            self._write(step, parts, protect)
        except BaseException as error:  # noqa: BLE001 - a thread has no caller: all errors wait for the training thread
            self._handle_error(step, error)

    def _write(self, step: int, parts: Contents, protect: Collection[int]) -> None:
        # Its files and their hashes in a hidden folder, on the disk; then `before_commit`, the sync of logs and ledger;
        # then the folder gets its name, from which on it counts; then it is read back.
        written = self.store.publish(step, functools.partial(_write_if_room, parts), parts.before_commit)
        self.store.confirm(written)
        self.last_step = step
        if self._on_saved is not None:
            self._on_saved(step)
        # Only now, with the new one read back: what is deleted before is missed after.
        self.store.prune(self.keep, {*protect, step})

    def _handle_error(self, step: int, error: BaseException) -> None:
        if not is_disk_full(error):
            error.add_note(f"This happened while the checkpoint of step {step} was being written.")
            self._error = error
            return
        self.failed_saves += 1
        logger.warning(
            "DISK FULL: the checkpoint of step %d was NOT written (%s). Training goes on, older checkpoints are "
            "untouched, the next save tries again. Free some space in %s.",
            step,
            error,
            self.store.root,
        )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _write_if_room(parts: Contents, draft: Draft) -> None:
    # As part of the writing: where several processes write together, none may stay away on its own.
    if (needed := parts.nbytes + HEADROOM_BYTES) > (free := free_bytes(draft.folder)):
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(draft.folder.parent))
    parts.write(draft)
