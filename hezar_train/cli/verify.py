"""The proof that every sample was trained exactly once per epoch, from a run's ledger.

Each line of the ledger says which positions of an epoch one update took. Laid end to end they must cover each epoch
from position 0 to its last, none twice and none left out; the shuffle must put every sample at one position; and the
newest checkpoint must have seen as many samples as the ledger has up to its place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hezar_train.cli.exit_codes import EXIT_FAILED
from hezar_train.cli.options import debug_option, plain_warnings, run_argument
from hezar_train.config import TrainerConfig
from hezar_train.errors import CheckpointError, DataError
from hezar_train.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from hezar_train.checkpoint import Checkpoint, CheckpointStore
    from hezar_train.data.sampler import Indices

__all__ = [
    "Audit",
    "audit",
    "audit_run",
    "contents_of",
    "reaches_all",
    "verify",
]

MOST_POSITIONS = 20_000_000
"""How many positions of shuffles are computed at most: some seconds' work."""

MOST_PROBLEMS = 10


@dataclass
class Audit:
    """What was checked and is so, and what is not."""

    num_updates: int = 0
    is_whole: bool = True
    """Whether the last epoch is at its end."""
    proven: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Walk:
    """The ledger laid end to end: where it is, and how far each epoch went."""

    ends: dict[int, int] = field(default_factory=dict)
    num_updates: int = 0
    num_samples: int = 0
    problems: list[str] = field(default_factory=list)

    def take(self, epoch: int, first: int, count: int) -> None:
        """Go on by one line."""
        expected = self.ends.get(epoch, 0)
        if self.ends and epoch not in (self.last_epoch, self.last_epoch + 1):
            self.problems.append(f"after epoch {self.last_epoch} comes epoch {epoch}")
        elif first < expected:
            self.problems.append(f"epoch {epoch}: positions {first} to {min(first + count, expected) - 1} came twice")
        elif first > expected:
            self.problems.append(f"epoch {epoch}: positions {expected} to {first - 1} were left out")
        self.ends[epoch] = max(expected, first + count)
        self.num_updates += 1
        self.num_samples += count

    @property
    def last_epoch(self) -> int:
        return max(self.ends, default=0)


def audit_run(run: Path, config: TrainerConfig) -> Audit:
    """Check the ledger of a run against its plan, the shuffle and its newest checkpoint."""
    from hezar_train.events import LEDGER_FILE, Ledger

    if not (run / LEDGER_FILE).is_file() or not (run / "plan.json").is_file():
        raise DataError(f"{run} has no {LEDGER_FILE} and plan.json to look at: it has not trained yet")
    plan, state = Plan.load(run / "plan.json"), _newest_state(run / config.checkpoints_dir)
    walk, seen = _Walk(), 0
    for line in Ledger.read(run / LEDGER_FILE):
        walk.take(line.epoch, line.first, line.count)
        if (line.epoch, line.first + line.count) <= (state.get("epoch", 0), state.get("position", 0)):
            seen += line.count
    audit = Audit(walk.num_updates)
    _check_epochs(audit, walk, plan)
    _check_shuffle(audit, walk, plan, config)
    _check_checkpoint(audit, state, seen)
    return audit


def _check_epochs(audit: Audit, walk: _Walk, plan: Plan) -> None:
    """Every epoch but the last must be whole; the last is, or is under way."""
    problems = [*walk.problems, *_short_epochs(walk, plan)]
    audit.problems += problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        audit.problems.append(f"and {len(problems) - MOST_PROBLEMS} more of this kind")
    if problems or not walk.ends:
        return
    *whole, last = walk.ends
    if _is_whole(walk.ends[last], plan):
        whole.append(last)
    if whole:
        audit.proven.append(
            f"{_epochs(whole)}: the positions 0 to {walk.ends[whole[-1]] - 1} came once each, in order, none left out"
            + (f"; the rest of less than {plan.window_samples} is dropped (drop_last)" if plan.drop_last else "")
        )
    audit.is_whole = last in whole
    if not audit.is_whole:
        of = "a stream" if plan.num_samples is None else f"{plan.num_samples}"
        audit.proven.append(f"epoch {last}: the first {walk.ends[last]} positions of {of} came once each, in order")


def _short_epochs(walk: _Walk, plan: Plan) -> Iterator[str]:
    for epoch, end in walk.ends.items():
        if plan.num_samples is not None and end > plan.num_samples:
            yield f"epoch {epoch}: it went to position {end - 1}, but there are {plan.num_samples} samples"
        elif epoch != walk.last_epoch and plan.num_samples is not None and not _is_whole(end, plan):
            yield f"epoch {epoch}: positions {end} to {plan.num_samples - 1} were left out"


def _is_whole(end: int, plan: Plan) -> bool:
    if plan.num_samples is None:
        return False
    return end == plan.num_samples or (plan.drop_last and plan.num_samples - end < plan.window_samples)


