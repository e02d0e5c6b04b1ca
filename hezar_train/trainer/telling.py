"""What a trainer tells people: rows in its logs, and the facts of its run as a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hezar_train.checkpoint import unwrap
from hezar_train.errors import DataError
from hezar_train.events import load_csv
from hezar_train.terminal import print_facts
from hezar_train.terminal.display import facts_of
from hezar_train.trainer.checks import size_of
from hezar_train.trainer.parts import Parts
from hezar_train.trainer.session import append_row

__all__ = ["Telling"]


class Telling(Parts):
    """Logs to write and to read, and facts to show."""

    def log(self, logs: Mapping[str, float], step: int) -> None:
        """Write values to every writer, under their names; while the run trains, or after it."""
        if not self.storage.writers and self.runtime.is_main:
            append_row(self.folder, self.state, self.storage, self.trainer_csv_log_file, logs, step)
            return
        self.storage.log(logs, step, self.state.epoch)
        self.storage.flush()

    def load_csv_logs(self, logs_dir: str | os.PathLike[str] | None = None) -> dict[str, list[Any]]:
        """Read the CSV log of this run, or of another logs folder, as a list per column."""
        if logs_dir is None and self.state.logs_dir is None:
            raise DataError("nothing was logged yet: train first, or pass the logs folder of a run")
        folder = self.folder.logs(self.state) if logs_dir is None else Path(logs_dir)
        return load_csv(folder / self.trainer_csv_log_file)

    def print_info(self) -> None:
        """Show the facts of the run as a table."""
        if self.runtime.is_main:
            print_facts(
                facts_of(
                    self.config, self.plan, self.runtime, unwrap(self.model), self.schedule, self.state,
                    optimizer=self.optimizer, eval_samples=size_of(self.eval_dataset), best_key=self.best_key,
                )
            )  # fmt: skip
