"""What a loss is the mean of, samples or labels, and so how much each micro-batch counts in its update.

The units of a loss are samples, or the labels that count. The weight of a micro-batch in its window is its number of
units over all processes' sum, so that splitting a batch does not change the gradient, also with padding and in a short
last window. `Weigher` says it before the first backward; `share_of` in `loop/loop.py` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hezar_train.data import Window, batch_length
from hezar_train.errors import DataError
from hezar_train.metrics import IGNORED_LABEL
from hezar_train.runtime import Processes
from hezar_train.trainer.model_runner import labels_of
from hezar_train.types import TaskType

__all__ = ["Weigher", "counts_labels", "label_counter"]

LABEL_TASKS = {TaskType.SEQUENCE_LABELING, TaskType.MASK_FILLING, TaskType.TEXT_GENERATION, TaskType.LANGUAGE_MODELING}
LABEL_MODELS = ("ForTokenClassification", "ForMaskedLM")
CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel")


class Weigher:
    """Say what the micro-batches of a window weigh, before the first of them is trained on."""

    def __init__(self, units_in: Callable[[Any], float] | None, processes: Processes) -> None:
        """Count the units in a batch by `units_in`; without it they are its samples."""
        self._units_in, self._processes = units_in, processes

    def weigh(self, window: Window) -> Window:
        """Say what each micro-batch weighs, and all of them on all processes together."""
        self.weigh_here(window)
        if self._processes.count > 1:
            by_samples = window.count > 0 and self._units_in is None  # 0: a step on its own, outside of a fit
            total = float(window.count) if by_samples else self._processes.sum([window.total_weight])[0]
            window.total_weight = total
        return window

    def weigh_here(self, window: Window) -> Window:
        """Say what each micro-batch of this process weighs, and all of them together."""
        sizes = window.sizes or map(batch_length, window.batches)
        window.weights = [
            float(size) if self._units_in is None or not size else self._units_in(batch)
            for batch, size in zip(window.batches, sizes, strict=True)
        ]
        window.total_weight = sum(window.weights)
        return window

    def weight_of(self, batch: Any, size: int) -> float:
        """Return the units in a batch of so many samples."""
        return float(size) if self._units_in is None else self._units_in(batch)


def counts_labels(loss_weight: str | None, task: str | None, model: nn.Module) -> bool:
    """Tell whether the units of this model's loss are labels (else they are samples)."""
    if loss_weight is not None:
        return loss_weight == "labels"
    if task is not None and task in LABEL_TASKS:
        return True
    return _is_encoder_decoder(model) is True or type(model).__name__.endswith(LABEL_MODELS + CAUSAL_MODELS)


def label_counter(task: str | None, model: nn.Module) -> Callable[[Any], float]:
    """Return a function that counts a batch's labels; a causal model never predicts the first position."""
    first = 1 if _is_causal(task, model) else 0

    def count(batch: Any) -> float:
        labels = labels_of(batch)
        if not isinstance(labels, torch.Tensor):
            raise DataError(
                "the loss is weighed by labels, but the batch has no tensor 'labels'. Set loss_weight='samples'."
            )
        counted = labels[..., first:] if labels.ndim > 1 else labels
        return float((counted != IGNORED_LABEL).sum())

    return count


def _is_causal(task: str | None, model: nn.Module) -> bool:
    if task == TaskType.LANGUAGE_MODELING:
        return True
    if _is_encoder_decoder(model) is not None:
        return not _is_encoder_decoder(model) and (task == TaskType.TEXT_GENERATION or _holds_causal(model))
    return _holds_causal(model)


def _holds_causal(model: nn.Module) -> bool:
    """Tell whether a model is, or directly wraps, a causal one of transformers."""
    return any(type(part).__name__.endswith(CAUSAL_MODELS) for part in (model, *model.children()))


def _is_encoder_decoder(model: nn.Module) -> bool | None:
    """Read a transformers-like config; None where the model does not say."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", None)
