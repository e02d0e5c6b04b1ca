"""`verify` and `audit`: is what a run saved whole, and did it train on what it should have.

`verify` checks every checkpoint against its manifest. `audit` proves from the ledger that every sample was trained
exactly once per epoch: it says which positions of an epoch each update took. Laid end to end they must cover each
epoch from position 0 to its last, none twice and none left out; the shuffle must put every sample at one position; and
the newest checkpoint must have seen as many samples as the ledger has up to its place. Of several models that learn one
after another, each has epochs of its own, and the lines of each must do so.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hezar_train.cli.exit_codes import EXIT_FAILED
from hezar_train.cli.options import debug_option, plain_warnings, run_argument
from hezar_train.cli.output import echo
from hezar_train.config import TrainerConfig
from hezar_train.errors import CheckpointError, DataError
from hezar_train.events import FEWER_ROWS, Ledger, LedgerLine, read_starts
from hezar_train.plan import Plan
from hezar_train.run_folder import read_file
from hezar_train.run_layout import STATE_FILE, RunLayout
from hezar_train.state import TrainerState

if TYPE_CHECKING:
    from torch import Tensor

    from hezar_train.checkpoint import Checkpoint, CheckpointStore
    from hezar_train.data import ByLength
    from hezar_train.data.sampler import Indices

__all__ = [
    "Audit",
    "audit",
    "audit_run",
    "contents_of",
    "num_before",
    "reaches_all",
    "verify",
]

MEGABYTE = 1_000_000
MOST_PROBLEMS = 10
MOST_STATE_BYTES = 256 << 20
COUNTERS = ("epoch", "position", "update_step", "samples_seen", "global_step")

MOST_POSITIONS = 20_000_000
"""How many positions of shuffles are computed at most: some seconds' work."""
POSITIONS_OF_AN_ORDER = 4000
"""As many as could be computed in the time that it takes to begin an order."""

SEVERAL_MODELS = "ModelDict"
"""The class of the model of a run that trains several, as the run records it."""


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
    from hezar_train.recipes.build import refuse_checkpoint

    refuse_checkpoint(Path(run), takes_step=False)
    with plain_warnings():
        layout = RunLayout.of(run_config(run))
    store = CheckpointStore(layout.checkpoints)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.root} holds no checkpoints: there is nothing to verify")
    best, problem = _best_of(layout.best, steps)
    num_damaged = sum(not _is_checkpoint_whole(store, step, is_best=step == best) for step in steps)
    if problem:
        _print_finding(False, problem)
    if num_damaged:
        words = f"{num_damaged} of {len(steps)} checkpoints damaged"
        echo(f"{words}; a resume takes the newest that is whole", err=True)
    if num_damaged or problem:
        sys.exit(EXIT_FAILED)
    echo("1 checkpoint, whole" if len(steps) == 1 else f"{len(steps)} checkpoints, all whole")
    if contents:
        newest = store.path(steps[-1])
        echo("\n".join(["", newest.name, *contents_of(layout.root, store.open(newest))]))


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
    from hezar_train.recipes import run_config

    with plain_warnings():
        config = run_config(run)
    found = audit_run(config)
    echo(f"{found.num_updates} updates in {RunLayout.of(config).ledger}")
    for words in found.proven:
        _print_finding(True, words)
    for words in found.problems:
        _print_finding(False, words)
    if found.problems:
        echo("Not every sample was trained exactly once per epoch.", err=True)
        sys.exit(EXIT_FAILED)
    so_far = "" if found.is_whole else ", as far as the run has come"
    if found.fewer_rows:
        echo(f"Every sample was given to the collator exactly once per epoch{so_far}. {found.fewer_rows}")
        return
    echo(f"Every sample was trained exactly once per epoch{so_far}.")


def _print_finding(is_well: bool, words: str) -> None:
    click.secho("  ok   " if is_well else "  BAD  ", fg="green" if is_well else "red", nl=False)
    echo(words)


def _best_of(file: Path, steps: Sequence[int]) -> tuple[int | None, str]:
    """Return the step of the best checkpoint, and what is wrong with the file that names it."""
    from hezar_train.checkpoint.manifest import read_best_step

    try:
        best = read_best_step(file)
    except CheckpointError as error:
        return None, str(error)
    is_there = best is None or best in steps
    return best, "" if is_there else f"{file} names step {best}, which has no checkpoint"


