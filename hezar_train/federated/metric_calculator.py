"""Metrics by FederatedScope's names over a whole split, each computed by a metric of `hezar_train.metrics`.

What is scored stands in columns: `y_true` is (samples, columns); of a classification, `y_pred` is of the same shape and
`y_prob` (samples, classes, columns), before the softmax; of a regression, `y_prob` is (samples, columns). An unlabelled
place (NaN or, of a classification, below 0) does not count. A metric is the mean over the columns in which it is
defined, and NaN where there is none. Each name has the direction in which it is better; users may add their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from hezar_train.data import SPLITS
from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.loop import Context
from hezar_train.metrics import IGNORED_LABEL, Metric
from hezar_train.metrics.classification import F1, Accuracy
from hezar_train.metrics.ranking import AveragePrecision, ExactAuroc, TopKAccuracy
from hezar_train.metrics.regression import MeanSquaredError, RootMeanSquaredError
from hezar_train.types import TaskType

__all__ = ["MetricCalculator", "MetricCall", "is_larger_better", "register_metric"]

ALWAYS = ("loss", "avg_loss", "total")
MOST_HITS = 100

MetricCall = Callable[..., float]
"""Called with the keywords `ctx`, `y_true`, `y_pred`, `y_prob` and `metric`, its own name."""

Column = tuple[torch.Tensor, torch.Tensor]
"""Predictions (class ids, outputs or values) and labels of one column, without unlabelled places."""


class _Metric(NamedTuple):
    call: MetricCall
    is_larger_better: bool


class _Scored(NamedTuple):
    """What is scored: labels, predicted classes (None in a regression), outputs (None if only classes are known)."""

    y_true: torch.Tensor
    y_pred: torch.Tensor | None
    y_prob: torch.Tensor | None


class MetricCalculator:
    """Compute metrics of a routine from its context; loss (a sum), avg_loss and total are always among them."""

    def __init__(self, eval_metric: str | Iterable[str] = (), *, base: float | None = None) -> None:
        """Choose metrics by name; `base` is what "imp_ratio" compares the error with."""
        asked = [eval_metric] if isinstance(eval_metric, str) else sorted(eval_metric)
        if "std" in asked:
            raise ConfigError("'std' is told over many workers: format_eval_res() gives it in the form 'fairness'")
        self.eval_metric: dict[str, MetricCall] = {name: _named(name).call for name in (*ALWAYS, *asked)}
        if "imp_ratio" in asked:
            self.eval_metric["imp_ratio"] = _improvement_on(base)

    def eval(self, ctx: Context) -> dict[str, float]:
        """Return `{split}_{metric}` of what `ctx.ys_true` and `ctx.ys_prob` (or `ctx.ys_pred`) hold."""
        true, prob, pred = (_joined(ctx.get(name)) for name in ("ys_true", "ys_prob", "ys_pred"))
        if true is None or (prob is None and pred is None):
            raise DataError("the context holds no ys_true, or neither ys_prob nor ys_pred: add a Monitor to the hooks")
        scored = _in_columns(true, prob, pred, is_regression=_is_regression(ctx))
        return {
            f"{ctx.split}_{name}": float(call(ctx=ctx, metric=name, **scored._asdict()))
            for name, call in self.eval_metric.items()
        }


def register_metric(name: str, metric: MetricCall, *, the_larger_the_better: bool = True) -> None:
    """Make a metric known by a name: a function of `ctx`, `y_true`, `y_pred`, `y_prob` and `metric`."""
    if name in _BUILT_IN or name in _names_of_hits():
        raise ConfigError(f"register_metric({name!r}): a metric of the package has that name. Choose another")
    _REGISTERED[name] = _Metric(metric, the_larger_the_better)


def is_larger_better(key: str) -> bool:
    """Tell a metric's direction by its name, also with its split before it or "_std" behind it."""
    split, _, name = key.partition("_")
    name = name if split in SPLITS else key
    return _named("std" if name.endswith("_std") else name).is_larger_better


def _named(name: str) -> _Metric:
    known = {**_BUILT_IN, **_REGISTERED}
    if name in known:
        return known[name]
    if name in _names_of_hits():
        return _Metric(_hits, is_larger_better=True)
    raise ConfigError(
        f"{name!r} is not a metric.{suggestion(name, known)} There are: {choices(known)}, hits@1 to hits@{MOST_HITS}."
    )


