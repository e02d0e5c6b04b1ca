"""What a run left in its folder, as plain values, and what follows from them: has it ended, how, is it under way.

`reading` fills them. The lock file is never opened: closing any descriptor of it would take the lock from a trainer of
this process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hezar_train.events import FAILED, METRICS_FILE, Row, end_of, ended_for_good

__all__ = ["Evaluation", "RunRecord", "Table"]

STALE_SECONDS = 600
"""A run that has written nothing for so long is taken for killed."""


@dataclass(frozen=True)
class Table:
    """A table of an evaluation: `values[i][j]` belongs to `rows[i]` and `columns[j]`."""

    name: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]


@dataclass(frozen=True)
class Evaluation:
    """The record of one evaluation; what is kept per data set has the set's name as key, empty for a single one."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, list[Table]] = field(default_factory=dict)
    worst_samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stop_reason: str | None = None
    """Why the run was to stop after it."""
    sample_loss_name: str = "loss"
    """What the losses of the worst samples are, in words."""


@dataclass
class RunRecord:
    """Everything that the report shows of one run, as far as it could be read."""

    root: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    """What each start was made of, as the trainer wrote it down."""
    settings_by_start: list[dict[str, Any]] = field(default_factory=list)
    """The config of each start, as far as it can still be read; empty where it cannot."""
    start_times: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    dropped_rows: list[Row] = field(default_factory=list)
    """Rows that a resume took back, because their steps were done again."""
    newest_saved_step: int = 0
    """Step of the newest checkpoint."""
    best_evaluation: Evaluation | None = None
    last_evaluation: Evaluation | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of the checkpoints."""
        return self.root / str(self.settings.get("checkpoints_dir") or "checkpoints")

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        evaluated = self.last_evaluation.step if self.last_evaluation else 0
        return max([row.step for row in self.rows[-1:]] + [evaluated, self.newest_saved_step])

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if its plan says so."""
        total = self.plan.get("total_steps")
        return total if isinstance(total, int) and 0 < total < 1 << 60 else None

    @property
    def steps_in_epoch(self) -> int | None:
        """Steps of one epoch; None for a stream."""
        found = self.plan.get("steps_in_epoch")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint."""
        step = self.best.get("step")
        return step if isinstance(step, int) else None

    @property
    def best_metric(self) -> str | None:
        """Full name of the metric that tells the best checkpoint."""
        metric = self.best.get("metric")
        return metric if isinstance(metric, str) else None

    @property
    def set_names(self) -> list[str]:
        """Names of the evaluation sets, where there are several."""
        shown = self.last_evaluation or Evaluation(0)
        names = {*shown.tables, *shown.worst_samples, *shown.examples, "test"} - {""}
        return sorted(names, key=len, reverse=True)

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended before its plan did."""
        last = self.last_evaluation
        if last is not None and last.step >= self.last_step and last.stop_reason is not None:
            return last.stop_reason
        reason = self.end.get("reason")
        return None if reason is None else str(reason)

    @property
    def end(self) -> dict[str, Any]:
        """How the last start ended, as the trainer wrote it down; empty while it goes on, and if it was killed."""
        return end_of(self.starts[-1]) if self.starts else {}

    @property
    def error(self) -> str | None:
        """The kind of error that ended the run, if one did."""
        return str(self.end.get("error") or "an error") if self.end.get("how") == FAILED else None

    @property
    def is_finished(self) -> bool:
        """Tell whether the run came to its end."""
        if self.error is not None:
            return False
        total = self.total_steps
        is_over = ended_for_good(self.end, self.settings)
        return is_over or self.stop_reason is not None or (total is not None and self.last_step >= total)

    @property
    def is_under_way(self) -> bool:
        """Tell whether a trainer seems to be at work: the lock has a holder's name, and something was just written."""
        if self.end or self.is_finished or not _is_held(self.root / "lock"):
            return False
        return time.time() - self._last_change() < STALE_SECONDS

    def _last_change(self) -> float:
        """Return when the run last wrote something that grows while it trains."""
        logs = self.root / str(self.settings.get("logs_dir") or "logs")
        written = (
            self.root / "lock",
            self.root / "ledger.jsonl",
            self.checkpoints_dir,
            *logs.glob(f"*/{METRICS_FILE}"),
        )
        return max((path.stat().st_mtime for path in written if path.exists()), default=0.0)


def _is_held(lock: Path) -> bool:
    try:
        return lock.stat().st_size > 0
    except OSError:
        return False