def _is_checkpoint_whole(store: CheckpointStore, step: int, *, is_best: bool) -> bool:
    from hezar_train.checkpoint import Checkpoint

    path, mark = store.path(step), " (best)" if is_best else ""
    try:
        found = Checkpoint(path).step
    except CheckpointError as error:
        _print_finding(False, f"{path.name}{mark}: {error}")
        return False
    if found != step:
        _print_finding(False, f"{path.name}{mark}: the folder is named after step {step} but holds step {found}")
        return False
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    _print_finding(True, f"{path.name}  {size / MEGABYTE:.1f} MB{mark}")
    return True


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


@dataclass
class Audit:
    """What was checked and is so, and what is not."""

    num_updates: int = 0
    is_whole: bool = True
    """Whether the last epoch is at its end."""
    proven: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fewer_rows: str = ""
    """What the collator made of the samples, where it was not a row of each."""


@dataclass
class _ModelLedger:
    """The lines of one model laid end to end: how far each of its epochs went."""

    name: str
    """Empty where there is one model."""
    ends: dict[int, int] = field(default_factory=dict)
    lines: dict[int, list[LedgerLine]] = field(default_factory=dict)
    """Those of each epoch."""
    last_epoch: int = 0
    num_updates: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, line: LedgerLine) -> None:
        """Go on by one line."""
        epoch, expected = line.epoch, self.ends.get(line.epoch, 0)
        if self.ends and epoch not in (self.last_epoch, self.last_epoch + 1):
            self.problems.append(f"after epoch {self.last_epoch} comes epoch {epoch}")
        elif line.first < expected:
            last = min(line.end, expected) - 1
            self.problems.append(f"epoch {epoch}: positions {line.first} to {last} came twice")
        elif line.first > expected:
            self.problems.append(f"epoch {epoch}: positions {expected} to {line.first - 1} were left out")
        self.ends[epoch] = max(expected, line.end)
        self.last_epoch = max(self.last_epoch, epoch)
        self.lines.setdefault(epoch, []).append(line)
        self.num_updates += line.updates

    def update_ends(self, epoch: int) -> Iterator[int]:
        """Yield where each update of an epoch ended."""
        return (one.end for line in self.lines.get(epoch, ()) for one in line.each())

    def continues_with(self, line: LedgerLine) -> bool:
        """Tell whether a line goes on in the epoch under way."""
        return line.epoch == self.last_epoch and line.first == self.ends.get(line.epoch)

    def expects(self, line: LedgerLine, plan: Plan) -> bool:
        """Tell whether a line is the one that follows; where an epoch of a stream ends is not known."""
        is_at_end = not self.ends or plan.num_samples is None or _is_whole(self.ends[self.last_epoch], plan)
        return self.continues_with(line) or (is_at_end and (line.epoch, line.first) == (self.last_epoch + 1, 0))

    def is_complete(self, plan: Plan) -> bool:
        """Tell whether the model has learned for as long as the plan says."""
        has_all_epochs = self.last_epoch >= plan.num_epochs and _is_whole(self.ends[self.last_epoch], plan)
        return has_all_epochs or self.num_updates >= plan.total_updates


class _Walk:
    """The ledger of a run, line by line, each counted for the model that learns.

    Where models learn call by call, two may be at one place; for which of them a line is counted then proves the same.
    """

    def __init__(self, models: Sequence[str], plan: Plan, *, in_calls: bool) -> None:
        """Say by `in_calls` that a model may pass its turn on before it is complete: each call trains all of them."""
        self.models = [_ModelLedger(name) for name in models or [""]]
        self._plan, self._turn = plan, 0
        self._may_pass_any_time = in_calls or plan.num_samples is None  # where a stream ends is not known

    def add(self, line: LedgerLine) -> None:
        """Go on by one line."""
        if len(self.models) > 1 and self._is_of_next_model(line):
            self._turn = self._next_turn
        self.models[self._turn].add(line)

    @property
    def _next_turn(self) -> int:
        return (self._turn + 1) % len(self.models)

    def _is_of_next_model(self, line: LedgerLine) -> bool:
        model = self.models[self._turn]
        if not model.ends or model.continues_with(line):
            return False
        is_passed_on = self._may_pass_any_time or model.is_complete(self._plan)
        return is_passed_on and self.models[self._next_turn].expects(line, self._plan)


