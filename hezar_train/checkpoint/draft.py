"""A checkpoint while it is being written: durable files in a hidden folder, the manifest last.

This module owns the order "content, manifest, folder"; it does not know the checkpoint's final name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hezar_train.checkpoint.disk import FileRecord, fsync_folder, settle_folder, write_file_durably
from hezar_train.checkpoint.manifest import MANIFEST_FILE, Manifest, is_inside
from hezar_train.errors import CheckpointError

__all__ = ["Draft"]


class Draft:
    """Collect files in a folder of its own, then seal it with a manifest of all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, FileRecord] = {}

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write one file durably."""
        self._records[name] = write_file_durably(self._new_path(name), parts)

    def write_folder(self, name: str, fill: Callable[[Path], None]) -> None:
        """Let `fill` write files into a subfolder, then make them durable and take them in."""
        folder = self._new_path(name)
        folder.mkdir()
        fill(folder)
        self._records |= {f"{name}/{path}": record for path, record in settle_folder(folder).items()}

    @property
    def records(self) -> dict[str, FileRecord]:
        """What is known of the files so far, by name."""
        return dict(self._records)

    def take_in(self, records: Mapping[str, FileRecord]) -> None:
        """Count files that other processes have written into the folder, durably."""
        self._records |= records

    def seal(self, step: int) -> None:
        """Write the manifest; from here on the folder is a checkpoint that only lacks its name."""
        write_file_durably(self.folder / MANIFEST_FILE, [Manifest(step, self._records).to_bytes()])
        fsync_folder(self.folder)

    def _new_path(self, name: str) -> Path:
        path = self.folder / name
        if not is_inside(name) or "/" in name or name == MANIFEST_FILE or path.exists():
            raise CheckpointError(f"a checkpoint cannot hold a second part called {name!r}, or one outside its folder")
        return path
