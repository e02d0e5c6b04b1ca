"""Read a run's folder into plain values: what was asked, logged and evaluated, how each start ended, what is saved.

`read_run` makes a `RunRecord` of the files. Nothing in them can make it fail: what cannot be read becomes a sentence in
`problems`, and its place stays empty. From a record follow the starts with their times (`starts_of`, `time_split`); the
health of the checkpoints is looked at apart (`saved_checkpoints`), for hashing them takes a while.

No torch is needed. The lock file is never opened: closing any descriptor of it would take the lock from a trainer of
this process.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

from hezar_train.config import read_mapping
from hezar_train.config.files import load_json, read_json
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.events import FAILED, Row, end_of, ended_for_good, starts_in
from hezar_train.run_folder import RunFolderError, read_file
from hezar_train.run_layout import (
    BEST_FILE,
    CONFIG_FILE,
    DROPPED_SUFFIX,
    EVENTS_PREFIX,
    LOGS_FOLDER,
    METRICS_FILE,
    PLAN_FILE,
    RECIPE_FILE,
    STARTS_FILE,
    STATE_FILE,
    RunLayout,
)

__all__ = [
    "Clock",
    "Evaluation",
    "RunRecord",
    "SavedCheckpoint",
    "Start",
    "Table",
    "TimeSplit",
    "is_moment",
    "is_number",
    "models_in_sequence",
    "newest_checkpoint_state",
    "planned_steps",
    "read_run",
    "read_runs",
    "saved_checkpoints",
    "starts_of",
    "time_split",
]

MARKS_OF_A_RUN = (CONFIG_FILE, PLAN_FILE, f"{LOGS_FOLDER}/*/{METRICS_FILE}")

STALE_SECONDS = 600
"""A run that has written nothing for so long is taken for killed."""

LARGEST, LATEST = 1e300, 1e11  # a value that can be drawn, a moment that has a date
ENDLESS = 1 << 60
"""Steps of a plan that has no end: those of a stream without a length."""

SECONDS_NAME = re.compile(r"time\.(\w+)_seconds")
"""Rows may tell how many seconds since the row before went into something."""

LEAST_OTHER = 0.01
"""Of all time: opening files and the like."""

MOST_LOG_BYTES = 512 << 20
MOST_NAMES, MOST_METRICS, MOST_SETS, MOST_RECORDS, MOST_FIELDS = 5000, 2000, 100, 1000, 50
"""Of names that were logged; of an evaluation: metrics, data sets, samples of all sets together, fields of an example.

Nobody reads more, and a page has tables and pictures of what takes a few bytes in a file.
"""

MOST_BYTES_HASHED = 256_000_000
"""Of all checkpoints of a run together; beyond, sizes are compared and `hezar-train verify` does the rest."""

VERIFIED, SIZES_MATCH = "verified", "sizes match"


@dataclass(frozen=True)
class Table:
    """A table of an evaluation: `values[i][j]` belongs to `rows[i]` and `columns[j]`."""

    name: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]


@dataclass(frozen=True)
class Evaluation:
    """The record of one evaluation; what is kept per data set has the set's name as key, empty for a single one."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, list[Table]] = field(default_factory=dict)
    worst_samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stop_reason: str | None = None
    """Why the run was to stop after it."""
    sample_loss_name: str = "loss"
    """What the losses of the worst samples are, in words."""


