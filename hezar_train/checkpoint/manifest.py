"""The manifest: which files make a checkpoint, and the proof that they are those that were written.

This module owns the names of the parts, `manifest.json` and its verification. It refuses to guess: a listed file that
is missing, shorter or different by a bit is damage, and so is a manifest that does not match its own hash. A file that
the manifest does not list is nobody's business.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hezar_train.checkpoint.disk import FileRecord, hash_file
from hezar_train.errors import CheckpointError

__all__ = [
    "CONFIG_FILE",
    "MANIFEST_FILE",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "REQUIRED_FILES",
    "STATE_FILE",
    "Manifest",
    "is_inside",
    "read_manifest",
    "verify",
]

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
CONFIG_FILE = "train_config.yaml"
REQUIRED_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, CONFIG_FILE)


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
        content = json.loads((folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _hash(content):
        raise CheckpointError(f"{MANIFEST_FILE} does not match its own SHA-256")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{MANIFEST_FILE} has format {content.get('format')!r}; this version of hezar_train reads {FORMAT}"
        )
    return Manifest(content["step"], {name: FileRecord(**record) for name, record in content["files"].items()})


def verify(folder: Path) -> Manifest:
    """Check every listed file against the manifest, and return it; the error says which file is wrong and how."""
    manifest = read_manifest(folder)
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            raise CheckpointError(f"{name} is not listed in {MANIFEST_FILE}")
    # Sizes first: they are free, and hashing may take minutes.
    for name, record in manifest.files.items():
        _check_size(folder, name, record)
    for name, record in manifest.files.items():
        _check_content(folder, name, record)
    return manifest


def is_inside(name: str) -> bool:
    """Tell whether a relative path stays inside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    if not is_inside(name):
        raise CheckpointError(f"{MANIFEST_FILE} lists {name!r}, which is outside the checkpoint")
    try:
        size = (folder / name).stat().st_size
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
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("utf-8")).hexdigest()
