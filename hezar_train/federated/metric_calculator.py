"""Metrics by FederatedScope's names, each with the direction in which it is better; users may add their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from hezar_train.data import SPLITS
from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.federated import scores
from hezar_train.federated.scores import Judged
from hezar_train.loop import Context
from hezar_train.types import TaskType

__all__ = ["MetricCalculator", "MetricCall", "is_larger_better", "register_metric"]

ALWAYS = ("loss", "avg_loss", "total")
MOST_HITS = 100

MetricCall = Callable[..., float]
"""Called with the keywords `ctx`, `y_true`, `y_pred`, `y_prob` and `metric`, its own name."""


class _Metric(NamedTuple):
    call: MetricCall
    is_larger_better: bool


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
        found = scores.judged(true, prob, pred, is_regression=_is_regression(ctx))
        return {
            f"{ctx.split}_{name}": float(call(ctx=ctx, metric=name, **found._asdict()))
            for name, call in self.eval_metric.items()
        }


def register_metric(name: str, metric: MetricCall, *, the_larger_the_better: bool = True) -> None:
    """Make a metric known by a name: a function of `ctx`, `y_true`, `y_pred`, `y_prob` and `metric`."""
    if name in _BUILT_IN or name in _hits():
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
    if name in _hits():
        return _Metric(_hits_at, is_larger_better=True)
    raise ConfigError(
        f"{name!r} is not a metric.{suggestion(name, known)} There are: {choices(known)}, hits@1 to hits@{MOST_HITS}."
    )


def _joined(parts: Any) -> torch.Tensor | None:
    """Return one tensor of what hooks gathered: a tensor, an array, or a list of them."""
    if isinstance(parts, list | tuple) and parts and getattr(parts[0], "shape", ()):
        return torch.cat([torch.as_tensor(part) for part in parts])
    return None if parts is None else torch.as_tensor(parts)


def _is_regression(ctx: Context) -> bool:
    return bool(ctx.config.task == TaskType.REGRESSION)


def _of_arrays(score: scores.Score) -> MetricCall:
    def call(*, y_true: Any, y_pred: Any, y_prob: Any, **_: Any) -> float:
        return score(Judged(y_true, y_pred, y_prob))

    return call


def _improvement_on(base: float | None) -> MetricCall:
    """Return by how many percent an error is below a base."""
    if base is None or base <= 0:
        raise ConfigError(f"'imp_ratio' compares with base={base!r}: give an error above 0 to improve on")
    return lambda **found: (base - _error(**found)) / base * 100


def _error(*, ctx: Context, y_true: Any, y_pred: Any, y_prob: Any, **_: Any) -> float:
    found = Judged(y_true, y_pred, y_prob)
    return scores.mean_squared_error(found) if _is_regression(ctx) else 1 - scores.accuracy(found)


def _hits_at(*, y_true: Any, y_pred: Any, y_prob: Any, metric: str, **_: Any) -> float:
    return scores.hits(Judged(y_true, y_pred, y_prob), int(metric.partition("@")[2]))


def _hits() -> set[str]:
    return {f"hits@{count}" for count in range(1, MOST_HITS + 1)}


_BUILT_IN: dict[str, _Metric] = {
    "loss": _Metric(lambda ctx, **_: ctx.loss_batch_total, is_larger_better=False),
    "avg_loss": _Metric(lambda ctx, **_: ctx.loss_batch_total / ctx.num_samples, is_larger_better=False),
    "total": _Metric(lambda ctx, **_: ctx.num_samples, is_larger_better=False),
    "loss_regular": _Metric(lambda ctx, **_: ctx.loss_regular_total, is_larger_better=False),
    "correct": _Metric(_of_arrays(scores.correct), is_larger_better=True),
    "acc": _Metric(_of_arrays(scores.accuracy), is_larger_better=True),
    "ap": _Metric(_of_arrays(scores.average_precision), is_larger_better=True),
    "f1": _Metric(_of_arrays(scores.macro_f1), is_larger_better=True),
    "roc_auc": _Metric(_of_arrays(scores.roc_auc), is_larger_better=True),
    "rmse": _Metric(_of_arrays(scores.root_mean_squared_error), is_larger_better=False),
    "mse": _Metric(_of_arrays(scores.mean_squared_error), is_larger_better=False),
    "imp_ratio": _Metric(_error, is_larger_better=True),
    "std": _Metric(_error, is_larger_better=False),  # over workers; here for its direction
}
_REGISTERED: dict[str, _Metric] = {}
