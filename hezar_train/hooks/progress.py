"""What a person sees of a run: a live bar on a terminal, one plain line per log period in a file.

Owns the display and nothing else: it measures no loss and decides no moment; whoever wires it to the loop calls it.
There is no thread and no redirected stream. The bar is drawn from the loop, at most four times a second, below an empty
line on which the cursor rests, so that a `print` of the user's own lands on that line and pushes the bar down. Only the
text comes from rich: its `Live` costs eight times as much per frame, hides the cursor (a killed run would leave it
hidden) and keeps it behind the bar, where a `print` runs into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, SupportsFloat, TextIO

from hezar_train.hooks.pace import Pace
from hezar_train.hooks.terminal import Painter, can_draw_on, send

if TYPE_CHECKING:
    from hezar_train.events import Row

__all__ = ["Progress"]

REFRESH_SECONDS = 0.25

_ERASE_BELOW = "\x1b[J"
_SHOWN_ELSEWHERE = frozenset(
    {"train.loss", "train.recent_loss", "train.learning_rate", "train.lr", "train.samples_per_second"}
)


class Progress:
    """Show where the run is, how well it does and how long it still takes.

    `advance` after each step only notes numbers; the drawing happens when a refresh is due. What is called `loss` is
    the mean since the last row.
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
        self.is_terminal = can_draw_on(self._stream) if is_terminal is None else is_terminal
        self._painter = Painter(self._stream) if self.is_terminal and enabled else None
        self._pace = Pace(steps_between)
        self._logged_pace: tuple[int, float | None] = (-1, None)  # the step of the last row, and its samples/s
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
            self._pace.mark(step, self.samples)
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

    def aside(self, what: str) -> AbstractContextManager[None]:
        """Leave the body's time out of samples/s, and know from it how long `what` takes; bodies may nest."""
        return self._pace.aside(what)

    def start_evaluation(self, total_batches: int | None) -> None:
        """Show a second bar for an evaluation of so many batches."""
        if self._evaluation is None:
            self._pace.pause_samples()
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
            self._pace.resume_samples()
            self.refresh()

    def close(self) -> None:
        """Draw the bar a last time, to stay; what is said afterwards is a plain line."""
        self._evaluation = None
        if self._painter is not None and self._is_drawn:
            self._write(_ERASE_BELOW + "".join(line + "\n" for line in self._frame(self._painter)))
        self._painter = None

    def samples_per_second(self) -> float | None:
        """Return the pace of the last seconds, without evaluations and what is done aside."""
        return self._pace.samples_per_second(self.samples)

    def seconds_left(self) -> float | None:
        """Return how long the rest takes if it goes on as so far; None until a second step can tell."""
        return self._pace.seconds_left(self.step, self.total_steps)

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
        pace = _pace_parts(row.values.get("train.samples_per_second"), self.seconds_left())
        return [*_measures(measured), *_parts(others, _four_digits), *pace]

    def _frame(self, painter: Painter) -> list[str]:
        lines = []
        if self.epoch:
            lines.append(self._training_bar(painter))
        if self._evaluation is not None:
            done, total = self._evaluation
            lines.append(painter.bar("evaluation", done, total, [f"{_of(done, total)} batches"]))
        return lines

    def _training_bar(self, painter: Painter) -> str:
        loss = None if self.loss is None else float(self.loss)
        step, logged_pace = self._logged_pace
        pace = _pace_parts(logged_pace if step == self.step else self.samples_per_second(), self.seconds_left())
        measured = {"loss": loss, "lr": self.learning_rate}
        parts = [_of(self.step, self.total_steps), *_measures(measured), *pace]
        return painter.bar(f"epoch {_of(self.epoch, self.total_epochs)}", self.step, self.total_steps, parts)

    def _write(self, text: str) -> None:
        try:
            send(self._stream, text)
        except OSError:
            # The terminal was closed or the pipe's reader left: no reason to lose a run, and nobody is looking.
            self.enabled = False
            self._painter = None


def _of(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number}/{total}"


def _measures(values: Mapping[str, float | None]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items() if value is not None]


def _parts(values: Mapping[str, float], shown: Callable[[str, float], str]) -> list[str]:
    short = {name: name.removeprefix("train.").removeprefix("evaluation.") for name in values}
    return [f"{short[name]} {shown(name, value)}" for name, value in values.items()]


def _four_digits(_: str, value: float) -> str:
    return f"{value:.4g}"


def _pace_parts(samples_per_second: float | None, seconds_left: float | None) -> list[str]:
    parts = []
    if samples_per_second is not None:
        digits = f"{samples_per_second:,.0f}" if samples_per_second >= 10 else f"{samples_per_second:.2g}"
        parts.append(f"{digits} samples/s")
    if seconds_left is not None:
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return parts
