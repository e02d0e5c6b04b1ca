"""The folder of checkpoints: names, publication, choice of the newest that verifies, retention.

This module owns the names in that folder: `00000120` is the checkpoint of step 120 (any zero padding is read), names
that start with a dot are not checkpoints. It refuses to rewrite a checkpoint that verifies, to delete the newest, and
to answer "there is none" where there were some.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hezar_train.checkpoint.contents import Checkpoint
from hezar_train.checkpoint.disk import make_folder_durably, remove_folder, rename_durably
from hezar_train.checkpoint.draft import Draft
from hezar_train.checkpoint.manifest import MANIFEST_FILE
from hezar_train.errors import CheckpointError

__all__ = ["CheckpointStore", "Rejected", "to_delete"]

TEMPORARY_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
DAMAGED_PREFIX = ".damaged-"
DROPPED_PREFIX = ".dropped-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


def to_delete(steps: Iterable[int], keep: int | None, protect: Collection[int] = ()) -> list[int]:
    """Return the steps that retention lets go: all but the newest `keep` and the protected; the newest never goes."""
    if keep is None:
        return []
    oldest_first = sorted(set(steps))
    surplus = oldest_first[: max(len(oldest_first) - max(keep, 1), 0)]
    return [step for step in surplus if step not in protect]


class CheckpointStore:
    """Keep checkpoints under one folder; every method that changes it expects the caller to hold the run's lock."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending; none of them is verified."""
        return sorted({step for step, _ in self._folders()})

    def path(self, step: int) -> Path:
        """Return the folder of a step, existing under any zero padding or yet to be written."""
        usual = self.root / f"{step:08d}"
        others = [folder for found, folder in self._folders() if found == step]
        return usual if usual in others or not others else others[0]

    def open(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint at a path, verified."""
        folder = Path(path)
        if not folder.exists():
            raise CheckpointError(f"there is no checkpoint at {folder}: the path does not exist. {self._advice()}")
        if not (folder / MANIFEST_FILE).exists():
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST_FILE}. {self._advice()}")
        try:
            return Checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {error}. {self._advice()}") from error

    def newest(self) -> tuple[Checkpoint | None, list[Rejected]]:
        """Return the newest checkpoint that verifies and those passed over; None only if there never was one."""
        rejected: list[Rejected] = []
        for step, folder in reversed(self._folders()):
            try:
                return self._open_as(step, folder), rejected
            except CheckpointError as error:
                rejected.append(Rejected(folder, str(error)))
        rejected += [Rejected(folder, "was set aside as damaged") for folder in self._hidden(DAMAGED_PREFIX)]
        if rejected:
            reasons = "\n".join(f"  {one.path.name}: {one.reason}" for one in rejected)
            raise CheckpointError(
                f"no checkpoint in {self.root} can be loaded:\n{reasons}\n"
                "Restore one from a copy, or move the folder away to start from scratch."
            )
        return None, []

    def publish(
        self, step: int, fill: Callable[[Draft], None], before_commit: Callable[[], None] | None = None
    ) -> Path:
        """Write a checkpoint so that it appears whole or not at all; one that is already there and verifies stays."""
        if self._is_good(step):
            return self.path(step)
        make_folder_durably(self.root)
        # The process id and a clock that never goes back: no two drafts share a name.
        draft = Draft(self.root / f"{TEMPORARY_PREFIX}{step:08d}-{os.getpid()}-{time.monotonic_ns()}")
        draft.folder.mkdir()
        try:
            fill(draft)
            draft.seal(step)
            if before_commit is not None:
                before_commit()
            return self._commit(step, draft.folder)
        except BaseException:
            remove_folder(draft.folder)
            raise

    def confirm(self, path: Path) -> None:
        """Read a checkpoint back and verify it."""
        self.open(path)

    def prune(self, keep: int | None, protect: Collection[int] = ()) -> list[int]:
        """Delete all but the newest `keep` and the protected checkpoints; return the steps deleted."""
        doomed = to_delete(self.steps(), keep, protect)
        for step, folder in self._folders():
            if step in doomed:
                # Renamed first: a half deleted folder must not look like a damaged checkpoint.
                self._remove(self._set_aside(folder, TRASH_PREFIX))
        return doomed

    def clean(self) -> list[str]:
        """Remove what killed writers left behind; return the names."""
        leftovers = [*self._hidden(TEMPORARY_PREFIX), *self._hidden(TRASH_PREFIX)]
        for folder in leftovers:
            self._remove(folder)
        return [folder.name for folder in leftovers]

    def set_aside(self, rejected: Iterable[Rejected]) -> list[Path]:
        """Rename damaged checkpoints, so that they do not count for retention any more; return the new paths."""
        return [self._set_aside(one.path, DAMAGED_PREFIX) for one in rejected if _is_numeric(one.path.name)]

    def drop_after(self, step: int) -> list[Path]:
        """Rename all checkpoints newer than `step`: a run that leaves their history must not find them later."""
        return [self._set_aside(folder, DROPPED_PREFIX) for found, folder in self._folders() if found > step]

    def _commit(self, step: int, draft: Path) -> Path:
        if any(found == step for found, _ in self._folders()):
            self._set_aside(self.path(step), DAMAGED_PREFIX)
        final = self.root / f"{step:08d}"
        rename_durably(draft, final)
        return final

    def _is_good(self, step: int) -> bool:
        folder = self.path(step)
        if not folder.exists():
            return False
        try:
            self._open_as(step, folder)
        except CheckpointError as error:
            logger.warning("The checkpoint %s is damaged (%s); it is set aside and written anew.", folder, error)
            return False
        return True

    def _open_as(self, step: int, folder: Path) -> Checkpoint:
        checkpoint = Checkpoint(folder)
        if checkpoint.step != step:
            raise CheckpointError(f"the folder is named after step {step} but holds step {checkpoint.step}")
        return checkpoint

    def _folders(self) -> list[tuple[int, Path]]:
        if not self.root.is_dir():
            return []
        numeric = [path for path in self.root.iterdir() if _is_numeric(path.name) and path.is_dir()]
        return sorted((int(path.name), path) for path in numeric)

    def _hidden(self, prefix: str) -> list[Path]:
        return sorted(self.root.glob(f"{prefix}*"))

    def _set_aside(self, folder: Path, prefix: str) -> Path:
        names = (self.root / f"{prefix}{folder.name}-{number}" for number in itertools.count(1))
        target = next(path for path in names if not path.exists())
        rename_durably(folder, target)
        return target

    def _remove(self, folder: Path) -> None:
        if not remove_folder(folder):
            logger.warning("%s could not be deleted completely; the next start tries again.", folder)

    def _advice(self) -> str:
        if not (steps := self.steps()):
            return f"There are no checkpoints in {self.root}."
        return f"{self.root} has the steps {', '.join(map(str, steps))}; resume_from_checkpoint=True takes the newest."


def _is_numeric(name: str) -> bool:
    return name.isascii() and name.isdigit()
