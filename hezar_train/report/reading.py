"""From the files of a run's folder to a `RunRecord`, read so that nothing in them can make the reading fail.

What cannot be read becomes a sentence in `problems`, and its place stays empty.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hezar_train.config import read_mapping
from hezar_train.config.trainer_config import CONFIG_FILE
from hezar_train.errors import ConfigError
from hezar_train.events import DROPPED_SUFFIX, METRICS_FILE, STARTS_FILE, Row, starts_in
from hezar_train.report.records import Evaluation, RunRecord, Table

__all__ = ["is_moment", "is_number", "read_run", "read_runs"]

MARKS_OF_A_RUN = (CONFIG_FILE, "plan.json", f"logs/*/{METRICS_FILE}")

LARGEST, LATEST = 1e300, 1e11  # a value that can be drawn, a moment that has a date
_EVENTS_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def read_runs(roots: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Read several runs; each has a name that tells it from the others."""
    if not roots:
        raise ConfigError("no run was given: name the folder of at least one")
    folders = [Path(root) for root in roots]
    return [read_run(folder, name) for folder, name in zip(folders, _short_names(folders), strict=True)]


def read_run(root: str | os.PathLike[str], name: str | None = None) -> RunRecord:
    """Read a run's folder; an error only if it is none."""
    folder = Path(root)
    if not any(any(folder.glob(mark)) for mark in MARKS_OF_A_RUN):  # others have folders of such names, too
        raise ConfigError(
            f"{folder} is not the folder of a run: it has none of {', '.join(MARKS_OF_A_RUN)}. Name the output_dir of "
            "a run; `hezar-train runs` lists those in ./runs."
        )
    return _Reader(folder, name or _short_names([folder])[0]).read()


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Name folders by as many of their last parts as it takes to tell them apart."""
    parts = [folder.resolve().parts[1:] or (str(folder),) for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each[-1:])} ({number})" for number, each in enumerate(parts, start=1)]


class _Reader:
    """Read one folder and note what is wrong with it."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._run = RunRecord(root, name)

    def read(self) -> RunRecord:
        run = self._run
        run.settings = self._settings()
        run.plan, run.recipe = self._json("plan.json"), self._json("recipe.json")
        run.best = self._json("best.json")
        run.starts = starts_in(self._json(STARTS_FILE))
        logs = self._root / str(run.settings.get("logs_dir") or "logs")
        run.rows = list(self._rows(logs, METRICS_FILE))
        run.dropped_rows = list(self._rows(logs, METRICS_FILE + DROPPED_SUFFIX))
        run.start_times = self._start_times(logs)
        saved = _numbered(run.checkpoints_dir, "*")
        run.newest_saved_step = max(saved, default=0)
        run.settings_by_start = [*self._earlier_settings(saved), run.settings]
        self._read_evaluations()
        return run

    def _settings(self) -> dict[str, Any]:
        path = self._root / CONFIG_FILE
        if not path.exists():
            self._run.problems.append(f"{CONFIG_FILE} is missing: the config is not shown")
            return {}
        try:
            return read_mapping(path)
        except ConfigError as error:
            self._run.problems.append(f"{error}: the config is not shown")
            return {}

    def _earlier_settings(self, saved: dict[int, Path]) -> Iterator[dict[str, Any]]:
        """Yield the config of each start but the last: that of the newest checkpoint that it left, if there is one."""
        for start, following in pairwise(self._run.starts):
            ends = [one["step"] for one in (start, following) if is_number(one.get("step"))]
            left = [step for step in saved if len(ends) == 2 and ends[0] < step <= ends[1]]
            try:
                yield read_mapping(saved[max(left)] / CONFIG_FILE) if left else {}
            except ConfigError:  # the checkpoint's own health is told elsewhere
                yield {}

    def _json(self, name: str) -> dict[str, Any]:
        path = self._root / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._run.problems.append(f"{name} cannot be read: {error}")
            return {}
        if not isinstance(found, dict):
            self._run.problems.append(f"{name} holds a {type(found).__name__}; expected names and values")
            return {}
        return found

    def _rows(self, logs: Path, name: str) -> Iterator[Row]:
        """Yield the rows of all logs folders, oldest first."""
        for path in sorted(logs.glob(f"*/{name}")):
            shown = path.relative_to(self._root)
            try:
                lines = path.read_bytes().splitlines(keepends=True)
            except OSError as error:
                self._run.problems.append(f"{shown} cannot be read: {error}")
                continue
            rows = [_row(line) for line in lines if line.endswith(b"\n")]  # a last one without is being written
            if damaged := [number for number, row in enumerate(rows, start=1) if row is None]:
                told = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
                self._run.problems.append(f"{shown}: {len(damaged)} lines are no logged rows (line {told})")
            yield from (row for row in rows if row is not None)

    def _start_times(self, logs: Path) -> list[float]:
        """Return when the run was started, each time: as recorded, else by the names of TensorBoard's files."""
        recorded: list[Any] = [one.get("time") for one in self._run.starts]
        if times := sorted(float(moment) for moment in recorded if is_moment(moment)):
            return times
        names = [_EVENTS_FILE.match(path.name) for path in logs.glob("*/events.out.tfevents.*")]
        return sorted({float(match.group(1)) for match in names if match})

    def _read_evaluations(self) -> None:
        """Read the newest record that can be read, and that of the best checkpoint."""
        run = self._run
        paths = _numbered(self._root / "evaluations", "*.json")
        read: dict[int, Evaluation | None] = {}
        for step in sorted(paths, reverse=True):
            run.last_evaluation = read[step] = self._evaluation(paths[step], step)
            if run.last_evaluation is not None:
                break
        best = run.best_step
        if best in paths:
            run.best_evaluation = read[best] if best in read else self._evaluation(paths[best], best)

    def _evaluation(self, path: Path, step: int) -> Evaluation | None:
        found = self._json(str(path.relative_to(self._root)))
        if not found:
            return None
        reason, loss_name = found.get("stop_reason"), found.get("sample_loss_name")
        metrics = {
            str(name): _number(value) for name, value in _mapped(found.get("metrics")).items() if is_number(value)
        }
        return Evaluation(
            step,
            metrics,
            {str(name): list(self._tables(tables, path)) for name, tables in _mapped(found.get("tables")).items()},
            _records_by_set(found.get("worst_samples")),
            _records_by_set(found.get("examples")),
            None if reason is None else str(reason),
            loss_name if isinstance(loss_name, str) and loss_name else "loss",
        )

    def _tables(self, tables: Any, path: Path) -> Iterator[Table]:
        for table in _listed(tables):
            try:
                yield _table(table)
            except (KeyError, TypeError, ValueError):
                self._run.problems.append(f"{path.relative_to(self._root)}: a table in it is malformed")


