"""Every byte that must outlive a crash goes through here: durable files, durable folders, atomic renames.

This module owns `fsync` and knows nothing of checkpoints. It refuses to write over a file: what is written here is
written once, under a name nobody else uses.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hezar_train.config.files import fsync_folder, is_disk_full

__all__ = [
    "FileRecord",
    "free_bytes",
    "fsync_folder",
    "hash_file",
    "is_disk_full",
    "make_folder_durably",
    "remove_folder",
    "rename_durably",
    "replace_file",
    "settle_folder",
    "write_file_durably",
]

CHUNK_BYTES = 4 << 20  # a chunk that was just written is hashed while it is still in the processor's cache


@dataclass(frozen=True)
class FileRecord:
    """What identifies a file's content."""

    size: int
    sha256: str


def write_file_durably(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, fsync it, and return the record of the bytes that were meant (not of what the disk holds)."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(parts):
            _write_all(file.fileno(), chunk)
            digest.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all, in place of one that may be there."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process
    write_file_durably(temporary, parts)
    rename_durably(temporary, path)


def hash_file(path: Path) -> FileRecord:
    """Read a file to its end and return its record."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def make_folder_durably(folder: Path) -> None:
    """Create a folder with its parents, so that the whole path survives a power cut."""
    if folder.is_dir():
        return
    make_folder_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def settle_folder(folder: Path) -> dict[str, FileRecord]:
    """Make durable what somebody else wrote into a folder; return the record of every file by its relative path."""
    records = {}
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            _fsync_file(path)
            records[path.relative_to(folder).as_posix()] = hash_file(path)
        fsync_folder(Path(parent))
    return records


def rename_durably(source: Path, target: Path) -> None:
    """Rename within one folder and make the new name durable."""
    os.rename(source, target)
    fsync_folder(target.parent)


def remove_folder(folder: Path) -> bool:
    """Delete a folder as far as possible; return whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def free_bytes(folder: Path) -> int:
    """Return the bytes that an ordinary user may still write there."""
    return shutil.disk_usage(folder).free


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
