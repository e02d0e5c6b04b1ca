"""What a terminal is sent: rich text as characters, in the room that there is; what it cannot show is escaped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from hezar_train.runtime.console import can_draw_on, columns_of, folded

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Painter", "can_draw_on", "send"]

_MAX_BAR_WIDTH = 40
_WANTED_BAR_WIDTH = 10
_MIN_BAR_WIDTH = 5


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
        self._console.width = columns_of(self._stream)
        self._console.print(what, end="")
        painted = self._paper.getvalue()
        self._paper.seek(0)
        self._paper.truncate()
        return painted

    def bar(self, label: str, done: int, total: int | None, parts: Sequence[str], spare: Sequence[str] = ()) -> str:
        """Return a label, a bar and the parts on one line; `spare` are those that make room for it, first to last."""
        from rich.text import Text

        width = columns_of(self._stream) - 1  # a character in the last column makes some terminals wrap
        kept = _kept([label, *parts], spare, width - (_WANTED_BAR_WIDTH if total else 0))
        marks = self._marks(min(_MAX_BAR_WIDTH, width - _length(kept)), done, total)
        place = 1 if label in kept else 0
        line = Text("  ").join(part for part in (*map(Text, kept[:place]), marks, *map(Text, kept[place:])) if part)
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
        return self.paint(line)

    def folded(self, parts: Sequence[str]) -> str:
        """Return the parts on as many lines as they take; none is cut."""
        return folded(parts, columns_of(self._stream))

    def _marks(self, width: int, done: int, total: int | None) -> Text:
        from rich.text import Text

        if width < _MIN_BAR_WIDTH or not total:
            return Text()
        filled = min(width, width * done // total)
        style = "bar.finished" if done >= total else "bar.complete"
        return Text.assemble((self._mark * filled, style), (self._mark * (width - filled), "bar.back"))


def _kept(parts: list[str], spare: Sequence[str], room: int) -> list[str]:
    """Return the parts without as many of the spare ones, first to last, as there is no room for."""
    for part in spare:
        if _length(parts) <= room:
            break
        parts = [other for other in parts if other is not part]
    return parts


def _length(parts: Sequence[str]) -> int:
    return sum(len(part) + 2 for part in parts)
