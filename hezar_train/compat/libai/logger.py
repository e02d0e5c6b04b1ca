"""LiBai's `setup_logger`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

__all__ = ["setup_logger"]


def setup_logger(
    output: str | os.PathLike[str] | None = None, distributed_rank: int = 0, *, name: str = "libai"
) -> logging.Logger:
    """Let the logger of that name print on the main process, and write to `log.txt` in a folder if one is given."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    if distributed_rank != 0 or logger.handlers:
        return logger
    made: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if output:
        Path(output).mkdir(parents=True, exist_ok=True)
        made.append(logging.FileHandler(Path(output) / "log.txt"))
    for handler in made:
        handler.setFormatter(logging.Formatter("[%(asctime)s %(name)s] %(message)s"))
        logger.addHandler(handler)
    return logger