@dataclass
class RunRecord:
    """Everything that the report shows of one run, as far as it could be read."""

    root: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    """What each start was made of, as the trainer wrote it down."""
    settings_by_start: list[dict[str, Any]] = field(default_factory=list)
    """The config of each start, as far as it can still be read; empty where it cannot."""
    start_times: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    dropped_rows: list[Row] = field(default_factory=list)
    """Rows that a resume took back, because their steps were done again."""
    newest_saved_step: int = 0
    """Step of the newest checkpoint."""
    newest_checkpoint: dict[str, Any] = field(default_factory=dict)
    """What it says of the trainer, in its sections."""
    best_evaluation: Evaluation | None = None
    last_evaluation: Evaluation | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def layout(self) -> RunLayout:
        """Where its files lie."""
        return RunLayout.with_settings(self.root, self.settings)

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        evaluated = self.last_evaluation.step if self.last_evaluation else 0
        return max([row.step for row in self.rows[-1:]] + [evaluated, self.newest_saved_step])

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if its plan says so."""
        return planned_steps(self.plan, self.newest_checkpoint)

    @property
    def steps_in_epoch(self) -> int | None:
        """Steps of one epoch; None for a stream, and for models in sequence, each of which has epochs of its own."""
        found = self.plan.get("steps_in_epoch")
        if len(models_in_sequence(self.newest_checkpoint)) > 1:
            return None
        return found if isinstance(found, int) and found > 0 else None

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint."""
        step = self.best.get("step")
        return step if isinstance(step, int) else None

    @property
    def best_metric(self) -> str | None:
        """Full name of the metric that tells the best checkpoint."""
        metric = self.best.get("metric")
        return metric if isinstance(metric, str) else None

    @property
    def set_names(self) -> list[str]:
        """Names of the evaluation sets, where there are several."""
        shown = self.last_evaluation or Evaluation(0)
        names = {*shown.tables, *shown.worst_samples, *shown.examples, "test"} - {""}
        return sorted(names, key=len, reverse=True)

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended before its plan did."""
        last = self.last_evaluation
        if last is not None and last.step >= self.last_step and last.stop_reason is not None:
            return last.stop_reason
        reason = self.end.get("reason")
        return None if reason is None else str(reason)

    @property
    def end(self) -> dict[str, Any]:
        """How the last start ended, as the trainer wrote it down; empty while it goes on, and if it was killed."""
        return end_of(self.starts[-1]) if self.starts else {}

    @property
    def error(self) -> str | None:
        """The kind of error that ended the run, if one did."""
        return str(self.end.get("error") or "an error") if self.end.get("how") == FAILED else None

    @property
    def is_finished(self) -> bool:
        """Tell whether the run came to its end."""
        if self.error is not None:
            return False
        total = self.total_steps
        is_over = ended_for_good(self.end, self.settings)
        return is_over or self.stop_reason is not None or (total is not None and self.last_step >= total)

    @property
    def is_running(self) -> bool:
        """Tell whether a trainer seems to be at work: the lock has a holder's name, and something was just written."""
        if self.end or self.is_finished or not _is_held(self.layout.lock):
            return False
        return time.time() - self._last_change() < STALE_SECONDS

    def _last_change(self) -> float:
        """Return when the run last wrote something that grows while it trains."""
        layout = self.layout
        written = (layout.lock, layout.ledger, layout.checkpoints, *layout.log_files(METRICS_FILE))
        return max(map(_changed_at, written), default=0.0)


