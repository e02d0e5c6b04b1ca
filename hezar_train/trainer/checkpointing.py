"""What a trainer tells the Hub: how pushes begin and end around a run, and where a run comes from.

Everything that is sent comes from the run's folder; the trainer is only asked for facts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hezar_train.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    CheckpointStore,
    Parts,
    SavingGroup,
    gather_shards,
    gather_whole,
    load_shards,
)
from hezar_train.checkpoint.manifest import read_best_step
from hezar_train.config import TrainerConfig
from hezar_train.config.files import read_mapping, to_yaml
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.hooks import Stopping
from hezar_train.hub import (
    MODEL_CONFIG_FOLDER,
    Pusher,
    PushTarget,
    fetch_checkpoint,
    fetch_records,
    fetch_weights,
    is_hub_address,
    names_hub_weights,
)
from hezar_train.loop import Hook
from hezar_train.optim import Schedule, set_momentum
from hezar_train.plan import Plan, exactness_changes
from hezar_train.runtime import logger
from hezar_train.state import TrainerState
from hezar_train.trainer.checks import parameters_of
from hezar_train.trainer.folder import RunFolder

__all__ = [
    "Snapshot",
    "apply_accepted",
    "fetch_into",
    "find_checkpoint",
    "finish_pushes",
    "local_weights",
    "preprocessor_writer",
    "pusher_of",
    "refuse_changes",
    "take_over",
]


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


# What a checkpoint of a trainer holds, and how it is put back: model, optimizer, state, schedule, scaler, hooks, data.
#
# No random state is saved: order and randomness are functions of the counters.

PREPROCESSOR_FOLDER = "preprocessor"


@dataclass
class Snapshot:
    """The live objects behind a checkpoint."""

    config: TrainerConfig
    plan: Plan
    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler | None
    state: TrainerState
    hooks: Sequence[Hook]
    facts: Mapping[str, Any] = field(default_factory=dict)
    write_preprocessor: Callable[[Path], None] | None = None
    write_model_config: Callable[[Path], None] | None = None
    cursor: Any = None
    """Where the data is, if the position does not say it all."""

    measured: Mapping[str, tuple[float, int, bool | None]] = field(default_factory=dict)
    """What hooks put and no row of the log holds yet: value, step and smoothing hint by name."""

    hook_states: Mapping[str, Any] = field(default_factory=dict)
    """The states of the hooks in the checkpoint that was put back, by name."""

    stopping: Stopping | None = None
    group: SavingGroup | None = None
    """The processes that save together, because each has a share of the model; None: each has all of it."""

    def __post_init__(self) -> None:
        self._config_text = to_yaml(self.config.to_dict())  # once: it takes longer than a small model's copy

    def take(self, before_commit: Callable[[], None] | None = None) -> Parts:
        """Gather everything that this process saves by reference; the writer copies the tensors."""
        contents = self._contents(before_commit)
        if self.group is None:
            return Parts.gather(**contents)
        return gather_shards(**contents, rank=self.group.rank, count=self.group.count)

    def take_whole(self) -> Parts:
        """Gather everything with whole tensors, on the main process; all processes call this together."""
        if self.group is None:
            return Parts.gather(**self._contents())
        return gather_whole(**self._contents(), is_kept=self.group.is_main)

    def _contents(self, before_commit: Callable[[], None] | None = None) -> dict[str, Any]:
        extra = {
            "plan": self.plan.to_dict(),
            "facts": dict(self.facts),
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "hooks": {name: hook.state_dict() for name, hook in self._named_hooks()},
            "stopping": None if self.stopping is None else self.stopping.state_dict(),
            "data": self.cursor,
            "measured": dict(self.measured),
        }
        writers = {PREPROCESSOR_FOLDER: self.write_preprocessor, MODEL_CONFIG_FOLDER: self.write_model_config}
        folders = {name: write for name, write in writers.items() if write is not None}
        return {
            "model": self.model,
            "optimizer": self.optimizer.state_dict(),
            "state": self.state.to_dict(),
            "texts": {CONFIG_FILE: self._config_text},
            "extra": extra,
            "folders": folders,
            "before_commit": before_commit,
        }

    def put_back(self, checkpoint: Checkpoint) -> None:
        """Bring every object back to where the checkpoint has it."""
        load_shards(checkpoint, self.model, self.optimizer)
        extra = checkpoint.extra()
        self.schedule.load_state_dict(extra["schedule"])
        if self.scaler is not None and extra["scaler"] is not None:
            self.scaler.load_state_dict(extra["scaler"])
        if self.stopping is not None and extra.get("stopping") is not None:
            self.stopping.load_state_dict(extra["stopping"])
        self.cursor, self.measured = extra["data"], extra["measured"]
        self.state.update(checkpoint.state())
        self.hook_states = extra["hooks"]
        self.put_back_hooks(self.hooks)

    def put_back_hooks(self, hooks: Sequence[Hook]) -> None:
        """Give hooks the state that the checkpoint has for them, those included that are added after it was read."""
        for name, hook in self._named_hooks():
            if name in self.hook_states and any(hook is one for one in hooks):
                hook.load_state_dict(self.hook_states[name])

    def _named_hooks(self) -> list[tuple[str, Hook]]:
        """Name each hook; a second one of the same name gets a number."""
        seen: dict[str, int] = {}
        named = []
        for hook in self.hooks:
            seen[hook.name] = number = seen.get(hook.name, 0) + 1
            named.append((hook.name if number == 1 else f"{hook.name}-{number}", hook))
        return named


def preprocessor_writer(preprocessor: Any) -> Callable[[Path], None] | None:
    """Return how to write a preprocessor into a folder: its `save_pretrained`, else its `save`."""
    if preprocessor is None:
        return None
    for method in ("save_pretrained", "save"):
        if hasattr(preprocessor, method):
            write = getattr(preprocessor, method)
            return lambda folder: write(str(folder))
    raise ConfigError(
        f"the preprocessor {type(preprocessor).__name__} has neither save_pretrained(folder) nor save(folder), so "
        "it cannot be kept with the model. Add one, or do not pass it."
    )


# Which checkpoint a run goes on from, and whether it can go on exactly.

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
