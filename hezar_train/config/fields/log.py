"""Fields of what is written down while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hezar_train.config.checks import one_of, path, steps, wrong_type
from hezar_train.config.names import TRACKERS

__all__ = ["LogFields"]


@dataclass(kw_only=True)
class LogFields:
    log_steps: int | float | None = None
    """Steps between two log entries; a float below 1 is a share of the run. None or 0: at epoch ends only."""

    logs_dir: str = "logs"
    """Folder of the logs, under `output_dir`; each run has its own folder in it, which a resume goes on in."""

    trackers: list[str] | None = None
    """Trackers besides the JSON lines and CSV files, by Accelerate's names. None: TensorBoard; an empty list: none."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from steps("log_steps", self.log_steps, least=0)
        yield from path("logs_dir", self.logs_dir)
        if self.trackers is None:
            return
        if not isinstance(self.trackers, list | tuple):
            yield wrong_type("trackers", self.trackers, "a list of names")
            return
        for number, tracker in enumerate(self.trackers):
            yield from one_of(f"trackers[{number}]", tracker, TRACKERS, optional=False)
