"""Write the report: one HTML file with style, script, numbers and text, which needs no network.

Owns the order of the sections and where the file goes. The page's content policy lets only its own script run, told by
its hash, and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from hezar_train import __version__
from hezar_train.config.files import write_atomically
from hezar_train.report.charts import NUM_COLOURS, curves_section, payload
from hezar_train.report.markup import Content, Html, element, joined, moment, of_user
from hezar_train.report.picture import make_panels, write_curves
from hezar_train.report.read import (
    RunRecord,
    SavedCheckpoint,
    Start,
    read_runs,
    saved_checkpoints,
    starts_of,
    time_split,
)
from hezar_train.report.samples import results_in_words, results_section
from hezar_train.report.sections import (
    checkpoints_section,
    comparison_section,
    environment_section,
    facts_list,
    settings_section,
    status_badge,
    time_section,
)
from hezar_train.run_layout import COMPARISON_FILE, REPORT_FILE

__all__ = ["COMPARISON_FILE", "REPORT_FILE", "write_report"]


@dataclass(frozen=True)
class _Shown:
    """A run with what was worked out of it."""

    run: RunRecord
    starts: list[Start]
    checkpoints: list[SavedCheckpoint]


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write a page about a run, or one that compares several, and return its path.

    Without `out` it is `RUN/report.html`, with a picture of the curves beside it, and `comparison.html` in the current
    folder for several. A run may be under way. What cannot be read is told on the page.
    """
    records = read_runs(runs)
    target = Path(out) if out is not None else _usual_place(records)
    if out is None and len(records) == 1:
        write_curves(records[0])
    # a lone surrogate in a label is no reason for no report
    return write_atomically(target, _page(records).encode("utf-8", "replace"))


def _usual_place(records: Sequence[RunRecord]) -> Path:
    return records[0].root / REPORT_FILE if len(records) == 1 else Path(COMPARISON_FILE)


def _page(records: Sequence[RunRecord]) -> str:
    shown = [_Shown(run, starts_of(run), saved_checkpoints(run.layout)) for run in records]
    script = _asset("js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    panels = make_panels(records)
    names = ", ".join(run.name for run in records)
    body = (
        _one(shown[0], curves_section(records, panels))
        if len(shown) == 1
        else _several(shown, curves_section(records, panels))
    )
    return Template(_asset("html")).substitute(
        script_hash=f"sha256-{digest}",
        version=html.escape(__version__),
        title=html.escape(f"{names} · hezar_train"),
        style=_asset("css"),
        body=joined([body, _footer(records)]),
        data=payload(records, panels, [one.starts for one in shown]),
        script=script,
    )


def _asset(kind: str) -> str:
    return files("hezar_train.report").joinpath("assets", f"report.{kind}").read_text(encoding="utf-8")


def _one(shown: _Shown, curves: Html) -> Html:
    run = shown.run
    heading = element("div", of_user(run.name, "h1"), status_badge(run), class_="title")
    parts: list[Content] = [element("header", heading, _subtitle(run)), _problems([run]), facts_list(run, shown.starts)]
    sections = {"Curves": curves} | _sections_of(shown)
    links = [element("a", title, href=f"#{_anchor(title)}") for title in sections]
    parts.append(element("nav", *links, aria_label="Sections"))
    parts += [_section(title, content) for title, content in sections.items()]
    return element("main", *parts)


def _several(shown: Sequence[_Shown], curves: Html) -> Html:
    runs = [one.run for one in shown]
    heading = element("div", element("h1", f"{len(runs)} runs compared"), class_="title")
    parts: list[Content] = [element("header", heading), _problems(runs)]
    parts.append(_section("Runs", comparison_section(runs, [one.starts for one in shown])))
    parts.append(_section("Curves", curves))
    parts += [_article(place, one) for place, one in enumerate(shown)]
    return element("main", *parts)


def _article(place: int, shown: _Shown) -> Html:
    """Return everything about one run of several, folded away."""
    key = element("i", class_=f"key c{place % NUM_COLOURS}")
    heading = element("div", key, of_user(shown.run.name, "h2"), status_badge(shown.run), class_="title")
    folded = [element("details", _summary(title, shown.run), content) for title, content in _sections_of(shown).items()]
    return element("article", heading, _subtitle(shown.run), facts_list(shown.run, shown.starts), *folded, class_="run")


def _summary(title: str, run: RunRecord) -> Html:
    """Return the line that stands for a section, which says what is inside where that is more than its title does."""
    inside = results_in_words(run) if title == "Evaluation" else ""
    if not inside:
        return element("summary", title)
    return element("summary", f"{title} of ", of_user(run.name), f": {inside}")


def _sections_of(shown: _Shown) -> dict[str, Html]:
    run, starts = shown.run, shown.starts
    return {
        "Evaluation": results_section(run),
        "Time": time_section(run, starts, time_split(run, starts)),
        "Checkpoints": checkpoints_section(run, shown.checkpoints),
        "Config": settings_section(run),
        "Environment": environment_section(run),
    }


def _section(title: str, content: Html) -> Html:
    anchor = _anchor(title)
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), content, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def _anchor(title: str) -> str:
    return title.lower()


def _subtitle(run: RunRecord) -> Html:
    words = [str(run.root)]
    if recipe := run.recipe.get("path"):
        words.append(f"recipe {recipe}")
    task = run.settings.get("task")
    if task and str(task) != Path(str(recipe)).name:  # many a recipe is named after its task
        words.append(f"task {task}")
    return of_user(" · ".join(words), "p")


def _problems(runs: Sequence[RunRecord]) -> Html | None:
    found = [f"{run.name}: {one}" if len(runs) > 1 else one for run in runs for one in run.problems]
    if not found:
        return None
    title = element("h2", "Not everything could be read")
    return element("section", title, element("ul", *(of_user(one, "li") for one in found)), class_="problems")


def _footer(runs: Sequence[RunRecord]) -> Html:
    words = f"Written {moment(time.time())} by hezar_train {__version__}."
    if any(run.is_running for run in runs):
        words += " A run was still under way: write the report again to see more."
    return element("footer", words)
