"""lernomatic's view of what was measured: arrays of losses and accuracies, the latest of each, one file of them all.

Owns names, not numbers: the storage holds those, for as many epochs as there are. Losses of the training are one per
update; those of an evaluation one per evaluation, over its whole data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hezar_train.events import EventStorage
    from hezar_train.runtime import Runtime
    from hezar_train.state import TrainerState

__all__ = ["HistoryView"]

STEP_LOSS = "train.step_loss"
PERIOD_LOSS = "train.recent_loss"
EVALUATION_LOSS = "evaluation.loss"
EVALUATION_ACCURACY = "evaluation.accuracy"

Points = list[tuple[float, int]]
Floats = NDArray[np.float64]


class HistoryView:
    """Getters of histories, for a Trainer to inherit: None for arrays and 0.0 for numbers before the first value."""

    if TYPE_CHECKING:
        storage: EventStorage
        runtime: Runtime
        state: TrainerState

    def get_loss_history(self) -> Floats | None:
        """Return the loss of every update; before a resume, the mean loss of every log period."""
        return _array(self._losses())

    def get_cur_loss(self) -> float:
        """Return the loss of the last update."""
        return self._latest(STEP_LOSS, PERIOD_LOSS)

    def get_cur_epoch_loss(self) -> Floats | None:
        """Return the losses of the epoch under way, or of the one just finished."""
        return _array(self._of_this_epoch(self._losses()))

    def get_val_loss_history(self) -> Floats | None:
        """Return the loss of every evaluation."""
        return _array(self._points(EVALUATION_LOSS))

    def get_cur_val_loss(self) -> float:
        """Return the loss of the last evaluation."""
        return self._latest(EVALUATION_LOSS)

    def get_cur_epoch_val_loss(self) -> Floats | None:
        """Return the losses of the evaluations in the epoch under way, or in the one just finished."""
        return _array(self._of_this_epoch(self._points(EVALUATION_LOSS)))

    def get_acc_history(self) -> Floats | None:
        """Return the accuracy of every evaluation."""
        return _array(self._points(EVALUATION_ACCURACY))

    def get_cur_acc(self) -> float:
        """Return the accuracy of the last evaluation."""
        return self._latest(EVALUATION_ACCURACY)

    def save_history(self, path: str | os.PathLike[str]) -> Path:
        """Write everything measured so far into one JSON file."""
        self.runtime.processes.on_main(lambda: self.storage.save_history(path))
        return Path(path)

    def load_history(self, path: str | os.PathLike[str]) -> None:
        """Read a saved history; what this trainer measures from now on follows it."""
        self.storage.load_history(path)

    def _losses(self) -> Points:
        """Return the loss of each update, and of the time before the first one held what the rows say."""
        losses = self._points(STEP_LOSS)
        periods = self._points(PERIOD_LOSS)
        return [point for point in periods if not losses or point[1] < losses[0][1]] + losses

    def _points(self, name: str) -> Points:
        history = self.storage.histories().get(name)
        return [] if history is None else history.values()

    def _latest(self, *names: str) -> float:
        histories = self.storage.histories()
        return next((histories[name].latest() for name in names if name in histories), 0.0)

    def _of_this_epoch(self, points: Points) -> Points:
        """Return the last points that lie in this epoch; a loaded history may end with higher steps than are done."""
        if not self.state.epoch_step:
            return []
        first, last, found = self.state.global_step - self.state.epoch_step, self.state.global_step, []
        for value, step in reversed(points):
            if not first < step <= last:
                break
            found.append((value, step))
            last = step
        return found[::-1]


def _array(points: Iterable[tuple[float, int]]) -> Floats | None:
    values = [value for value, _ in points]
    return np.array(values) if values else None