def _names_of_hits() -> set[str]:
    return {f"hits@{count}" for count in range(1, MOST_HITS + 1)}


def _is_regression(ctx: Context) -> bool:
    return bool(ctx.config.task == TaskType.REGRESSION)


def _joined(parts: Any) -> torch.Tensor | None:
    """Return one tensor of what hooks gathered: a tensor, an array, or a list of them."""
    if isinstance(parts, list | tuple) and parts and getattr(parts[0], "shape", ()):
        return torch.cat([torch.as_tensor(part) for part in parts])
    return None if parts is None else torch.as_tensor(parts)


def _in_columns(y_true: torch.Tensor, y_prob: torch.Tensor | None, y_pred: Any, *, is_regression: bool) -> _Scored:
    """Bring labels, outputs and predicted classes into columns."""
    true = _as_columns(y_true)
    if is_regression:
        return _Scored(true, None, None if y_prob is None else _same_shape(_as_columns(y_prob), true))
    prob = None if y_prob is None else _with_classes(y_prob.double(), true)
    pred = prob.argmax(1) if y_pred is None and prob is not None else y_pred
    return _Scored(true, _same_shape(_as_columns(pred), true), prob)


def _with_classes(prob: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return outputs as (samples, classes, columns); those of the labels' own shape are one logit each."""
    if _as_columns(prob).shape == true.shape:
        return torch.stack([torch.zeros_like(true), _as_columns(prob)], dim=1)
    return prob[..., None] if prob.ndim == 2 else prob


def _as_columns(values: torch.Tensor) -> torch.Tensor:
    return (values[:, None] if values.ndim == 1 else values).double()


def _same_shape(values: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    if true.ndim != 2 or values.shape != true.shape:
        raise DataError(
            f"labels of shape {tuple(true.shape)} do not go with predictions of shape {tuple(values.shape)}: expected "
            "labels (samples) or (samples, columns), and outputs (samples, classes) or (samples, classes, columns)"
        )
    return values


def _classes(scored: _Scored) -> Iterator[Column]:
    """Yield predicted classes and labels of each column that has labels."""
    if scored.y_pred is None:
        raise DataError("a regression predicts no classes: ask for mse or rmse instead")
    yield from _labelled(scored.y_pred, scored.y_true, scored.y_true >= 0)


def _outputs(scored: _Scored) -> torch.Tensor:
    """Return the outputs of all classes, (samples, classes, columns)."""
    if scored.y_pred is None:
        raise DataError("a regression has no classes to tell apart: ask for mse or rmse instead")
    if scored.y_prob is None:
        raise DataError("the outputs are not known, only the predicted classes: ask for acc, correct or f1 instead")
    return scored.y_prob


def _values(scored: _Scored) -> Iterator[Column]:
    """Yield predicted values and labels of each column that has labels, in a regression."""
    if scored.y_pred is not None or scored.y_prob is None:
        raise DataError("a squared error needs a regression: set task='regression', or ask for acc or f1 instead")
    yield from _labelled(scored.y_prob, scored.y_true, ~scored.y_true.isnan())


def _labelled(values: torch.Tensor, true: torch.Tensor, counted: torch.Tensor) -> Iterator[Column]:
    for number, rows in enumerate(counted.T):
        if rows.any():
            yield values[rows, ..., number], true[rows, number]


def _mean(make: Callable[[], Metric], columns: Iterable[Column]) -> float:
    """Return the mean of a metric with one output over the columns in which it is defined."""
    values = [_computed(make(), *column) for column in columns]
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _computed(metric: Metric, predictions: torch.Tensor, targets: torch.Tensor) -> float:
    metric.update(predictions, targets)
    (value,) = metric.compute().values()
    return value


def _accuracy(scored: _Scored) -> float:
    return _mean(Accuracy, _classes(scored))


def _correct(scored: _Scored) -> float:
    return _mean(partial(Accuracy, normalize=False), _classes(scored))


def _f1(scored: _Scored) -> float:
    """Return the mean F1 of the classes that occur; of several columns, the F1 of class 1 in each."""
    columns = list(_classes(scored))
    if len(columns) > 1:
        return _mean(partial(F1, labels=[1]), (((pred == 1).long(), (true == 1).long()) for pred, true in columns))
    return _mean(F1, (_numbered(*column) for column in columns))


def _numbered(pred: torch.Tensor, true: torch.Tensor) -> Column:
    """Return both with the classes that occur counted from 0: `F1` skips a predicted class below 0, which is wrong."""
    pred_ids, true_ids = torch.unique(torch.stack([pred, true]), return_inverse=True)[1]
    return pred_ids, true_ids


def _average_precision(scored: _Scored) -> float:
    return _computed(AveragePrecision("probabilities", multilabel=True), *_against_rest(scored))


def _roc_auc(scored: _Scored) -> float:
    return _computed(ExactAuroc("probabilities", multilabel=True), *_against_rest(scored))


def _against_rest(scored: _Scored) -> Column:
    """Return the share of class 1 of two, or of each of more, as the scores of a label of its own in each column."""
    shares = _outputs(scored).movedim(1, 2).softmax(2)  # (samples, columns, classes)
    num_classes = shares.shape[2]
    first = 0 if num_classes > 2 else 1
    true = scored.y_true[..., None]
    is_class = true == torch.arange(first, num_classes)
    return shares[..., first:].flatten(1), torch.where(true >= 0, is_class.long(), IGNORED_LABEL).flatten(1)


def _hits(*, y_true: Any, y_pred: Any, y_prob: Any, metric: str, **_: Any) -> float:
    """Return the share of labels among the highest outputs; of equal ones, the lower class is higher."""
    outputs = _outputs(_Scored(y_true, y_pred, y_prob))
    last = outputs.shape[1] - 1
    columns = _labelled(outputs, y_true, y_true >= 0)
    # `TopKAccuracy` ranks the higher of two equal classes first, as scikit-learn does: here classes count downwards.
    mirrored = ((scores.flip(1), last - true.long()) for scores, true in columns)
    return _mean(partial(TopKAccuracy, int(metric.partition("@")[2])), mirrored)


def _mean_squared_error(scored: _Scored) -> float:
    return _mean(MeanSquaredError, _values(scored))


def _root_mean_squared_error(scored: _Scored) -> float:
    return _mean(RootMeanSquaredError, _values(scored))


def _improvement_on(base: float | None) -> MetricCall:
    """Return by how many percent an error is below a base."""
    if base is None or base <= 0:
        raise ConfigError(f"'imp_ratio' compares with base={base!r}: give an error above 0 to improve on")
    return lambda **found: (base - _error(**found)) / base * 100


def _error(*, ctx: Context, y_true: Any, y_pred: Any, y_prob: Any, **_: Any) -> float:
    scored = _Scored(y_true, y_pred, y_prob)
    return _mean_squared_error(scored) if _is_regression(ctx) else 1 - _accuracy(scored)


def _of_arrays(score: Callable[[_Scored], float]) -> MetricCall:
    def call(*, y_true: Any, y_pred: Any, y_prob: Any, **_: Any) -> float:
        return score(_Scored(y_true, y_pred, y_prob))

    return call


_BUILT_IN: dict[str, _Metric] = {
    "loss": _Metric(lambda ctx, **_: ctx.loss_batch_total, is_larger_better=False),
    "avg_loss": _Metric(lambda ctx, **_: ctx.loss_batch_total / ctx.num_samples, is_larger_better=False),
    "total": _Metric(lambda ctx, **_: ctx.num_samples, is_larger_better=False),
    "loss_regular": _Metric(lambda ctx, **_: ctx.loss_regular_total, is_larger_better=False),
    "correct": _Metric(_of_arrays(_correct), is_larger_better=True),
    "acc": _Metric(_of_arrays(_accuracy), is_larger_better=True),
    "ap": _Metric(_of_arrays(_average_precision), is_larger_better=True),
    "f1": _Metric(_of_arrays(_f1), is_larger_better=True),
    "roc_auc": _Metric(_of_arrays(_roc_auc), is_larger_better=True),
    "rmse": _Metric(_of_arrays(_root_mean_squared_error), is_larger_better=False),
    "mse": _Metric(_of_arrays(_mean_squared_error), is_larger_better=False),
    "imp_ratio": _Metric(_error, is_larger_better=True),
    "std": _Metric(_error, is_larger_better=False),  # over workers; here for its direction
}
_REGISTERED: dict[str, _Metric] = {}
