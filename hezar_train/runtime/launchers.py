"""What a launcher was asked for, where it tells nobody."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

__all__ = ["wanted_of_accelerate"]


def wanted_of_accelerate() -> int:
    """Return the processes that `accelerate launch` was asked for, if it started this one; else 1.

    With `--cpu` it starts one process whatever was asked for, and says nothing.
    """
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("-", "_").split("\0")
    except OSError:  # no such file on this system
        return 1
    if "launch" not in words or not any(word.endswith("accelerate") for word in words):
        return 1
    asked = [after for word, after in itertools.pairwise(words) if word == "__num_processes"]
    asked += [word.partition("=")[2] for word in words if word.startswith("__num_processes=")]
    return int(asked[-1]) if asked and asked[-1].isdigit() else 1
