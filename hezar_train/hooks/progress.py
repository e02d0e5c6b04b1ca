"""What a person sees of a run: a live bar on a terminal, one plain line per log period in a file.

Owns the display and nothing else: it measures no loss and decides no moment; whoever wires it to the loop calls it.
There is no thread and no redirected stream. The bar is drawn from the loop, at most four times a second, below an empty
line on which the cursor rests, so that a `print` of the user's own lands on that line and pushes the bar down. Only the
text comes from rich: its `Live` costs eight times as much per frame, hides the cursor (a killed run would leave it
hidden) and keeps it behind the bar, where a `print` runs into it.
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, SupportsFloat, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from hezar_train.events import Row

__all__ = ["Progress", "info_table", "mean_distance", "print_facts"]

REFRESH_SECONDS = 0.25

_RATE_WINDOW = 40  # refreshes that the shown rate looks back on: ten seconds
_MAX_BAR_WIDTH = 40
_MIN_BAR_WIDTH = 5
_DEFAULT_COLUMNS = 80
_NEVER = float("inf")
_ERASE_BELOW = "\x1b[J"
_SHOWN_ELSEWHERE = frozenset(
    {"train.loss", "train.recent_loss", "train.learning_rate", "train.lr", "train.samples_per_second"}
)


class Progress:
    """Show where the run is, how well it does and how long it still takes.

    `advance` after each step only notes numbers; the drawing happens when a refresh is due. What is called `loss` is
    the mean since the last row.

    Evaluations and what is done `aside` do not count into samples/s. What is done aside counts into the time left by
    its own mean, as often as it is still to come; all else counts by the step, from the end of the first one on, for
    what a start or a resume takes does not come again.
    """

    def __init__(
        self,
        total_steps: int | None,
        total_epochs: int | None,
        step: int = 0,
        *,
        stream: TextIO | None = None,
        is_terminal: bool | None = None,
        enabled: bool = True,
        steps_between: Mapping[str, float] | None = None,
    ) -> None:
        """Begin at `step`; `steps_between` says after how many steps, on average, each kind of thing is done aside."""
        self.enabled = enabled
        self.total_steps = total_steps
        self.total_epochs = total_epochs
        self.step = step
        self.epoch = 0
        self.samples = 0
        self.loss: SupportsFloat | None = None
        self.learning_rate: float | None = None
        self.shown: Callable[[str, float], str] = _four_digits
        self._stream = sys.stdout if stream is None else stream
        self.is_terminal = _is_terminal(self._stream) if is_terminal is None else is_terminal
        self._painter = _Painter(self._stream) if self.is_terminal and enabled else None
        self._clock = _Clock()  # of samples/s
        self._step_clock = _Clock()  # of all that is not done aside
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._logged_pace: tuple[int, float | None] = (-1, None)  # the step of the last row, and its samples/s
        self._first_mark: tuple[float, int] | None = None  # where the first step ended: seconds, step
        self._steps_between = {} if steps_between is None else steps_between
        self._aside: dict[str, tuple[float, int]] = {}  # seconds and number of what was done
        self._evaluation: tuple[int, int | None] | None = None
        self._is_drawn = False
        self._due = 0.0

    def advance(
        self, step: int, epoch: int, samples: int, loss: SupportsFloat | None, learning_rate: float | None
    ) -> None:
        """Note that `step` is done, with `samples` more samples; draw if a refresh is due."""
        self.step = step
        self.epoch = epoch
        self.samples += samples
        self.loss = loss
        self.learning_rate = learning_rate
        if perf_counter() >= self._due:
            self._mark()
            self.refresh()

    def line(self, row: Row) -> None:
        """Print what was logged; a terminal gets only evaluations, the bar shows the rest."""
        if "train.samples_per_second" in row.values:
            self._logged_pace = (row.step, row.values["train.samples_per_second"])
        if not self.enabled:
            return
        evaluation = {name: value for name, value in row.values.items() if name.startswith("evaluation.")}
        if not self.is_terminal and len(evaluation) < len(row.values):
            self.say("  ".join([*self._place(row), *self._training_parts(row)]))
        if evaluation:
            parts = [*self._place(row), "evaluation", *_parts(evaluation, self.shown)]
            self.say("  ".join(parts) if self._painter is None else self._painter.folded(parts))

    def say(self, message: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self.enabled:
            return
        if self._painter is None:
            self._write(message + "\n")
            return
        self._write(_ERASE_BELOW + message + "\n")
        if self._is_drawn:
            self.refresh()

    def refresh(self) -> None:
        """Draw the bar now."""
        self._due = perf_counter() + REFRESH_SECONDS
        if self._painter is None:
            return
        lines = self._frame(self._painter)
        self._is_drawn = True
        # Moving up by 0 lines would move up by one: terminals read it so.
        back = f"\x1b[{len(lines)}A\r" if lines else ""
        self._write(_ERASE_BELOW + "".join("\n" + line for line in lines) + back)

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Leave the body's time out of samples/s, and know from it how long `what` takes; bodies may nest."""
        begun = perf_counter()
        self._clock.pause()
        self._step_clock.pause()
        try:
            yield
        finally:
            self._clock.resume()
            self._step_clock.resume()
            seconds, number = self._aside.get(what, (0.0, 0))
            self._aside[what] = (seconds + perf_counter() - begun, number + 1)

    def start_evaluation(self, total_batches: int | None) -> None:
        """Show a second bar for an evaluation of so many batches."""
        if self._evaluation is None:
            self._clock.pause()
        self._evaluation = (0, total_batches)
        self.refresh()

    def advance_evaluation(self, batches: int) -> None:
        """Note that `batches` of the evaluation are done; draw if a refresh is due."""
        if perf_counter() >= self._due and self._evaluation is not None:
            self._evaluation = (batches, self._evaluation[1])
            self.refresh()

    def end_evaluation(self) -> None:
        """Take the second bar away."""
        if self._evaluation is not None:
            self._evaluation = None
            self._clock.resume()
            self.refresh()

    def close(self) -> None:
        """Draw the bar a last time, to stay; what is said afterwards is a plain line."""
        self._evaluation = None
        if self._painter is not None and self._is_drawn:
            self._write(_ERASE_BELOW + "".join(line + "\n" for line in self._frame(self._painter)))
        self._painter = None

    def samples_per_second(self) -> float | None:
        """Return the pace of the last seconds, without evaluations and what is done aside."""
        now = (self._clock.active_seconds(), self.samples)
        of_last_seconds = _rate(self._marks[0], now) if self._marks else None
        return _rate((0.0, 0), now) if of_last_seconds is None else of_last_seconds

    def seconds_left(self) -> float | None:
        """Return how long the rest takes if it goes on as so far; None until a second step can tell."""
        if self.total_steps is None or self._first_mark is None or self.step <= self._first_mark[1]:
            return None
        seconds, step = self._first_mark
        num_left = max(0, self.total_steps - self.step)
        in_steps = (self._step_clock.active_seconds() - seconds) / (self.step - step) * num_left
        return in_steps + sum(self._seconds_aside(what, num_left) for what in self._aside)

    def _seconds_aside(self, what: str, num_steps: int) -> float:
        """Return how long what is done aside takes in so many steps, the last of which ends with it."""
        seconds, number = self._aside[what]
        return math.ceil(num_steps / self._steps_between.get(what, _NEVER)) * seconds / number

    def _mark(self) -> None:
        self._marks.append((self._clock.active_seconds(), self.samples))
        if self._first_mark is None:
            self._first_mark = (self._step_clock.active_seconds(), self.step)

    def _place(self, row: Row) -> list[str]:
        moment = datetime.fromtimestamp(row.time).strftime("%Y-%m-%d %H:%M:%S")
        return [moment, f"epoch {_of(row.epoch, self.total_epochs)}", f"step {_of(row.step, self.total_steps)}"]

    def _training_parts(self, row: Row) -> list[str]:
        measured = {
            "loss": row.values.get("train.recent_loss"),
            "mean_loss": row.values.get("train.loss"),
            "lr": row.values.get("train.learning_rate", self.learning_rate),
        }
        others = {
            name: value
            for name, value in row.values.items()
            if name not in _SHOWN_ELSEWHERE and not name.startswith("evaluation.")
        }
        pace = _pace(row.values.get("train.samples_per_second"), self.seconds_left())
        return [*_measures(measured), *_parts(others, _four_digits), *pace]

    def _frame(self, painter: _Painter) -> list[str]:
        lines = []
        if self.epoch:
            lines.append(self._training_bar(painter))
        if self._evaluation is not None:
            done, total = self._evaluation
            lines.append(painter.bar("evaluation", done, total, [f"{_of(done, total)} batches"]))
        return lines

    def _training_bar(self, painter: _Painter) -> str:
        loss = None if self.loss is None else float(self.loss)
        step, logged_pace = self._logged_pace
        pace = _pace(logged_pace if step == self.step else self.samples_per_second(), self.seconds_left())
        measured = {"loss": loss, "lr": self.learning_rate}
        parts = [_of(self.step, self.total_steps), *_measures(measured), *pace]
        return painter.bar(f"epoch {_of(self.epoch, self.total_epochs)}", self.step, self.total_steps, parts)

    def _write(self, text: str) -> None:
        try:
            _send(self._stream, text)
        except OSError:
            # The terminal was closed or the pipe's reader left: no reason to lose a run, and nobody is looking.
            self.enabled = False
            self._painter = None


