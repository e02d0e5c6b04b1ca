"""What makes a folder a checkpoint: files that were written durably, and the manifest that lists and proves them.

This module owns the names of a checkpoint's files, `manifest.json` and its verification, the folder while it is being
filled (`Draft`: contents first, the manifest last), and `fsync`: every byte of a checkpoint that must outlive a crash
goes through the functions at its end. It does not know where a checkpoint lies or what its tensors mean, and needs no
torch.

It refuses to guess: a listed file that is missing, shorter or different by a bit is damage, and so is a manifest that
does not match its own hash or has another form than `Manifest` writes. A file that the manifest does not list is
ignored; a listed one that is a link, or no file at all, is refused. And it refuses to write over a file: what is
written here is written once, under a name nobody else uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hezar_train.config import read_mapping
from hezar_train.config.files import fsync_folder
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.run_folder import is_inside, open_file, plain_path, read_file, remove_folder
from hezar_train.run_layout import CONFIG_FILE, MANIFEST_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE

__all__ = [
    "CONFIG_FILE",
    "MANIFEST_FILE",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "REQUIRED_FILES",
    "STATE_FILE",
    "Draft",
    "FileRecord",
    "Manifest",
    "free_bytes",
    "hash_file",
    "is_inside",
    "make_folder_durably",
    "read_best_step",
    "read_manifest",
    "remove_folder",
    "rename_durably",
    "replace_file",
    "sync_and_hash_folder",
    "verify",
    "write_file_durably",
]

REQUIRED_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, CONFIG_FILE)

FORMAT = 1  # of the manifest; a folder of another one is refused
MOST_BYTES = 16 << 20  # of a manifest: a hundred thousand files
MOST_STEPS = 1 << 62
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # names are shown, and a terminal obeys these
SHA256 = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 4 << 20  # a chunk that was just written is hashed while it is still in the processor's cache


@dataclass(frozen=True)
class FileRecord:
    """What identifies a file's content."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint by relative path."""

    step: int
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        """Return the file's content, its own hash included."""
        body = self._body()
        return json.dumps({**body, "sha256": _hash(body)}, indent=1).encode("utf-8")

    def _body(self) -> dict[str, Any]:
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return {"format": FORMAT, "step": self.step, "files": files}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; a damaged one is a damaged checkpoint."""
    try:
        content = json.loads(read_file(folder / MANIFEST_FILE, MOST_BYTES))
        is_sound = isinstance(content, dict) and content.pop("sha256", None) == _hash(content)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {error}") from error
    if not is_sound:
        raise CheckpointError(f"{MANIFEST_FILE} does not match its own SHA-256")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{MANIFEST_FILE} has format {content.get('format')!r}; this version of hezar_train reads {FORMAT}"
        )
    return _manifest_of(content)


def _manifest_of(content: dict[str, Any]) -> Manifest:
    step, files = content.get("step"), content.get("files")
    if content.keys() != {"format", "step", "files"} or type(step) is not int or not 0 <= step < MOST_STEPS:
        raise CheckpointError(f"{MANIFEST_FILE} is not of the form that this package writes")
    if not isinstance(files, dict):
        raise CheckpointError(f"{MANIFEST_FILE} lists no files")
    return Manifest(step, {name: _record_of(name, record) for name, record in files.items()})


def _record_of(name: str, record: Any) -> FileRecord:
    if not is_inside(name) or CONTROLS.search(name):
        raise CheckpointError(f"{MANIFEST_FILE} lists {name!r}, which is refused: it is outside the checkpoint")
    if not isinstance(record, dict) or record.keys() != {"size", "sha256"}:
        raise CheckpointError(f"{MANIFEST_FILE} lists {name!r} without its size and its hash")
    size, sha256 = record["size"], record["sha256"]
    if type(size) is not int or size < 0 or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        raise CheckpointError(f"{MANIFEST_FILE} lists {name!r} with a size or a hash that is none")
    return FileRecord(size, sha256)


def verify(folder: Path, unread: re.Pattern[str] | None = None) -> Manifest:
    """Check every listed file against the manifest, and return it; the error says which file is wrong and how.

    Of those with an `unread` name only the sizes are compared.
    """
    manifest = read_manifest(folder)
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            raise CheckpointError(f"{name} is not listed in {MANIFEST_FILE}")
    # Sizes first: they are free, and hashing may take minutes.
    for name, record in manifest.files.items():
        _check_size(folder, name, record)
    for name, record in manifest.files.items():
        if unread is None or not unread.fullmatch(name):
            _check_content(folder, name, record)
    return manifest


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    try:
        size = plain_path(folder, name).stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    if size != record.size:
        raise CheckpointError(f"{name} has {size} bytes instead of {record.size}")


def _check_content(folder: Path, name: str, record: FileRecord) -> None:
    try:
        found = hash_file(folder / name)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    if found != record:
        raise CheckpointError(f"{name} does not match its SHA-256 in {MANIFEST_FILE}: it was changed or damaged")


def _hash(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))  # plain ASCII, whatever is in it
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class Draft:
    """Collect the files of a checkpoint in a hidden folder, then seal it with a manifest of all of them.

    The order is contents, manifest, folder: whatever the manifest lists is on disk before the manifest is. The final
    name is not known here; whoever renames the folder gives it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, FileRecord] = {}

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write one file durably."""
        self._records[name] = write_file_durably(self._new_path(name), parts)

    def write_folder(self, name: str, fill: Callable[[Path], None]) -> None:
        """Let `fill` write files into a subfolder, then make them durable and list them."""
        folder = self._new_path(name)
        folder.mkdir()
        fill(folder)
        self._records |= {f"{name}/{path}": record for path, record in sync_and_hash_folder(folder).items()}

    @property
    def records(self) -> dict[str, FileRecord]:
        """What is known of the files so far, by name."""
        return dict(self._records)

    def add_records(self, records: Mapping[str, FileRecord]) -> None:
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


def read_best_step(file: Path) -> int | None:
    """Return the step of the best checkpoint of a run; None if there is no best result.

    The file is read with care: a person may have written it.
    """
    if not file.is_file():
        return None
    try:
        step = read_mapping(file).get("step")
    except ConfigError as error:
        raise CheckpointError(f"{error}; expected the step of the best checkpoint") from error
    if not isinstance(step, int) or isinstance(step, bool):
        raise CheckpointError(f"{file}: expected the step of the best checkpoint, got step={step!r}")
    return step


def write_file_durably(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, fsync it, and return the record of the bytes that were meant (not of what the disk holds)."""
    digest, size = hashlib.sha256(), 0
    # Unbuffered: a chunk goes to the system while it is in the cache for its hash, and no error waits until the close.
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(parts):
            _write_all(file.fileno(), chunk)
            digest.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all, in place of one that may be there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_file_durably(temporary, parts)
        rename_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half a file would only keep the disk full


def sync_and_hash_folder(folder: Path) -> dict[str, FileRecord]:
    """Make durable what somebody else wrote into a folder; return the record of every file by its relative path."""
    records = {}
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            _fsync_file(path)
            records[path.relative_to(folder).as_posix()] = hash_file(path)
        fsync_folder(Path(parent))  # the names of the files are the folder's content
    return records


def make_folder_durably(folder: Path) -> None:
    """Create a folder with its parents, so that the whole path survives a power cut."""
    if folder.is_dir():
        return
    make_folder_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Rename within one folder and make the new name durable."""
    os.rename(source, target)
    fsync_folder(target.parent)


def hash_file(path: Path) -> FileRecord:
    """Read a file to its end and return its record."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


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
