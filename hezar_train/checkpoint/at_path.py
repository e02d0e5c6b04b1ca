"""One checkpoint at a path of the caller's choice, outside a run's folder of checkpoints.

Written as carefully as any other: whole or not at all. A checkpoint that is there already keeps its place until the new
one is verified; anything else that is there is refused, never replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

from hezar_train.checkpoint.contents import Checkpoint, Parts
from hezar_train.checkpoint.disk import make_folder_durably, remove_folder, rename_durably
from hezar_train.checkpoint.draft import Draft
from hezar_train.checkpoint.manifest import MANIFEST_FILE, verify
from hezar_train.checkpoint.store import TEMPORARY_PREFIX, CheckpointStore
from hezar_train.errors import CheckpointError

__all__ = ["open_checkpoint", "put_back", "write_checkpoint"]

REPLACED_PREFIX = ".replaced-"


def write_checkpoint(path: Path, parts: Parts, step: int) -> Path:
    """Write a checkpoint to the folder `path`, in place of one that may be there; return the path."""
    if path.exists() and not (path / MANIFEST_FILE).exists():
        raise CheckpointError(f"{path} is there and is not a checkpoint: give a path that does not exist yet")
    make_folder_durably(path.parent)
    draft = Draft(path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}"))
    remove_folder(draft.folder)  # of a killed process that had our number
    draft.folder.mkdir()
    try:
        parts.write(draft)
        draft.seal(step)
        verify(draft.folder)
        _put_in_place(draft.folder, path)
    except BaseException:
        remove_folder(draft.folder)
        raise
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at a path, verified; one that a killed `write_checkpoint` was replacing is put back."""
    put_back(path)
    return CheckpointStore(path.parent).open(path)


def put_back(path: Path) -> None:
    """Put a checkpoint back that a killed `write_checkpoint` was replacing."""
    replaced = path.with_name(REPLACED_PREFIX + path.name)
    if not path.exists() and replaced.exists():
        rename_durably(replaced, path)


def _put_in_place(draft: Path, final: Path) -> None:
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        remove_folder(replaced)
        rename_durably(final, replaced)
    rename_durably(draft, final)
    remove_folder(replaced)
