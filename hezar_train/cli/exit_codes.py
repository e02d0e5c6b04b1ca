"""Exit codes, and errors as one readable block, with a traceback only for those who ask."""

from __future__ import annotations

import errno
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import textwrap
import traceback
from types import TracebackType
from typing import Any, NoReturn

import click

from hezar_train.cli.output import echo
from hezar_train.config.credentials import shown_arguments, without_secrets
from hezar_train.errors import (
    NO_RIGHT,
    PROGRAM,
    ConfigError,
    DataError,
    HezarTrainError,
    HookError,
    HubError,
    LostProcessError,
    TrainingInterrupted,
    is_ours,
    is_own_code,
    printable,
    shown_path,
    suggestion,
)

__all__ = [
    "DEBUG",
    "EXIT_CODES",
    "EXIT_FAILED",
    "EXIT_NOT_UPLOADED",
    "PROGRAM",
    "Commands",
    "NotUploadedError",
    "is_main_process",
    "show_error",
    "show_unexpected",
]

EXIT_FAILED = 1
EXIT_REFUSED = 2  # also click's own code for a wrong command line
EXIT_NOT_UPLOADED = 75  # the system's word for "try again later"
EXIT_INTERRUPTED = 130

EXIT_CODES = """\b
Exit codes:
  0    done (also: it was done already)
  1    failed: a damaged checkpoint, a locked folder, a full disk, a non-finite loss, another process of the run that is
       lost, the Hub, an error of the recipe's own code, an unexpected error
  2    refused: a mistake in the config, the data, the hooks or the command line
  75   trained, but not uploaded to the Hub, also by `push`: `hezar-train push RUN` finishes it
  130  interrupted by Ctrl-C; after the first one, the run was saved
  143  ended by SIGTERM; the run was saved"""

ERROR_MARK = "error: "
UNEXPECTED = "This was not expected."
OF_THE_RECIPE = "This came from the recipe: its code, its data or its options. Correct it there."
ASKED_BYTES = re.compile(r"you tried to allocate (\d+) bytes")
NO_SPACE = "Nothing could be written there. Free some space, or name a folder on another disk."
OF_THE_SYSTEM = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NO_RIGHT),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), NO_SPACE),
}
DEBUG = "hezar_train.debug"
EXITED_WITHIN = (
    "was called by a recipe, a dataset, a model or a hook before the command was done; expected it to go on or to "
    "raise. Take the call out of that code, or raise an error that says what is wrong."
)


class NotUploadedError(HubError):
    """A push that failed: what was trained lies in the run's folder, and can be pushed again."""


class Commands(click.Group):
    """Show the package's errors as one readable block and turn them into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Keep the order in which the commands were added: what a newcomer needs comes first."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except TrainingInterrupted as interruption:
            echo(f"{interruption} The same command goes on from there.", err=True)
            raise
        except KeyboardInterrupt:
            echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except click.NoSuchOption as error:
            words = f"No such option {error.option_name!r}.{_written_as_field(error)}"
            raise click.UsageError(words, error.ctx) from error
        except click.UsageError as error:
            words = error.format_message()
            if printable(words) == words:
                raise
            raise click.UsageError(printable(words), error.ctx) from error
        except SystemExit as end:
            place = _own_place(end.__traceback__)
            if place is None and end.code not in (None, 0):
                raise
            show_error("\n".join([f"{_exit_of(end)} {EXITED_WITHIN}", *_shown(place)]))
            ctx.exit(EXIT_FAILED)
        except OSError as error:
            if error.errno not in OF_THE_SYSTEM or _own_place(error.__traceback__) or ctx.find_root().meta.get(DEBUG):
                raise
            about = "" if error.filename is None else f"{error.filename}: "
            show_error(f"{about}{error.strerror}. {OF_THE_SYSTEM[error.errno]}")
            ctx.exit(EXIT_FAILED)
        except HezarTrainError as error:
            if ctx.find_root().meta.get(DEBUG):
                echo(traceback.format_exc(), err=True, nl=False)
            else:
                show_error("\n".join([str(error), *_notes(error)]))
            _leave(ctx, error)


OTHER_WAYS = {
    ("resume", "--checkpoint"): "It goes on from the newest; from another one: resume_from_checkpoint=FOLDER.",
    ("train", "--checkpoint"): "To go on from a checkpoint: resume_from_checkpoint=FOLDER.",
    ("train", "--resume"): "To go on with a run: hezar-train resume RUN.",
    ("train", "--config"): "A config file is given in the place of the recipe: hezar-train train FILE.yaml.",
}
"""What options that other programs have are here, by command."""


def _written_as_field(error: click.NoSuchOption) -> str:
    """Return how to write what was given as an option, if it is a field of the config and the command takes fields."""
    from hezar_train.config import TrainerConfig

    command = "" if error.ctx is None else str(error.ctx.command.name)
    if advice := OTHER_WAYS.get((command, error.option_name)):
        return f" {advice}"
    name = error.option_name.lstrip("-").replace("-", "_")
    takes_fields = error.ctx is not None and any(one.name == "overrides" for one in error.ctx.command.params)
    if takes_fields and name in TrainerConfig.fields():
        return f" A field of the config is given without dashes: {name}=VALUE."
    return suggestion(error.option_name, error.possibilities or ())


def _leave(ctx: click.Context, error: HezarTrainError) -> NoReturn:
    """Leave with the exit code of an error; of one that is another process's, the launcher may start all again."""
    if isinstance(error, LostProcessError):
        raise SystemExit(EXIT_FAILED) from error
    ctx.exit(_exit_code(error))


