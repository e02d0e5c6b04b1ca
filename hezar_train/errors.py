"""Every error a user can meet: one base, a few kinds, each saying what was given, what was expected and what to do.

This module owns the kinds, the one way to suggest a spelling and what of a text may be shown; it imports nothing of
the package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HezarTrainError",
    "HookError",
    "HookTypeError",
    "HubError",
    "MissingDependencyError",
    "NonFiniteError",
    "RunLockedError",
    "TrainingInterrupted",
    "choices",
    "printable",
    "state_for",
    "suggestion",
]

# Controls but tab and newline, lone surrogates, separators of lines, and what turns the direction of all that follows.
# Marks of direction and joiners of single letters stay: Persian is written with them.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class HezarTrainError(Exception):
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
    """A dataset, loader or batch of a form that cannot be trained on."""


class CheckpointError(HezarTrainError, ValueError):
    """A checkpoint that is missing, damaged, or does not fit the run."""


class RunLockedError(HezarTrainError):
    """Another live trainer holds the run's folder."""


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


class TrainingInterrupted(SystemExit):
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


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known word, or an empty string."""
    spelled = {word.lower(): word for word in known}
    typed = str(given).lower()
    near = sorted((word for word in spelled if word.startswith(typed)), key=len) if len(typed) >= 3 else []
    near = near or difflib.get_close_matches(typed, spelled, n=1, cutoff=0.6)
    return f" Did you mean {str(spelled[near[0]])!r}?" if near else ""


def choices(known: Iterable[str]) -> str:
    """Join names for a message, sorted."""
    return ", ".join(sorted(known))


def printable(text: str) -> str:
    """Return text without what a terminal would obey: names, data and errors of others may hold escape sequences."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)
