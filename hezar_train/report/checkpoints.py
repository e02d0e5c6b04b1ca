"""The checkpoints of a run and whether they are whole; hashes are checked as long as that is a matter of a moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hezar_train.errors import CheckpointError

__all__ = ["SavedCheckpoint", "saved_checkpoints"]

MOST_BYTES_HASHED = 256_000_000
"""Of all checkpoints of a run together; beyond, sizes are compared and `hezar-train verify` does the rest."""

VERIFIED, SIZES_MATCH = "verified", "sizes match"


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on disk."""

    step: int
    path: Path
    size_bytes: int
    saved_at: float
    health: str
    is_good: bool


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints in a folder, newest first, each with its health."""
    found = sorted((path for path in folder.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))
    return list(_examined(found))


def _examined(paths: list[Path]) -> Iterator[SavedCheckpoint]:
    room = MOST_BYTES_HASHED
    for path in reversed(paths):  # the newest matter most
        health, size, is_good = _health(path, room)
        room -= size if health == VERIFIED else 0
        try:
            saved_at = path.stat().st_mtime
        except OSError:  # retention was faster
            continue
        yield SavedCheckpoint(int(path.name), path, size, saved_at, health, is_good)


def _health(path: Path, room: int) -> tuple[str, int, bool]:
    """Return what can be said of a checkpoint, its size, and whether that is good."""
    from hezar_train.checkpoint.manifest import read_manifest, verify

    size = 0
    try:
        manifest = read_manifest(path)
        size = sum(record.size for record in manifest.files.values())
        if size <= room:
            verify(path)
            return VERIFIED, size, True
        for name, record in manifest.files.items():
            if (found := (path / name).stat().st_size) != record.size:
                return f"damaged: {name} has {found} bytes instead of {record.size}", size, False
    except (CheckpointError, OSError) as error:
        return f"damaged: {error}", size, False
    return SIZES_MATCH, size, True
