"""`train`, `resume` and `reproduce`: in this process, or in several that are started again when one dies."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hezar_train.cli.exit_codes import DEBUG, EXIT_NOT_UPLOADED, is_main_process
from hezar_train.cli.options import (
    NUM_RESTARTS,
    SAVED_BEFORE,
    debug_option,
    overrides_argument,
    plain_warnings,
    process_options,
    recipe_argument,
    recipe_option,
    refuse_unwritable_folder,
    run_argument,
    trust_option,
)
from hezar_train.cli.output import echo
from hezar_train.config.files import read_json
from hezar_train.errors import ConfigError, RunLockedError, TrainingInterrupted
from hezar_train.launch import join_group, num_restarts, run_group
from hezar_train.run_layout import CONFIG_FILE, RunLayout

if TYPE_CHECKING:
    from hezar_train.config import TrainerConfig
    from hezar_train.recipes import LoadedRecipe
    from hezar_train.trainer import Trainer

__all__ = [
    "reproduce",
    "resume",
    "train",
]

TRUST = "--trust"
FAST_DEV_RUN = ("max_steps=20", "eval_steps=10", "log_steps=1")

MOST_PROCESSES_A_CORE = 16
"""More would only wait for each other, or for memory."""


@click.command("train", short_help="Train a recipe, or go on with it.")
@recipe_argument
@overrides_argument
@click.option(
    "--fast-dev-run", is_flag=True, help="Try everything once: 20 steps, an evaluation every 10, in OUTPUT_DIR-dev."
)
@process_options
@trust_option
@debug_option
def train(
    recipe: str,
    overrides: tuple[str, ...],
    fast_dev_run: bool,
    num_processes: int | None,
    max_restarts: int | None,
    trust: bool,
) -> None:
    """Train a recipe: a name, a folder, a config file in a recipe's folder, or the train_config.yaml of a run.

    KEY=VALUE changes a field of the trainer's config, recipe.KEY=VALUE an option of the recipe; values are YAML.

    \b
    Examples:
      hezar-train train image_classification
      hezar-train train image_classification num_epochs=5 output_dir=runs/short recipe.dropout=0.1
      hezar-train train recipes/image_classification/smoke.yaml
      hezar-train train runs/short/train_config.yaml output_dir=runs/again seed=1
      hezar-train train image_classification --num-processes 2
      hezar-train train image_classification --fast-dev-run

    A run that was stopped goes on with the same command, if its config says resume_from_checkpoint: true; with
    `hezar-train resume RUN`, always.
    """
    from hezar_train.recipes import load_target

    with plain_warnings():
        loaded = load_target(recipe, overrides, trust=trust)
        if fast_dev_run:  # what keeps it away from the real run comes last: nothing can override it
            place = json.dumps(f"{Path(loaded.config.output_dir)}-dev")
            apart = (f"output_dir={place}", "resume_from_checkpoint=false", "push_to_hub=false")
            overrides = _replaced(_replaced(FAST_DEV_RUN, overrides), apart)
            loaded = load_target(recipe, overrides, trust=trust)
    _run(loaded, ["train", *_word(trust), "--", recipe, *overrides], num_processes, max_restarts)


@click.command("resume", short_help="Go on with a run, from its folder alone.")
@run_argument
@overrides_argument
@recipe_option
@process_options
@trust_option
@debug_option
def resume(
    run: str,
    overrides: tuple[str, ...],
    recipe: str | None,
    num_processes: int | None,
    max_restarts: int | None,
    trust: bool,
) -> None:
    """Go on with a run from its newest checkpoint: config, recipe and options are those in its folder.

    A change that would make it another run is refused, and so is a recipe that has changed since, unless you say
    accept_changes=true. What does not change the run is free: how often to log, save and evaluate; num_epochs, too,
    unless a schedule is laid out over the whole run.

    A run without a checkpoint is refused, unless it was stopped before it had trained anything.

    A folder may be somebody else's: a recipe of your own that you have not trained with on this machine, and other code
    that the folder names, is run only with --trust.

    \b
    Examples:
      hezar-train resume runs/image_classification
      hezar-train resume runs/image_classification num_epochs=40 accept_changes=true
      hezar-train resume runs/image_classification resume_from_checkpoint=best
    """
    from hezar_train.recipes import load_run, refuse_changed_recipe, refuse_without_checkpoint

    if any(override.startswith("output_dir=") for override in overrides):
        raise ConfigError(
            "a run goes on in its own folder. To start another one with its config: "
            f"hezar-train train {shlex.quote(f'{run}/{CONFIG_FILE}')} output_dir=..."
        )
    with plain_warnings():
        loaded = load_run(run, _replaced(["resume_from_checkpoint=true"], overrides), recipe, trust=trust)
    refuse_changed_recipe(loaded)
    if _is_first_start():
        refuse_without_checkpoint(loaded)
    place = [] if recipe is None else ["--recipe", recipe]
    _run(loaded, ["resume", *_word(trust), *place, "--", run, *overrides], num_processes, max_restarts)


@click.command("reproduce", short_help="Run a pushed run again, with a recipe of this machine.")
@click.argument("address", metavar="OWNER/NAME[@REVISION]")
@overrides_argument
@recipe_option
@process_options
@debug_option
def reproduce(
    address: str, overrides: tuple[str, ...], recipe: str | None, num_processes: int | None, max_restarts: int | None
) -> None:
    """Train again what a repository holds: its config, with a recipe of the same hash that is on this machine.

    No code of the repository is run. Folders, devices, trackers and the Hub are this machine's own affair.

    \b
    Example:
      hezar-train reproduce me/digits output_dir=runs/again
    """
    from hezar_train.hub import fetch_recipe
    from hezar_train.recipes import recipe_of_hash

    found = fetch_recipe(address)
    output = {"output_dir": f"runs/{found.repo_id.replace('/', '-')}-reproduced"}
    with plain_warnings():
        loaded = recipe_of_hash(found.sha256, {**found.fields, **output}, found.options, overrides, recipe)
    place = [] if recipe is None else ["--recipe", recipe]
    _run(loaded, ["reproduce", *place, "--", address, *overrides], num_processes, max_restarts)


def _word(trust: bool) -> list[str]:
    """Return what the launcher's processes are told of trust: what the user said, for each of them looks anew."""
    return [TRUST] if trust else []


