"""Where a command writes: a place that cannot be written to is refused before any work is done for it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from hezar_train.errors import ConfigError

__all__ = ["refuse_unwritable_file", "refuse_unwritable_folder"]


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
