"""The lock that keeps a second trainer out of a run's folder.

This module owns the lock file. It is a POSIX record lock: the system takes it from a process that dies, however it
dies, and forked loader workers do not inherit it. Two of its weaknesses are covered: it does not refuse the process
that holds it (hence the registry), and closing *any* descriptor of the file in the holding process releases it, so
nothing else in the package may open the lock file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path
from types import TracebackType

from hezar_train.checkpoint.manifest import make_folder_durably
from hezar_train.errors import RunLockedError
from hezar_train.run_folder import RunFolderError, open_file, refuse_second_name

__all__ = ["RunLock"]

HELD_ERRNOS = frozenset({errno.EACCES, errno.EAGAIN})
NO_LOCKS_ERRNOS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

logger = logging.getLogger(__name__)

# Which process holds a path: a forked child inherits the entry of its parent, but not the lock.
_held_by_pid: dict[Path, int] = {}


class RunLock:
    """Hold a run's folder while the context lasts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder, name = os.path.split(path)
        self.path = Path(folder).resolve() / name  # links on the way are followed, one in the lock's place is not
        self._descriptor: int | None = None
        self._owner_pid = -1

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or say who has it."""
        if _held_by_pid.get(self.path) == os.getpid():
            raise RunLockedError(self._refusal("another trainer of this very process"))
        make_folder_durably(self.path.parent)
        descriptor = open_file(self.path, os.O_RDWR | os.O_CREAT, accept_second_name=True)
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        _write_holder(self.path, descriptor)
        self._descriptor, self._owner_pid = descriptor, os.getpid()
        _held_by_pid[self.path] = self._owner_pid

    def release(self) -> None:
        """Give the lock back; in a forked child of the holder this does nothing."""
        if self._descriptor is None or self._owner_pid != os.getpid():
            return
        del _held_by_pid[self.path]
        with contextlib.suppress(OSError, RunFolderError):
            refuse_second_name(self.path, self._descriptor)
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)  # this releases it; the file stays, since a lock on a deleted one excludes nobody
        self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD_ERRNOS:
                raise RunLockedError(self._refusal(_read_holder(descriptor))) from None
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
            logger.warning(
                "The file system of %s has no locks (%s): nothing stops a second trainer from writing to this folder.",
                self.path,
                error,
            )

    def _refusal(self, holder: str) -> str:
        return (
            f"{self.path.parent} is in use by {holder}. Two trainers in one folder would overwrite each other: wait "
            "for the other one, stop it, or choose another output_dir."
        )


def _write_holder(path: Path, descriptor: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    # The text is for the message only: a full disk must not keep a run from starting, nor a copy by links (`cp -l`).
    with contextlib.suppress(OSError, RunFolderError):
        refuse_second_name(path, descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode("utf-8"), 0)


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