def _replaced(earlier: Iterable[str], later: Iterable[str]) -> tuple[str, ...]:
    """Return overrides of which a later one stands in the place of an earlier one of its name."""
    later = tuple(later)
    keys = {text.partition("=")[0] for text in later}
    return (*(text for text in earlier if text.partition("=")[0] not in keys), *later)


def _run(loaded: LoadedRecipe, arguments: Sequence[str], num_processes: int | None, max_restarts: int | None) -> None:
    if _is_first_start() and is_main_process():
        refuse_unwritable_folder(loaded.config.output_dir, "output_dir=FOLDER")
    if num_processes is not None:
        restarts = NUM_RESTARTS if max_restarts is None else max_restarts
        if code := _train_in_processes(loaded, arguments, num_processes, restarts):
            sys.exit(code)
        return
    if max_restarts is not None:
        raise click.UsageError("--max-restarts is for several processes: give --num-processes, too.")
    _train_here(loaded)


def _is_first_start() -> bool:
    """Tell whether this command was not checked before: by our launcher, or by this process before a restart."""
    return SAVED_BEFORE not in os.environ and not num_restarts()


def _train_here(loaded: LoadedRecipe) -> None:
    """Train in this process, which may be one of several; after a restart by our launcher, from the newest checkpoint.

    Not after one by torchrun: over several machines its processes do not agree on how often they were restarted.
    """
    from hezar_train.recipes import build_trainer, resumed

    if num_restarts() and SAVED_BEFORE in os.environ:
        loaded = resumed(loaded, os.environ[SAVED_BEFORE])
    join_group(on_cpu=_is_on_cpu(loaded.config))
    trainer = build_trainer(loaded)
    try:
        trainer.train()
    except TrainingInterrupted:  # all processes leave together, so they can wait for the main one
        _report_together(trainer)
        raise
    except RunLockedError:  # the run is another trainer's
        raise
    except Exception:
        _write_report(trainer)
        raise
    _report_together(trainer)
    if is_main_process():
        _print_end(loaded, trainer)


def _report_together(trainer: Trainer) -> None:
    """Let the main process write the report before any other one leaves: a launcher would then end it, too."""
    trainer.runtime.processes.on_main(lambda: _write_report(trainer))


def _write_report(trainer: Trainer) -> None:
    """Write the page about the run and say where it is; whatever goes wrong with it must not hide how the run ended."""
    from hezar_train.report import write_report

    layout = RunLayout.of(trainer.config)
    if not trainer.runtime.is_main or not layout.plan.exists():  # it failed before it was a run
        return
    try:
        echo(f"Report: {write_report([layout.root])}")
    except Exception as error:  # noqa: BLE001 - the training counts, not the page about it
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        echo(f"warning: there is no report ({problem}). Try: hezar-train report {layout.root}", err=True)


def _print_end(loaded: LoadedRecipe, trainer: Trainer) -> None:
    """Say where everything is, and leave with the code of a run that is not on the Hub, if it should be."""
    echo(f"Everything lies in {loaded.config.output_dir}")
    if best := read_json(RunLayout.of(loaded.config).best):
        echo(f"The best checkpoint is that of step {best['step']}: {best['metric']} {best['value']:.4g}")
    if trainer.hub_uploaded is False:
        echo(f"Not uploaded. `hezar-train push {loaded.config.output_dir}` finishes it.", err=True)
        sys.exit(EXIT_NOT_UPLOADED)


def _train_in_processes(loaded: LoadedRecipe, arguments: Sequence[str], num_processes: int, max_restarts: int) -> int:
    """Run this very command, without its number of processes, in several of them; return the exit code."""
    from hezar_train.recipes import saved_checkpoints

    if "WORLD_SIZE" in os.environ:
        raise click.UsageError(
            "--num-processes starts the processes itself, but another launcher has started this one already "
            f"(WORLD_SIZE={os.environ['WORLD_SIZE']}). Leave one of the two out."
        )
    most = MOST_PROCESSES_A_CORE * (os.cpu_count() or 1)
    if num_processes > most:
        raise click.UsageError(
            f"--num-processes {num_processes}: expected at most {most} here, as there are {os.cpu_count()} cores. "
            "Give a process to each GPU, or to each core."
        )
    config = loaded.config
    os.environ[SAVED_BEFORE] = saved_checkpoints(config)
    has_here = bool({"", os.getcwd()} & set(sys.path))
    debug = ["--debug"] if click.get_current_context().find_root().meta.get(DEBUG) else []
    python = [sys.executable, *([] if has_here else ["-P"]), "-m", "hezar_train"]
    progress = functools.partial(saved_checkpoints, config)
    return run_group([*python, *debug, *arguments], num_processes, max_restarts, progress, on_cpu=_is_on_cpu(config))


def _is_on_cpu(config: TrainerConfig) -> bool:
    return config.use_cpu or str(config.device).startswith("cpu")
