"""What a list of runs tells of each, read from small files alone; a file that is missing or damaged costs its cell.

A command is a process of its own and holds no run, so it may read the lock file, which nothing in a trainer's process
may open.
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

from hezar_train.cli.options import GAP, debug_option, show, table, width_of_paper
from hezar_train.config import CONFIG_FILE, read_mapping
from hezar_train.config.files import read_json
from hezar_train.errors import ConfigError
from hezar_train.events import FAILED, FINISHED, INTERRUPTED, end_of, ended_for_good, read_starts

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


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs below a folder, or the folder itself; what lies inside a run is not looked at."""
    if _is_run(folder):
        yield folder
        return
    for below in sorted(folder.iterdir()) if folder.is_dir() else []:
        if below.is_dir() and not below.name.startswith("."):
            yield from find_runs(below)


def summarize(run: Path, name: str) -> RunSummary:
    """Read what there is to tell of a run."""
    settings = _settings(run)
    checkpoints = run / str(settings.get("checkpoints_dir") or "checkpoints")
    logs = run / str(settings.get("logs_dir") or "logs")
    state, plan, best = _newest_state(checkpoints), read_json(run / "plan.json"), read_json(run / "best.json")
    written = [run / CONFIG_FILE, run / "ledger.jsonl", *logs.glob("*/metrics.json"), *checkpoints.glob("[0-9]*")]
    last_change = max((path.stat().st_mtime for path in written if path.exists()), default=0.0)
    age_seconds = max(0.0, time.time() - last_change)
    total = plan.get("total_steps")
    step = max(_number(state.get("global_step")), _last_logged(logs), _last_evaluated(run))
    return RunSummary(
        name,
        Path(str(read_json(run / "recipe.json").get("path") or settings.get("task") or "")).name,
        step,
        total if isinstance(total, int) and 0 < total < 1 << 60 else None,  # a stream without an end has none
        _best(best),
        _state(run, state, step >= _number(total) > 0, age_seconds),
        age_seconds,
    )


def _state(run: Path, state: dict[str, Any], has_all_steps: bool, age_seconds: float) -> str:
    if _is_alive(read_json(run / "lock"), age_seconds):
        return RUNNING
    end = _last_end(run)
    if end.get("how") == FAILED:
        return FAILED
    is_over = ended_for_good(end, _settings(run))
    epochs, num_epochs = _number(state.get("epoch")), _number(state.get("total_epochs"))
    has_all_epochs = bool(state.get("epoch_finished")) and epochs >= num_epochs
    stopped = state.get("stop_reason") or _last_evaluation(run).get("stop_reason")
    return FINISHED if is_over or has_all_steps or has_all_epochs or stopped else INTERRUPTED


def _is_alive(holder: dict[str, Any], age_seconds: float) -> bool:
    """Tell whether the process that the lock names still lives; of another machine, whether it has written lately."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return age_seconds < LIVELY_SECONDS
    try:
        os.kill(int(holder["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, KeyError, ValueError, TypeError):
        return False
    return True


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def _settings(run: Path) -> dict[str, Any]:
    try:
        return read_mapping(run / CONFIG_FILE)
    except ConfigError:
        return {}


def _newest_state(checkpoints: Path) -> dict[str, Any]:
    folders = [path for path in checkpoints.glob("[0-9]*") if path.name.isdigit()]
    newest = max(folders, key=lambda path: int(path.name), default=None)
    found = None if newest is None else read_json(newest / "trainer_state.json").get("state")
    return found if isinstance(found, dict) else {}


def _last_logged(logs: Path) -> int:
    """Return the step of the newest log's last whole line."""
    files = sorted(logs.glob("*/metrics.json"))
    if not files:
        return 0
    with files[-1].open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = [line for line in file.read().split(b"\n")[:-1] if line]
    try:
        return _number(json.loads(lines[-1]).get("step")) if lines else 0
    except (ValueError, AttributeError):
        return 0


def _last_end(run: Path) -> dict[str, Any]:
    """Return how the last start of a run ended; empty for one that was killed."""
    starts = read_starts(run)
    return end_of(starts[-1]) if starts else {}


def _evaluations(run: Path) -> list[Path]:
    return sorted(path for path in (run / "evaluations").glob("*.json") if path.stem.isdigit())


def _last_evaluation(run: Path) -> dict[str, Any]:
    return read_json(_evaluations(run)[-1]) if _evaluations(run) else {}


def _last_evaluated(run: Path) -> int:
    return int(_evaluations(run)[-1].stem) if _evaluations(run) else 0


def _best(best: dict[str, Any]) -> str:
    value = best.get("value")
    if not isinstance(value, int | float):
        return ""
    return f"{str(best.get('metric')).removeprefix('evaluation.')} {value:.4g}"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


# `runs`: a table of the runs in a folder.

TITLES = ["run", "recipe", "steps", "best", "state", "age"]
NAME, RECIPE, STATE, NUMBERS = 0, 1, 4, (2, 5)
SHORTEST_NAME = 8
STYLES = {RUNNING: "green", FINISHED: "", INTERRUPTED: "yellow", FAILED: "red"}
UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


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
    found = [summarize(run, _name(run, folder)) for run in find_runs(folder)]
    if not found:
        click.echo(f"There are no runs in {folder}. Start one: hezar-train train image_classification")
        return
    _print(sorted(found, key=lambda run: run.age_seconds))
    states = {run.state for run in found}
    if INTERRUPTED in states or FAILED in states:
        which = "an interrupted" if INTERRUPTED in states else "a failed"
        click.echo(f"\nGo on with {which} run: hezar-train resume RUN")


def _print(found: list[RunSummary]) -> None:
    """Print the table; where it is too wide, the recipe is cut or left out, for mostly the run has its name."""
    from rich.text import Text

    cells = [_cells(run) for run in found]
    widths = [max(map(len, column)) for column in zip(TITLES, *cells, strict=True)]
    room = width_of_paper() - sum(widths) - GAP * (len(widths) - 1) + widths[RECIPE]
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
    steps = f"{run.step}" if run.total_steps is None else f"{run.step}/{run.total_steps}"
    return [run.name, run.kind, steps, run.best, run.state, _age(run.age_seconds)]


def _name(run: Path, folder: Path) -> str:
    return str(run) if run == folder else str(run.relative_to(folder))


def _age(seconds: float) -> str:
    """Return an age in its largest unit."""
    name, size = next(((name, size) for name, size in UNITS if seconds >= size), UNITS[-1])
    return f"{int(seconds // size)} {name}"
