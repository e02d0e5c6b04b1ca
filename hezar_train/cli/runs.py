"""`runs`: a table of the runs in a folder, each summarized from small files alone.

A file that is missing, damaged or made to mislead costs its cell, a folder that cannot be read costs its line; the
other runs are listed all the same. A command is a process of its own and holds no run, so it may read the lock file,
which nothing in a trainer's process may open.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hezar_train.cli.options import GAP, debug_option, output_width, show, table
from hezar_train.cli.output import echo
from hezar_train.config import read_mapping
from hezar_train.config.files import read_json
from hezar_train.errors import ConfigError, why_unreadable
from hezar_train.events import FAILED, FINISHED, INTERRUPTED, end_of, ended_for_good, read_starts
from hezar_train.run_folder import open_file
from hezar_train.run_layout import CONFIG_FILE, METRICS_FILE, RunLayout, is_run

__all__ = [
    "RUNNING",
    "RunSummary",
    "find_runs",
    "runs",
    "summarize",
]

RUNNING = "running"
LIVELY_SECONDS = 600
"""A run on another machine that has written something within this time is taken to be alive."""

TAIL_BYTES = 65_536
MOST_FOLDERS = 100_000
MOST_PIDS = 1 << 31
MOST_STEPS, LARGEST = 1 << 62, 1e300

TITLES = ["run", "recipe", "steps", "best", "state", "age"]
NAME, RECIPE, STATE, NUMBERS = 0, 1, 4, (2, 5)
SHORTEST_NAME = 8
STYLES = {RUNNING: "green", FINISHED: "", INTERRUPTED: "yellow", FAILED: "red"}
UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


@dataclass(frozen=True)
class RunSummary:
    """One line of the list."""

    name: str
    kind: str
    """Its recipe, else its task."""
    step: int
    total_steps: int | None
    best: str
    state: str
    age_seconds: float
    """Since something was last written."""


@click.command("runs", short_help="List the runs in a folder.")
@click.argument("folder", metavar="[FOLDER]", default="runs", type=click.Path(path_type=Path))
@debug_option
def runs(folder: Path) -> None:
    """List the runs in FOLDER (./runs if not given), the latest first: how far each is, and how well it does.

    The age is that of the last thing it wrote.

    \b
    Examples:
      hezar-train runs
      hezar-train runs /data/experiments
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}. Name the one your runs are in, or train something first.")
    found = [one for run in find_runs(folder) if (one := _summary(run, _name(run, folder))) is not None]
    if not found:
        echo(f"There are no runs in {folder}. Start one: hezar-train train image_classification")
        return
    _print(sorted(found, key=lambda run: run.age_seconds))
    states = {run.state for run in found}
    if INTERRUPTED in states or FAILED in states:
        which = "an interrupted" if INTERRUPTED in states else "a failed"
        echo(f"\nGo on with {which} run: hezar-train resume RUN")


def _summary(run: Path, name: str) -> RunSummary | None:
    try:
        return summarize(run, name)
    except OSError as error:
        echo(f"{name} is left out: {why_unreadable(error)}", err=True)
        return None


def _print(found: list[RunSummary]) -> None:
    """Print the table; where it is too wide, the recipe is cut or left out, for mostly the run has its name."""
    from rich.text import Text

    cells = [_cells(run) for run in found]
    widths = [max(map(len, column)) for column in zip(TITLES, *cells, strict=True)]
    room = output_width() - sum(widths) - GAP * (len(widths) - 1) + widths[RECIPE]
    numbers = [number for number in range(len(TITLES)) if number != RECIPE or room >= SHORTEST_NAME]
    rows = table(*(TITLES[number] for number in numbers))
    for number, column in zip(numbers, rows.columns, strict=True):
        column.no_wrap = number != NAME  # a name that is too long goes on in the next line, so that it can be copied
        column.overflow = "fold" if number == NAME else "ellipsis"
        column.max_width = room if number == RECIPE else None
        column.justify = "right" if number in NUMBERS else "left"
    for row in cells:
        rows.add_row(*(Text(row[number], STYLES[row[STATE]] if number == STATE else "") for number in numbers))
    show(rows)


def _cells(run: RunSummary) -> list[str]:
    # a plan that counts one call of many, or one model of several of which nothing is saved, is no whole
    is_part = run.total_steps is None or run.step > run.total_steps
    steps = f"{run.step}" if is_part else f"{run.step}/{run.total_steps}"
    return [run.name, run.kind, steps, run.best, run.state, _age(run.age_seconds)]


def _name(run: Path, folder: Path) -> str:
    return str(run) if run == folder else str(run.relative_to(folder))


