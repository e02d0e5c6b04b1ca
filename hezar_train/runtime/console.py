"""What the package says to a user who has not set up logging."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["logger", "make_visible"]

logger = logging.getLogger("hezar_train")


def make_visible(log: logging.Logger) -> None:
    """Show what the package says to a user who has not set up logging: the main process speaks, others only warn."""
    if log.handlers or logging.getLogger().handlers:
        return
    log.addHandler(_Console())
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


class _Console(logging.Handler):
    """Print records to whatever standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201
