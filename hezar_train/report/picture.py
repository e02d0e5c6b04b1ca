"""The curves of a run as one PNG, for a model card or a README.

Drawn with Pillow, which TensorBoard brings along.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hezar_train.config.files import write_atomically
from hezar_train.report.panels import Curve, Line, Panel, make_panels
from hezar_train.report.reading import read_run
from hezar_train.report.records import RunRecord
from hezar_train.report.ticks import round_ends, round_ticks, tick_words
from hezar_train.report.words import number, spoken

__all__ = ["CURVES_FILE", "curves_png", "draw", "write_curves"]

CURVES_FILE = "curves.png"

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

INK, MUTED, GRID, PAPER = "#1f2733", "#667085", "#e4e7ec", "#ffffff"
COLOURS = ("#2f6fde", "#d9540b", "#0f8a5f", "#9a4fd0", "#b8860b", "#c2255c")

Point = tuple[float, float]


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
    picture = Image.new("RGB", size, PAPER)
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