def audit_run(config: TrainerConfig) -> Audit:
    """Check the ledger of a run against its plan, the shuffle and its newest checkpoint."""
    from hezar_train.report.read import models_in_sequence

    layout = RunLayout.of(config)
    if not layout.ledger.is_file() or not layout.plan.is_file():
        raise DataError(
            f"{layout.root} has no {layout.ledger.name} and {layout.plan.name} to look at: it has not trained yet"
        )
    plan, checkpoint = Plan.load(layout.plan), _newest_checkpoint(layout)
    models = models_in_sequence(checkpoint) if checkpoint else _models_without_checkpoint(layout, plan)
    walk, state = _Walk(models, plan, in_calls=config.local_update_steps is not None), checkpoint.get("state", {})
    num_updates = num_seen = 0
    for line in Ledger.read_lines(layout.ledger):
        walk.add(line)
        num_updates += line.updates
        num_seen += line.count * num_before(line, state, in_sequence=len(models) > 1)
    audit = Audit(num_updates, fewer_rows=_fewer_rows(layout.root))
    for model in walk.models:
        _check_epochs(audit, model, plan)
    _check_orders(audit, walk.models, plan, config, layout)
    _check_checkpoint(audit, state, num_seen)
    return audit


def _fewer_rows(run: Path) -> str:
    """Say what the collator made of a batch that has fewer rows than samples, in any of the run's starts."""
    for start in read_starts(run):
        match start.get(FEWER_ROWS):
            case [int(rows), int(samples)]:
                return f"It made {rows} rows of {samples} samples; whether it left some out, the ledger cannot tell."
    return ""


def _models_without_checkpoint(layout: RunLayout, plan: Plan) -> list[str]:
    """Number the models of a run that has saved nothing: if it has several and more updates than one needs."""
    starts = read_starts(layout.root)
    model = starts[-1].get("model") if starts else None
    if not isinstance(model, dict) or model.get("class") != SEVERAL_MODELS:
        return []
    num_models = math.ceil(sum(line.updates for line in Ledger.read_lines(layout.ledger)) / plan.total_updates)
    return [f"model {number}" for number in range(1, num_models + 1)] if num_models > 1 else []


def _newest_checkpoint(layout: RunLayout) -> dict[str, Any]:
    """Return the sections of the newest checkpoint's `trainer_state.json`; empty if there is no checkpoint."""
    from hezar_train.checkpoint.format import MOST_JSON_BYTES, parse_json, unpack

    if not (folders := layout.checkpoint_folders()):
        return {}
    path = folders[max(folders)] / STATE_FILE
    try:
        found = dict(parse_json(read_file(path, MOST_JSON_BYTES), STATE_FILE))
        state = unpack(found["state"], {})
        TrainerState.refuse_misfits(state)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. `hezar-train verify RUN` says more.") from error
    return {**found, "state": state}


def num_before(line: LedgerLine, state: dict[str, Any], *, in_sequence: bool) -> int:
    """Count the updates of a line that a checkpoint has seen; models in sequence come by one place more than once."""
    if in_sequence:
        num_seen = int(state.get("update_step", 0)) - line.update + 1
        return max(0, min(num_seen, line.updates))
    epoch, position = state.get("epoch", 0), state.get("position", 0)
    if line.epoch != epoch or line.end <= position:
        return line.updates if line.epoch <= epoch else 0
    return (position - line.first) // line.count if position > line.first else 0


def _check_epochs(audit: Audit, model: _ModelLedger, plan: Plan) -> None:
    """Every epoch of a model but the last must be whole; the last is, or is under way."""
    of_model = f"{model.name}, " if model.name else ""
    problems = [f"{of_model}{problem}" for problem in (*model.problems, *_short_epochs(model, plan))]
    audit.problems += problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        audit.problems.append(f"and {len(problems) - MOST_PROBLEMS} more of this kind")
    if problems or not model.ends:
        return
    *whole, last = model.ends
    if _is_whole(model.ends[last], plan):
        whole.append(last)
    if whole:
        positions = f"the positions 0 to {model.ends[whole[-1]] - 1} came once each, in order, none left out"
        dropped = f"; the rest of less than {plan.window_samples} is dropped (drop_last)" if plan.drop_last else ""
        audit.proven.append(f"{of_model}{_epochs(whole)}: {positions}{dropped}")
    audit.is_whole = audit.is_whole and last in whole
    if last not in whole:
        of = "a stream" if plan.num_samples is None else f"{plan.num_samples}"
        audit.proven.append(
            f"{of_model}epoch {last}: the first {model.ends[last]} positions of {of} came once each, in order"
        )


def _short_epochs(model: _ModelLedger, plan: Plan) -> Iterator[str]:
    for epoch, end in model.ends.items():
        if plan.num_samples is not None and end > plan.num_samples:
            yield f"epoch {epoch}: it went to position {end - 1}, but there are {plan.num_samples} samples"
        elif epoch != model.last_epoch and plan.num_samples is not None and not _is_whole(end, plan):
            yield f"epoch {epoch}: positions {end} to {plan.num_samples - 1} were left out"


