"""What a recipe's `read` is given: it asks for a text or for a file, and what is neither is refused with a sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hezar_train.errors import DataError

__all__ = ["path_of", "text_of"]


def text_of(given: Any) -> str:
    """Return a text as it is; refuse a file, and any other JSON value."""
    if isinstance(given, str):
        return given
    raise DataError(
        f"{given} is {_kind_of(given)}; a text is expected. Put texts into a .txt file, a line each, or into a .jsonl "
        'file as {"text": ...}'
    )


def path_of(given: Any) -> Path:
    """Return the path of a file, which may be written as a text; refuse any other JSON value."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise DataError(
        f'{given} is {_kind_of(given)}; a file is expected. Name the file itself, or in a .jsonl file {{"path": ...}}'
    )


def _kind_of(given: Any) -> str:
    return "a file" if isinstance(given, os.PathLike) else f"a JSON value of the type {type(given).__name__}"
