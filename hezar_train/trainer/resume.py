"""Which checkpoint a run goes on from, and whether it can go on exactly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hezar_train.checkpoint import CONFIG_FILE, Checkpoint, CheckpointStore
from hezar_train.checkpoint.best import read_best_step
from hezar_train.config import TrainerConfig
from hezar_train.config.files import read_mapping
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.hub import is_hub_address
from hezar_train.optim import Schedule, set_momentum
from hezar_train.plan import Plan, exactness_changes
from hezar_train.runtime import logger
from hezar_train.state import TrainerState
from hezar_train.trainer.checks import parameters_of
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.publishing import fetch_into

__all__ = ["apply_accepted", "find_checkpoint", "refuse_changes", "take_over"]

NAMES = ("best", "last")


def find_checkpoint(config: TrainerConfig, folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint that the config asks for: the newest that verifies, or the one at a path."""
    wanted = config.resume_from_checkpoint
    if not wanted:
        return None
    store = CheckpointStore(folder.checkpoints)
    if is_hub_address(wanted):
        return store.open(fetch_into(folder, str(wanted), config.to_dict()))
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


def refuse_changes(checkpoint: Checkpoint, config: TrainerConfig, plan: Plan, facts: Mapping[str, Any]) -> None:
    """Raise with the list of what changed, if the run could not go on exactly; `accept_changes` lets it pass."""
    old = read_mapping(checkpoint.path / CONFIG_FILE)
    extra = checkpoint.extra()
    old_plan = Plan.from_dict(extra["plan"])
    changes = exactness_changes(old, config.to_dict(), old_plan, plan)
    before = extra.get("facts") or facts
    changes += [f"{name}: {before.get(name)} in the checkpoint, {now} now" for name, now in facts.items()
                if before.get(name) != now]  # fmt: skip
    changes += _cut_window(checkpoint, old_plan, plan)
    if not changes:
        return
    listed = "\n".join(f"  {change}" for change in changes)
    if config.accept_changes:
        logger.warning("going on from %s with changes, so not exactly:\n%s", checkpoint.path, listed)
        return
    raise ConfigError(
        f"{checkpoint.path} cannot be resumed exactly, because something changed:\n{listed}\n"
        "Put it back; or begin another run, in another output_dir; or go on all the same with accept_changes=True."
    )


def _best_step(folder: RunFolder) -> int:
    if (step := read_best_step(folder.best)) is None:
        raise CheckpointError(f"resume_from_checkpoint='best', but {folder.best} does not exist: no best result yet")
    return step


def take_over(
    folder: RunFolder, store: CheckpointStore, state: TrainerState, checkpoint: Checkpoint | None, *, saves: bool
) -> None:
    """Make a folder the run's own: what does not belong to it is set aside, never deleted."""
    store.clean()
    is_foreign = checkpoint is not None and checkpoint.path.resolve().parent != store.root.resolve()
    if state.global_step == 0 or is_foreign:
        if (previous := folder.move_previous_aside()) is not None:
            logger.info("an earlier run in this folder was moved to %s", previous)
        state.update(files={}, logs_dir=None, best_checkpoint=None, best_metric_value=None)
        return
    for path in store.drop_after(state.global_step):
        logger.info("a checkpoint past step %d was set aside: %s", state.global_step, path)
    if saves:
        folder.write_best(state)


def apply_accepted(
    checkpoint: Checkpoint, config: TrainerConfig, optimizer: Optimizer, schedule: Schedule, model: nn.Module
) -> None:
    """Put changed optimizer settings into force, which the restored optimizer has as they were."""
    old = TrainerConfig.from_dict(read_mapping(checkpoint.path / CONFIG_FILE))
    if old.learning_rate != config.learning_rate and old.learning_rate > 0:
        schedule.scale_rates(config.learning_rate / old.learning_rate)
    settings = dict(config.optimizer_kwargs or {})
    for group in optimizer.param_groups:
        group.update({name: value for name, value in settings.items() if name in group})
    if old.weight_decay != config.weight_decay:
        _set_weight_decay(optimizer, config, model)
    if config.momentum is not None and config.momentum != old.momentum and schedule.momentum is None:
        set_momentum(optimizer, config.momentum)


def _set_weight_decay(optimizer: Optimizer, config: TrainerConfig, model: nn.Module) -> None:
    made = parameters_of(model, config)
    own = made if isinstance(made, list) and len(made) == len(optimizer.param_groups) else optimizer.param_groups
    for group, like in zip(optimizer.param_groups, own, strict=True):
        group["weight_decay"] = config.weight_decay if like is group else like["weight_decay"]


def _cut_window(checkpoint: Checkpoint, old: Plan, new: Plan) -> list[str]:
    """Tell of an update that an earlier `max_steps` cut short: a longer run would have made it whole."""
    state = checkpoint.state()
    is_cut = state["position"] % old.window_samples and not state["epoch_finished"]
    if not is_cut or old.num_samples is None or new.counted_steps <= old.counted_steps:
        return []
    return [f"max_steps: it ended the run at step {state['global_step']}, inside an update that would now be whole"]
