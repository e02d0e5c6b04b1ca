"""What a person wants predictions for: from files to inputs, and from inputs to samples.

An input is a text, the path of a file, or a JSON value. The recipe's `read(given, preprocessor)` makes a sample of it,
of the form that its datasets have, without labels; a recipe without one is served by its preprocessor, called with the
input. Nothing is read before it is fetched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hezar_train.errors import DataError

__all__ = ["Inputs", "gather_inputs", "reader_of"]

STANDARD_INPUT = "-"
TEXT_SUFFIX = ".txt"
JSON_LINES_SUFFIX = ".jsonl"
TEXT_KEY = "text"
PATH_KEYS = ("path", "image", "audio")
WRONG_INPUT = (OSError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What a recipe's `read` raises of something that it was not made for; torch and readers of sounds say RuntimeError."""


class Inputs:
    """Inputs as a dataset; each becomes a sample when it is fetched."""

    def __init__(self, given: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self.given, self._read = given, read

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        given = self.given[index]
        try:
            return self._read(given)
        except WRONG_INPUT as error:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{str(given)!r} cannot be made a sample: {reason}") from error


def gather_inputs(files: Sequence[str]) -> list[Any]:
    """Return the inputs in files: the lines of `.txt` and `.jsonl`, the files of a folder, else each file itself."""
    found = [given for file in files for given in _inputs_in(file)]
    if not found:
        raise DataError(f"there is nothing to predict for: {'; '.join(map(_lack_of, files))}")
    return found


def reader_of(module: ModuleType, preprocessor: Any) -> Callable[[Any], Any]:
    """Return how a recipe turns an input into a sample."""
    own = getattr(module, "read", None)
    if callable(own):
        return lambda given: own(given, preprocessor)
    if callable(preprocessor):
        return lambda given: preprocessor(str(given) if isinstance(given, Path) else given)
    raise DataError(
        "this recipe does not say how a text or a file becomes a sample: define read(given, preprocessor) in its "
        "recipe.py, or let build() return a preprocessor that can be called with one."
    )


def _inputs_in(file: str) -> Iterator[Any]:
    if file == STANDARD_INPUT:
        yield from _lines(sys.stdin.read())
        return
    path = Path(file)
    if not path.exists():
        raise DataError(
            f"{path}: there is no such file. A text is given in a .txt file, a line each, or on standard input: "
            "echo 'some text' | hezar-train predict RUN -"
        )
    if path.is_dir():
        yield from sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
    elif path.suffix == TEXT_SUFFIX:
        yield from _lines(_text_of(path))
    elif path.suffix == JSON_LINES_SUFFIX:
        yield from _json_lines(path)
    else:
        yield path


def _lack_of(file: str) -> str:
    if Path(file).is_dir():
        return f"the folder {file} has no files (hidden ones, and those in folders below, are not read)"
    return f"{'the standard input' if file == STANDARD_INPUT else file} has no line that is not empty"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if line.strip():
            try:
                yield _plain_input(json.loads(line), path.parent)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error.msg}") from error


def _plain_input(value: Any, folder: Path) -> Any:
    """Return the text or the path that an object is about, where it says so; a path is seen from the file's folder."""
    if not isinstance(value, dict):
        return value
    if isinstance(value.get(TEXT_KEY), str):
        return value[TEXT_KEY]
    path = next((value[key] for key in PATH_KEYS if isinstance(value.get(key), str)), None)
    return value if path is None else folder / path
