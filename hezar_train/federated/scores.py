"""Scores over all labels and outputs of a split, in columns; an unlabelled place (NaN, or below 0) does not count.

`y_true` is (samples, columns). Of a classification, `y_pred` is of the same shape and `y_prob` (samples, classes,
columns), before the softmax; of a regression, `y_prob` is (samples, columns). A score is the mean over the columns in
which it is defined, and NaN where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from hezar_train.errors import DataError

__all__ = [
    "Judged",
    "Score",
    "accuracy",
    "average_precision",
    "correct",
    "hits",
    "judged",
    "macro_f1",
    "mean_squared_error",
    "roc_auc",
    "root_mean_squared_error",
]

Score = Callable[["Judged"], float]


class Judged(NamedTuple):
    """What is scored: labels, predicted classes (None in a regression), outputs (None if only classes are known)."""

    y_true: torch.Tensor
    y_pred: torch.Tensor | None
    y_prob: torch.Tensor | None


def judged(y_true: Any, y_prob: Any, y_pred: Any = None, *, is_regression: bool = False) -> Judged:
    """Bring labels and outputs into columns; outputs of the labels' own shape are one logit each."""
    true = _column(torch.as_tensor(y_true).double())
    prob = None if y_prob is None else torch.as_tensor(y_prob).double()
    if is_regression:
        return Judged(true, None, None if prob is None else _same_shape(_column(prob), true))
    if prob is None:
        return Judged(true, _same_shape(_column(torch.as_tensor(y_pred).double()), true), None)
    if _column(prob).shape == true.shape:
        prob = torch.stack([torch.zeros_like(true), _column(prob)], dim=1)
    prob = prob[..., None] if prob.ndim == 2 else prob
    pred = prob.argmax(1).double() if y_pred is None else _column(torch.as_tensor(y_pred).double())
    return Judged(true, _same_shape(pred, true), prob)


def correct(found: Judged) -> float:
    """Count the right predictions."""
    return _mean((pred == true).sum() for true, pred in _predicted(found))


def accuracy(found: Judged) -> float:
    """Return the share of right predictions."""
    return _mean((pred == true).double().mean() for true, pred in _predicted(found))


def macro_f1(found: Judged) -> float:
    """Return the mean F1 of the classes that occur; of several columns, the F1 of class 1 in each."""
    columns = list(_predicted(found))
    if len(columns) > 1:
        return _mean(_f1(true == 1, pred == 1) for true, pred in columns)
    return _mean(
        _f1(true == one, pred == one) for true, pred in columns for one in _distinct(torch.cat([true, pred]))[0]
    )


def average_precision(found: Judged) -> float:
    """Return the area under the curve of precision over recall, of class 1 of two or of each against the rest."""
    return _mean(_precision_area(score, positive) for score, positive in _against_rest(found))


def roc_auc(found: Judged) -> float:
    """Return the chance that a sample of a class scores higher for it than one of another class."""
    return _mean(_roc_area(score, positive) for score, positive in _against_rest(found))


def hits(found: Judged, count: int) -> float:
    """Return the share of labels among the `count` highest outputs; of equal ones, the lower class is higher."""
    return _mean((_rank(prob, true.long()) <= count).double().mean() for true, prob in _scored(found))


def mean_squared_error(found: Judged) -> float:
    """Return the mean square of the errors."""
    return _mean(squares.mean() for squares in _squares(found))


def root_mean_squared_error(found: Judged) -> float:
    """Return the root of the mean square of the errors."""
    return _mean(squares.mean().sqrt() for squares in _squares(found))


def _column(values: torch.Tensor) -> torch.Tensor:
    return values[:, None] if values.ndim == 1 else values


def _same_shape(values: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    if true.ndim != 2 or values.shape != true.shape:
        raise DataError(
            f"labels of shape {tuple(true.shape)} do not go with predictions of shape {tuple(values.shape)}: expected "
            "labels (samples) or (samples, columns), and outputs (samples, classes) or (samples, classes, columns)"
        )
    return values


def _mean(values: Iterator[torch.Tensor]) -> float:
    defined = [float(value) for value in values if not torch.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _predicted(found: Judged) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield labels and predicted classes of each column that has labels."""
    if found.y_pred is None:
        raise DataError("a regression predicts no classes: ask for mse or rmse instead")
    yield from _columns(found, found.y_pred)


def _scored(found: Judged) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield labels and the outputs of all classes, of each column that has labels."""
    if found.y_pred is None:
        raise DataError("a regression has no classes to tell apart: ask for mse or rmse instead")
    if found.y_prob is None:
        raise DataError("the outputs are not known, only the predicted classes: ask for acc, correct or f1 instead")
    yield from _columns(found, found.y_prob)


def _squares(found: Judged) -> Iterator[torch.Tensor]:
    """Yield the squared errors of each column that has labels."""
    if found.y_pred is not None or found.y_prob is None:
        raise DataError("a squared error needs a regression: set task='regression', or ask for acc or f1 instead")
    yield from ((true - prob).square() for true, prob in _columns(found, found.y_prob))


def _columns(found: Judged, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(found.y_true.shape[1]):
        true = found.y_true[:, number]
        counted = ~true.isnan() if found.y_pred is None else true >= 0
        if counted.any():
            yield true[counted], values[counted, ..., number]


def _against_rest(found: Judged) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield scores and positives of class 1 of two, or of each of more; those without a curve are left out."""
    for true, prob in _scored(found):
        shares = prob.softmax(1)
        for one in range(prob.shape[1]) if prob.shape[1] > 2 else (1,):
            positive = true == one
            if positive.any() and not positive.all():
                yield shares[:, one], positive


def _f1(actual: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    both = 2 * (actual & predicted).sum().double()
    return both / (actual.sum() + predicted.sum()).clamp_min(1)


def _roc_area(score: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    _, group, sizes = _distinct(score)
    ranks = (sizes.cumsum(0) - (sizes - 1) / 2)[group]  # equal scores share the mean of their places
    count = positive.sum()
    return (ranks[positive].sum() - count * (count + 1) / 2) / (count * (~positive).sum())


def _precision_area(score: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    _, group, sizes = _distinct(score)
    gained = torch.zeros_like(sizes).index_add_(0, group, positive.double()).flip(0)
    precision = gained.cumsum(0) / sizes.flip(0).cumsum(0)
    return (gained * precision).sum() / positive.sum()


def _distinct(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct values in order, which of them each value is, and how often each occurs."""
    distinct, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return distinct, group, counts.double()


def _rank(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    own = scores.gather(1, label[:, None])
    is_lower = torch.arange(scores.shape[1]) < label[:, None]
    return 1 + ((scores > own) | ((scores == own) & is_lower)).sum(1)
