"""The progress of a run: a live bar on a terminal, one plain line per log period in a file, and the pace behind them.

`Progress` owns the display and nothing else: it measures no loss and decides no moment; the run's session begins it and
hooks of the loop bring it forward. How long the bar is follows from the plan (`begin_run`). `Pace` measures how fast
the run goes and how long it still takes, by what it has done so far.

There is no thread and no redirected stream. The bar is drawn from the loop, at most four times a second, below an empty
line on which the cursor rests, so that a `print` of the user's own lands on that line and pushes the bar down. Its
parts have fixed widths, so that nothing moves from frame to frame; where there is no room for all of them, whole ones
are left out before the bar or the time left. Only the text comes from rich: its `Live` costs eight times as much per
frame, hides the cursor (a killed run would leave it hidden) and keeps it behind the bar, where a `print` runs into it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, SupportsFloat, TextIO

from hezar_train.errors import printable
from hezar_train.runtime.logging import ERASE_BELOW, columns_of, fold_lines
from hezar_train.terminal.display import Painter, can_draw_on, send

if TYPE_CHECKING:
    from hezar_train.events import Row
    from hezar_train.plan import Plan
    from hezar_train.state import TrainerState

__all__ = [
    "EVALUATION",
    "SAVING",
    "Pace",
    "Progress",
    "mean_distance",
]

EVALUATION, SAVING = "evaluation", "saving"  # what is done aside while a run trains

REFRESH_SECONDS = 0.25
LONGEST_SHOWN = timedelta(days=9999)

_NUMBER_WIDTH = 8  # at least three digits: 0.000123, 1.23e-05
_PACE_WIDTH = len("123,456 samples/s")
_TIME_LEFT_WIDTH = len("10:00:00 left")
_SHOWN_ELSEWHERE = frozenset(
    {"train.loss", "train.recent_loss", "train.learning_rate", "train.lr", "train.samples_per_second"}
)
_NUM_MARKS = 40  # that samples/s look back on: ten seconds, with a mark at each refresh of the bar
_NEVER = math.inf


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
        self._given = (stream, is_terminal)
        self.begin(total_steps, total_epochs, step, enabled=enabled, steps_between=steps_between)

    def begin(
        self,
        total_steps: int | None,
        total_epochs: int | None,
        step: int,
        *,
        enabled: bool,
        steps_between: Mapping[str, float] | None = None,
        shown: Callable[[str, float], str] | None = None,
    ) -> None:
        """Begin with another run, or another call of one; `shown` says how a metric's value is written."""
        stream, is_terminal = self._given
        self.enabled = enabled
        self.total_steps = total_steps
        self.total_epochs = total_epochs
        self.step = step
        self.epoch = 0
        self.samples = 0
        self.loss: SupportsFloat | None = None
        self.learning_rate: float | None = None
        self.shown: Callable[[str, float], str] = shown or _four_digits
        self._stream = sys.stdout if stream is None else stream  # of now: a user may have redirected it
        self.is_terminal = can_draw_on(self._stream) if is_terminal is None else is_terminal
        self._painter = Painter(self._stream) if self.is_terminal and enabled else None
        self._pace = Pace(steps_between)
        self._logged_pace: tuple[int, float | None] = (-1, None)  # the step of the last row, and its samples/s
        self._evaluation: tuple[int, int | None] | None = None
        self._is_drawn = False
        self._due = 0.0

    def begin_run(
        self,
        plan: Plan,
        state: TrainerState,
        total_steps: int,
        *,
        evaluates: bool,
        enabled: bool,
        shown: Callable[[str, float], str] | None = None,
    ) -> None:
        """Begin with a run from where it is to the end of the plan, or of this call of `train()`, at `total_steps`."""
        evaluations = [plan.eval_updates] if evaluates else []
        in_updates = {EVALUATION: evaluations, SAVING: [plan.save_updates, *evaluations]}
        ends = [plan.updates_in_epoch, plan.total_updates]
        steps_between = {what: mean_distance(ends + each) * plan.accumulation for what, each in in_updates.items()}
        total_epochs = plan.num_epochs if state.call_end is None else None
        self.begin(
            total_steps, total_epochs, state.global_step, enabled=enabled, steps_between=steps_between, shown=shown
        )

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
        """Print a line, above the bar if there is one; a terminal gets it folded between words."""
        if not self.enabled:
            return
        message = printable(message)
        if self.is_terminal:
            message = fold_lines(message, columns_of(self._stream))
        if self._painter is None:
            self._write(message + "\n")
            return
        self._write(ERASE_BELOW + message + "\n")
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
        self._write(ERASE_BELOW + "".join("\n" + line for line in lines) + back)

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
            self._write(ERASE_BELOW + "".join(line + "\n" for line in self._frame(self._painter)))
        self._painter = None

    def samples_per_second(self) -> float | None:
        """Return the pace of the last seconds, without evaluations and what is done aside."""
        return self._pace.samples_per_second(self.samples)

    def seconds_left(self) -> float | None:
        """Return how long the rest takes if it goes on as so far; None until a second step can tell."""
        return self._pace.seconds_left(self.step, self.total_steps)

    def _place(self, row: Row) -> list[str]:
        moment = datetime.fromtimestamp(row.time).strftime("%H:%M:%S" if self.is_terminal else "%Y-%m-%d %H:%M:%S")
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
        pace = _samples_per_second(row.values.get("train.samples_per_second")), _time_left(self.seconds_left())
        return [*_measures(measured), *_parts(others, _four_digits), *filter(None, pace)]

    def _frame(self, painter: Painter) -> list[str]:
        lines = []
        if self.epoch:
            lines.append(self._training_bar(painter))
        if self._evaluation is not None:
            done, total = self._evaluation
            lines.append(painter.bar("evaluation", done, total, [f"{_aligned(done, total)} batches"]))
        return lines

    def _training_bar(self, painter: Painter) -> str:
        logged_step, logged_pace = self._logged_pace
        now = logged_pace if logged_step == self.step else self.samples_per_second()
        label, steps = f"epoch {_aligned(self.epoch, self.total_epochs)}", _aligned(self.step, self.total_steps)
        loss, rate = _fixed("loss", self.loss), _fixed("lr", self.learning_rate)
        pace = _samples_per_second(now).rjust(_PACE_WIDTH)
        left = "" if self.total_steps is None else _time_left(self.seconds_left()).ljust(_TIME_LEFT_WIDTH)
        parts = [part for part in (steps, loss, rate, pace, left) if part]
        return painter.bar(label, self.step, self.total_steps, parts, spare=[pace, rate, loss, label])

    def _write(self, text: str) -> None:
        try:
            send(self._stream, text)
        except OSError:
            # The terminal was closed or the pipe's reader left: no reason to lose a run, and nobody is looking.
            self.enabled = False
            self._painter = None


