"""The command line: `hezar-train train` and `hezar-train config validate`.

Owns words, exit codes and how an error looks; everything else happens in `launch`. Nothing here imports torch until a
training really starts: a mistake in a config is answered at once.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hezar_train import __version__
from hezar_train.elastic import num_restarts, reported_exit, run_group
from hezar_train.errors import ConfigError, DataError, HezarTrainError, TrainingInterrupted

if TYPE_CHECKING:
    from hezar_train.launch import LoadedRecipe

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_REFUSED = 2  # also click's own code for a wrong command line
EXIT_INTERRUPTED = 130

EXIT_CODES = """\b
Exit codes:
  0    done (also: it was done already)
  1    failed: a damaged checkpoint, a locked folder, a loss that is not finite, an unexpected error
  2    refused: a mistake in the config, the data or the command line
  130  interrupted by Ctrl-C; after the first one, the run was saved
  143  ended by SIGTERM; the run was saved"""

DEBUG = "hezar_train.debug"
SAVED_BEFORE = "HEZAR_TRAIN_SAVED_BEFORE"
NUM_RESTARTS = 3


def _note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.find_root().meta[DEBUG] = value or ctx.find_root().meta.get(DEBUG, False)


def _debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --debug before and after the name of a command."""
    words = "Show the traceback of an error."
    return click.option("--debug", is_flag=True, expose_value=False, callback=_note_debug, help=words)(command)


class _Commands(click.Group):
    """Show the package's errors as one readable block and turn them into exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TrainingInterrupted as interruption:
            click.echo(f"{interruption} The same command goes on from there.", err=True)
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except HezarTrainError as error:
            if ctx.find_root().meta.get(DEBUG):
                traceback.print_exc()
            else:
                _show(error)
            ctx.exit(EXIT_REFUSED if isinstance(error, ConfigError | DataError) else EXIT_FAILED)


def _show(error: HezarTrainError) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(str(error), err=True)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show what a config warns of without the place in our source."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if SAVED_BEFORE in os.environ or not _is_main():
        return  # the front has shown them, or the main process does
    for warning in caught:
        click.echo(f"warning: {warning.message}", err=True)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hezar-train")
@_debug_option
def _root() -> None:
    """Train PyTorch models from one config; kill a run anywhere and get the same model."""


@_root.command("train", short_help="Train a recipe, or go on with it.")
@click.argument("recipe", metavar="RECIPE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--num-processes", type=click.IntRange(min=1), metavar="N", help="Train with N processes on this machine."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="R",
    help=f"How often to start again when a process dies; {NUM_RESTARTS} if not given. Needs --num-processes.",
)
@_debug_option
def _train(recipe: str, overrides: tuple[str, ...], num_processes: int | None, max_restarts: int | None) -> None:
    """Train a recipe: a name, a folder, or a config file in a recipe's folder.

    KEY=VALUE changes a field of the trainer's config, recipe.KEY=VALUE an option of the recipe; values are YAML.

    \b
    Examples:
      hezar-train train digits
      hezar-train train digits num_epochs=5 output_dir=runs/short recipe.dropout=0.1
      hezar-train train recipes/digits/smoke.yaml
      hezar-train train digits --num-processes 2

    A run that was stopped goes on with the same command, if its config says resume_from_checkpoint: true.
    """
    from hezar_train.launch import load_recipe

    with _plain_warnings():
        loaded = load_recipe(recipe, overrides)
    if num_processes is not None:
        restarts = NUM_RESTARTS if max_restarts is None else max_restarts
        sys.exit(_train_in_processes(loaded, [recipe, *overrides], num_processes, restarts))
    if max_restarts is not None:
        raise click.UsageError("--max-restarts is for several processes: give --num-processes, too.")
    _train_here(loaded)


def _train_here(loaded: LoadedRecipe) -> None:
    """Train in this process, which may be one of several; after a restart by our front, from the newest checkpoint.

    Not after one by torchrun: over several machines its processes do not agree on how often they were restarted.
    """
    from hezar_train.launch import build_trainer, resumed

    if num_restarts() and SAVED_BEFORE in os.environ:
        loaded = resumed(loaded, os.environ[SAVED_BEFORE])
    trainer = build_trainer(loaded)
    trainer.train()
    if not _is_main():
        return
    words = f"Everything lies in {loaded.config.output_dir}"
    if trainer.folder.best.exists():
        words += f"; the best checkpoint is that of step {trainer.state.best_checkpoint}"
    click.echo(words)


def _train_in_processes(loaded: LoadedRecipe, arguments: list[str], num_processes: int, max_restarts: int) -> int:
    """Run this very command, without its number of processes, in several of them; return the exit code."""
    from hezar_train.launch import saved_checkpoints

    if "WORLD_SIZE" in os.environ:
        raise click.UsageError(
            "--num-processes starts the processes itself, but another launcher has started this one already "
            f"(WORLD_SIZE={os.environ['WORLD_SIZE']}). Leave one of the two out."
        )
    config = loaded.config
    os.environ[SAVED_BEFORE] = saved_checkpoints(config)
    has_here = bool({"", os.getcwd()} & set(sys.path))
    debug = ["--debug"] if click.get_current_context().find_root().meta.get(DEBUG) else []
    python = [sys.executable, *([] if has_here else ["-P"]), "-m", "hezar_train"]
    on_cpu = config.use_cpu or str(config.device).startswith("cpu")
    progress = functools.partial(saved_checkpoints, config)
    return run_group([*python, *debug, "train", "--", *arguments], num_processes, max_restarts, progress, on_cpu=on_cpu)


@_root.group("config", cls=click.Group)
def _config() -> None:
    """Look at config files."""


@_config.command("validate", short_help="Tell all problems of a config file.")
@click.argument("file", type=click.Path())
@_debug_option
def _validate(file: str) -> None:
    """Check a config file, plain or with a recipe's sections, and tell all its problems at once.

    \b
    Example:
      hezar-train config validate recipes/digits/config.yaml
    """
    from hezar_train.launch import check_file

    with _plain_warnings():
        check_file(file)
    click.echo(f"{file}: no problems")


def main() -> None:
    """Run the command line and leave with its exit code."""
    with reported_exit():
        sys.exit(_root.main(prog_name="hezar-train"))