def _is_whole(end: int, plan: Plan) -> bool:
    if plan.num_samples is None:
        return False
    return end == plan.num_samples or (plan.drop_last and plan.num_samples - end < plan.window_samples)


def _epochs(numbers: list[int]) -> str:
    return f"epoch {numbers[0]}" if len(numbers) == 1 else f"epochs {numbers[0]} to {numbers[-1]}"


def _check_orders(
    audit: Audit, models: Sequence[_ModelLedger], plan: Plan, config: TrainerConfig, layout: RunLayout
) -> None:
    """Compute the orders of as many epochs as is reasonable, and see that each sample stands in each of them once."""
    from hezar_train.data.sampler import Permutation

    if not plan.num_samples or not (config.dataloader_shuffle or config.uses_lengths):
        return
    epochs = list(dict.fromkeys(epoch for model in models for epoch in model.ends))  # all models have the same orders
    keys = epochs if config.reshuffle_each_epoch or plan.window_tokens else [0]
    computed = keys[: MOST_POSITIONS // max(plan.num_samples, POSITIONS_OF_AN_ORDER)]
    # Without one to compute no lengths are needed: the plan may name a number of samples that no memory holds.
    by_length = _by_length(config, plan, layout) if config.uses_lengths and computed else None
    for key in computed:
        if by_length is not None:
            order = by_length.order(key, plan.window_samples).samples
        else:
            order = Permutation(plan.num_samples, config.seed, key).chunk(0, plan.num_samples)
        if len(order) != plan.num_samples or not reaches_all(order):
            audit.problems.append(f"the shuffle of epoch {key} does not reach every sample")
        if by_length is not None and plan.window_tokens is not None:
            _check_windows(audit, models, by_length, key, plan)
    if computed:
        of = f"{len(computed)} of {len(keys)} orders" if len(computed) < len(keys) else f"all {len(keys)} orders"
        lengths = f", lengths {by_length.lengths.digest[:8]}" if by_length is not None else ""
        audit.proven.append(f"the shuffle (seed {config.seed}{lengths}) has each of {plan.num_samples} samples at one "
                            f"position: {of} computed")  # fmt: skip
    if by_length is not None and plan.window_tokens is not None and computed and not audit.problems:
        audit.proven.append(
            f"every update of {_epochs(computed)} took just the samples that the lengths say: none has more than "
            f"{plan.window_tokens} tokens"
        )


def _by_length(config: TrainerConfig, plan: Plan, layout: RunLayout) -> ByLength:
    """Return what the lengths of the run's samples decide, from the file in its folder."""
    from hezar_train.data import ByLength, Lengths, LengthSettings

    if not layout.lengths.is_file():
        raise DataError(f"{layout.root} has no {layout.lengths.name}, without which its order cannot be computed")
    settings = LengthSettings(config.group_by_length, plan.window_tokens, plan.step_tokens, config.packing)
    return ByLength(
        Lengths.load(layout.lengths, plan.num_samples or 0), settings, seed=config.seed,
        shuffle=config.dataloader_shuffle, reshuffle=config.reshuffle_each_epoch,
    )  # fmt: skip


def _check_windows(audit: Audit, models: Sequence[_ModelLedger], by_length: ByLength, epoch: int, plan: Plan) -> None:
    """Compare where the updates of an epoch ended with where the lengths say that they end."""
    expected = by_length.order(epoch, plan.window_samples).ends
    for model in models:
        most = 0 if expected is None else len(expected)
        found = list(itertools.islice(model.update_ends(epoch), most + 1))
        wanted = [] if expected is None else expected[: len(found)].tolist()
        if found != wanted:
            pairs = enumerate(zip(found, wanted, strict=False))
            place = next((number for number, (one, other) in pairs if one != other), len(wanted))
            right = f"by the lengths it ends at {wanted[place] - 1}" if place < len(wanted) else "there is none such"
            audit.problems.append(
                f"epoch {epoch}: its update {place + 1} ended at position {found[place] - 1}, and {right}"
            )


def reaches_all(order: Indices) -> bool:
    """Tell whether an order of samples has each of them, and so each of them once."""
    import numpy as np

    is_met = np.zeros(len(order), dtype=bool)
    is_met[order] = True
    return bool(is_met.all())


def _check_checkpoint(audit: Audit, state: dict[str, Any], num_seen: int) -> None:
    if not state:
        return
    counted = state.get("samples_seen")
    words = f"the checkpoint of step {state.get('global_step')} has seen {counted} samples"
    if counted == num_seen:
        audit.proven.append(f"{words}, as many as the ledger has up to there")
    else:
        audit.problems.append(f"{words}; the ledger has {num_seen} up to there")