def _check_shuffle(audit: Audit, walk: _Walk, plan: Plan, config: TrainerConfig) -> None:
    """Compute the orders of as many epochs as is reasonable, and see that each sample stands in each of them once."""
    from hezar_train.data.sampler import Permutation

    if not config.dataloader_shuffle or not plan.num_samples:
        return
    keys = list(walk.ends) if config.reshuffle_each_epoch else [0]
    computed = keys[: MOST_POSITIONS // plan.num_samples]
    for key in computed:
        if not reaches_all(Permutation(plan.num_samples, config.seed, key).chunk(0, plan.num_samples)):
            audit.problems.append(f"the shuffle of epoch {key} does not reach every sample")
    if computed:
        of = f"{len(computed)} of {len(keys)} orders" if len(computed) < len(keys) else f"all {len(keys)} orders"
        audit.proven.append(f"the shuffle (seed {config.seed}) has each of {plan.num_samples} samples at one position: "
                            f"{of} computed")  # fmt: skip


def reaches_all(order: Indices) -> bool:
    """Tell whether an order of samples has each of them, and so each of them once."""
    import numpy as np

    is_met = np.zeros(len(order), dtype=bool)
    is_met[order] = True
    return bool(is_met.all())


def _check_checkpoint(audit: Audit, state: dict[str, Any], seen: int) -> None:
    if not state:
        return
    counted = state.get("samples_seen")
    words = f"the checkpoint of step {state.get('global_step')} has seen {counted} samples"
    if counted == seen:
        audit.proven.append(f"{words}, as many as the ledger has up to there")
    else:
        audit.problems.append(f"{words}; the ledger has {seen} up to there")


def _newest_state(checkpoints: Path) -> dict[str, Any]:
    """Return the state in the newest checkpoint; empty if there is none."""
    from hezar_train.checkpoint import STATE_FILE, CheckpointStore

    store = CheckpointStore(checkpoints)
    if not (steps := store.steps()):
        return {}
    path = store.path(steps[-1]) / STATE_FILE
    try:
        return dict(json.loads(path.read_bytes())["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. `hezar-train verify RUN` says more.") from error


def _epochs(numbers: list[int]) -> str:
    return f"epoch {numbers[0]}" if len(numbers) == 1 else f"epochs {numbers[0]} to {numbers[-1]}"


# What lies in a checkpoint, as lines to read: the state, the tensors, and what the run has measured so far.


def contents_of(run: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the state of a checkpoint, its tensors with their shapes, and the series of the run with their lengths."""
    yield "state"
    for name, value in checkpoint.state().items():
        if value not in (None, {}, []) and not isinstance(value, dict):
            yield f"  {name:<34} {value}"
    tensors, _ = checkpoint.model()
    yield f"model: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} values"
    yield from (_line(name, tensor) for name, tensor in tensors.items())
    yield "measured so far"
    yield from _series(run, checkpoint.step)


def _line(name: str, tensor: Tensor) -> str:
    return f"  {name:<34} {str(tensor.dtype).removeprefix('torch.'):<10}{' x '.join(map(str, tensor.shape))}"


def _series(run: Path, step: int) -> Iterator[str]:
    from hezar_train.report.read import read_run

    found: dict[str, list[float]] = {}
    for row in read_run(run).rows:
        for name, value in row.values.items() if row.step <= step else ():
            found.setdefault(name, []).append(value)
    for name, values in found.items():
        yield f"  {name:<34} {len(values):<10}last {values[-1]:.6g}"


# `verify` and `audit`: is what a run saved whole, and did it train on what it should have.

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
    from hezar_train.recipes import run_config

    with plain_warnings():
        config = run_config(run)
    store = CheckpointStore(Path(run) / config.checkpoints_dir)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.root} holds no checkpoints: there is nothing to verify")
    best, problem = _best_of(Path(run), steps)
    num_damaged = sum(not _is_checkpoint_whole(store, step, is_best=step == best) for step in steps)
    if problem:
        _tell(False, problem)
    if num_damaged:
        words = f"{num_damaged} of {len(steps)} checkpoints damaged"
        click.echo(f"{words}; a resume takes the newest that is whole", err=True)
    if num_damaged or problem:
        sys.exit(EXIT_FAILED)
    click.echo("1 checkpoint, whole" if len(steps) == 1 else f"{len(steps)} checkpoints, all whole")
    if contents:
        from hezar_train.cli.verify import contents_of

        click.echo(
            "\n".join(["", store.path(steps[-1]).name, *contents_of(Path(run), store.open(store.path(steps[-1])))])
        )


def _best_of(run: Path, steps: list[int]) -> tuple[int | None, str]:
    """Return the step of the best checkpoint, and what is wrong with the file that names it."""
    from hezar_train.checkpoint.manifest import read_best_step

    try:
        best = read_best_step(run / "best.json")
    except CheckpointError as error:
        return None, str(error)
    is_there = best is None or best in steps
    return best, "" if is_there else f"{run / 'best.json'} names step {best}, which has no checkpoint"


def _is_checkpoint_whole(store: CheckpointStore, step: int, *, is_best: bool) -> bool:
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
    from hezar_train.cli.verify import audit_run
    from hezar_train.recipes import run_config

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
