"""Xet without a storage service: the client writes to and reads from folders (`local://`) that the hub hands out.

A folder's database is locked by the process that opened it. So every upload gets a folder of its own, and every reader
a copy of the one in which the newest large files of its commit are; older ones come as plain LFS files.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path

__all__ = ["XetFolders"]

RECORD_BYTES = 48
HASH_BYTES = 32
END_OF_FILES = b"\xff" * HASH_BYTES
HAS_VERIFICATION, HAS_SHA256 = 1 << 31, 1 << 30
STORAGE = Path("xet", "xorbs")


class XetFolders:
    """The folders that clients uploaded into."""

    def __init__(self, folder: Path) -> None:
        self._uploads, self._copies = folder / "uploads", folder / "copies"
        self._uploads.mkdir(parents=True, exist_ok=True)
        self._copies.mkdir(parents=True, exist_ok=True)

    def new(self) -> Path:
        """Return an empty folder for one upload."""
        folder = self._uploads / f"{time.time_ns():020d}"
        folder.mkdir()
        return folder

    def copy(self, folder: Path) -> Path:
        """Return a copy of an upload for one reader."""
        copy = Path(tempfile.mkdtemp(dir=self._copies))
        shutil.copytree(folder / STORAGE, copy / STORAGE, copy_function=_copy_or_link)
        return copy

    def newest_with(self, sha256s: set[str]) -> Path | None:
        """Return the last upload that holds one of these files."""
        uploads = sorted(self._uploads.iterdir(), reverse=True)
        return next((folder for folder in uploads if not sha256s.isdisjoint(self.hashes(folder))), None)

    def hashes(self, folder: Path) -> dict[str, str]:
        """Return the Xet hash of each file of an upload, by SHA-256."""
        shards = (folder / STORAGE / "shards").glob("*.mdb")
        return {sha256: xet_hash for shard in shards for sha256, xet_hash in _files_of(shard).items()}

    def read(self, sha256: str, size: int) -> bytes:
        """Return one file's bytes: hf_xet alone knows how its folders hold them."""
        from hf_xet import XetFileInfo, XetSession

        upload = self.newest_with({sha256})
        folder = self.copy(upload)
        with XetSession().new_file_download_group(endpoint=f"local://{folder}") as group:
            group.start_download_file(XetFileInfo(self.hashes(upload)[sha256], size), str(folder / sha256))
        return (folder / sha256).read_bytes()


def _copy_or_link(source: str, target: str) -> None:
    # only the database is ever written to again
    (shutil.copyfile if source.endswith(".redb") else os.link)(source, target)


@functools.cache
def _files_of(shard: Path) -> dict[str, str]:
    """Return the hashes in a shard: per file a record, its segments' records, and one with the SHA-256."""
    content, at, found = shard.read_bytes(), RECORD_BYTES, {}
    while content[at : at + HASH_BYTES] != END_OF_FILES:
        file_hash, flags, num_segments = struct.unpack_from(f"<{HASH_BYTES}s2I", content, at)
        at += RECORD_BYTES * (1 + num_segments * (2 if flags & HAS_VERIFICATION else 1))
        if flags & HAS_SHA256:
            found[_hex(content[at : at + HASH_BYTES])] = _hex(file_hash)
            at += RECORD_BYTES
    return found


def _hex(value: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", value))
