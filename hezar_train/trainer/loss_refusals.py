"""Why a loss cannot be computed of logits and labels, in the user's words; asked only after a loss has failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hezar_train.data import form_of
from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics import IGNORED_LABEL

__all__ = [
    "DIFFERENCE_LOSSES",
    "REFUSED_BY_LOSS",
    "no_loss_tensor",
    "no_tensor",
    "refused_loss",
    "unlike_shapes",
    "usable_criterion",
]

REFUSED_BY_LOSS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
DIFFERENCE_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
WHERE = "Change the dataset or the data_collator, or choose another criterion."


def usable_criterion(setting: str, found: Any) -> Callable[..., torch.Tensor]:
    """Return a loss made of what a dotted path names; refuse what cannot be one."""
    try:
        loss = found() if isinstance(found, type) else found
    except TypeError as error:
        raise ConfigError(
            f"{setting} cannot be made without arguments ({error}). Expected a loss: a class such as "
            "torch.nn.CrossEntropyLoss, or a function of (logits, labels)."
        ) from error
    if not callable(loss):
        raise ConfigError(f"{setting} is of type {type(loss).__name__}. Expected a loss that can be called.")
    if not _takes_two(loss):
        raise ConfigError(f"{setting} cannot be called with (logits, labels). Expected a loss, which is.")
    return loss  # type: ignore[no-any-return]


def _takes_two(loss: Callable[..., Any]) -> bool:
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function in C that does not tell
        return True
    return True


def no_tensor(logits: Any, labels: Any) -> DataError:
    """Return the refusal of logits or labels that are no tensor."""
    if not isinstance(logits, torch.Tensor):
        return DataError(f"the model's logits are {form_of(logits)}; expected a tensor. Return one from forward().")
    return DataError(
        f"the labels of a batch are {form_of(labels)}{_example(labels)}; expected numbers, as a tensor. Give each "
        "class a number (0, 1, ...) in the dataset, or make a tensor of them in the data_collator."
    )


def _example(labels: Any) -> str:
    return f" such as {labels[0]!r}" if isinstance(labels, list | tuple) and labels else ""


def unlike_shapes(criterion: object, logits: torch.Tensor, labels: torch.Tensor) -> DataError:
    """Return the refusal of a loss of differences between one shape and another."""
    return DataError(
        f"{type(criterion).__name__} compares number with number, but the logits are {form_of(logits)} and the labels "
        f"{form_of(labels)}; expected one shape. For classes by number, set criterion='CrossEntropyLoss'. {WHERE}"
    )


def refused_loss(criterion: Any, logits: torch.Tensor, labels: torch.Tensor, error: Exception) -> DataError:
    """Return the refusal that says why a criterion could not compare logits with labels."""
    name = type(criterion).__name__ if isinstance(criterion, nn.Module) else getattr(criterion, "__name__", "criterion")
    if isinstance(criterion, CLASS_LOSSES) and (reason := _about_classes(criterion, logits, labels)):
        return DataError(f"{name}: {reason}")
    return DataError(
        f"{name} cannot compare logits ({form_of(logits)}) with labels ({form_of(labels)}): {error}. {WHERE}"
    )


def _about_classes(criterion: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> str:
    if logits.ndim < 2:
        return (
            "the model gives one number for each sample; expected one for each class. Give it as many outputs as there "
            "are classes, or set criterion='BCEWithLogitsLoss' for a yes or no (with float labels)."
        )
    num_classes, given = logits.shape[-1], f"the labels are {form_of(labels)}"
    if labels.ndim != logits.ndim - 1 or len(labels) != len(logits):
        expected = f"one class for each of the {len(logits)} rows, as int64 of shape {len(logits)}"
        return f"{given}, the logits {form_of(logits)}; expected {expected}. {WHERE}"
    if labels.dtype not in (torch.int64, torch.uint8):
        return f"{given}; expected whole numbers (int64), each the number of a class. Convert them: labels.long()."
    ignored = getattr(criterion, "ignore_index", IGNORED_LABEL)
    wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignored)]
    if not wrong.numel():
        return ""
    shown = ", ".join(map(str, sorted(set(wrong.tolist()))[:5]))
    return f"the labels hold {shown}; expected 0 to {num_classes - 1}, as the model has {num_classes} classes" + (
        ". Do they begin at 1? Subtract 1." if labels.min() > 0 and labels.max() == num_classes
        else f" ({ignored} leaves a label out). Correct them, or give the model as many classes."
    )  # fmt: skip


def no_loss_tensor(source: str, found: object) -> DataError:
    """Return the refusal of a loss that is no tensor."""
    return DataError(
        f"the loss is {form_of(found)}, from {source}; expected a single number, as a tensor computed by the model."
    )
