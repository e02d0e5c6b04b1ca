"""Which checkpoint a run goes on from, and whether it can go on exactly."""

from __future__ import annotations

import os
from pathlib import Path

from hezar_train.checkpoint import CONFIG_FILE, Checkpoint, CheckpointStore
from hezar_train.config import TrainerConfig
from hezar_train.config.files import read_mapping
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.plan import Plan, exactness_changes
from hezar_train.runtime import logger
from hezar_train.trainer.folder import RunFolder

__all__ = ["find_checkpoint", "refuse_changes"]

NAMES = ("best", "last")


def find_checkpoint(config: TrainerConfig, folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint that the config asks for: the newest that verifies, or the one at a path."""
    wanted = config.resume_from_checkpoint
    if not wanted:
        return None
    store = CheckpointStore(folder.checkpoints)
    if wanted is not True and str(wanted) not in NAMES:
        return store.open(Path(os.fspath(wanted)))
    if wanted == "best":
        return store.open(store.path(_best_step(folder)))
    found, rejected = store.newest()
    for one in rejected:
        logger.warning("checkpoint %s is damaged and was passed over: %s", one.path, one.reason)
    if found is None:
        logger.info("nothing to resume in %s: starting from the beginning", folder.checkpoints)
    return found


def refuse_changes(checkpoint: Checkpoint, config: TrainerConfig, plan: Plan) -> None:
    """Raise with the list of what changed, if the run could not go on exactly; `accept_changes` lets it pass."""
    old = read_mapping(checkpoint.path / CONFIG_FILE)
    changes = exactness_changes(old, config.to_dict(), Plan.from_dict(checkpoint.extra()["plan"]), plan)
    if not changes:
        return
    listed = "\n".join(f"  {change}" for change in changes)
    if config.accept_changes:
        logger.warning("going on from %s with changes, so not exactly:\n%s", checkpoint.path, listed)
        return
    raise ConfigError(
        f"{checkpoint.path} cannot be resumed exactly, because something changed:\n{listed}\n"
        "Put it back, or set accept_changes=True to go on all the same."
    )


def _best_step(folder: RunFolder) -> int:
    if not folder.best.exists():
        raise CheckpointError(f"resume_from_checkpoint='best', but {folder.best} does not exist: no best result yet")
    return int(read_mapping(folder.best)["step"])
