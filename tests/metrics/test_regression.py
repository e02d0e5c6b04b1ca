"""Metrics of regression against scikit-learn's and scipy's, near zero and far from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from hezar_train.errors import DataError
from hezar_train.metrics import Metric
from hezar_train.metrics import metric as metric_module
from hezar_train.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    Pearson,
    RootMeanSquaredError,
    Spearman,
)

ERRORS: list[tuple[type[Metric], Callable[..., Any]]] = [
    (MeanSquaredError, sklearn_metrics.mean_squared_error),
    (RootMeanSquaredError, sklearn_metrics.root_mean_squared_error),
    (MeanAbsoluteError, sklearn_metrics.mean_absolute_error),
    (R2, sklearn_metrics.r2_score),
]
ALL = [*(metric for metric, _ in ERRORS), Pearson, Spearman]
SEEDS = st.integers(0, 2**32)
BATCH_SIZES = st.sampled_from([1, 3, 7, 64])
OFFSETS = st.sampled_from([0.0, -3.0, 1e6, -1e6])


def counted(make: Callable[[], Metric], predictions: Any, targets: Any, batch_size: int, weights: Any = None) -> Metric:
    """Count batches on two processes in turn, and merge."""
    processes = [make(), make(), make()]
    for number, start in enumerate(range(0, len(targets), batch_size)):
        cut = slice(start, start + batch_size)
        processes[number % 2].update(predictions[cut], targets[cut], None if weights is None else weights[:, cut])
    processes[2].merge(processes[0].state())
    processes[2].merge(processes[1].state())
    return processes[2]


def value(metric: Metric) -> float:
    (only,) = metric.compute().values()
    return only


def values(num_samples: int, seed: int, offset: float, num_outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw pairs that float32 holds exactly, so that Spearman's metric may keep them so."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(num_samples, num_outputs, generator=generator)
    predictions = targets + torch.randn(num_samples, num_outputs, generator=generator)
    shape = (num_samples,) if num_outputs == 1 else (num_samples, num_outputs)
    return (predictions + offset).view(shape), (targets + offset).view(shape)


@pytest.mark.parametrize(("ours", "theirs"), ERRORS)
@settings(deadline=None)
@given(st.integers(2, 50), SEEDS, BATCH_SIZES, OFFSETS, st.integers(1, 3))
def test_errors_equal_sklearn(
    ours: Any, theirs: Any, num_samples: int, seed: int, batch_size: int, offset: float, num_outputs: int
) -> None:
    predictions, targets = values(num_samples, seed, offset, num_outputs)
    expected = theirs(targets.double(), predictions.double())
    assert value(counted(ours, predictions, targets, batch_size)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("ours", "theirs"), [(Pearson, scipy.stats.pearsonr), (Spearman, scipy.stats.spearmanr)])
@settings(deadline=None)
@given(st.integers(2, 50), SEEDS, BATCH_SIZES, OFFSETS, st.booleans())
def test_correlations_equal_scipy(
    ours: Any, theirs: Any, num_samples: int, seed: int, batch_size: int, offset: float, has_ties: bool
) -> None:
    predictions, targets = values(num_samples, seed, offset)
    predictions = predictions.round() if has_ties else predictions
    assume(len(predictions.unique()) > 1 and len(targets.unique()) > 1)
    expected = theirs(predictions.double(), targets.double()).statistic
    assert value(counted(ours, predictions, targets, batch_size)) == pytest.approx(expected, abs=1e-9)


def test_moments_hold_at_an_offset_of_a_million_where_sums_of_squares_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(5_000, generator=generator, dtype=torch.float64) * 1e-3 + 1e6
    predictions = targets + torch.randn(5_000, generator=generator, dtype=torch.float64) * 1e-3
    naive = (targets**2).sum() - targets.sum() ** 2 / len(targets)
    exact = ((targets - targets.mean()) ** 2).sum()
    assert abs(naive / exact - 1) > 0.1
    expected = sklearn_metrics.r2_score(targets, predictions)
    assert value(counted(R2, predictions, targets, 16)) == pytest.approx(expected, abs=1e-9)
    expected = scipy.stats.pearsonr(predictions, targets).statistic
    assert value(counted(Pearson, predictions, targets, 16)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6 / 3])
@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_constant_targets_are_as_sklearn_and_scipy_have_them(constant: float, batch_size: int) -> None:
    targets = torch.full((11,), constant, dtype=torch.float64)
    predictions = torch.randn(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert value(counted(R2, predictions, targets, batch_size)) == 0.0
    assert value(counted(R2, targets, targets, batch_size)) == 1.0
    if constant == 0.0:  # of others, scikit-learn's mean may be off by rounding, and its score by 31 powers of ten
        assert sklearn_metrics.r2_score(targets, predictions) == 0.0
        assert sklearn_metrics.r2_score(targets, targets) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert math.isnan(scipy.stats.pearsonr(predictions, targets).statistic)
        assert math.isnan(scipy.stats.spearmanr(predictions, targets).statistic)
    for make in (Pearson, Spearman):
        assert math.isnan(value(counted(make, predictions, targets, batch_size)))
        assert math.isnan(value(counted(make, targets, predictions, batch_size)))


@pytest.mark.parametrize("batch_size", [1, 4, 40])
def test_constants_among_other_samples_of_weight_zero_are_constant(batch_size: int) -> None:
    targets = torch.tensor([5.0, 0.1, 0.1, -1e6, 0.1, 3e-9, 0.1, 0.1] * 5, dtype=torch.float64)
    weights = torch.stack([torch.ones(40), (targets == 0.1) * torch.arange(1.0, 41.0)])
    predictions = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert counted(R2, predictions, targets, batch_size, weights).compute_rows()[1] == {"r2": 0.0}
    assert math.isnan(counted(Pearson, predictions, targets, batch_size, weights).compute_rows()[1]["pearson"])


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_row_of_weights_is_the_data_with_samples_repeated(make: Callable[[], Metric], num_outputs: int) -> None:
    predictions, targets = values(20, seed=7, offset=100.0, num_outputs=num_outputs)
    predictions = predictions.round(decimals=1)
    weights = torch.randint(0, 4, (6, 20), generator=torch.Generator().manual_seed(0)).float()
    weights[0], weights[5] = 1.0, 0.0
    rows = [next(iter(row.values())) for row in counted(make, predictions, targets, 1, weights).compute_rows()]
    for row, weight in zip(rows[:5], weights.long(), strict=False):
        repeated = make()
        repeated.update(predictions.repeat_interleave(weight, 0), targets.repeat_interleave(weight, 0))
        assert row == pytest.approx(value(repeated), rel=1e-9, abs=1e-9)
    assert math.isnan(rows[5])


@pytest.mark.parametrize("make", ALL)
def test_without_samples_and_after_a_reset_a_metric_is_nan(make: Callable[[], Metric]) -> None:
    metric = make()
    assert math.isnan(value(metric))
    metric.update(torch.zeros(0), torch.zeros(0))
    assert math.isnan(value(metric))
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    assert math.isfinite(value(metric))
    metric.reset()
    assert math.isnan(value(metric))
    assert metric.state() == {}


@pytest.mark.parametrize("make", [R2, Pearson, Spearman])
def test_one_sample_has_no_spread(make: Callable[[], Metric]) -> None:
    metric = make()
    metric.update(torch.tensor([1.0]), torch.tensor([2.0]))
    assert math.isnan(value(metric))


@pytest.mark.parametrize("make", ALL)
def test_a_nan_prediction_makes_a_metric_nan(make: Callable[[], Metric]) -> None:
    predictions = torch.tensor([1.0, math.nan, 3.0, 2.0])
    assert math.isnan(value(counted(make, predictions, torch.arange(4.0), 2)))


@pytest.mark.parametrize("make", ALL)
def test_a_column_and_a_line_of_predictions_are_the_same(make: Callable[[], Metric]) -> None:
    predictions, targets = values(9, seed=1, offset=0.0)
    line, column = make(), make()
    line.update(predictions, targets)
    column.update(predictions[:, None], targets)
    assert value(column) == value(line)


@pytest.mark.parametrize("shape", [(3,), (4, 2), (2, 2), ()])
def test_shapes_that_do_not_fit_are_refused_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"expected one shape: \(samples\) or \(samples, outputs\) for both"):
        MeanSquaredError().update(torch.zeros(shape), torch.zeros(4))


def test_objectives_tell_errors_from_scores() -> None:
    objectives = {make.name: make().objective(make.name) for make in ALL}
    minimized = ["mse", "rmse", "mae"]
    maximized = ["r2", "pearson", "spearman"]
    assert objectives == dict.fromkeys(minimized, "minimize") | dict.fromkeys(maximized, "maximize")


def test_spearman_keeps_eight_bytes_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_module, "BLOCK_SIZE", 10)
    predictions, targets = values(95, seed=2, offset=0.0)
    metric = Spearman()
    for prediction, target in zip(predictions, targets, strict=True):
        metric.update(prediction[None], target[None])
    assert metric.state()["pairs"].nbytes == 95 * 8
    assert value(metric) == pytest.approx(scipy.stats.spearmanr(predictions, targets).statistic, abs=1e-12)
    assert metric._pairs is not None
    assert sum(block.nbytes for block in metric._pairs._blocks) == 100 * 8


def test_metrics_hold_no_gradient() -> None:
    predictions, targets = values(5, seed=1, offset=0.0)
    for make in ALL:
        metric = make()
        metric.update(predictions.clone().requires_grad_(), targets)
        assert not any(tensor.requires_grad for tensor in metric.state().values())


def test_numpy_and_lists_are_welcome() -> None:
    metric = MeanAbsoluteError()
    metric.update([1.0, 2.0], np.array([2.0, 4.0]))
    assert metric.compute() == {"mae": 1.5}
