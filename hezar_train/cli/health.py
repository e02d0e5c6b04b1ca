"""`verify` and `audit`: is what a run saved whole, and did it train on what it should have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hezar_train.cli.endings import EXIT_FAILED
from hezar_train.cli.options import debug_option, plain_warnings, run_argument
from hezar_train.errors import CheckpointError

if TYPE_CHECKING:
    from hezar_train.checkpoint import CheckpointStore

__all__ = ["audit", "verify"]

MEGABYTE = 1_000_000


@click.command("verify", short_help="Check the health of every checkpoint of a run.")
@run_argument
@click.option(
    "--contents", is_flag=True, help="Also show what lies in the newest: state, tensors, names of what was measured."
)
@debug_option
def verify(run: str, contents: bool) -> None:
    """Check every checkpoint of a run against its manifest: each file is there, and has the bytes that were written.

    The exit code is 1 if one is damaged.

    \b
    Examples:
      hezar-train verify runs/image_classification
      hezar-train verify runs/image_classification --contents
    """
    from hezar_train.checkpoint import CheckpointStore
    from hezar_train.launch import run_config

    with plain_warnings():
        config = run_config(run)
    store = CheckpointStore(Path(run) / config.checkpoints_dir)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.root} holds no checkpoints: there is nothing to verify")
    best, problem = _best_of(Path(run), steps)
    num_damaged = sum(not _is_whole(store, step, is_best=step == best) for step in steps)
    if problem:
        _tell(False, problem)
    if num_damaged:
        words = f"{num_damaged} of {len(steps)} checkpoints damaged"
        click.echo(f"{words}; a resume takes the newest that is whole", err=True)
    if num_damaged or problem:
        sys.exit(EXIT_FAILED)
    click.echo("1 checkpoint, whole" if len(steps) == 1 else f"{len(steps)} checkpoints, all whole")
    if contents:
        from hezar_train.cli.contents import contents_of

        click.echo(
            "\n".join(["", store.path(steps[-1]).name, *contents_of(Path(run), store.open(store.path(steps[-1])))])
        )


def _best_of(run: Path, steps: list[int]) -> tuple[int | None, str]:
    """Return the step of the best checkpoint, and what is wrong with the file that names it."""
    from hezar_train.checkpoint.best import read_best_step

    try:
        best = read_best_step(run / "best.json")
    except CheckpointError as error:
        return None, str(error)
    is_there = best is None or best in steps
    return best, "" if is_there else f"{run / 'best.json'} names step {best}, which has no checkpoint"


def _is_whole(store: CheckpointStore, step: int, *, is_best: bool) -> bool:
    from hezar_train.checkpoint import Checkpoint

    path, mark = store.path(step), " (best)" if is_best else ""
    try:
        found = Checkpoint(path).step
    except CheckpointError as error:
        _tell(False, f"{path.name}{mark}: {error}")
        return False
    if found != step:
        _tell(False, f"{path.name}{mark}: the folder is named after step {step} but holds step {found}")
        return False
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    _tell(True, f"{path.name}  {size / MEGABYTE:.1f} MB{mark}")
    return True


@click.command("audit", short_help="Prove that every sample was trained once per epoch.")
@run_argument
@debug_option
def audit(run: str) -> None:
    """Prove from the ledger of a run that every sample was trained exactly once per epoch, and say what was checked.

    The exit code is 1 if it is not so.

    \b
    Example:
      hezar-train audit runs/image_classification
    """
    from hezar_train.cli.audit import audit_run
    from hezar_train.launch import run_config

    with plain_warnings():
        config = run_config(run)
    found = audit_run(Path(run), config)
    click.echo(f"{found.num_updates} updates in {Path(run) / 'ledger.jsonl'}")
    for words in found.proven:
        _tell(True, words)
    for words in found.problems:
        _tell(False, words)
    if found.problems:
        click.echo("Not every sample was trained exactly once per epoch.", err=True)
        sys.exit(EXIT_FAILED)
    so_far = "" if found.is_whole else ", as far as the run has come"
    click.echo(f"Every sample was trained exactly once per epoch{so_far}.")


def _tell(is_well: bool, words: str) -> None:
    click.secho("  ok   " if is_well else "  BAD  ", fg="green" if is_well else "red", nl=False)
    click.echo(words)
