"""The section of the curves: a figure per panel with its last values as text, and the numbers that the script draws.

Readers without scripts see a picture instead, where there is a single run.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

from hezar_train.report.markup import Content, Html, capitalised, element, joined, number, of_user, spoken
from hezar_train.report.picture import Curve, Line, Panel, draw
from hezar_train.report.read import RunRecord, Start

__all__ = ["NUM_COLOURS", "curves_section", "payload"]

NUM_COLOURS = 8
NUM_DASHES = 4


def curves_section(runs: Sequence[RunRecord], panels: Sequence[Panel]) -> Html:
    """Return the curves with their controls; those that few look for are folded away."""
    if not panels:
        return element("p", "Nothing has been logged yet.", class_="empty")
    main = [panel for panel in panels if panel.is_main]
    others = [panel for panel in panels if not panel.is_main]
    parts: list[Content] = [_toolbar(runs), _grid(main, runs, 0)]
    if len(runs) == 1 and main:
        parts.append(_still_picture(main))
    if others:
        title = element("summary", f"Also logged: {len(others)} more")
        parts.append(element("details", title, _grid(others, runs, len(main)), class_="more", open=not main))
    return joined(parts)


def payload(runs: Sequence[RunRecord], panels: Sequence[Panel], starts: Sequence[Sequence[Start]]) -> str:
    """Return what the script needs as JSON that cannot end its element."""
    ordered = sorted(panels, key=lambda panel: not panel.is_main)
    content = {
        "runs": [
            {
                "name": run.name,
                "stepsInEpoch": run.steps_in_epoch,
                "best": run.best_step,
                "resumes": [start.first_step for start in run_starts[1:]],
            }
            for run, run_starts in zip(runs, starts, strict=True)
        ],
        "panels": [
            {
                "title": spoken(panel.name),
                "smooth": panel.may_be_smoothed,
                "zero": panel.starts_at_zero,
                "lines": [_numbers(one) for one in panel.lines],
            }
            for panel in ordered
        ],
    }
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _toolbar(runs: Sequence[RunRecord]) -> Html:
    axis = element(
        "label",
        "Across ",
        element(
            "select",
            element("option", "steps", value="step"),
            element("option", "epochs", value="epoch") if all(run.steps_in_epoch for run in runs) else None,
            element("option", "time at work", value="time"),
            id="axis",
        ),
    )
    slider = element("input", id="smoothing", type="range", min="0", max="0.98", step="0.02", value="0")
    smoothing = element("label", "Smoothing ", slider, element("output", "off", for_="smoothing"))
    scale = element("label", element("input", id="log-scale", type="checkbox"), " log scale")
    zoom = element(
        "span",
        element("button", "−", id="zoom-out", type="button", title="Zoom out", aria_label="Zoom out"),
        element("button", "+", id="zoom-in", type="button", title="Zoom in", aria_label="Zoom in"),
        element("button", "Whole run", id="zoom-reset", type="button"),
        class_="buttons",
    )
    shown = [axis, smoothing, scale, zoom]
    if len(runs) > 1:
        shown.append(element("span", *(_run_switch(place, run) for place, run in enumerate(runs)), class_="runs"))
    return element("div", *shown, _help(len(runs)), class_="toolbar")


def _help(num_runs: int) -> Html:
    marks = "A ring marks the best checkpoint" + (", a dotted line a resume. " if num_runs == 1 else ". ")
    mouse = element("span", "Drag over a curve to zoom, double-click to see all. ", class_="for-mouse")
    keys = element("span", "Keys: ← → move, + − zoom, Esc sees all.", class_="for-mouse")
    touch = element("span", "Touch a curve to see its values.", class_="for-touch")
    return element("p", marks, mouse, keys, touch, id="chart-help", class_="hint")


def _run_switch(place: int, run: RunRecord) -> Html:
    box = element("input", type="checkbox", checked=True, data_run=place)
    return element("label", box, element("i", class_=f"key c{place % NUM_COLOURS}"), of_user(run.name))


def _grid(panels: Sequence[Panel], runs: Sequence[RunRecord], first: int) -> Html:
    figures = (_figure(panel, runs, place) for place, panel in enumerate(panels, start=first))
    return element("div", *figures, class_="charts")


def _figure(panel: Panel, runs: Sequence[RunRecord], place: int) -> Html:
    caption = element(
        "figcaption",
        element("strong", capitalised(panel.name)),
        element("span", "last value", class_="at", aria_live="off"),
    )
    last = "; ".join(f"{_label(line, panel, runs)} {_last(line.curve)}" for line in panel.lines[:6])
    plot = element(
        "div", class_="plot", tabindex="0", role="img", data_panel=place,
        aria_label=f"Curve of {spoken(panel.name)}. Last values: {last}", aria_describedby="chart-help",
    )  # fmt: skip
    legend = element("ul", *(_legend_entry(line, panel, runs) for line in panel.lines), class_="legend")
    return element("figure", caption, plot, legend, class_="chart")


def _legend_entry(line: Line, panel: Panel, runs: Sequence[RunRecord]) -> Html:
    colour, dash = _look(line, panel, len(runs))
    key = element("i", class_=f"key c{colour} d{dash}")
    return element("li", key, of_user(_label(line, panel, runs)), element("output", _last(line.curve)))


def _look(line: Line, panel: Panel, num_runs: int) -> tuple[int, int]:
    """Return the numbers of a line's colour and dash: colours tell runs apart, or, of one run, its roles."""
    role = _place_of_role(line.role, panel)
    return (role % NUM_COLOURS, 0) if num_runs == 1 else (line.run % NUM_COLOURS, role % NUM_DASHES)


def _place_of_role(role: str, panel: Panel) -> int:
    """Return 0 for training where evaluation could be beside it, so that each has one look in all panels."""
    others = [one for one in panel.roles if one not in ("", "train")]
    return 1 + others.index(role) if role in others else 0


def _label(line: Line, panel: Panel, runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        return line.role or "value"
    return f"{runs[line.run].name} · {line.role}" if len(panel.roles) > 1 else runs[line.run].name


def _last(curve: Curve) -> str:
    finite = [value for value in curve.values if math.isfinite(value)]
    return number(finite[-1]) if finite else "not finite"


def _numbers(line: Line) -> dict[str, Any]:
    curve = line.curve
    found: dict[str, Any] = {
        "run": line.run,
        "x": curve.steps,
        "t": [round(value, 2) for value in curve.seconds],
        "y": [_short(value) for value in curve.values],
    }
    if curve.low:
        found |= {"lo": [_short(value) for value in curve.low], "hi": [_short(value) for value in curve.high]}
    return found | ({"ring": True} if line.chooses else {})


def _short(value: float) -> float | None:
    """Return six digits of a number; what is not finite becomes a gap."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _still_picture(panels: Sequence[Panel]) -> Html | None:
    """Return the curves as a picture for readers without scripts."""
    finite = [
        panel for panel in panels if any(map(math.isfinite, (v for line in panel.lines for v in line.curve.values)))
    ]
    if not finite:
        return None
    encoded = base64.b64encode(draw(finite[:6])).decode()
    names = ", ".join(spoken(panel.name) for panel in finite[:6])
    image = element("img", src=f"data:image/png;base64,{encoded}", alt=f"Curves of {names}")
    return element("noscript", image)
