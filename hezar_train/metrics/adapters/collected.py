"""Functions of the whole set: predictions and targets are kept on the host, and go to other processes as tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hezar_train.metrics.adapters.adapted import AdaptedMetric, counted_pairs
from hezar_train.metrics.metric import Inputs

__all__ = ["CollectedMetric"]

Values: TypeAlias = npt.NDArray[Any] | list[Any]

JSON_SUFFIX = ".json"

logger = logging.getLogger(__name__)


class CollectedMetric(AdaptedMetric):
    """A function `f(predictions, targets)` of the whole set, which returns a number or a mapping of them.

    It receives numpy arrays, or lists where samples are texts or differ in length.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str,
        output_keys: Sequence[str] | None = None,
        objective: str | None = None,
        consumes: Inputs | None = None,
        drops_ignored: bool = True,
    ) -> None:
        super().__init__(name, output_keys, objective, consumes)
        self._function = function
        self._drops_ignored = drops_ignored
        self._batches: list[tuple[Values, Values]] = []
        self._has_warned = False

    def reset(self) -> None:
        self._batches = []

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:  # noqa: ARG002
        if not self._has_warned:
            self._has_warned = True
            logger.warning("metric %r needs the whole set at once: its predictions are kept in memory", self.name)
        if self._drops_ignored:
            predictions, targets = counted_pairs(predictions, targets)
        self._batches.append((_on_host(predictions), _on_host(targets)))

    def compute(self) -> dict[str, float]:
        if not self._batches:
            return self._undefined()
        return self._outputs(self._function(*self._joined()))

    def state(self) -> dict[str, torch.Tensor]:
        if not self._batches:
            return {}
        return dict(_packed(*item) for item in zip(("predictions", "targets"), self._joined(), strict=True))

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if state:
            self._batches.append((_unpacked("predictions", state), _unpacked("targets", state)))

    def _joined(self) -> tuple[Values, Values]:
        predictions, targets = zip(*self._batches, strict=True)
        # One batch from now on: joining again, for a state and then for a result, costs nothing.
        self._batches = [(_join(predictions), _join(targets))]
        return self._batches[0]


def _on_host(values: Any) -> Values:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return np.array((values.float() if values.dtype is torch.bfloat16 else values).numpy(), copy=True)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values.copy()
    return list(values)


def _join(batches: Sequence[Values]) -> Values:
    """Return all samples: an array if they have one shape, a flat one if batches differ in axes, else a list."""
    arrays = [batch for batch in batches if isinstance(batch, np.ndarray)]
    if len(arrays) < len(batches):
        return [sample for batch in batches for sample in batch]
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    if len({array.ndim for array in arrays}) > 1:
        return np.concatenate([array.reshape(-1) for array in arrays])
    return [sample.tolist() for array in arrays for sample in array]


def _packed(name: str, values: Values) -> tuple[str, torch.Tensor]:
    if isinstance(values, np.ndarray):
        return name, torch.from_numpy(values)
    text = json.dumps([value.tolist() if hasattr(value, "tolist") else value for value in values])
    return name + JSON_SUFFIX, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _unpacked(name: str, state: Mapping[str, torch.Tensor]) -> Values:
    if name in state:
        return np.asarray(state[name].cpu().numpy())
    values: list[Any] = json.loads(state[name + JSON_SUFFIX].cpu().numpy().tobytes())
    return values
