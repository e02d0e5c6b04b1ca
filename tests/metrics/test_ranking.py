"""Metrics that rank scores: top-k accuracy, and areas under curves, binned and exact, against scikit-learn's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, top_k_accuracy_score

from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics import IGNORED_LABEL, Metric
from hezar_train.metrics.ranking import Auroc, AveragePrecision, ExactAuroc, TopKAccuracy

ROUNDING = 1e-9
EXACT = [(ExactAuroc, roc_auc_score), (AveragePrecision, average_precision_score)]


def counted(make: Callable[[], Metric], scores: torch.Tensor, targets: torch.Tensor, batch_size: int) -> Any:
    """Count batches on two processes in turn, and merge."""
    processes = [make(), make(), make()]
    for number, (some, their) in enumerate(zip(scores.split(batch_size), targets.split(batch_size), strict=True)):
        processes[number % 2].update(some, their)
    processes[2].merge(processes[0].state())
    processes[2].merge(processes[1].state())
    return processes[2]


def area(metric: Metric) -> float:
    (only,) = metric.compute().values()
    return only


def samples(num_samples: int, num_columns: int, seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(max(num_columns, 2), (num_samples,), generator=generator)
    logits = torch.randn(num_samples, num_columns, generator=generator, dtype=torch.float64)
    logits[torch.arange(num_samples), targets.clamp(max=num_columns - 1)] += 0.7
    return logits * scale, targets


CASES = given(
    st.integers(12, 80), st.sampled_from([1, 2, 3, 5]), st.integers(0, 2**32), st.sampled_from([1, 7, 64]),
    st.sampled_from([0.05, 1.0, 30.0]), st.sampled_from([16, 4096]),
)  # fmt: skip


@settings(deadline=None)
@CASES
def test_the_exact_area_lies_within_the_stated_error(
    num_samples: int, num_columns: int, seed: int, batch_size: int, scale: float, num_bins: int
) -> None:
    logits, targets = samples(num_samples, num_columns, seed, scale)
    assume(len(targets.unique()) == max(num_columns, 2))
    if num_columns == 1:
        exact = roc_auc_score(targets, logits[:, 0])
    elif num_columns == 2:
        exact = roc_auc_score(targets, logits[:, 1] - logits[:, 0])
    else:
        exact = roc_auc_score(targets, logits.softmax(-1), multi_class="ovr", average="macro")
    metric = counted(partial(Auroc, num_bins), logits, targets, batch_size)
    assert abs(area(metric) - exact) <= metric.max_error + ROUNDING
    assert area(metric) == pytest.approx(
        area(counted(partial(Auroc, num_bins), logits, targets, num_samples)), abs=1e-12
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(10, 60), st.integers(0, 2**32), st.sampled_from([1, 7, 64]))
def test_labels_have_an_area_each(num_samples: int, seed: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    targets = (logits + torch.randn(logits.shape, generator=generator) > 0).long()
    assume(all(len(column.unique()) == 2 for column in targets.T))
    metric = counted(partial(Auroc, multilabel=True), logits, targets, batch_size)
    assert abs(area(metric) - roc_auc_score(targets, logits)) <= metric.max_error + ROUNDING


def test_probabilities_are_ranked_as_they_are() -> None:
    logits, targets = samples(200, 4, seed=1, scale=2.0)
    shares = logits.softmax(-1)
    by_shares, by_logits = (Auroc(scores="probabilities"), Auroc())
    by_shares.update(shares, targets)
    by_logits.update(logits, targets)
    assert area(by_shares) == pytest.approx(area(by_logits), abs=by_logits.max_error)
    two = Auroc(scores="probabilities")
    two.update(torch.tensor([[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]]), torch.tensor([0, 1, 0]))
    assert area(two) == 1.0


def test_the_error_is_small_on_a_set_of_common_size() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(2, (20_000,), generator=generator)
    logits = torch.randn(20_000, generator=generator, dtype=torch.float64) * 2 + targets
    metric = Auroc()
    metric.update(logits, targets)
    assert metric.max_error < 5e-4
    assert abs(area(metric) - roc_auc_score(targets, logits)) < 1e-5


def test_true_ties_count_half() -> None:
    metric = Auroc()
    metric.update(torch.tensor([0.0, 0.0, 3.0, -3.0]), torch.tensor([1, 0, 1, 0]))
    assert area(metric) == (1 + 1 + 1 + 0.5) / 4
    assert metric.max_error == 0.5 / 4


def test_infinite_logits_rank_at_the_ends() -> None:
    metric = Auroc()
    metric.update(torch.tensor([math.inf, 50.0, -1e20, -math.inf]), torch.tensor([1, 1, 0, 0]))
    assert area(metric) == 1.0


def test_a_row_of_weights_is_the_data_with_samples_repeated() -> None:
    logits, targets = samples(20, 3, seed=3, scale=1.0)
    weights = torch.randint(0, 4, (5, 20), generator=torch.Generator().manual_seed(0)).float()
    weights[0] = 1.0
    metric = Auroc()
    for start in range(0, 20, 6):
        metric.update(logits[start : start + 6], targets[start : start + 6], weights[:, start : start + 6])
    rows = [row["auroc"] for row in metric.compute_rows()]
    for row, weight in zip(rows, weights.long(), strict=True):
        repeated = Auroc()
        repeated.update(logits.repeat_interleave(weight, 0), targets.repeat_interleave(weight, 0))
        assert row == pytest.approx(area(repeated), abs=1e-12)


def test_tokens_are_samples_and_ignored_ones_are_not() -> None:
    logits, targets = samples(24, 3, seed=4, scale=1.0)
    flat, nested = Auroc(), Auroc()
    flat.update(logits, targets)
    with_padding = torch.cat([logits.view(8, 3, 3), torch.full((8, 1, 3), 9.0)], dim=1)
    nested.update(with_padding, torch.cat([targets.view(8, 3), torch.full((8, 1), IGNORED_LABEL)], dim=1))
    assert area(nested) == area(flat)


def test_a_class_without_samples_is_left_out_and_without_any_the_area_is_nan() -> None:
    logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [2.0, 1.0, 0.0]])
    metric = Auroc()
    assert math.isnan(area(metric))
    assert math.isnan(metric.max_error)
    metric.update(logits, torch.tensor([0, 1, 0]))
    assert area(metric) == 1.0
    metric.reset()
    metric.update(logits, torch.tensor([1, 1, 1]))
    assert math.isnan(area(metric))


def test_a_nan_score_makes_the_area_nan() -> None:
    metric = Auroc()
    metric.update(torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0, IGNORED_LABEL, 1]))
    assert area(metric) == 1.0
    metric.update(torch.tensor([math.nan]), torch.tensor([0]))
    assert math.isnan(area(metric))


def test_what_does_not_fit_is_refused() -> None:
    metric = Auroc()
    with pytest.raises(DataError, match="give logits with one axis more"):
        metric.update(torch.zeros(4, 3), torch.zeros(5, dtype=torch.long))
    metric.update(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(DataError, match="another number before"):
        metric.update(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ConfigError, match="num_bins=1"):
        Auroc(num_bins=1)
    with pytest.raises(ConfigError, match=r"scores='logit'.*Did you mean 'logits'\?"):
        Auroc(scores="logit")


@settings(deadline=None)
@given(
    st.integers(1, 40), st.integers(3, 6), st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([1, 3, 7, 64]),
    st.booleans(),
)  # fmt: skip
def test_top_k_accuracy_equals_sklearn_with_ties_too(
    num_samples: int, num_classes: int, k: int, seed: int, batch_size: int, has_ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_samples, num_classes, generator=generator)
    scores = scores.round() if has_ties else scores
    targets = torch.randint(num_classes, (num_samples,), generator=generator)
    k = min(k, num_classes - 1)
    expected = top_k_accuracy_score(targets, scores.numpy(), k=k, labels=np.arange(num_classes))
    metric = counted(partial(TopKAccuracy, k), scores, targets, batch_size)
    assert area(metric) == pytest.approx(expected, abs=1e-12)


def test_top_k_skips_ignored_targets_and_never_takes_a_nan_for_a_hit() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.0], [math.nan, math.nan, math.nan], [5.0, 4.0, 3.0]])
    metric = TopKAccuracy(k=2)
    metric.update(scores, torch.tensor([0, 1, IGNORED_LABEL]))
    assert area(metric) == 1 / 2
    with pytest.raises(ConfigError, match="k=0"):
        TopKAccuracy(k=0)
    with pytest.raises(DataError, match="logits with one axis more"):
        metric.update(torch.zeros(3), torch.zeros(3, dtype=torch.long))


class TestExact:
    """The areas of metrics that keep every score."""

    @pytest.mark.parametrize(("make", "theirs"), EXACT)
    @pytest.mark.parametrize("batch_size", [1, 7, 64])
    @pytest.mark.parametrize("num_columns", [1, 2, 4])
    def test_they_equal_sklearn_with_ties_too(
        self, make: Callable[..., Metric], theirs: Callable[..., float], batch_size: int, num_columns: int
    ) -> None:
        logits, targets = samples(60, num_columns, seed=num_columns, scale=1.0)
        logits = logits.round(decimals=1)
        found = counted(make, logits, targets, batch_size)
        if num_columns < 4:
            expected = theirs(targets, logits[:, -1] - (logits[:, 0] if num_columns == 2 else 0))
        else:
            shares = logits.softmax(-1)
            expected = np.mean([theirs(targets == one, shares[:, one]) for one in range(4)])
        assert area(found) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(("make", "theirs"), EXACT)
    def test_labels_have_an_area_each_without_those_that_are_ignored(
        self, make: Callable[..., Metric], theirs: Callable[..., float]
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shares = torch.rand(40, 3, generator=generator, dtype=torch.float64)
        targets = (torch.rand(40, 3, generator=generator) < 0.4).long()
        targets[::5, 1] = IGNORED_LABEL
        shares, targets = torch.cat([shares, shares[:, :1]], 1), torch.cat([targets, torch.full((40, 1), -1)], 1)
        found = counted(partial(make, "probabilities", multilabel=True), shares, targets, 7)
        kept = [(targets[:, one] >= 0, one) for one in range(3)]
        expected = np.mean([theirs(targets[rows, one], shares[rows, one]) for rows, one in kept])
        assert area(found) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(("make", "theirs"), EXACT)
    def test_a_row_of_weights_is_the_data_with_samples_repeated(
        self, make: Callable[..., Metric], theirs: Callable[..., float]
    ) -> None:
        logits, targets = samples(20, 2, seed=3, scale=1.0)
        weights = torch.randint(0, 4, (5, 20), generator=torch.Generator().manual_seed(0)).float()
        weights[0] = 1.0
        first, second = make(), make()
        first.update(logits[:6], targets[:6], weights[:, :6])
        second.update(logits[6:], targets[6:], weights[:, 6:])
        first.merge(second.state())
        (key,) = first.output_keys
        margin = logits[:, 1] - logits[:, 0]
        expected = [theirs(targets, margin, sample_weight=row) for row in weights]
        assert [row[key] for row in first.compute_rows()] == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("make", [ExactAuroc, AveragePrecision])
    def test_tokens_are_samples_and_ignored_ones_are_not(self, make: Callable[..., Metric]) -> None:
        logits, targets = samples(24, 3, seed=4, scale=1.0)
        flat, nested = make(), make()
        flat.update(logits, targets)
        with_padding = torch.cat([logits.view(8, 3, 3), torch.full((8, 1, 3), math.nan)], dim=1)
        padded = torch.cat([targets.view(8, 3), torch.full((8, 1), IGNORED_LABEL)], dim=1)
        nested.update(with_padding, padded, torch.ones(2, 8))
        assert [*nested.compute().values()] == pytest.approx([*flat.compute().values()], abs=1e-12)
        assert nested.compute_rows()[0] == nested.compute_rows()[1]

    @pytest.mark.parametrize("make", [ExactAuroc, AveragePrecision])
    def test_nothing_one_class_alone_and_a_nan_score_make_the_area_nan(self, make: Callable[..., Metric]) -> None:
        metric = make()
        assert math.isnan(area(metric))
        metric.update(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 1, 1]))
        assert math.isnan(area(metric))
        metric.update(torch.tensor([0.0]), torch.tensor([0]))
        assert area(metric) == 1.0
        metric.update(torch.tensor([math.nan]), torch.tensor([0]))
        assert math.isnan(area(metric))
        metric.reset()
        assert metric.state() == {}

    @pytest.mark.parametrize("make", [ExactAuroc, AveragePrecision])
    def test_what_does_not_fit_is_refused(self, make: Callable[..., Metric]) -> None:
        metric = make()
        with pytest.raises(DataError, match=f"{metric.name} got scores for .* give logits with one axis more"):
            metric.update(torch.zeros(4, 3), torch.zeros(5, dtype=torch.long))
        metric.update(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
        with pytest.raises(DataError, match="another number before"):
            metric.update(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long))
        with pytest.raises(ConfigError, match=r"scores='logit'.*Did you mean 'logits'\?"):
            make(scores="logit")