def _table(found: Any) -> Table:
    rows, columns = [str(one) for one in found["rows"]], [str(one) for one in found["columns"]]
    values = [[_number(value) for value in row] for row in found["values"]]
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError("the values do not fit the names")
    return Table(str(found["name"]), rows, columns, values)


def _row(line: bytes) -> Row | None:
    """Read a logged row; None if it is none."""
    try:
        record = json.loads(line)
        step, epoch, seconds = int(record.pop("step")), int(record.pop("epoch")), float(record.pop("time"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    if step < 0 or not 0 <= seconds < LATEST:
        return None
    return Row(step, epoch, seconds, {name: _number(value) for name, value in record.items() if is_number(value)})


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return what is named after a step, by step."""
    return {int(path.stem): path for path in folder.glob(pattern) if path.stem.isdecimal() and path.stem.isascii()}


def is_moment(value: Any) -> bool:
    """Tell whether a value can be the moment of something."""
    return is_number(value) and 0 < value < LATEST


def is_number(value: Any) -> bool:
    """Tell whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> float:
    """Return a number that axes can hold: what is beyond is as good as infinite."""
    if value > LARGEST:
        return math.inf
    return -math.inf if value < -LARGEST else float(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapped(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _records_by_set(value: Any) -> dict[str, list[dict[str, Any]]]:
    found = {
        str(name): [one for one in _listed(rows) if isinstance(one, dict)] for name, rows in _mapped(value).items()
    }
    return {name: rows for name, rows in found.items() if rows}
