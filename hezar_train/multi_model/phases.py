"""One model after another: where each phase begins, and what of the run's state belongs to one model alone.

All of it is kept in the state, as plain values: a phase that a kill broke off goes on where its last checkpoint has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hezar_train.hooks import Stopping
from hezar_train.state import TrainerState

__all__ = ["Phases"]

NAME = "multi_model"
OWN = (
    "epoch", "position", "epoch_step", "epoch_finished", "loss_tracker_sum", "loss_tracker_count", "best_metric_value",
    "best_checkpoint",
)  # fmt: skip


class Phases:
    """Let models learn one after another, each with its own place in the data, sums, best result and patience."""

    def __init__(self, state: TrainerState, names: Sequence[str], stopping: Callable[[], Stopping]) -> None:
        """Begin with the first model; `stopping` returns the judge of the run, which another config replaces."""
        self._state, self._names, self._stopping = state, list(names), stopping
        self._untouched = self._own(num_updates=0)

    @property
    def first_step(self) -> int:
        """The step that the phase under way began after."""
        return int(self._kept["first_step"])

    @property
    def updates_of_others(self) -> int:
        """Updates of the run that were not those of the model of this phase."""
        return int(self._kept["updates_of_others"])

    def enter(self, index: int) -> None:
        """Put away what is one model's own and give the next one its own, which at first is that of a new run."""
        state, kept = self._state, self._kept
        kept["models"][self._names[state.model_index]] = self._own(state.update_step - kept["updates_of_others"])
        found = copy.deepcopy(kept["models"].get(self._names[index], self._untouched))
        kept |= {"first_step": state.global_step, "updates_of_others": state.update_step - found["num_updates"]}
        self._stopping().load_state_dict(found["stopping"])
        state.update(found, model_index=index)

    @property
    def _kept(self) -> dict[str, Any]:
        at_first = {"first_step": 0, "updates_of_others": 0, "models": {}}
        found: dict[str, Any] = self._state.hooks.setdefault(NAME, at_first)
        return found

    def _own(self, num_updates: int) -> dict[str, Any]:
        own = {name: getattr(self._state, name) for name in OWN}
        return own | {"num_updates": num_updates, "stopping": copy.deepcopy(self._stopping().state_dict())}
