"""Histories as one JSON file: floats are written so that they read back exactly.

Owns the format and its checks. A number that is not finite is written as NaN or Infinity, as Python's `json` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hezar_train.config.files import write_atomically
from hezar_train.errors import DataError
from hezar_train.events.history import History

__all__ = ["SavedHistory", "read_histories", "write_histories"]

_VERSION = 1


class SavedHistory(NamedTuple):
    """The values of one name as a file holds them."""

    values: list[float]
    steps: list[int]
    num_ever: int
    sum_ever: float
    smoothing_hint: bool | None


def write_histories(path: str | os.PathLike[str], histories: Mapping[str, History]) -> Path:
    """Write all values held, whole or not at all."""
    saved = {name: _saved(history)._asdict() for name, history in histories.items()}
    content = json.dumps({"version": _VERSION, "histories": saved}, ensure_ascii=False)
    return write_atomically(path, content + "\n")


def read_histories(path: str | os.PathLike[str]) -> dict[str, SavedHistory]:
    """Read what `write_histories` wrote."""
    try:
        content = json.loads(Path(path).read_bytes())
        version, histories = content["version"], content["histories"]
        saved = {name: _parse(fields) for name, fields in histories.items()} if version == _VERSION else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is not a file of histories, as save_history() writes it") from None
    if version != _VERSION:
        raise DataError(f"{path} has version {version!r} of the format, expected {_VERSION}")
    return saved


def _saved(history: History) -> SavedHistory:
    points = history.values()
    values, steps = [value for value, _ in points], [step for _, step in points]
    return SavedHistory(values, steps, history.total, history.global_sum(), history.smoothing_hint)


def _parse(fields: dict[str, Any]) -> SavedHistory:
    saved = SavedHistory(**fields)
    pairs = zip(saved.values, saved.steps, strict=True)  # a ValueError if one list is shorter
    values, steps = zip(*[(float(value), int(step)) for value, step in pairs], strict=True)
    return saved._replace(values=list(values), steps=list(steps))