def _exit_code(error: HezarTrainError) -> int:
    if isinstance(error, NotUploadedError):
        return EXIT_NOT_UPLOADED
    return EXIT_REFUSED if isinstance(error, ConfigError | DataError | HookError) else EXIT_FAILED


def show_error(words: str) -> None:
    """Print an error as one block; on a terminal, lines that are too long end between words."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    click.secho(ERROR_MARK, fg="red", bold=True, nl=False, err=True)
    echo(words if width is None else folded(words, width), err=True)


def folded(words: str, width: int) -> str:
    """Fold the long lines of an error, each going on under its own beginning; words are never cut."""
    first, *others = words.split("\n")
    folder = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    folder.initial_indent, folder.subsequent_indent = " " * len(ERROR_MARK), "  "  # the mark stands there already
    lines = [folder.fill(first)[len(ERROR_MARK) :]]
    for line in others:
        indent = line[: len(line) - len(line.lstrip())]
        folder.initial_indent, folder.subsequent_indent = indent, indent + "   "
        lines.append(folder.fill(line.lstrip()) if len(line) > width else line)
    return "\n".join(lines)


def _about_module(name: str) -> str:
    """Say what to do where a module is not there; its package may have another name than itself."""
    known = {module.name for module in pkgutil.iter_modules()} | sys.stdlib_module_names
    near = suggestion(name, {each for each in known if not each.startswith("_")} - {name})
    return f"Correct the import, or install the package that has the module {name!r}.{near}"


def show_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that nobody expected: what, where in the user's own code, and where the whole traceback is."""
    lines = [f"{kind.__name__}: {error}"]
    told, own = _notes(error), _own_place(trace)
    if (place := own if told or own else _place(trace)) is not None:
        lines += _shown(place)
    kept = _keep(kind, error, trace)
    where = "" if kept is None else f" The traceback is in {kept}."
    lines += told
    if isinstance(error, ModuleNotFoundError) and own:
        lines.append(_about_module(str(error.name).partition(".")[0]))
    if (asked := ASKED_BYTES.search(str(error))) is not None:
        size = f"{int(asked[1]) / 1e9:,.3g} GB" if int(asked[1]) < 1e12 else f"{int(asked[1]) / 1e12:,.3g} TB"
        lines.append(f"There is not enough memory: {size} were asked for at once. Make what is built there smaller.")
    cause = OF_THE_RECIPE if told or own else UNEXPECTED
    lines.append(f"{cause}{where} --debug shows it here.")
    show_error("\n".join(lines))


def _exit_of(end: SystemExit) -> str:
    return "sys.exit()" if end.code is None else f"sys.exit({end.code!r})"


def _shown(place: traceback.FrameSummary | None) -> list[str]:
    """Return a line of code with where it stands, for an error."""
    if place is None:
        return []
    return [f"  in {shown_path(place.filename)}, line {place.lineno}, {place.name}:", f"    {place.line}"]


def is_main_process() -> bool:
    """Tell whether this process speaks for all of its group."""
    return os.environ.get("RANK", "0") == "0"


def _notes(error: BaseException) -> list[str]:
    """Return what was noted where an error passed: the sample, the batch, the worker."""
    return [line for note in getattr(error, "__notes__", ()) for line in str(note).splitlines()]


def _own_place(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """Return the last line of the user's own code, if what it called was no longer ours."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_own_code(frame.filename):
            return frame
        if is_ours(frame.filename):
            return None
    return None


def _place(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """Return the last line of the user's own code or of a recipe, else the last of all that has a text."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_own_code(frame.filename)]
    return next(reversed(own or [frame for frame in frames if frame.line]), None)


def _keep(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str | None:
    """Write the traceback to a file, for what took hours may not be worth repeating; None where that fails."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="hezar-train-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            told = "".join(traceback.format_exception(kind, error, trace))
            # Whoever asks for help passes it on.
            command = " ".join([sys.argv[0], *shown_arguments(sys.argv[1:])])
            file.write(f"{command}\n\n{without_secrets(told)}")
    except OSError:
        return None
    return file.name
