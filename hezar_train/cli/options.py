"""What several commands share: their arguments and options, shell completion, warnings, tables, and checks of places.

A place that cannot be written to is refused before any work is done for it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hezar_train.cli.exit_codes import DEBUG, is_main_process
from hezar_train.cli.output import echo
from hezar_train.errors import ConfigError, HezarTrainError, printable, shown_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segments
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "GAP",
    "NUM_RESTARTS",
    "SAVED_BEFORE",
    "complete_fields",
    "complete_recipes",
    "debug_option",
    "output_width",
    "overrides_argument",
    "plain_warnings",
    "process_options",
    "recipe_argument",
    "recipe_option",
    "refuse_unwritable_file",
    "refuse_unwritable_folder",
    "run_argument",
    "show",
    "shown_path",
    "table",
    "trust_option",
]


SAVED_BEFORE = "HEZAR_TRAIN_SAVED_BEFORE"
NUM_RESTARTS = 3
WIDTH_OF_FILES = 200
GAP = 2  # between columns

Command = Callable[..., Any]


def debug_option(command: Command) -> Command:
    """Accept --debug before and after the name of a command."""
    words = "Show the traceback of an error."
    return click.option("--debug", is_flag=True, expose_value=False, callback=_note_debug, help=words)(command)


def _note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.find_root().meta[DEBUG] = value or ctx.find_root().meta.get(DEBUG, False)
    if value:
        sys.excepthook = sys.__excepthook__


def complete_recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the names of recipes, and files."""
    from hezar_train.recipes import recipe_names

    names = [CompletionItem(name) for name in recipe_names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def complete_fields(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the names of fields."""
    from hezar_train.config import TrainerConfig

    return [CompletionItem(name) for name in TrainerConfig.fields() if name.startswith(incomplete)]


def _complete_overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the names of fields, and of the recipe's options, with their equals sign."""
    options = [CompletionItem(name) for name in _options(ctx.params) if name.startswith(incomplete)]
    return [CompletionItem(f"{item.value}=") for item in (*complete_fields(ctx, param, incomplete), *options)]


def _options(arguments: Mapping[str, Any]) -> list[str]:
    """Return the options of the recipe, the file or the run that the command line names; none if it is not one."""
    from hezar_train.recipes import option_names

    given = next((arguments[name] for name in ("recipe", "source", "run") if arguments.get(name)), None)
    try:
        return [] if given is None else [f"recipe.{name}" for name in option_names(given)]
    except HezarTrainError:
        return []


def recipe_argument(command: Command) -> Command:
    """Take RECIPE: a name, a folder or a config file."""
    return click.argument("recipe", metavar="RECIPE", shell_complete=complete_recipes)(command)


def run_argument(command: Command) -> Command:
    """Take RUN: the folder of a run."""
    return click.argument("run", metavar="RUN", type=click.Path(file_okay=True))(command)


def overrides_argument(command: Command) -> Command:
    """Take any number of KEY=VALUE."""
    return click.argument(
        "overrides", metavar="[KEY=VALUE]...", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_overrides
    )(command)


def recipe_option(command: Command) -> Command:
    """Take --recipe, for a run whose recipe has moved."""
    words = "Where the recipe is, if it is not found."
    return click.option("--recipe", metavar="FOLDER", shell_complete=complete_recipes, help=words)(command)


def trust_option(command: Command) -> Command:
    """Take --trust, for a run whose recipe, or what it names, this user has not trained with yet."""
    words = (
        "Run the recipe and the code that a run's folder names, and remember them: the folder is yours, or you read it."
    )
    return click.option("--trust", is_flag=True, help=words)(command)


def process_options(command: Command) -> Command:
    """Take --num-processes and --max-restarts."""
    processes = click.option(
        "--num-processes", type=click.IntRange(min=1), metavar="N", help="Train with N processes on this machine."
    )
    restarts = click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="R",
        help=f"How often to start again when a process dies; {NUM_RESTARTS} if not given. Needs --num-processes.",
    )
    return processes(restarts(command))


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show what a config warns of without the place in our source."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if SAVED_BEFORE in os.environ or not is_main_process():
        return  # the launcher has shown them, or the main process does
    for warning in caught:
        echo(f"warning: {warning.message}", err=True)


def table(*titles: str, lines_between: int = 0) -> Table:
    """Return an empty table without a frame; text that is too long for its column goes on in the next line."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, GAP, lines_between, 0), header_style="bold")
    for title in titles:
        made.add_column(title, overflow="fold")
    return made


def output_width() -> int:
    """Return how many characters fit on a line: of the terminal, or of a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_FILES


def show(what: Table | Text) -> None:
    """Print as wide as the terminal; in a file or a pipe, wide enough and without spaces at the ends of lines."""
    from rich.console import Console

    if sys.stdout.isatty():
        console = Console(width=output_width(), markup=False, highlight=False)
        console.print(_printable_segments(what, console), end="")
        return
    console = Console(file=io.StringIO(), width=output_width(), markup=False, highlight=False)
    with console.capture() as captured:
        console.print(what)
    echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _printable_segments(what: Table | Text, console: Console) -> Segments:
    """Return what rich would print, with its styles, but without what the texts in it hold for a terminal."""
    from rich.segment import Segment, Segments

    return Segments(Segment(printable(one.text), one.style, one.control) for one in console.render(what))


def refuse_unwritable_folder(folder: str | os.PathLike[str], option: str) -> None:
    """Raise if a folder cannot be made, or not be written to; `option` is what names it on the command line."""
    path = Path(folder)
    try:
        _try_to_write_into(path)
    except OSError as error:
        reason = "it is a file" if os.path.isfile(path) else error.strerror
        raise ConfigError(
            f"{path} cannot be written to: {reason}. Expected a folder, or a place where one can be made. "
            f"Name another: {option}"
        ) from error


def refuse_unwritable_file(file: str | os.PathLike[str], option: str) -> None:
    """Raise if a file cannot be written; `option` is what names it on the command line."""
    path = Path(file)
    if os.path.isdir(path):
        raise ConfigError(f"{path} cannot be written: it is a folder. Name a file: {option}")
    try:
        _try_to_write_into(path.parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file: {option}") from error


def _try_to_write_into(folder: Path) -> None:
    """Make a folder and a file in it, as permissions do not tell everything; what was made is removed again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
