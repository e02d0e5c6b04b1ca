"""The file that names the best checkpoint of a run, read with care: a person may have written it."""

from __future__ import annotations

from pathlib import Path

from hezar_train.config import read_mapping
from hezar_train.errors import CheckpointError, ConfigError

__all__ = ["read_best_step"]


def read_best_step(file: Path) -> int | None:
    """Return the step of the best checkpoint; None if there is no best result."""
    if not file.is_file():
        return None
    try:
        step = read_mapping(file).get("step")
    except ConfigError as error:
        raise CheckpointError(f"{error}; expected the step of the best checkpoint") from error
    if not isinstance(step, int) or isinstance(step, bool):
        raise CheckpointError(f"{file}: expected the step of the best checkpoint, got step={step!r}")
    return step
