"""The curves of runs, grouped as they are looked at: train and evaluation of one quantity share a panel.

Owns which values go together, under which title and in which order, and how many points of a curve are kept. Nothing
here draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hezar_train.events import Row
from hezar_train.report.records import RunRecord
from hezar_train.report.timeline import SECONDS_NAME, Clock, starts_of

__all__ = ["Curve", "Line", "Panel", "make_panels", "thinned"]

MOST_POINTS = 1200
"""Points of a curve that a page carries; a screen has fewer columns."""

BOUNDS = (".low", ".high")
RECENT_LOSS, MEAN_LOSS = "train.recent_loss", "train.loss"
STAGES = ("train", "evaluation")
ORDER_OF_TRAIN_ONLY = ("learning_rate", "samples_per_second", "grad_norm")
NEVER_SMOOTHED = frozenset({"learning_rate"})
FROM_ZERO = frozenset({"samples_per_second"})
"""Its noise would fill a chart of its own; how much it is says more."""


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
    for number, run in enumerate(runs):
        clock = Clock(starts_of(run))
        names = list(dict.fromkeys(name for row in run.rows for name in row.values))
        for name in names:
            if name.endswith(BOUNDS) or SECONDS_NAME.fullmatch(name):
                continue
            title, role = _place(name, run, has_recent_loss=RECENT_LOSS in names)
            line = Line(number, role, thinned(_curve(run.rows, name, clock)), chooses=role == _choosing_role(run))
            panels.setdefault(title, Panel(title)).lines.append(line)
    for panel in panels.values():
        panel.lines.sort(key=lambda line: (line.run, line.role != "train", line.role))
        panel.is_main = _rank(panel, runs) < len(RANKS) - 1
    return sorted(panels.values(), key=lambda panel: _rank(panel, runs))


RANKS = ("loss", "best metric", "metrics", *ORDER_OF_TRAIN_ONLY, "others")


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


def _curve(rows: Iterable[Row], name: str, clock: Clock) -> Curve:
    """Collect a quantity; of two rows of one step the later counts."""
    found = {row.step: row for row in rows if name in row.values}
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
    kept = sorted({index for stretch in _stretches(len(curve.steps), most // 4) for index in _corners(curve, stretch)})
    columns = (curve.steps, curve.seconds, curve.values, curve.low, curve.high)
    return Curve(*([column[index] for index in kept] if column else [] for column in columns))  # type: ignore[arg-type]


def _stretches(length: int, number: int) -> Iterator[range]:
    for part in range(number):
        if stretch := range(length * part // number, length * (part + 1) // number):
            yield stretch


def _corners(curve: Curve, stretch: range) -> set[int]:
    finite = [index for index in stretch if math.isfinite(curve.values[index])] or [stretch[0]]
    broken = next((index for index in stretch if not math.isfinite(curve.values[index])), stretch[0])
    least, greatest = (choose(finite, key=curve.values.__getitem__) for choose in (min, max))
    # A value that is not finite takes the place of an ordinary end: the page must show it.
    return {broken, stretch[-1], least, greatest}
