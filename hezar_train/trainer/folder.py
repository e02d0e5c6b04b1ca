"""What a trainer does in its run's folder: records of evaluations, the best checkpoint, what a fresh start moves aside.

Nothing is ever deleted here but pictures of old evaluations: lines past a checkpoint go to `*.dropped`, an earlier run
in the same folder to `previous/`. A folder in which a link would lead any of this elsewhere is refused at once.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Self

from hezar_train.config import TrainerConfig
from hezar_train.config.files import is_disk_full, write_atomically
from hezar_train.events import amend_start
from hezar_train.run_folder import read_file, remove_files
from hezar_train.run_layout import DROPPED_SUFFIX, PREVIOUS_FOLDER, RunLayout, step_of
from hezar_train.runtime import logger
from hezar_train.state import TrainerState

__all__ = ["RunFolder"]

PICTURE_SUFFIXES = (".png",)


class RunFolder(RunLayout):
    """The folder of the run that a trainer works in."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """Return the folder of the run that a config asks for; refuse one with links inside."""
        folder = super().of(config)
        folder.refuse_links()
        return folder

    def move_previous_aside(self) -> Path | None:
        """Move what an earlier run left to `previous/{n}`; return that folder, or None if there was nothing."""
        found = [
            path
            for path in (
                self.checkpoints,
                self.all_logs,
                self.evaluations,
                self.exports,
                self.ledger,
                self.plan,
                self.config,
                self.best,
                self.recipe,
                self.hub,
                self.environment,
                *self.pages,
            )
            if path.exists()
        ]
        if not found:
            return None
        taken = [step for path in self.previous.glob("*") if (step := step_of(path.name)) is not None]
        target = self.previous / f"{max(taken, default=0) + 1:04d}"
        target.mkdir(parents=True)
        for path in found:
            destination = self._place_in(target, path)
            destination.parent.mkdir(parents=True, exist_ok=True)
            path.rename(destination)
        return target

    def _place_in(self, target: Path, path: Path) -> Path:
        """Name where something is moved to; what lies outside stays on its own disk, beside where it was."""
        if path.is_relative_to(self.root) and ".." not in path.relative_to(self.root).parts:
            return target / path.relative_to(self.root)
        names = (path.with_name(f"{path.name}-{PREVIOUS_FOLDER}-{number}") for number in itertools.count(1))
        return next(name for name in names if not name.exists())

    def record_evaluation(self, step: int, epoch: int, metrics: dict[str, float], details: dict[str, Any]) -> None:
        """Write an evaluation's result, once and whole."""
        _write_if_there_is_room(
            self.evaluation_record(step), {"step": step, "epoch": epoch, "metrics": metrics, **details}
        )

    def keep_pictures_of(self, steps: set[int]) -> None:
        """Delete the pictures of all other evaluations: they are for looking only, and can be made again."""
        for path in self.evaluations.glob("*"):
            step = step_of(path.name)
            if step is not None and step not in steps and path.is_dir():
                remove_files(path, PICTURE_SUFFIXES)

    def amend_start(self, facts: dict[str, Any]) -> None:
        """Add facts to the record of the start under way; a disk that refuses is no reason to stop training."""
        try:
            amend_start(self.root, facts)
        except OSError as error:
            logger.warning("%s was not brought up to date: %s", self.environment, error)

    def recorded_evaluation(self, step: int) -> dict[str, float] | None:
        """Read an evaluation's result; None where there is none, or none that can be read."""
        try:
            found: dict[str, Any] = json.loads(read_file(self.evaluation_record(step)))
            return {str(name): float(value) for name, value in found["metrics"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None  # a damaged record is as good as none: the evaluation runs again

    def recorded_stop_reason(self, step: int) -> str | None:
        """Return why the run was asked to stop in the evaluation of a step, if it was."""
        try:
            found = json.loads(read_file(self.evaluation_record(step))).get("stop_reason")
        except (FileNotFoundError, ValueError, AttributeError, RecursionError):
            return None
        return None if found is None else str(found)

    def drop_evaluations_after(self, step: int) -> None:
        """Put aside the records of evaluations that the resumed run will do again."""
        for path in sorted(self.evaluations.glob("*.json")):
            if (found := step_of(path.stem)) is not None and found > step:
                names = (path.with_name(f"{path.name}.{number}{DROPPED_SUFFIX}") for number in itertools.count(1))
                path.rename(next(name for name in names if not name.exists()))

    def write_best(self, state: TrainerState) -> None:
        """Point to the best checkpoint so far; what points to one that this run has not reached is put aside."""
        if state.best_checkpoint is None:
            if self.best.exists():
                self.best.replace(self.best.with_name(self.best.name + DROPPED_SUFFIX))
            return
        found = {
            "step": state.best_checkpoint,
            "metric": state.metric_for_best_checkpoint,
            "value": state.best_metric_value,
        }
        _write_if_there_is_room(self.best, found)


def _write_if_there_is_room(path: Path, content: dict[str, Any]) -> None:
    """Write a small file that a resume can do without; a full disk is no reason to stop training."""
    text = json.dumps(content, indent=1) + "\n"
    if path.is_file() and path.stat().st_size == len(text.encode()) and read_file(path) == text.encode():
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        if not is_disk_full(error):
            raise
        logger.warning("%s was not written: the disk is full. Training goes on.", path)
