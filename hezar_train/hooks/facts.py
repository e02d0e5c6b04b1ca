"""Facts about a run, as a table on a terminal and as aligned plain lines elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from hezar_train.hooks.terminal import Painter, can_draw_on, send
from hezar_train.runtime.console import columns_of, folded

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["info_table", "print_facts"]

_BORDERS = len("│  │  │")


def info_table(facts: Mapping[str, str], columns: int = 80) -> Table:
    """Make a two-column table of facts, for a terminal of so many columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    room = columns - _BORDERS - max(map(len, facts), default=0)
    for name, value in facts.items():
        table.add_row(Text(name), Text(_foldable(str(value), room)))
    return table


def print_facts(facts: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Print facts: a table on a terminal, aligned plain lines elsewhere."""
    stream = sys.stdout if stream is None else stream
    if can_draw_on(stream):
        send(stream, Painter(stream).paint(info_table(facts, columns_of(stream))))
        return
    width = max((len(name) for name in facts), default=0)
    send(stream, "".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


def _foldable(value: str, room: int) -> str:
    """Let a word that is too long for its column, such as a path, go on in the next line after a slash or a dot."""
    if all(len(word) <= room for word in value.split()):
        return value
    return folded(re.split(r"(?<=[ /._])", value), room, gap="")