class _Painter:
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


class _Clock:
    """Count seconds since it was made, without pauses, which may nest."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._paused_seconds = 0.0
        self._pause_start = 0.0
        self._depth = 0

    def pause(self) -> None:
        if self._depth == 0:
            self._pause_start = perf_counter()
        self._depth += 1

    def resume(self) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._paused_seconds += perf_counter() - self._pause_start

    def active_seconds(self) -> float:
        end = self._pause_start if self._depth else perf_counter()
        return end - self._start - self._paused_seconds


def mean_distance(periods: Sequence[int | None]) -> float:
    """Return how far apart the multiples of any of the periods are on average; what two have in common counts once."""
    given = {period for period in periods if period}
    counted = [period for period in given if not any(period % other == 0 for other in given - {period})]
    return 1 / sum(1 / period for period in counted) if counted else _NEVER


def info_table(facts: Mapping[str, str]) -> Table:
    """Make a two-column table of facts."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name), Text(str(value)))
    return table


def print_facts(facts: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Print facts: a table on a terminal, aligned plain lines elsewhere."""
    stream = sys.stdout if stream is None else stream
    if _is_terminal(stream):
        _send(stream, _Painter(stream).paint(info_table(facts)))
        return
    width = max((len(name) for name in facts), default=0)
    _send(stream, "".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


def _send(stream: TextIO, text: str) -> None:
    """Write at once; what the stream's encoding lacks is escaped, for a log line is no reason to lose a run either."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _is_terminal(stream: TextIO) -> bool:
    """Tell whether a bar can be drawn; a file stays plain whatever the environment says about colours."""
    if not stream.isatty():
        return False
    from rich.console import Console

    console = Console(file=stream, force_terminal=True)
    return not console.is_dumb_terminal and not console.legacy_windows


def _rate(before: tuple[float, int], now: tuple[float, int]) -> float | None:
    seconds = now[0] - before[0]
    return (now[1] - before[1]) / seconds if seconds > 0 and now[1] > before[1] else None


def _of(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number}/{total}"


def _measures(values: Mapping[str, float | None]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items() if value is not None]


def _parts(values: Mapping[str, float], shown: Callable[[str, float], str]) -> list[str]:
    short = {name: name.removeprefix("train.").removeprefix("evaluation.") for name in values}
    return [f"{short[name]} {shown(name, value)}" for name, value in values.items()]


def _four_digits(_: str, value: float) -> str:
    return f"{value:.4g}"


def _pace(samples_per_second: float | None, seconds_left: float | None) -> list[str]:
    parts = []
    if samples_per_second is not None:
        digits = f"{samples_per_second:,.0f}" if samples_per_second >= 10 else f"{samples_per_second:.2g}"
        parts.append(f"{digits} samples/s")
    if seconds_left is not None:
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return parts