def _of(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number}/{total}"


def _aligned(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number:>{len(str(total))}}/{total}"


def _fixed(name: str, value: SupportsFloat | None) -> str:
    """Return a name and a number that always take the same room; digits that are too many are left out."""
    if value is None:
        return ""
    texts = (f"{float(value):.{digits}g}" for digits in (4, 3, 2, 1))
    return f"{name} {next(text for text in texts if len(text) <= _NUMBER_WIDTH):<{_NUMBER_WIDTH}}"


def _measures(values: Mapping[str, float | None]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items() if value is not None]


def _parts(values: Mapping[str, float], shown: Callable[[str, float], str]) -> list[str]:
    short = {name: name.removeprefix("train.").removeprefix("evaluation.") for name in values}
    return [f"{short[name]} {shown(name, value)}" for name, value in values.items()]


def _four_digits(_: str, value: float) -> str:
    return f"{value:.4g}"


def _samples_per_second(pace: float | None) -> str:
    if pace is None:
        return ""
    return f"{pace:,.0f} samples/s" if pace >= 10 else f"{pace:.2g} samples/s"


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds > LONGEST_SHOWN.total_seconds():
        return f"more than {LONGEST_SHOWN.days} days left"
    return f"{timedelta(seconds=round(seconds))} left"


class Pace:
    """Measure a run from now on, by marks that the loop sets now and then.

    Evaluations and what is done `aside` do not count into samples/s. What is done aside counts into the time left by
    its own mean, as often as it is still to come; all else counts by the step, from the end of the first one on, for
    what a start or a resume takes does not come again.
    """

    def __init__(self, steps_between: Mapping[str, float] | None = None) -> None:
        """Say by `steps_between` after how many steps, on average, each kind of thing is done aside."""
        self._steps_between = {} if steps_between is None else steps_between
        self._sample_clock = _Clock()
        self._step_clock = _Clock()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_NUM_MARKS)  # seconds, samples
        self._first_mark: tuple[float, int] | None = None  # where the first step ended: seconds, step
        self._aside: dict[str, tuple[float, int]] = {}  # seconds and number of what was done

    def mark(self, step: int, samples: int) -> None:
        """Note that the run is at this step and has seen so many samples since it began."""
        self._marks.append((self._sample_clock.active_seconds(), samples))
        if self._first_mark is None:
            self._first_mark = (self._step_clock.active_seconds(), step)

    def pause_samples(self) -> None:
        """Leave what follows out of samples/s."""
        self._sample_clock.pause()

    def resume_samples(self) -> None:
        """Count into samples/s again."""
        self._sample_clock.resume()

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Leave the body's time out of samples/s, and know from it how long `what` takes; bodies may nest."""
        begun = perf_counter()
        self._sample_clock.pause()
        self._step_clock.pause()
        try:
            yield
        finally:
            self._sample_clock.resume()
            self._step_clock.resume()
            seconds, number = self._aside.get(what, (0.0, 0))
            self._aside[what] = (seconds + perf_counter() - begun, number + 1)

    def samples_per_second(self, samples: int) -> float | None:
        """Return the pace of the last seconds, given the samples seen by now."""
        now = (self._sample_clock.active_seconds(), samples)
        of_last_seconds = _rate(self._marks[0], now) if self._marks else None
        return _rate((0.0, 0), now) if of_last_seconds is None else of_last_seconds

    def seconds_left(self, step: int, total_steps: int | None) -> float | None:
        """Return how long the rest takes if it goes on as so far; None until a second step can tell."""
        if total_steps is None or self._first_mark is None or step <= self._first_mark[1]:
            return None
        first_seconds, first_step = self._first_mark
        num_left = max(0, total_steps - step)
        in_steps = (self._step_clock.active_seconds() - first_seconds) / (step - first_step) * num_left
        return in_steps + sum(self._seconds_aside(what, num_left) for what in self._aside)

    def _seconds_aside(self, what: str, num_steps: int) -> float:
        """Return how long what is done aside takes in so many steps, the last of which ends with it."""
        seconds, number = self._aside[what]
        return math.ceil(num_steps / self._steps_between.get(what, _NEVER)) * seconds / number


def mean_distance(periods: Sequence[int | None]) -> float:
    """Return how far apart the multiples of any of the periods are on average; what two have in common counts once."""
    given = {period for period in periods if period}
    counted = [period for period in given if not any(period % other == 0 for other in given - {period})]
    return 1 / sum(1 / period for period in counted) if counted else _NEVER


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


def _rate(before: tuple[float, int], now: tuple[float, int]) -> float | None:
    seconds = now[0] - before[0]
    return (now[1] - before[1]) / seconds if seconds > 0 and now[1] > before[1] else None
