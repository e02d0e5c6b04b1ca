"""Where the parts of a finished or running run lie, found from its folder alone.

This module only reads. It never opens the lock file: closing any descriptor of it would release the trainer's lock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hezar_train.checkpoint import CONFIG_FILE, CheckpointStore
from hezar_train.config.files import read_json, read_mapping
from hezar_train.errors import CheckpointError, ConfigError

__all__ = ["RunPaths"]


class RunPaths:
    """The paths of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = _config_of(root)
        self.settings: dict[str, Any] = read_mapping(self.config)
        self.checkpoints = root / str(self.settings.get("checkpoints_dir") or "checkpoints")
        self.logs = root / str(self.settings.get("logs_dir") or "logs")
        self.evaluations = root / "evaluations"
        self.staging = root / ".hub"
        self.record = root / "hub.json"

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return CheckpointStore(self.checkpoints)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint."""
        if not (steps := self.store.steps()):
            raise CheckpointError(f"{self.checkpoints} holds no checkpoint: there is nothing to push")
        return steps[-1]

    def best_step(self) -> int:
        """Return the step of the best checkpoint, or of the newest where none was found best."""
        best = self.json("best.json").get("step")
        return best if isinstance(best, int) and best in self.store.steps() else self.newest_step()

    def json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; empty where there is none that can be read."""
        return read_json(self.root / name)

    def evaluation_at(self, step: int) -> dict[str, Any]:
        """Return the record of the newest evaluation that is not past a step; empty if there is none."""
        known = [path for path in sorted(self.evaluations.glob("*.json")) if path.stem.isdigit()]
        reached = [path for path in known if int(path.stem) <= step]
        return self.json(f"{self.evaluations.name}/{reached[-1].name}") if reached else {}

    def log_folders(self) -> list[Path]:
        """Return the folders of logs, oldest first."""
        return sorted(path for path in self.logs.glob("*") if path.is_dir()) if self.logs.is_dir() else []


def _config_of(root: Path) -> Path:
    """Return the run's config; a trainer may call it otherwise, but checkpoints always hold it under this name."""
    found = [*sorted(root.glob(f"checkpoints/[0-9]*/{CONFIG_FILE}")), *root.glob(CONFIG_FILE)]
    if not found:
        raise ConfigError(f"{root} is not the folder of a run: it has no {CONFIG_FILE}")
    return found[-1]
