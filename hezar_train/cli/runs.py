"""`runs`: a table of the runs in a folder."""

from __future__ import annotations

from pathlib import Path

import click

from hezar_train.cli.options import debug_option, show, table
from hezar_train.cli.run_summary import RUNNING, RunSummary, find_runs, summarize
from hezar_train.errors import ConfigError
from hezar_train.events import FAILED, FINISHED, INTERRUPTED

__all__ = ["runs"]

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
    from rich.text import Text

    rows = table("run", "recipe", "steps", "best", "state", "age")
    rows.columns[2].justify = rows.columns[5].justify = "right"
    for run in found:
        steps = f"{run.step}" if run.total_steps is None else f"{run.step}/{run.total_steps}"
        state = Text(run.state, STYLES[run.state])
        rows.add_row(run.name, run.kind, steps, run.best, state, _age(run.age_seconds))
    show(rows)


def _name(run: Path, folder: Path) -> str:
    return str(run) if run == folder else str(run.relative_to(folder))


def _age(seconds: float) -> str:
    """Return an age in its largest unit."""
    name, size = next(((name, size) for name, size in UNITS if seconds >= size), UNITS[-1])
    return f"{int(seconds // size)} {name}"
