"""Results as people pass them on: nested mappings flattened to one level, and lines to paste into a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from hezar_train.errors import DataError

__all__ = ["flatten_results_dict", "print_csv_format"]


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested results as one mapping: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in _leaves(results, ""):
        if name in flat:
            raise DataError(f"two results flatten to the name {name!r}; rename one of them")
        flat[name] = value
    return flat


def print_csv_format(results: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print for each task of `results` its name, a line of metric names and a line of values."""
    stream = sys.stdout if stream is None else stream
    for task, found in results.items():
        if not isinstance(found, Mapping):
            stream.write(f"{task}={found}\n")
            continue
        flat = flatten_results_dict(found)
        stream.write(f"task: {task}\n{','.join(flat)}\n{','.join(map(_number, flat.values()))}\n")


def _leaves(results: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
