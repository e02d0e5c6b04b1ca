"""`runs`: a table of the runs in a folder."""

from __future__ import annotations

from pathlib import Path

import click

from hezar_train.cli.options import GAP, debug_option, show, table, width_of_paper
from hezar_train.cli.run_summary import RUNNING, RunSummary, find_runs, summarize
from hezar_train.errors import ConfigError
from hezar_train.events import FAILED, FINISHED, INTERRUPTED

__all__ = ["runs"]

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
