"""What all adapters share: what a metric of another maker is given, and how its outputs become floats under keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hezar_train.metrics.metric import IGNORED_LABEL, Inputs, Metric
from hezar_train.metrics.selection import check_outputs

__all__ = ["AdaptedMetric", "counted_pairs", "probabilities"]

MINIMIZED_NAMES = frozenset({"cer", "loss", "mae", "mse", "perplexity", "rmse", "ter", "wer"})


class AdaptedMetric(Metric):
    """What all adapters share: outputs of any form become floats under keys, and an objective."""

    def __init__(
        self, name: str, output_keys: Sequence[str] | None, objective: str | None, consumes: Inputs | None
    ) -> None:
        self.name = name
        self.consumes = consumes or "predictions"
        self._chosen_keys = None if output_keys is None else list(output_keys)
        self._computed_keys: list[str] | None = None
        self._objective = objective

    @property
    def output_keys(self) -> list[str]:
        return self._chosen_keys or self._computed_keys or [self.name]

    def objective(self, key: str) -> str:
        return self._objective or ("minimize" if key in MINIMIZED_NAMES else "maximize")

    def compute_rows(self) -> list[dict[str, float]]:
        return [self.compute()]

    def _outputs(self, value: Any) -> dict[str, float]:
        outputs = _flat(self.name, value)
        check_outputs(self.name, self._chosen_keys or (), outputs)
        self._computed_keys = list(outputs)
        return {key: outputs[key] for key in self.output_keys}


def counted_pairs(predictions: Any, targets: Any) -> tuple[Any, Any]:
    """Leave out integer targets of -100 and their predictions, which then are flat; else return both as they are."""
    if not isinstance(targets, torch.Tensor) or not isinstance(predictions, torch.Tensor):
        return predictions, targets
    if targets.is_floating_point() or predictions.shape[: targets.dim()] != targets.shape:
        return predictions, targets
    kept = targets != IGNORED_LABEL
    return (predictions, targets) if bool(kept.all()) else (predictions[kept], targets[kept])


def probabilities(scores: torch.Tensor, family: str) -> torch.Tensor:
    """Return the probabilities that logits stand for, classes on axis 1; of two classes, that of the second."""
    scores = scores.float()
    if family == "multilabel":
        return scores.sigmoid()
    if scores.dim() == 1 or scores.shape[-1] == 1:
        return scores.reshape(len(scores)).sigmoid()
    shares = scores.softmax(-1)
    return shares[..., 1] if family == "binary" else shares.movedim(-1, 1)


def _flat(name: str, value: Any) -> dict[str, float]:
    """Return numbers under keys: those of a mapping, `name` for one number, `name.0`, `name.1`, ... for several."""
    if isinstance(value, Mapping):
        return {key: number for part, each in value.items() for key, number in _nested(str(part), each).items()}
    numbers = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if numbers.dtype.kind not in "biuf":
        return {}
    if numbers.size == 1:
        return {name: float(numbers.reshape(()))}
    return {f"{name}.{number}": float(each) for number, each in enumerate(numbers.reshape(-1))}


def _nested(name: str, value: Any) -> dict[str, float]:
    numbers = _flat(name, value)
    return {f"{name}.{key}": number for key, number in numbers.items()} if isinstance(value, Mapping) else numbers
