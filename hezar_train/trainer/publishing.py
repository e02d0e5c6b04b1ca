"""What a trainer tells the Hub: how pushes begin and end around a run, and where a run comes from.

Everything that is sent comes from the run's folder; the trainer is only asked for facts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hezar_train.config import TrainerConfig
from hezar_train.hub import (
    Pusher,
    PushTarget,
    fetch_checkpoint,
    fetch_records,
    fetch_weights,
    names_hub_weights,
)
from hezar_train.runtime import logger
from hezar_train.trainer.folder import RunFolder

__all__ = ["fetch_into", "finish_pushes", "local_weights", "pusher_of"]


def pusher_of(config: TrainerConfig, folder: RunFolder) -> Pusher | None:
    """Return what pushes this run, started; None if the config does not ask for it."""
    if not config.push_to_hub:
        return None
    target = PushTarget(
        str(config.hub_model_id), config.hub_revision, config.hub_private, config.hub_strategy, metadata=config.hub_card
    )
    pusher = Pusher(folder.root, target)
    pusher.start()
    return pusher


def finish_pushes(pusher: Pusher | None, wait_seconds: float, say: Callable[[str], None]) -> bool | None:
    """Push the end, wait for it, tell what became of all pushes; return whether the end is on the Hub."""
    if pusher is None:
        return None
    is_uploaded = pusher.close(wait_seconds)
    say(pusher.summary())
    return is_uploaded


def fetch_into(folder: RunFolder, address: str, own_config: Mapping[str, Any]) -> Path:
    """Bring a checkpoint from the Hub into the run's folder, with the records that belong to it; return its path."""
    found = fetch_checkpoint(address, folder.checkpoints, own_config=own_config)
    if not folder.all_logs.exists():  # else this machine has its own, which the run goes on with
        fetch_records(address, folder.root)
    logger.info("%s was fetched to %s", address, found)
    return found


def local_weights(source: str | os.PathLike[str]) -> Path:
    """Return where the initial weights are; those on the Hub are downloaded."""
    return fetch_weights(str(source)) if names_hub_weights(source) else Path(source)
