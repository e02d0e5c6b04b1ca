"""The package's logger: what it says to a user who has not set up logging, and what a writer to a terminal must know.

Below the cursor there may be a progress bar: whoever writes a line erases it first, and it is drawn again in a moment.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from hezar_train.errors import printable

__all__ = ["ERASE_BELOW", "can_draw_on", "columns_of", "fold_lines", "folded", "logger", "make_visible"]

ERASE_BELOW = "\x1b[J"
_DEFAULT_COLUMNS = 80

logger = logging.getLogger("hezar_train")


def make_visible(log: logging.Logger) -> None:
    """Show what the package says to a user who has not set up logging: the main process speaks, others only warn."""
    if log.handlers or logging.getLogger().handlers:
        return
    log.addHandler(_Console())
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


def can_draw_on(stream: TextIO) -> bool:
    """Tell whether a bar can be drawn; a file stays plain whatever the environment says about colours."""
    if not stream.isatty():
        return False
    from rich.console import Console

    console = Console(file=stream, force_terminal=True)
    return not console.is_dumb_terminal and not console.legacy_windows


def columns_of(stream: TextIO) -> int:
    """Return how wide the terminal is."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS


def folded(parts: Sequence[str], columns: int, gap: str = "  ") -> str:
    """Return the parts on as many lines as they take; none is cut."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(gap) + len(part) <= columns:
            lines[-1] += gap + part
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def fold_lines(text: str, columns: int) -> str:
    """Fold each line that is too long between its words."""
    return "\n".join(folded(line.split(" "), columns, gap=" ") for line in text.split("\n"))


class _Console(logging.Handler):
    """Print records to whatever standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        text, stream = printable(self.format(record)), sys.stderr
        if can_draw_on(stream):
            text = ERASE_BELOW + fold_lines(text, columns_of(stream))
        print(text, file=stream, flush=True)
