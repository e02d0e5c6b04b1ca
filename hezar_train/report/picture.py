"""The curves of runs: grouped into panels, thinned to what a screen shows, and drawn as a PNG for a card or a README.

`make_panels` says which values go together, under which title and in which order: train and evaluation of one quantity
share a panel. The report's script draws the same panels (`charts`). The PNG is drawn with Pillow, which TensorBoard
brings along.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hezar_train.config.files import write_atomically
from hezar_train.events import Row
from hezar_train.report.markup import number, spoken
from hezar_train.report.read import SECONDS_NAME, Clock, RunRecord, read_run, starts_of
from hezar_train.run_layout import CURVES_FILE

__all__ = [
    "CURVES_FILE",
    "Curve",
    "Line",
    "Panel",
    "curves_png",
    "draw",
    "make_panels",
    "round_ends",
    "round_ticks",
    "thinned",
    "tick_words",
    "write_curves",
]

MOST_POINTS = 1200
"""Points of a curve that a page carries; a screen has fewer columns."""

BOUNDS = (".low", ".high")
RECENT_LOSS, MEAN_LOSS = "train.recent_loss", "train.loss"
STAGES = ("train", "evaluation")
ORDER_OF_TRAIN_ONLY = ("learning_rate", "samples_per_second", "grad_norm")
RANKS = ("loss", "best metric", "metrics", *ORDER_OF_TRAIN_ONLY, "others")
NEVER_SMOOTHED = frozenset({"learning_rate"})
FROM_ZERO = frozenset({"samples_per_second"})
"""Its noise would fill a chart of its own; how much it is says more."""

SHARPNESS = 2  # twice the size: sharp on a dense screen
SCALE = 2 * SHARPNESS  # drawn larger still, then made smaller: smooth lines
WIDTH, HEIGHT, COLUMNS = 440, 270, 2
LEFT, RIGHT, TOP, BOTTOM = 62, 30, 54, 40
MOST_PANELS = 6
MOST_TICKS = 6
LEFT_OUT = frozenset({"samples_per_second", "grad_norm"})
"""Of the training, not of the model."""

MOST_DOTS = 40
ROOMY = 2
"""So many names of lines fit over a panel as they are."""

INK, MUTED, GRID, BACKGROUND = "#1f2733", "#667085", "#e4e7ec", "#ffffff"
COLOURS = ("#2f6fde", "#d9540b", "#0f8a5f", "#9a4fd0", "#b8860b", "#c2255c")

Point = tuple[float, float]

LEAST_WIDTH = 1e-12
"""Of a range, in parts of its numbers: floats cannot count ticks in less."""

MOST_PLAIN = 7
"""Characters of a number without a power of ten."""


@dataclass
class Curve:
    """One logged quantity over a run."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    """Lower ends of the confidence intervals; empty where there are none."""
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """A curve of one run in a panel."""

    run: int
    role: str
    """What tells it from the other lines of its run: train, evaluation, evaluation on a set."""
    curve: Curve
    chooses: bool = False
    """Whether it is of the set on which the best checkpoint was chosen."""


@dataclass
class Panel:
    """Lines that share a pair of axes."""

    name: str
    lines: list[Line] = field(default_factory=list)
    is_main: bool = True
    """Whether it belongs to what everybody wants to see."""

    @property
    def roles(self) -> list[str]:
        """The roles of its lines, in order."""
        return list(dict.fromkeys(line.role for line in self.lines))

    @property
    def may_be_smoothed(self) -> bool:
        """Tell whether smoothing says anything of it."""
        return self.name not in NEVER_SMOOTHED

    @property
    def starts_at_zero(self) -> bool:
        """Tell whether its axis begins at zero."""
        return self.name in FROM_ZERO


def make_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """Group everything that runs logged; losses first, then the metrics, then how the training went."""
    panels: dict[str, Panel] = {}
    for index, run in enumerate(runs):
        clock = Clock(starts_of(run))
        choosing = _choosing_role(run)
        logged: dict[str, dict[int, Row]] = {}
        for row in run.rows:
            for name in row.values:
                logged.setdefault(name, {})[row.step] = row  # of two rows of one step the later counts
        for name, found in logged.items():
            if name.endswith(BOUNDS) or SECONDS_NAME.fullmatch(name):
                continue
            title, role = _place(name, run, has_recent_loss=RECENT_LOSS in logged)
            line = Line(index, role, thinned(_curve(found, name, clock)), chooses=role == choosing)
            panels.setdefault(title, Panel(title)).lines.append(line)
    for panel in panels.values():
        panel.lines.sort(key=lambda line: (line.run, line.role != "train", line.role))
        panel.is_main = _rank(panel, runs) < len(RANKS) - 1
    return sorted(panels.values(), key=lambda panel: _rank(panel, runs))


def _rank(panel: Panel, runs: Sequence[RunRecord]) -> int:
    if panel.name == "loss":
        return 0
    best = {_place(run.best_metric, run, has_recent_loss=True)[0] for run in runs if run.best_metric}
    if panel.name in best:
        return 1
    if panel.name.endswith(".loss") or any(line.role.startswith("evaluation") for line in panel.lines):
        return 2
    return RANKS.index(panel.name) if panel.name in ORDER_OF_TRAIN_ONLY else len(RANKS) - 1


def _choosing_role(run: RunRecord) -> str:
    """Return the role of the lines of the set whose metric tells the best checkpoint."""
    metric = run.best_metric or ""
    return _place(metric, run, has_recent_loss=True)[1] or "evaluation"


def _place(name: str, run: RunRecord, *, has_recent_loss: bool) -> tuple[str, str]:
    """Return the panel and the role of a logged name."""
    if name == RECENT_LOSS:
        return "loss", "train"
    if name == MEAN_LOSS and has_recent_loss:
        return "mean loss since the start", "train"
    stage, dot, rest = name.partition(".")
    if not dot or stage not in STAGES:
        return name, ""
    for set_name in run.set_names:
        if stage == "evaluation" and rest.startswith(f"{set_name}."):
            return rest.removeprefix(f"{set_name}."), f"evaluation {set_name}"
    return rest, stage


def _curve(found: Mapping[int, Row], name: str, clock: Clock) -> Curve:
    """Collect a quantity from the rows that have it, by step."""
    curve = Curve()
    for step in sorted(found):
        row = found[step]
        curve.steps.append(step)
        curve.seconds.append(clock.seconds(row.time))
        curve.values.append(row.values[name])
    bounds = [[found[step].values.get(name + end, math.nan) for step in curve.steps] for end in BOUNDS]
    if not all(map(math.isnan, bounds[0])):
        curve.low, curve.high = bounds
    return curve


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Keep at most so many points, among them the first, last, least and greatest of each stretch.

    A line through these covers the same pixels as one through all.
    """
    if len(curve.steps) <= most:
        return curve
    kept = sorted({index for stretch in _cut_evenly(len(curve.steps), most // 4) for index in _corners(curve, stretch)})
    columns = (curve.steps, curve.seconds, curve.values, curve.low, curve.high)
    return Curve(*([column[index] for index in kept] if column else [] for column in columns))  # type: ignore[arg-type]


def _cut_evenly(length: int, number: int) -> Iterator[range]:
    for part in range(number):
        if stretch := range(length * part // number, length * (part + 1) // number):
            yield stretch


def _corners(curve: Curve, stretch: range) -> set[int]:
    finite = [index for index in stretch if math.isfinite(curve.values[index])] or [stretch[0]]
    broken = next((index for index in stretch if not math.isfinite(curve.values[index])), stretch[0])
    least, greatest = (choose(finite, key=curve.values.__getitem__) for choose in (min, max))
    # A value that is not finite takes the place of an ordinary end: the page must show it.
    return {broken, stretch[-1], least, greatest}


def curves_png(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path | None:
    """Draw the curves of a run into a PNG file, `RUN/curves.png` if none is named; None if nothing was logged."""
    return write_curves(read_run(run), out)


def write_curves(record: RunRecord, out: str | os.PathLike[str] | None = None) -> Path | None:
    """Draw the curves of a run that was read already."""
    panels = [panel for panel in make_panels([record]) if panel.is_main and panel.name not in LEFT_OUT]
    panels = [panel for panel in panels if _points(panel)]
    if not panels:
        return None
    return write_atomically(record.root / CURVES_FILE if out is None else out, draw(panels[:MOST_PANELS]))


def draw(panels: Sequence[Panel]) -> bytes:
    """Return panels of one run as a PNG, two in a row."""
    from PIL import Image, ImageDraw, ImageFont

    columns = min(COLUMNS, len(panels))
    size = (SCALE * WIDTH * columns, SCALE * HEIGHT * math.ceil(len(panels) / columns))
    picture = Image.new("RGB", size, BACKGROUND)
    fonts = tuple(ImageFont.load_default(points * SCALE) for points in (13, 10.5))
    last_step = max(step for panel in panels for step, _ in _points(panel))
    for place, panel in enumerate(panels):
        corner = (SCALE * WIDTH * (place % columns), SCALE * HEIGHT * (place // columns))
        _Axes(ImageDraw.Draw(picture), fonts, corner, panel, last_step).draw()
    file = io.BytesIO()
    picture = picture.reduce(SCALE // SHARPNESS)
    few = picture.quantize(128, Image.Quantize.FASTOCTREE)  # few colours: a third of the size
    few.save(file, format="PNG", optimize=True)
    return file.getvalue()


class _Axes:
    """One pair of axes with its lines."""

    def __init__(self, pen: Any, fonts: Sequence[Any], corner: tuple[int, int], panel: Panel, last_step: float) -> None:
        self._pen, (self._title_font, self._font), self._corner, self._panel = pen, fonts, corner, panel
        values = [value for _, value in _points(panel)]
        lowest = min([0.0, *values] if panel.starts_at_zero else values)
        self._across, self._up = (0.0, max(1.0, last_step)), round_ends(lowest, max(values), MOST_TICKS)

    def draw(self) -> None:
        """Draw the title, the grid, then the lines with their names."""
        self._text((LEFT, 10), spoken(self._panel.name), INK, self._title_font)
        self._draw_grid()
        x = float(LEFT)
        for line in self._panel.lines:
            colour = COLOURS[_place_of_role(line.role, self._panel) % len(COLOURS)]
            self._draw_line(line.curve, colour)
            x = self._draw_name(x, line, colour)

    def _draw_grid(self) -> None:
        low, high = self._up
        ticks = round_ticks(low, high, MOST_TICKS)
        for value, words in zip(ticks, tick_words(ticks), strict=True):
            left, y = self._place(self._across[0], value)
            right, _ = self._place(self._across[1], value)
            self._pen.line([(left, y), (right, y)], fill=GRID, width=SCALE)
            self._pen.text((left - 7 * SCALE, y), words, fill=MUTED, font=self._font, anchor="rm")
        for step in round_ticks(*self._across, MOST_TICKS):
            x, y = self._place(step, low)
            words = f"{step:,.0f}" if step else "step 0"
            self._pen.text((x, y + 9 * SCALE), words, fill=MUTED, font=self._font, anchor="mt")

    def _draw_name(self, x: float, line: Line, colour: str) -> float:
        last = next((value for value in reversed(line.curve.values) if math.isfinite(value)), math.nan)
        role = line.role.removeprefix("evaluation ") if len(self._panel.lines) > ROOMY else line.role
        words = f"{role or 'value'} {number(last)}"
        self._text((x, 31), words, colour, self._font)
        return x + float(self._pen.textlength(words, font=self._font)) / SCALE + 14

    def _draw_line(self, curve: Curve, colour: str) -> None:
        for stretch in _stretches(curve):
            places = [self._place(*point) for point in stretch]
            if len(places) > 1:
                self._pen.line(places, fill=colour, width=2 * SCALE, joint="curve")
            for x, y in places if len(curve.steps) <= MOST_DOTS else ():
                self._pen.ellipse([x - 3 * SCALE, y - 3 * SCALE, x + 3 * SCALE, y + 3 * SCALE], fill=colour)

    def _text(self, place: Point, words: str, colour: str, font: Any) -> None:
        x, y = (corner + round(SCALE * shift) for corner, shift in zip(self._corner, place, strict=True))
        self._pen.text((x, y), words, fill=colour, font=font)

    def _place(self, step: float, value: float) -> tuple[int, int]:
        (first, last), (low, high) = self._across, self._up
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return self._corner[0] + round(SCALE * x), self._corner[1] + round(SCALE * y)


def _points(panel: Panel) -> list[Point]:
    """Return all finite points of a panel."""
    return [point for line in panel.lines for stretch in _stretches(line.curve) for point in stretch]


def _stretches(curve: Curve) -> list[list[Point]]:
    """Return the finite points, apart wherever a value between them is not finite."""
    stretches: list[list[Point]] = [[]]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            stretches[-1].append((step, value))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _place_of_role(role: str, panel: Panel) -> int:
    """Return the number of a line's colour: training and evaluation have the same one in every panel."""
    others = [one for one in panel.roles if one != "train"]
    return 0 if role == "train" else 1 + others.index(role)


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many round numbers from `low` to `high`."""
    step = _round_step((high - low) / max(1, most - 1))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def round_ends(low: float, high: float, most: int) -> tuple[float, float]:
    """Widen a range to the round numbers around it, which are its ends then; one without width gets some."""
    if high - low <= LEAST_WIDTH * max(abs(low), abs(high), 1e-280):
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = _round_step((high - low) / max(1, most - 2))
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Return the numbers of an axis, all in one notation: plain ones, unless those are long and powers are not."""
    plain = [f"{tick:.12f}".rstrip("0").rstrip(".") for tick in ticks]
    powers = [_power(tick) for tick in ticks]
    is_exact = all(float(words) == tick for words, tick in zip(plain, ticks, strict=True))
    return plain if is_exact and _longest(plain) <= max(MOST_PLAIN, _longest(powers)) else powers


def _power(tick: float) -> str:
    if not tick:
        return "0"
    digits, power = f"{tick:.11e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _longest(words: Sequence[str]) -> int:
    return max((len(one.lstrip("-")) for one in words), default=0)


def _round_step(rough: float) -> float:
    """Return the least of 1, 2, 2.5 and 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
