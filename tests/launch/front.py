"""Lead processes of `counting.py`. Arguments: how many of them, how many restarts, and theirs."""

from __future__ import annotations

import sys
from pathlib import Path

from hezar_train.launch import run_group

SAVED = Path("saved")

if __name__ == "__main__":
    command = [sys.executable, str(Path(__file__).with_name("counting.py")), *sys.argv[3:]]
    progress = lambda: SAVED.read_text() if SAVED.exists() else None  # noqa: E731
    sys.exit(run_group(command, int(sys.argv[1]), int(sys.argv[2]), progress))
