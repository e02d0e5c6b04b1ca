"""LiBai's `Checkpointer`: what was saved under names, and the checkpoints of the run whose folder it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hezar_train.checkpoint import MANIFEST_FILE, CheckpointStore
from hezar_train.checkpoint import Checkpointer as PlainCheckpointer
from hezar_train.errors import NoSuchCheckpointError, choices
from hezar_train.run_layout import CHECKPOINTS_FOLDER
from hezar_train.runtime import logger

__all__ = ["Checkpointer"]


class Checkpointer(PlainCheckpointer):
    """Saves and loads under names, and finds the newest checkpoint of a run whose output_dir `save_dir` is."""

    def has_checkpoint(self) -> bool:
        """Tell whether a checkpoint was saved here, under a name or by the run."""
        return super().has_checkpoint() or bool(self._run().steps())

    def get_checkpoint_file(self) -> Path | None:
        """Return the folder of the checkpoint saved last, under a name or by the run; None if there is none."""
        named = super().get_checkpoint_file() if super().has_checkpoint() else None
        newest = self._run().newest()[0] if self._run().steps() else None
        if newest is None or (named is not None and _saved_at(named) > _saved_at(newest.path)):
            return named
        return newest.path

    def load(
        self, path: str | os.PathLike[str] | None, checkpointables: Iterable[str] | None = None, *, strict: bool = False
    ) -> dict[str, Any]:
        """Load from a name, a checkpoint, a run or a safetensors file; return what was saved as `extra`."""
        if path and not (self.save_dir / path).exists():
            _refuse_missing(Path(path))
        return super().load(path, checkpointables, strict=strict)

    def resume_or_load(self, path: str | os.PathLike[str] | None, resume: bool = True) -> dict[str, Any]:
        """Restore the last checkpoint; without one, or without `resume`, load weights alone, and say so if none."""
        if not path and not (resume and self.has_checkpoint()):
            there = f"there is no checkpoint in {self.save_dir}" if resume else "resuming was not asked for"
            logger.warning("nothing is loaded, and the model stays as it is: %s, and no path was given", there)
        return super().resume_or_load(path, resume)

    def _run(self) -> CheckpointStore:
        return CheckpointStore(self.save_dir / CHECKPOINTS_FOLDER)


def _refuse_missing(path: Path) -> None:
    store = CheckpointStore(path.parent / CHECKPOINTS_FOLDER)
    if not path.exists() and (steps := store.steps()):
        raise NoSuchCheckpointError(
            f"{path} does not exist: a run saves numbered checkpoints here, and no model_final. There are: "
            f"{choices(str(store.path(step)) for step in steps)}; {path.parent} itself stands for the newest."
        )


def _saved_at(folder: Path) -> int:
    manifest = folder / MANIFEST_FILE
    return manifest.stat().st_mtime_ns if manifest.exists() else 0