def _age(seconds: float) -> str:
    """Return an age in its largest unit."""
    name, size = next(((name, size) for name, size in UNITS if seconds >= size), UNITS[-1])
    return f"{int(seconds // size)} {name}"


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs below a folder, or the folder itself; what lies inside a run is not looked at."""
    if is_run(folder):
        yield folder
    elif folder.is_dir():
        yield from _runs_below(folder, set())


def _runs_below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the runs below a folder; one that several links lead to is looked into once."""
    try:
        if (real := folder.resolve()) in seen or len(seen) >= MOST_FOLDERS:
            return
        seen.add(real)
        inside = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except (OSError, RuntimeError) as error:  # no right to read it, or links that go round
        echo(f"{folder} is left out: {why_unreadable(error)}", err=True)
        return
    for below in inside:
        try:
            if is_run(below):
                yield below
            elif below.is_dir():
                yield from _runs_below(below, seen)
        except OSError as error:
            echo(f"{below} is left out: {why_unreadable(error)}", err=True)


def summarize(run: Path, name: str) -> RunSummary:
    """Read what there is to tell of a run."""
    from hezar_train.report.read import newest_checkpoint_state, planned_steps

    settings = _settings(run)
    layout = RunLayout.with_settings(run, settings)
    checkpoint = newest_checkpoint_state(layout)
    step = max(_saved_step(checkpoint), _last_logged(layout), max(layout.evaluation_records(), default=0))
    total = planned_steps(read_json(layout.plan), checkpoint)
    age_seconds = max(0.0, time.time() - _last_change(layout))
    return RunSummary(
        name,
        Path(str(read_json(layout.recipe).get("path") or settings.get("task") or "")).name,
        step,
        total,
        _best(read_json(layout.best)),
        _state(layout, settings, checkpoint, total is not None and step >= total, age_seconds),
        age_seconds,
    )


def _state(
    layout: RunLayout, settings: dict[str, Any], checkpoint: dict[str, Any], has_all_steps: bool, age_seconds: float
) -> str:
    if _is_alive(read_json(layout.lock), age_seconds):
        return RUNNING
    end = _last_end(layout.root)
    if end.get("how") == FAILED:
        return FAILED
    is_over = ended_for_good(end, settings) or has_all_steps or _has_all_epochs(checkpoint)
    stopped = _state_of(checkpoint).get("stop_reason") or _last_evaluation(layout).get("stop_reason")
    return FINISHED if is_over or stopped else INTERRUPTED


def _has_all_epochs(checkpoint: dict[str, Any]) -> bool:
    """Tell whether the newest checkpoint is of the last epoch's end; of models in sequence, the last one's."""
    from hezar_train.report.read import models_in_sequence

    state = _state_of(checkpoint)
    is_last_model = _number(state.get("model_index")) >= len(models_in_sequence(checkpoint)) - 1
    epochs, num_epochs = _number(state.get("epoch")), _number(state.get("total_epochs"))
    return is_last_model and bool(state.get("epoch_finished")) and epochs >= num_epochs


def _is_alive(holder: dict[str, Any], age_seconds: float) -> bool:
    """Tell whether the process that the lock names still lives; of another machine, whether it has written lately."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return age_seconds < LIVELY_SECONDS
    pid = holder.get("pid")
    if type(pid) is not int or not 0 < pid < MOST_PIDS:  # 0 and below mean whole groups of processes
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _settings(run: Path) -> dict[str, Any]:
    try:
        return read_mapping(run / CONFIG_FILE)
    except ConfigError:
        return {}


def _state_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state = checkpoint.get("state")
    return state if isinstance(state, dict) else {}


def _saved_step(checkpoint: dict[str, Any]) -> int:
    return _number(_state_of(checkpoint).get("global_step"))


def _last_change(layout: RunLayout) -> float:
    """Return when the run last wrote something; 0 if nothing of it is there."""
    saved = layout.checkpoint_folders().values()
    written = [layout.root / CONFIG_FILE, layout.ledger, *layout.log_files(METRICS_FILE), *saved]
    return max(map(_changed_at, written), default=0.0)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_logged(layout: RunLayout) -> int:
    """Return the step of the newest log's last whole line."""
    if not (files := layout.log_files(METRICS_FILE)):
        return 0
    try:
        with os.fdopen(open_file(files[-1]), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = [line for line in file.read(TAIL_BYTES).split(b"\n")[:-1] if line]
        return _number(json.loads(lines[-1]).get("step")) if lines else 0
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0


def _last_end(run: Path) -> dict[str, Any]:
    """Return how the last start of a run ended; empty for one that was killed."""
    starts = read_starts(run)
    return end_of(starts[-1]) if starts else {}


def _last_evaluation(layout: RunLayout) -> dict[str, Any]:
    records = layout.evaluation_records()
    return read_json(records[max(records)]) if records else {}


def _best(best: dict[str, Any]) -> str:
    value = best.get("value")
    if not isinstance(value, int | float) or abs(value) > LARGEST:
        return ""
    return f"{str(best.get('metric')).removeprefix('evaluation.')} {value:.4g}"


def _number(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < MOST_STEPS else 0