def _changed_at(path: Path) -> float:
    """Return when a file was last written; 0 if it is not there, or not ours to look at."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_held(lock: Path) -> bool:
    try:
        return lock.stat().st_size > 0
    except OSError:
        return False


def newest_checkpoint_state(layout: RunLayout) -> dict[str, Any]:
    """Read what the newest checkpoint says of the trainer, in its sections; empty if there is none that can be read."""
    folders = layout.checkpoint_folders()
    return read_json(folders[max(folders)] / STATE_FILE) if folders else {}


def models_in_sequence(checkpoint: Mapping[str, Any]) -> list[str]:
    """Name the models that learn one after another, by the sections of a checkpoint; none where they learn together."""
    facts = _mapped(_mapped(checkpoint.get("extra")).get("facts"))
    return list(_mapped(checkpoint.get("optimizer"))) if facts.get("interact") == "sequential" else []


def planned_steps(plan: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> int | None:
    """Return the steps of a whole run, if its plan says so; a plan counts those of one model of several in sequence."""
    total, models = plan.get("total_steps"), models_in_sequence(checkpoint)
    if not isinstance(total, int) or not 0 < total < ENDLESS:
        return None
    call_end = _mapped(checkpoint.get("state")).get("call_end")  # a call that does a part of the run says where it ends
    return call_end if models and isinstance(call_end, int) else total * max(1, len(models))


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
        self._names: set[str] = set()

    def read(self) -> RunRecord:
        run = self._run
        run.settings = self._settings()
        layout = run.layout
        run.plan, run.recipe = self._json(PLAN_FILE), self._json(RECIPE_FILE)
        run.best = self._json(BEST_FILE)
        run.starts = starts_in(self._json(STARTS_FILE))
        run.rows = list(self._rows(layout, METRICS_FILE))
        run.dropped_rows = list(self._rows(layout, METRICS_FILE + DROPPED_SUFFIX))
        run.start_times = self._start_times(layout)
        saved = layout.checkpoint_folders()
        run.newest_saved_step = max(saved, default=0)
        run.newest_checkpoint = newest_checkpoint_state(layout)
        run.settings_by_start = [*self._earlier_settings(saved), run.settings]
        self._read_evaluations(layout.evaluation_records())
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
            found = load_json(read_file(path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._run.problems.append(f"{name} cannot be read: {error}")
            return {}
        if not isinstance(found, dict):
            self._run.problems.append(f"{name} holds a {type(found).__name__}; expected names and values")
            return {}
        return found

    def _rows(self, layout: RunLayout, name: str) -> Iterator[Row]:
        """Yield the rows of all logs folders, oldest first."""
        for path in layout.log_files(name):
            shown = path.relative_to(self._root) if path.is_relative_to(self._root) else path
            try:
                lines = read_file(path, MOST_LOG_BYTES).splitlines(keepends=True)
            except (OSError, RunFolderError) as error:
                self._run.problems.append(f"{shown} cannot be read: {error}")
                continue
            rows = [_row(line) for line in lines if line.endswith(b"\n")]  # a last one without is being written
            if damaged := [number for number, row in enumerate(rows, start=1) if row is None]:
                told = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
                self._run.problems.append(f"{shown}: {len(damaged)} lines are no logged rows (line {told})")
            yield from (row for row in rows if row is not None and self._is_shown(row))

    def _is_shown(self, row: Row) -> bool:
        """Leave out what a row has under names beyond those that are shown; note that there are some."""
        new = row.values.keys() - self._names
        kept = sorted(new)[: MOST_NAMES - len(self._names)] if len(self._names) + len(new) > MOST_NAMES else new
        self._names.update(kept)
        if len(kept) < len(new):
            for name in new.difference(kept):
                del row.values[name]
            problem = f"more than {MOST_NAMES:,} names were logged: those beyond are not shown"
            self._run.problems += [] if problem in self._run.problems else [problem]
        return True

    def _start_times(self, layout: RunLayout) -> list[float]:
        """Return when the run was started, each time: as recorded, else by the names of TensorBoard's files."""
        recorded: list[Any] = [one.get("time") for one in self._run.starts]
        if times := sorted(float(moment) for moment in recorded if is_moment(moment)):
            return times
        stamps = [path.name.removeprefix(EVENTS_PREFIX).split(".")[0] for path in layout.log_files(f"{EVENTS_PREFIX}*")]
        return sorted({moment for stamp in stamps if stamp.isdecimal() and is_moment(moment := float(stamp))})

    def _read_evaluations(self, paths: dict[int, Path]) -> None:
        """Read the newest record that can be read, and that of the best checkpoint."""
        run = self._run
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
            str(name): _number(value)
            for name, value in islice(_mapped(found.get("metrics")).items(), MOST_METRICS)
            if is_number(value)
        }
        tables = islice(_mapped(found.get("tables")).items(), MOST_SETS)
        by_set = [_mapped(found.get(name)) for name in ("tables", "worst_samples", "examples")]
        num_samples = [sum(len(_listed(rows)) for rows in one.values()) for one in by_set[1:]]
        is_cut = max(map(len, by_set)) > MOST_SETS or max(num_samples) > MOST_RECORDS
        if is_cut or len(_mapped(found.get("metrics"))) > MOST_METRICS:
            self._run.problems.append(
                f"{path.relative_to(self._root)} holds more than a page shows: of {MOST_METRICS:,} metrics, "
                f"{MOST_SETS} data sets and {MOST_RECORDS:,} samples the first are shown"
            )
        return Evaluation(
            step,
            metrics,
            {str(name): list(self._tables(those, path)) for name, those in tables},
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
    found: dict[str, list[dict[str, Any]]] = {}
    room = MOST_RECORDS
    for name, rows in islice(_mapped(value).items(), MOST_SETS):
        records = [dict(islice(one.items(), MOST_FIELDS)) for one in _listed(rows)[:room] if isinstance(one, dict)]
        room -= len(records)
        found |= {str(name): records} if records else {}
    return found


@dataclass(frozen=True)
class Start:
    """One stretch of work, in wall-clock seconds and steps."""

    begun: float
    ended: float
    first_step: int
    last_step: int
    steps_done_again: int
    """Steps past the checkpoint that it resumed from, which had been done before."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What the trainer wrote down of it."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.ended - self.begun


class Clock:
    """Turn a moment into seconds of work since the run began: pauses between starts do not count."""

    def __init__(self, starts: list[Start]) -> None:
        self._starts = starts
        self._begun = [start.begun for start in starts]
        self._before = list(accumulate((start.seconds for start in starts), initial=0.0))

    def seconds(self, moment: float) -> float:
        """Return the seconds of work before a moment."""
        number = bisect.bisect_right(self._begun, moment) - 1
        if number < 0:
            return 0.0
        start = self._starts[number]
        return self._before[number] + min(moment, start.ended) - start.begun


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of work by what they went into."""

    seconds: dict[str, float]
    is_measured: bool
    """False: estimated from the moments at which rows were logged."""


def starts_of(run: RunRecord) -> list[Start]:
    """Return the starts of a run, oldest first; none if nothing was logged and no end was recorded.

    A start is known by its record, else by the TensorBoard file that each start opens. It lasts until its recorded end;
    one that was killed has none, and lasts until the last row that was logged before the next one, kept or taken back:
    what was lost between that row and a kill is not known.
    """
    rows = sorted([*run.rows, *run.dropped_rows], key=lambda row: row.time)
    records = {start.get("time"): start for start in run.starts if is_moment(start.get("time"))}
    last_row = rows[-1].time if rows else 0.0
    begun = [moment for moment in run.start_times if moment <= last_row or end_of(records.get(moment, {}))]
    if rows and (not begun or begun[0] > rows[0].time):
        begun.insert(0, rows[0].time)
    starts: list[Start] = []
    reached = 0
    times = [row.time for row in rows]
    kept = sorted(run.rows, key=lambda row: row.time)
    kept_times, kept_steps = [row.time for row in kept], list(accumulate((row.step for row in kept), max, initial=0))
    for moment, following in zip(begun, [*begun[1:], math.inf], strict=False):
        during = rows[bisect.bisect_left(times, moment) : bisect.bisect_left(times, following)]
        record = records.get(moment, {})
        # Where it went on from: as recorded, else the last step that was logged before it and kept.
        told, logged = record.get("step"), kept_steps[bisect.bisect_left(kept_times, moment)]
        first = (int(told) if isinstance(told, int) else logged) if starts else 0
        ended, last = _ended(record, *((during[-1].time, during[-1].step) if during else (moment, first)))
        starts.append(Start(moment, ended, first, max(first, last), max(0, min(reached, last) - first), record))
        reached = max(reached, last)
    return starts


def _ended(record: Mapping[str, Any], moment: float, step: int) -> tuple[float, int]:
    """Return when and at which step a start ended: as recorded, but not before what it is known to have done."""
    end = end_of(record)
    told, last = end.get("time", 0.0), end.get("step", 0)
    return max(moment, told) if is_moment(told) else moment, max(step, last) if isinstance(last, int) else step


def time_split(run: RunRecord, starts: list[Start]) -> TimeSplit:
    """Return where the time of a run went, as its rows tell it, or as far as their moments do."""
    total = sum(start.seconds for start in starts)
    rows = [*run.rows, *run.dropped_rows]
    measured: dict[str, float] = {}
    for row in rows:
        for name, value in row.values.items():
            if (match := SECONDS_NAME.fullmatch(name)) and math.isfinite(value):
                measured[match.group(1)] = measured.get(match.group(1), 0.0) + value
    if measured:
        rest = total - sum(measured.values())
        return TimeSplit(measured | ({"other": rest} if rest > 0 else {}), is_measured=True)
    if any(_seconds_of(start) for start in starts):
        return _recorded_split(rows, starts)
    evaluation = min(total, _seconds_before_evaluations(rows))
    return TimeSplit({"training": total - evaluation, "saving and evaluation": evaluation}, is_measured=False)


def _recorded_split(rows: list[Row], starts: list[Start]) -> TimeSplit:
    """Sum what the trainer wrote down of each start; what it did not, of one that was killed, was mostly training."""
    total = dict.fromkeys(("training", "data", "evaluation", "saving"), 0.0)
    rows = sorted(rows, key=lambda row: row.time)
    times = [row.time for row in rows]
    for start in starts:
        seconds = _seconds_of(start)
        if not seconds:
            during = rows[bisect.bisect_left(times, start.begun) : bisect.bisect_right(times, start.ended)]
            seconds["evaluation"] = _seconds_before_evaluations(during)
        rest = start.seconds - sum(seconds.values())
        for name, value in [*seconds.items(), ("other" if end_of(start.record) else "training", max(0.0, rest))]:
            total[name] = total.get(name, 0.0) + value
    if total.get("other", 0.0) < LEAST_OTHER * sum(total.values()):
        total.pop("other", None)
    return TimeSplit(total, is_measured=all(map(_seconds_of, starts)))


def _seconds_of(start: Start) -> dict[str, float]:
    found = start.record.get("seconds")
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(name): float(value) for name, value in pairs if is_number(value) and 0 <= value <= LARGEST}


