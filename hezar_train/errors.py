"""Every error a user can meet: one base, a few kinds, each saying what was given, what was expected and what to do.

This module owns the kinds, the one way to suggest a spelling, what of a text may be shown, and which code is the
user's own; it imports nothing of the package.
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HezarTrainError",
    "HookError",
    "HookTypeError",
    "HubError",
    "LostProcessError",
    "MissingDependencyError",
    "NoSuchCheckpointError",
    "NonFiniteError",
    "RunLockedError",
    "TrainingInterrupted",
    "a_kind",
    "choices",
    "is_ours",
    "is_own_code",
    "nearest",
    "printable",
    "shown_path",
    "state_for",
    "suggestion",
    "why_unreadable",
]

PROGRAM = "hezar-train"
NO_RIGHT = "You have no right to read or write it, which says nothing of what is in it. Change its rights or owner."
PACKAGE = Path(__file__).parent
SHIPPED_RECIPES = PACKAGE / "_recipes"

# Controls but tab and newline, lone surrogates, separators of lines, and what turns the direction of all that follows.
# Marks of direction and joiners of single letters stay: Persian is written with them.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class _Sendable(BaseException):
    """An error that another process gets as it was raised, whatever its constructor takes.

    Python sends `args`, which is what the innermost constructor was given, and calls the outermost one with it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), self.args, vars(self))


def _received(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Make a sent error again, past its own constructor."""
    error = kind.__new__(kind, *args)
    builtin: Any = next(one for one in kind.__mro__ if one.__module__ == "builtins")
    builtin.__init__(error, *args)  # `code` of a SystemExit, `msg` of an ImportError
    vars(error).update(attributes)
    return error


class HezarTrainError(_Sendable, Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(HezarTrainError, ValueError):
    """A setting, or a combination of settings, that cannot work; `problems` holds every one found."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self._message())

    def _message(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        return f"{len(self.problems)} problems:\n{lines}"


class DataError(HezarTrainError, ValueError):
    """A dataset, loader or batch of a form that cannot be trained on; `place` says which row of how many, from 0."""

    def __init__(self, message: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.place = place


class CheckpointError(HezarTrainError, ValueError):
    """A checkpoint that is missing, damaged, or does not fit the run."""


class NoSuchCheckpointError(CheckpointError, ConfigError):
    """A setting names a checkpoint or weights that are not there."""


class RunLockedError(HezarTrainError):
    """Another live trainer holds the run's folder."""


class LostProcessError(HezarTrainError, RuntimeError):
    """Another process of the run has ended, or did not answer in time."""


class HubError(HezarTrainError):
    """The Hub refused or could not be reached."""


class HookError(HezarTrainError, ValueError):
    """A hook, moment or hook name that does not exist, or exists twice."""


class HookTypeError(HookError, TypeError):
    """Something given as a hook that is none."""


class MissingDependencyError(HezarTrainError, ImportError):
    """An optional package is needed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}. Install it with: pip install 'hezar-train[{extra}]'"
        )


class NonFiniteError(HezarTrainError, ArithmeticError):
    """The loss or the gradient norm is not finite; the update was not applied."""

    def __init__(self, message: str, step: int, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.step = step
        self.samples = list(samples)


class TrainingInterrupted(_Sendable, SystemExit):
    """A signal ended the run after a save; `code` is the exit code (143 for SIGTERM, 130 for Ctrl-C)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message


@contextmanager
def state_for(what: str) -> Iterator[None]:
    """Turn what an object raises when it is given a state from a checkpoint, which may be anybody's, into our error."""
    try:
        yield
    except HezarTrainError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's state of {what} does not fit: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, None if none is near."""
    spelled = {word.lower(): word for word in known}
    typed = str(given).lower()
    near = sorted((word for word in spelled if word.startswith(typed)), key=len) if len(typed) >= 3 else []
    near = near or difflib.get_close_matches(typed, spelled, n=1, cutoff=0.6)
    return str(spelled[near[0]]) if near else None


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known word, or an empty string."""
    near = nearest(given, known)
    return "" if near is None else f" Did you mean {near!r}?"


def choices(known: Iterable[str]) -> str:
    """Join names for a message, sorted."""
    return ", ".join(sorted(known))


def a_kind(value: object) -> str:
    """Say of which kind a value is, with its article: "an int", "the class Net", "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeioAEIO' else 'a'} {kind}"


def is_ours(filename: str) -> bool:
    """Tell whether a file is this package's own code, and no recipe that comes with it."""
    path = Path(filename)
    return path.is_relative_to(PACKAGE) and not path.is_relative_to(SHIPPED_RECIPES)


def is_own_code(filename: str) -> bool:
    """Tell whether a file is the user's own code or a recipe: not this package, nor a library."""
    path = Path(filename)
    if is_ours(filename) or path.name == PROGRAM:  # the script that pip makes, wherever it lies
        return False
    if path.is_relative_to(SHIPPED_RECIPES):
        return True
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return os.path.isfile(path) and not any(path.is_relative_to(folder) for folder in libraries)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a file's path as a user would type it: from the present folder, if it lies below it."""
    try:
        return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else os.fspath(path)
    except OSError:  # the present folder is gone
        return os.fspath(path)


def why_unreadable(error: Exception) -> str:
    """Say why a file could not be read, and what to do, where the reason is a usual one."""
    if isinstance(error, PermissionError):
        return f"{error.strerror}. {NO_RIGHT}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text in UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8."
    return str(error)


def printable(text: str) -> str:
    """Return text without what a terminal would obey: names, data and errors of others may hold escape sequences."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)
