"""Why a loss cannot be computed of logits and labels, in the user's words; asked only after a loss has failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.data import form_of, shown_of
from hezar_train.errors import ConfigError, DataError, a_kind, choices
from hezar_train.metrics import IGNORED_LABEL

__all__ = [
    "DIFFERENCE_LOSSES",
    "REFUSED_BY_LOSS",
    "needs_arguments",
    "no_labels",
    "no_logits",
    "no_loss_tensor",
    "no_tensor",
    "refuse_needy_criterion",
    "refused_loss",
    "unlike_shapes",
    "usable_criterion",
]

REFUSED_BY_LOSS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
BINARY_LOSSES = (nn.BCEWithLogitsLoss, nn.BCELoss)
DIFFERENCE_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
LIKE_LABELS = {"target", "targets", "y", "class", "classes", "category", "label_ids", "labels_ids"}
A_LOSS = (
    "Expected a loss: a name of torch.nn such as 'CrossEntropyLoss', or the dotted path of a class, or of a function "
    "of (logits, labels)."
)
WHERE = "Change the dataset or the data_collator, or choose another criterion."


def usable_criterion(setting: str, found: Any) -> Callable[..., torch.Tensor]:
    """Return a loss made of what a dotted path names; refuse what cannot be one."""
    try:
        loss = found() if isinstance(found, type) else found
    except TypeError as error:
        raise needs_arguments(setting, error) from error
    if not callable(loss):
        raise ConfigError(f"{setting} is {a_kind(loss)}, which cannot be called. {A_LOSS}")
    if not _takes_two(loss):
        raise ConfigError(f"{setting} cannot be called with two arguments, (logits, labels). {A_LOSS}")
    return loss  # type: ignore[no-any-return]


def needs_arguments(setting: str, error: TypeError) -> ConfigError:
    """Return the refusal of a class that cannot be called without arguments."""
    return ConfigError(f"{setting} cannot be made without arguments ({error}). {A_LOSS}")


def refuse_needy_criterion(name: str | None, criterion: Callable[..., torch.Tensor] | None) -> None:
    """Raise for a loss that needs more than a criterion is called with, before anything is trained."""
    if criterion is None or _takes_two(criterion):
        return
    own = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion).parameters
    needs = choices([p.name for p in own.values() if p.default is p.empty][2:])
    raise ConfigError(
        f"criterion={name!r} needs more than logits and labels ({needs}), which a criterion does not get. Compute it "
        "in the model's compute_loss(), or choose another criterion."
    )


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
    if isinstance(labels, list | tuple) and labels and isinstance(labels[0], str):
        remedy = "Give each class a number (0, 1, ...) in the dataset."
        return DataError(
            f"the labels of a batch are {form_of(labels)} such as {labels[0]!r}; expected numbers, as a "
            f"tensor. {remedy}"
        )
    return DataError(
        f"the labels of a batch are {form_of(labels)}; expected numbers, as one tensor. Return a number or a tensor as "
        "a sample's label (a list of numbers in a tuple becomes a list of tensors), or make one in the data_collator."
    )


def no_labels(others: Mapping[str, Any]) -> DataError:
    """Return the refusal of a batch in which no labels are found, only others by name or none."""
    if not others:
        return DataError(
            "criterion is set, but the batch has no labels: it is inputs alone. Make each sample a tuple (inputs, "
            "label), as TensorDataset(inputs, labels) does, or a mapping with 'labels'."
        )
    near = [key for key in others if str(key).lower() in LIKE_LABELS]
    there = ", ".join(f"{key} ({form_of(value)})" for key, value in others.items())
    remedy = f"Rename {near[0]!r} to 'labels'" if near else "Put them under 'labels'"
    return DataError(f"criterion is set, but the batch has no labels: it has {there}. {remedy}.")


def no_logits(outputs: Mapping[str, Any]) -> DataError:
    """Return the refusal of outputs that a criterion cannot be computed of."""
    if set(outputs) == {"loss"}:
        return DataError(
            "criterion is set, but the model returned no 'logits': it returned a loss (a single number counts as one). "
            "Return the logits from forward(), one row a sample; or take `criterion` out of the config, to train on "
            "that loss."
        )
    return DataError(
        f"criterion is set, but the model returned no 'logits': it returned {choices(outputs) or 'an empty mapping'}. "
        "Return them under 'logits', or take `criterion` out of the config and return a 'loss'."
    )


def unlike_shapes(criterion: object, logits: torch.Tensor, labels: torch.Tensor) -> DataError:
    """Return the refusal of a loss of differences between one shape and another."""
    also = ", and labels as float" if isinstance(criterion, BINARY_LOSSES) and not labels.is_floating_point() else ""
    return DataError(
        f"{type(criterion).__name__} compares number with number, but the logits are {form_of(logits)} and the labels "
        f"{form_of(labels)}; expected one shape{also}. For classes by number, set criterion='CrossEntropyLoss'. {WHERE}"
    )


def refused_loss(criterion: Any, logits: torch.Tensor, labels: torch.Tensor, error: Exception) -> DataError:
    """Return the refusal that says why a criterion could not compare logits with labels."""
    name = type(criterion).__name__ if isinstance(criterion, nn.Module) else getattr(criterion, "__name__", "criterion")
    if isinstance(criterion, CLASS_LOSSES) and (reason := _about_classes(logits, labels)):
        return DataError(f"{name}: {reason}")
    if isinstance(criterion, CLASS_LOSSES) and (refusal := _no_such_class(criterion, logits, labels)):
        return refusal
    if isinstance(criterion, BINARY_LOSSES) and logits.shape != labels.shape:
        return unlike_shapes(criterion, logits, labels)
    given = f"logits ({form_of(logits)}) with labels ({form_of(labels)})"
    if isinstance(criterion, BINARY_LOSSES) and logits.shape == labels.shape and labels.dtype != logits.dtype:
        return DataError(
            f"{name} cannot compare {given}: expected labels of the logits' dtype. Convert them in the dataset or the "
            "data_collator: a tensor by y.float(), an array by y.astype('float32'), a number by torch.tensor(float(y))."
        )
    outside = logits[(logits < 0) | (logits > 1)]
    if isinstance(criterion, nn.BCELoss) and outside.numel():
        return DataError(
            f"BCELoss takes probabilities, and the model gave {outside[0].item():g}; expected 0 to 1. Set "
            "criterion='BCEWithLogitsLoss', which takes logits, or end forward() with torch.sigmoid()."
        )
    return DataError(f"{name} cannot compare {given}: {str(error).rstrip('. ')}. {WHERE}")


def _about_classes(logits: torch.Tensor, labels: torch.Tensor) -> str:
    """Say what is wrong with the shapes or the types; nothing if the values must be."""
    if logits.ndim < 2 and (not logits.is_floating_point() or (torch.is_grad_enabled() and not logits.requires_grad)):
        return (
            f"the model gives {form_of(logits)}, one number for each sample, without a gradient; expected one for each "
            "class. If that is the class it has chosen, take argmax() out of forward()."
        )
    if logits.ndim < 2:
        return (
            "the model gives one number for each sample; expected one for each class. Give it as many outputs as there "
            "are classes, or set criterion='BCEWithLogitsLoss' for a yes or no (with float labels, and no sigmoid in "
            "the model: this loss has one)."
        )
    num_rows, given = len(logits), f"the labels are {form_of(labels)}"
    if labels.ndim != logits.ndim - 1 or len(labels) != num_rows:
        expected = f"one class for each of the {num_rows} rows, as int64 of shape {num_rows}"
        return f"{given}, the logits {form_of(logits)}; {_about_shapes(logits, labels, expected)}"
    if labels.is_floating_point() and labels.numel() and bool((labels != labels.round()).any()):
        example = labels[labels != labels.round()][0].item()
        return (
            f"{given} such as {example:g}; expected whole numbers (int64), each the number of a class. For values "
            "instead of classes, set criterion='MSELoss' and give the model one output for each value of a label, here "
            f"{labels[0].numel()}."
        )
    if labels.dtype not in (torch.int64, torch.uint8):
        return (
            f"{given}; expected whole numbers (int64), each the number of a class. Convert them in the dataset or the "
            "data_collator: a tensor by y.long(), an array by y.astype('int64'), a number by int(y)."
        )
    return ""


def _about_shapes(logits: torch.Tensor, labels: torch.Tensor, expected: str) -> str:
    """Say which of both has the wrong shape, and what to do."""
    num_rows = len(logits)
    if labels.ndim == 1 and len(labels) == num_rows:
        return (
            f"expected logits of shape {num_rows} x classes. Return them so from the model: one row a sample, without "
            "further dimensions."
        )
    if labels.ndim == 1 and logits.ndim == 2:
        return (
            f"expected {expected}. The model gives {num_rows} rows for {len(labels)} labels: change forward(), or what "
            "the data_collator returns."
        )
    if labels.ndim == 2 and labels.shape == (num_rows, 1):
        return (
            f"expected {expected}. Take off the last dimension in the dataset or the data_collator: label.squeeze(-1)."
        )
    if labels.shape == logits.shape:
        return (
            f"expected {expected}. If they are one-hot: label.argmax(-1) in the dataset or the data_collator, or "
            "label.float() for probabilities."
        )
    if labels.ndim == logits.ndim == 2 and len(labels) == num_rows:
        num_outputs, num_classes = logits.shape[1], labels.shape[1]
        return (
            f"expected {expected}, or one probability a class, as float of shape {num_rows}x{num_outputs}. If they are "
            f"one-hot over {num_classes} classes, give the model {num_classes} outputs; it has {num_outputs}."
        )
    return f"expected {expected}. {WHERE}"


def _no_such_class(criterion: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> DataError | None:
    """Return the refusal of labels that are no class of the model; it tells the first such row."""
    num_classes, ignored = logits.shape[-1], getattr(criterion, "ignore_index", IGNORED_LABEL)
    is_wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignored)
    if not is_wrong.any():
        return None
    shown = ", ".join(map(str, sorted(set(labels[is_wrong].tolist()))[:5]))
    words = f"the labels hold {shown}; expected 0 to {num_classes - 1}, as the model has {num_classes} classes" + (
        ". Do they begin at 1? Subtract 1." if labels.min() > 0 and labels.max() == num_classes
        else f" ({ignored} leaves a label out). Correct them, or give the model as many classes."
    )  # fmt: skip
    row = (int(is_wrong.nonzero()[0, 0]), len(labels)) if labels.ndim == 1 else None
    return DataError(f"{type(criterion).__name__}: {words}", row)


def no_loss_tensor(source: str, found: object) -> DataError:
    """Return the refusal of a loss that is no tensor, or an empty one."""
    hint = "Return such a tensor there."
    if isinstance(found, int | float):
        hint = "Return the tensor there, without .item() or float()."
    elif found is None:
        hint = "Is a return missing there?"
    elif isinstance(found, Mapping) and "loss" in found:
        hint = "Return its 'loss' alone there."
    elif isinstance(found, torch.Tensor) and not found.numel():
        hint = "It holds no number: look at what it is computed of."
    return DataError(
        f"the loss is {shown_of(found)}, from {source}; expected a single number, as a tensor computed by the model. "
        f"{hint}"
    )
