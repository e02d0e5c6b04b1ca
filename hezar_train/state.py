"""`TrainerState`: where a run is, as one JSON file inside each checkpoint.

Counters, position, loss sums and the best checkpoint; no tensors, no settings, no derived numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hezar_train.config.files import read_mapping, write_atomically
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.run_folder import can_be_path

__all__ = ["STATE_VERSION", "TrainerState"]

STATE_VERSION = 1
MOST = 1 << 63
"""Of every counter."""


@dataclass
class TrainerState:
    """Where a run is; two runs with equal states and tensors go on alike."""

    version: int = STATE_VERSION
    """Version of this layout."""

    epoch: int = 1
    """The epoch under way, or the one just finished; the first is 1."""

    total_epochs: int = 1
    """Epochs in the whole run."""

    global_step: int = 0
    """Steps done in the whole run."""

    epoch_step: int = 0
    """Steps done in this epoch."""

    update_step: int = 0
    """Updates applied in the whole run."""

    position: int = 0
    """Samples consumed in this epoch, over all processes."""

    samples_seen: int = 0
    """Samples consumed in the whole run, over all processes."""

    epoch_finished: bool = False
    """Whether this epoch has no samples left."""

    evaluation_pending: bool = False
    """Whether what follows this step's save is still to be done: its evaluation, where there is one, and what that
    changes (best, plateau, stop). A checkpoint is saved before; a resume does it first."""

    loss_tracker_sum: float = 0.0
    """Sum of the weighted losses that the running mean is taken over."""

    loss_tracker_count: float = 0.0
    """Sum of the weights that belong to `loss_tracker_sum`."""

    period_loss_sum: float = 0.0
    """Sum of the weighted losses since the last log entry."""

    period_loss_count: float = 0.0
    """Sum of the weights that belong to `period_loss_sum`."""

    metric_for_best_checkpoint: str | None = None
    """Full name of the metric that tells the best checkpoint."""

    best_metric_value: float | None = None
    """Best value of that metric; always finite."""

    best_checkpoint: int | None = None
    """Step of the checkpoint that has it."""

    logs_dir: str | None = None
    """Folder of the logs of this start."""

    stop_reason: str | None = None
    """Why the run ended; None while it goes on."""

    call_end: int | None = None
    """Step that ends the call of train() under way, where a call does only a part of the run."""

    call_last_samples: int | None = None
    """Samples consumed when that call ends, where they and not steps end it."""

    call_first_samples: int = 0
    """Samples consumed before that call."""

    model_index: int = 0
    """Number of the model that is trained, where several are trained one after another."""

    hooks: dict[str, Any] = field(default_factory=dict)
    """What verbs keep across a kill, in plain values, by name (`use_diff`).

    Hook objects' states are beside the state in a checkpoint, because they may hold tensors.
    """

    files: dict[str, int] = field(default_factory=dict)
    """Sizes in bytes of the ledger and of logs in JSON lines when this state was saved: a resume cuts them there."""

    @property
    def loss_tracker_avg(self) -> float:
        """Running mean of the loss; 0.0 before the first."""
        return self.loss_tracker_sum / self.loss_tracker_count if self.loss_tracker_count else 0.0

    def mean_loss(self) -> dict[str, float]:
        """Return the running mean of the loss under its name in results and logs; nothing before the first update."""
        return {"train.loss": self.loss_tracker_avg} if self.loss_tracker_count else {}

    def update(self, items: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Set several fields; names that are no fields are ignored."""
        names = {each.name for each in dataclasses.fields(self)}
        for name, value in {**(items or {}), **more}.items():
            if name in names:
                setattr(self, name, value)

    def update_best_results(self, metric_value: float, objective: str, step: int) -> bool:
        """Take a value as the best if it is the first or strictly better; say whether it was taken."""
        if objective not in ("maximize", "minimize"):
            raise ConfigError(f"objective={objective!r} is not known. Choose from: maximize, minimize.")
        value = float(metric_value)
        if not math.isfinite(value):
            return False
        best = self.best_metric_value
        if best is not None and not (value > best if objective == "maximize" else value < best):
            return False
        self.best_metric_value, self.best_checkpoint = value, step
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a state; fields of a newer version are ignored, missing ones have their defaults."""
        state = cls()
        state.update(values)
        state.version = STATE_VERSION
        return state

    @classmethod
    def refuse_misfits(cls, values: Any) -> None:
        """Raise unless stored values are of the types that a state has; fields of a newer version are not looked at."""
        if not isinstance(values, Mapping):
            raise CheckpointError(f"a state is names with values, not a {type(values).__name__}")
        for each in dataclasses.fields(cls):
            if each.name in values and not _fits(values[each.name], str(each.type)):
                raise CheckpointError(
                    f"the stored state has {each.name}={_short(values[each.name])}; expected {each.type}"
                )
        for name in (values.get("logs_dir") or "", *(values.get("files") or ())):
            if not can_be_path(name):
                raise CheckpointError(f"the stored state names {_short(name)}, which no file can be called")

    def save(self, path: str | os.PathLike[str], drop_none: bool = False) -> Path:
        """Write the state atomically as JSON; floats are written exactly."""
        values = {name: value for name, value in self.to_dict().items() if value is not None or not drop_none}
        return write_atomically(path, json.dumps(values, indent=2, ensure_ascii=False, default=_refuse) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a state from the file that `save` wrote."""
        try:
            return cls.from_dict(read_mapping(path))
        except ConfigError as error:
            raise CheckpointError(str(error)) from error


def _fits(value: Any, kind: str) -> bool:
    if value is None or kind.endswith(" | None"):
        return kind.endswith(" | None") and (value is None or _fits(value, kind.removesuffix(" | None")))
    if kind == "dict[str, int]":
        return isinstance(value, dict) and all(isinstance(name, str) and _fits(value[name], "int") for name in value)
    if kind == "dict[str, Any]":
        return isinstance(value, dict) and all(isinstance(name, str) for name in value)
    if kind == "int":
        return type(value) is int and 0 <= value < MOST
    if kind == "float":
        return type(value) is float or (type(value) is int and abs(value) < MOST)
    return type(value) is {"bool": bool, "str": str}[kind]


def _short(value: Any) -> str:
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _refuse(value: Any) -> Any:
    raise CheckpointError(
        f"the state holds a {type(value).__name__}, {value!r}: expected plain values (numbers, text, lists, mappings). "
        "What state.hooks keeps under a name must be made of them."
    )
