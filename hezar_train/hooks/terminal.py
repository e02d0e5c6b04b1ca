"""What a terminal is sent: rich text as characters, in the room that there is; what it cannot show is escaped."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Painter", "can_draw_on", "send"]

_MAX_BAR_WIDTH = 40
_MIN_BAR_WIDTH = 5
_DEFAULT_COLUMNS = 80


def can_draw_on(stream: TextIO) -> bool:
    """Tell whether a bar can be drawn; a file stays plain whatever the environment says about colours."""
    if not stream.isatty():
        return False
    from rich.console import Console

    console = Console(file=stream, force_terminal=True)
    return not console.is_dumb_terminal and not console.legacy_windows


def send(stream: TextIO, text: str) -> None:
    """Write at once; what the stream's encoding lacks is escaped, for a line is no reason to lose a run."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


class Painter:
    """Turn rich text into the characters that a terminal wants.

    It paints on paper of its own: given the stream, rich would end the process when the stream breaks, and would take
    the width of another one.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._paper = io.StringIO()
        self._console = Console(file=self._paper, force_terminal=True, markup=False, highlight=False)
        self._mark = "━" if (stream.encoding or "utf-8").lower().startswith("utf") else "-"

    def paint(self, what: RenderableType) -> str:
        """Return what rich makes of `what`."""
        self._console.width = self._columns()
        self._console.print(what, end="")
        painted = self._paper.getvalue()
        self._paper.seek(0)
        self._paper.truncate()
        return painted

    def bar(self, label: str, done: int, total: int | None, parts: Sequence[str]) -> str:
        """Return a label, a bar in what room there is, and the parts, on one line."""
        from rich.text import Text

        after = "  ".join(parts)
        width = self._columns() - 1  # a character in the last column makes some terminals wrap
        room = min(_MAX_BAR_WIDTH, width - len(label) - len(after) - 4)
        line = Text("  ").join(part for part in (Text(label), self._marks(room, done, total), Text(after)) if part)
        line.truncate(width, overflow="ellipsis")
        return self.paint(line)

    def folded(self, parts: Sequence[str]) -> str:
        """Return the parts on as many lines as they take; none is cut."""
        width, lines = self._columns(), [parts[0]]
        for part in parts[1:]:
            if len(lines[-1]) + 2 + len(part) <= width:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}")
        return "\n".join(lines)

    def _marks(self, width: int, done: int, total: int | None) -> Text:
        from rich.text import Text

        if width < _MIN_BAR_WIDTH or not total:
            return Text()
        filled = min(width, width * done // total)
        style = "bar.finished" if done >= total else "bar.complete"
        return Text.assemble((self._mark * filled, style), (self._mark * (width - filled), "bar.back"))

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_COLUMNS
        except OSError:
            return _DEFAULT_COLUMNS