def _seconds_before_evaluations(rows: list[Row]) -> float:
    """Sum the time between a training row and the evaluation row of the same step."""
    total, before = 0.0, None
    for row in sorted(rows, key=lambda one: one.time):
        if not all(name.startswith("evaluation.") for name in row.values):
            before = row
        elif before is not None and before.step == row.step:
            total, before = total + row.time - before.time, None
    return total


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on disk."""

    step: int
    path: Path
    size_bytes: int
    saved_at: float
    health: str
    is_good: bool


def saved_checkpoints(layout: RunLayout) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run, newest first, each with its health; hashes are checked while that is quick."""
    return list(_examined(list(layout.checkpoint_folders().values())))


def _examined(paths: list[Path]) -> Iterator[SavedCheckpoint]:
    room = MOST_BYTES_HASHED
    for path in reversed(paths):  # the newest matter most
        health, size, is_good = _health(path, room)
        room -= size if health == VERIFIED else 0
        try:
            saved_at = path.stat().st_mtime
        except OSError:  # retention was faster
            continue
        yield SavedCheckpoint(int(path.name), path, size, saved_at, health, is_good)


def _health(path: Path, room: int) -> tuple[str, int, bool]:
    """Return what can be said of a checkpoint, its size, and whether that is good."""
    from hezar_train.checkpoint.manifest import read_manifest, verify

    size = 0
    try:
        manifest = read_manifest(path)
        size = sum(record.size for record in manifest.files.values())
        if size <= room:
            verify(path)
            return VERIFIED, size, True
        for name, record in manifest.files.items():
            if (found := (path / name).stat().st_size) != record.size:
                return f"damaged: {name} has {found} bytes instead of {record.size}", size, False
    except (CheckpointError, OSError) as error:
        return f"damaged: {error}", size, False
    return SIZES_MATCH, size, True
