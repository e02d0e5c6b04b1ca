"""The files of a run: its folder, and what is open in it while it trains.

`RunFolder` keeps the config and the plan that a run goes by, records of evaluations and of the best checkpoint, and
moves an earlier run aside; a folder in which a link would lead any of this elsewhere is refused at once. `RunFiles`
holds the append-only files of a run that trains: metrics, CSV, TensorBoard, trackers, ledger. At a resume what metrics
and ledger hold past the checkpoint is moved to `*.dropped` first, the CSV is made anew, and TensorBoard is told to
forget it, so that every value is there once. Nothing is ever deleted here but pictures of old evaluations.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hezar_train.config import TrainerConfig
from hezar_train.config.files import is_disk_full, write_atomically
from hezar_train.data import Lengths
from hezar_train.errors import DataError, HezarTrainError
from hezar_train.events import (
    METRICS_FILE,
    CSVWriter,
    EventStorage,
    EventWriter,
    JSONLinesWriter,
    Ledger,
    Row,
    TensorBoardWriter,
    TrackerWriter,
    amend_start,
    keep_until,
    read_rows,
)
from hezar_train.plan import Plan
from hezar_train.run_folder import read_file, remove_files
from hezar_train.run_layout import DROPPED_SUFFIX, EVENTS_PREFIX, PREVIOUS_FOLDER, RunLayout, step_of
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState

__all__ = ["RunFiles", "RunFolder", "append_row", "last_logged"]

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
                self.lengths,
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

    def write_settings(self, config: TrainerConfig, config_file: str, plan: Plan, lengths: Lengths | None) -> None:
        """Write what the run really goes by: its config, its plan, and the lengths of its samples where they count."""
        config.save(self.root, config_file)
        plan.save(self.plan)
        if lengths is not None:
            lengths.save(self.lengths)

    def record_evaluation(self, step: int, epoch: int, metrics: dict[str, float], details: dict[str, Any]) -> None:
        """Write an evaluation's result, once and whole."""
        _write_if_there_is_room(
            self.evaluation_record(step), {"step": step, "epoch": epoch, "metrics": metrics, **details}
        )

    def drop_pictures_but_of(self, steps: set[int]) -> None:
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


class RunFiles:
    """Open the files of a run; know their sizes, which a checkpoint keeps."""

    def __init__(
        self,
        folder: RunFolder,
        state: TrainerState,
        storage: EventStorage,
        runtime: Runtime,
        config: TrainerConfig,
        csv_file: str,
        build_writers: Callable[[], Sequence[EventWriter]],
    ) -> None:
        """Open them, those of `build_writers` last; if one cannot be opened, those before it are closed again."""
        logs = folder.logs(state.logs_dir)
        if state.logs_dir and not folder.owns(state.logs_dir):
            logger.warning(
                "the checkpoint names the logs %r, outside this run: new ones begin in %s", state.logs_dir, logs
            )
        state.logs_dir = str(logs.relative_to(folder.root) if logs.is_relative_to(folder.root) else logs.absolute())
        self._root, self._storage = folder.root, storage
        kept = self._drop_what_follows(folder, state, logs)
        self.ledger = Ledger(folder.ledger)
        try:
            self._open_logs(logs, csv_file, kept)
            if config.trackers is None or "tensorboard" in config.trackers:
                storage.writers.append(
                    TensorBoardWriter(logs)
                    if kept is None
                    else TensorBoardWriter.resumed(logs, kept, state.global_step)
                )
            if trackers := TrackerWriter.following(runtime.accelerator, folder.root.name, config):
                storage.writers.append(trackers)
            self._add_own(build_writers(), folder, state)
        except BaseException:
            self.close()
            raise

    def _open_logs(self, logs: Path, csv_file: str, kept: list[Row] | None) -> None:
        self._metrics = JSONLinesWriter(logs / METRICS_FILE)
        self._storage.writers.append(self._metrics)
        table = CSVWriter(logs / csv_file)
        self._storage.writers.append(table)
        if kept is not None:
            table.rebuild(kept)
            self._storage.recall(kept)

    def flush(self) -> dict[str, int]:
        """Hand all lines to the operating system; return the sizes that a checkpoint taken now must keep."""
        self.ledger.flush()
        self._storage.flush()
        lines = [one for one in self._storage.writers if isinstance(one, JSONLinesWriter)]  # also a user's own
        files: list[Ledger | JSONLinesWriter] = [self.ledger, *lines]
        return {self._name_of(file.path): file.size for file in files}

    def _name_of(self, path: Path) -> str:
        """Name a file from the run's folder on, so that the folder may move; one outside has its full path."""
        is_inside = path.resolve().is_relative_to(self._root.resolve())
        return str(path.resolve().relative_to(self._root.resolve()) if is_inside else path.resolve())

    def _add_own(self, writers: Sequence[EventWriter], folder: RunFolder, state: TrainerState) -> None:
        """Add a user's own writers; what the checkpoint knows of their files is cut back like the run's own."""
        self._storage.writers += writers
        if state.global_step == 0:
            return
        own = {self._name_of(one.path): one for one in self._storage.writers if isinstance(one, JSONLinesWriter)}
        for name, size in state.files.items():
            if folder.is_log(folder.placed(name)):
                continue
            if name in own:
                _warn_of_loss(name, own[name].cut(size))
            else:
                logger.warning("the checkpoint knows the size of %r, which is no log of this run: it stays", name)

    @property
    def has_pending(self) -> bool:
        """Tell whether lines wait for room on the disk."""
        return self.ledger.has_pending or self._metrics.has_pending

    def sync(self) -> None:
        """Make the flushed lines survive a power cut."""
        self.ledger.sync()
        self._storage.sync()

    def close(self) -> None:
        """Flush and close everything."""
        self.ledger.close()
        self._storage.close()

    def _drop_what_follows(self, folder: RunFolder, state: TrainerState, logs: Path) -> list[Row] | None:
        """Cut the files back to the checkpoint; return the rows kept, None at a fresh start."""
        if state.global_step == 0:
            return None
        for name, size in state.files.items():
            if folder.is_log(path := folder.placed(name)):
                _warn_of_loss(name, keep_until(path, size))
        folder.drop_evaluations_after(state.global_step)
        return read_rows(logs / METRICS_FILE)


def _warn_of_loss(name: str, surplus: int) -> None:
    if surplus < 0:
        logger.warning("%s lacks %d bytes of what the checkpoint knew: part of it is lost", name, -surplus)


def append_row(
    folder: RunFolder, state: TrainerState, storage: EventStorage, csv_file: str, values: Mapping[str, float], step: int
) -> None:
    """Write one more row behind those of a run that has ended."""
    if state.logs_dir is None:
        raise HezarTrainError(
            "log() was called before train(): there is no log yet. Log from a hook, or after train()."
        )
    logs = folder.logs(state.logs_dir)
    storage.writers += [JSONLinesWriter(logs / METRICS_FILE), CSVWriter(logs / csv_file)]
    if list(logs.glob(f"{EVENTS_PREFIX}*")):
        storage.writers.append(TensorBoardWriter(logs))
    try:
        storage.log(values, step, state.epoch)
    finally:
        storage.close()


def last_logged(folder: RunFolder, state: TrainerState, name: str) -> float | None:
    """Return the last value of a name that a run has logged until now; None if there is none, or no readable log."""
    try:
        rows = read_rows(folder.logs(state.logs_dir) / METRICS_FILE) if state.logs_dir else []
    except DataError:
        return None
    found = [row.values[name] for row in rows if name in row.values and row.step <= state.global_step]
    return found[-1] if found else None
