"""What a checkpoint of a trainer holds, and how it is put back: model, optimizer, state, schedule, scaler, hooks, data.

No random state is saved: order and randomness are functions of the counters.
"""

from __future__ import annotations

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
    Parts,
    SavingGroup,
    gather_shards,
    gather_whole,
    load_shards,
)
from hezar_train.config import TrainerConfig
from hezar_train.config.files import to_yaml
from hezar_train.errors import ConfigError
from hezar_train.hooks import Stopping
from hezar_train.hub import MODEL_CONFIG_FOLDER
from hezar_train.loop import Hook
from hezar_train.optim import Schedule
from hezar_train.plan import Plan
from hezar_train.state import TrainerState

__all__ = ["Snapshot", "preprocessor_writer"]

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
