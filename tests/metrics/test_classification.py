"""Metrics of classification against scikit-learn's on the whole set, for any cut into batches and processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics import IGNORED_LABEL, Metric
from hezar_train.metrics.classification import F1, Accuracy, ConfusionMatrix, Matthews, Precision, Recall
from hezar_train.metrics.ranking import TopKAccuracy

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning"),
    pytest.mark.filterwarnings("ignore:A single label was found"),
]

RATIOS: list[tuple[type[Metric], Callable[..., Any]]] = [
    (Precision, sklearn_metrics.precision_score),
    (Recall, sklearn_metrics.recall_score),
    (F1, sklearn_metrics.f1_score),
]
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**32)
BATCH_SIZES = st.sampled_from([1, 3, 7, 64])


def counted(make: Callable[[], Metric], predictions: Any, targets: Any, batch_size: int, weights: Any = None) -> Metric:
    """Count batches on two processes in turn, and merge."""
    processes = [make(), make(), make()]
    for number, start in enumerate(range(0, len(targets), batch_size)):
        cut = slice(start, start + batch_size)
        processes[number % 2].update(predictions[cut], targets[cut], None if weights is None else weights[:, cut])
    # The third process had no batch.
    processes[2].merge(processes[0].state())
    processes[2].merge(processes[1].state())
    return processes[2]


def value(metric: Metric) -> float:
    (only,) = metric.compute().values()
    return only


def ids(num_samples: int, num_classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    predictions, targets = torch.randint(num_classes, (2, num_samples), generator=generator)
    return predictions, targets


def labels(num_samples: int, num_labels: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    predictions, targets = (torch.rand(2, num_samples, num_labels, generator=generator) < 0.3).long()
    return predictions, targets


@settings(deadline=None)
@given(SIZES, st.integers(2, 6), SEEDS, BATCH_SIZES)
def test_accuracy_and_matthews_equal_sklearn(num_samples: int, num_classes: int, seed: int, batch_size: int) -> None:
    predictions, targets = ids(num_samples, num_classes, seed)
    right = sklearn_metrics.accuracy_score(targets, predictions)
    assert value(counted(Accuracy, predictions, targets, batch_size)) == pytest.approx(right, abs=1e-12)
    correlation = sklearn_metrics.matthews_corrcoef(targets, predictions)
    assert value(counted(Matthews, predictions, targets, batch_size)) == pytest.approx(correlation, abs=1e-9)


@pytest.mark.parametrize(("ours", "theirs"), RATIOS)
@settings(deadline=None)
@given(
    SIZES, st.integers(2, 6), SEEDS, BATCH_SIZES,
    st.sampled_from(["macro", "micro", "weighted"]), st.sampled_from([0.0, 1.0, math.nan]),
)  # fmt: skip
def test_averages_equal_sklearn(
    ours: Any, theirs: Any, num_samples: int, num_classes: int, seed: int, batch_size: int, average: str, zero: float
) -> None:
    predictions, targets = ids(num_samples, num_classes, seed)
    metric = counted(lambda: ours(average=average, zero_division=zero), predictions, targets, batch_size)
    expected = theirs(targets, predictions, average=average, zero_division=zero)
    assert value(metric) == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize(("ours", "theirs"), RATIOS)
@pytest.mark.parametrize("pos_label", [0, 1])
@settings(deadline=None, max_examples=30)
@given(SIZES, SEEDS, BATCH_SIZES)
def test_a_binary_average_is_of_the_positive_class(
    ours: Any, theirs: Any, pos_label: int, num_samples: int, seed: int, batch_size: int
) -> None:
    predictions, targets = ids(num_samples, 2, seed)
    metric = counted(lambda: ours(average="binary", pos_label=pos_label), predictions, targets, batch_size)
    if predictions.unique().tolist() == targets.unique().tolist() == [1 - pos_label]:
        assert value(metric) == 0.0
        return
    expected = theirs(targets, predictions, average="binary", pos_label=pos_label, zero_division=0.0)
    assert value(metric) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("ours", "theirs"), RATIOS)
@settings(deadline=None, max_examples=30)
@given(SIZES, SEEDS, BATCH_SIZES, st.sampled_from(["macro", "micro", "weighted"]))
def test_labels_choose_what_is_averaged_present_or_not(
    ours: Any, theirs: Any, num_samples: int, seed: int, batch_size: int, average: str
) -> None:
    predictions, targets = ids(num_samples, 4, seed)
    chosen = [3, 1, 6]
    metric = counted(lambda: ours(average=average, labels=chosen), predictions, targets, batch_size)
    expected = theirs(targets, predictions, labels=chosen, average=average, zero_division=0.0)
    assert value(metric) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("ours", "theirs"), RATIOS)
def test_without_an_average_each_class_has_its_output(ours: Any, theirs: Any) -> None:
    predictions, targets = ids(30, 3, seed=1)
    metric = ours(average=None)
    metric.expect_classes(4, ["no", "yes", "maybe", "never"])
    metric.update(predictions, targets)
    names = [f"{metric.name}.{name}" for name in ("no", "yes", "maybe", "never")]
    expected = theirs(targets, predictions, labels=range(4), average=None, zero_division=0.0)
    assert metric.output_keys == names
    assert metric.compute() == pytest.approx(dict(zip(names, expected, strict=True)), abs=1e-12)


@pytest.mark.parametrize(("ours", "theirs"), RATIOS)
@settings(deadline=None)
@given(
    SIZES, st.integers(1, 5), SEEDS, BATCH_SIZES,
    st.sampled_from(["macro", "micro", "weighted"]), st.sampled_from([0.0, 1.0, math.nan]),
)  # fmt: skip
def test_averages_of_labels_equal_sklearn(
    ours: Any, theirs: Any, num_samples: int, num_labels: int, seed: int, batch_size: int, average: str, zero: float
) -> None:
    predictions, targets = labels(num_samples, num_labels, seed)
    make = lambda: ours(average=average, zero_division=zero, multilabel=True)  # noqa: E731
    wide = [torch.cat([each, torch.zeros(len(each), 1).long()], dim=1) for each in (predictions, targets)]
    expected = theirs(wide[1], wide[0], average=average, zero_division=zero)
    assert value(counted(make, *wide, batch_size)) == pytest.approx(expected, abs=1e-9, nan_ok=True)


@settings(deadline=None)
@given(SIZES, st.integers(2, 5), SEEDS, BATCH_SIZES)
def test_multilabel_accuracy_is_of_samples_all_of_whose_labels_are_right(
    num_samples: int, num_labels: int, seed: int, batch_size: int
) -> None:
    predictions, targets = labels(num_samples, num_labels, seed)
    expected = sklearn_metrics.accuracy_score(targets, predictions)
    logits = torch.where(predictions > 0, 2.5, -0.1)
    for given_form in (predictions, logits):
        metric = counted(lambda: Accuracy(multilabel=True), given_form, targets.float(), batch_size)
        assert value(metric) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 5), SEEDS, BATCH_SIZES)
def test_ignored_tokens_are_not_counted(num_samples: int, length: int, seed: int, batch_size: int) -> None:
    predictions, targets = (each.view(num_samples, length) for each in ids(num_samples * length, 4, seed))
    ignored = torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    kept = targets[~ignored], predictions[~ignored]
    targets = targets.masked_fill(ignored, IGNORED_LABEL)
    for make in (Accuracy, F1, Matthews):
        if not len(kept[0]):
            assert math.isnan(value(counted(make, predictions, targets, batch_size)))
            continue
        expected = counted(make, kept[1], kept[0], len(kept[0]))
        assert value(counted(make, predictions, targets, batch_size)) == pytest.approx(value(expected), abs=1e-12)


def test_labels_of_a_sample_can_be_ignored() -> None:
    predictions = torch.tensor([[1, 0, 1], [0, 1, 1]])
    targets = torch.tensor([[1, 0, IGNORED_LABEL], [0, 0, 1]])
    f1, accuracy = F1(multilabel=True, average="micro"), Accuracy(multilabel=True)
    f1.update(predictions, targets)
    accuracy.update(predictions, targets)
    assert value(f1) == 2 * 2 / (3 + 2)
    assert value(accuracy) == 1 / 2


@pytest.mark.parametrize(
    "make", [Accuracy, Precision, Recall, F1, Matthews, lambda: F1("micro"), lambda: F1("weighted")]
)
@pytest.mark.parametrize("shape", [(9,), (9, 3)])
def test_a_row_of_weights_is_the_data_with_samples_repeated(make: Callable[[], Metric], shape: tuple[int, ...]) -> None:
    predictions, targets = (each.view(shape) for each in ids(math.prod(shape), 4, seed=5))
    weights = torch.tensor([[1] * 9, [0, 3, 1, 0, 0, 2, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 4, 0], [0] * 9]).float()
    rows = counted(make, predictions, targets, 4, weights).compute_rows()
    assert len(rows) == 4
    for row, weight in zip(rows[:3], weights.long(), strict=False):
        repeated = make()
        repeated.update(predictions.repeat_interleave(weight, 0), targets.repeat_interleave(weight, 0))
        assert row == pytest.approx(repeated.compute(), abs=1e-12)
    assert math.isnan(next(iter(rows[3].values())))


def test_rows_of_weights_apply_to_labels_too() -> None:
    predictions, targets = labels(9, 3, seed=2)
    weights = torch.tensor([[1] * 9, [0, 3, 1, 0, 0, 2, 1, 1, 0]])
    repeated = [each.repeat_interleave(weights[1], 0) for each in (targets, predictions)]
    for metric, theirs in ((F1(multilabel=True), sklearn_metrics.f1_score), (Accuracy(multilabel=True), None)):
        metric.update(predictions, targets, weights)
        expected = theirs(*repeated, average="macro") if theirs else sklearn_metrics.accuracy_score(*repeated)
        assert next(iter(metric.compute_rows()[1].values())) == pytest.approx(expected, abs=1e-12)


def test_falsy_options_are_honoured() -> None:
    predictions, targets = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    count = Accuracy(normalize=False)
    count.update(predictions, targets)
    assert value(count) == 3.0
    of_zero = Precision(average="binary", pos_label=0)
    of_zero.update(predictions, targets)
    assert value(of_zero) == 0.5
    assert value(F1(labels=[])) != value(F1(labels=[]))  # NaN: nothing to average
    optimist = Precision(average="binary", pos_label=1, zero_division=1)
    optimist.update(torch.tensor([0]), torch.tensor([1]))
    assert value(optimist) == 1.0


def test_logits_are_decided_by_the_largest() -> None:
    logits = torch.randn(20, 5, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(4, (20, 5), generator=torch.Generator().manual_seed(1))
    for make in (Accuracy, F1, Matthews):
        decided = counted(make, logits.argmax(-1), targets, 7).compute()
        assert counted(make, logits, targets, 7).compute() == decided


@pytest.mark.parametrize("shape", [(4, 1), (3,), (4, 3, 2)])
def test_predictions_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"do not fit: give class ids, or logits with one axis more"):
        F1().update(torch.zeros(shape), torch.zeros(4, dtype=torch.long))


def test_a_wrong_average_is_told_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"f1 has average='marco'.*macro, micro, weighted.*Did you mean 'macro'\?"):
        F1(average="marco")
    with pytest.raises(ConfigError, match="average='binary'"):
        F1(average="binary", multilabel=True)


def test_a_binary_average_of_three_classes_is_refused() -> None:
    metric = F1(average="binary")
    metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
    with pytest.raises(ConfigError, match=r"the classes are \[0, 1, 2\]"):
        metric.compute()


@settings(deadline=None, max_examples=30)
@given(SIZES, st.integers(1, 6), SEEDS, BATCH_SIZES, st.booleans())
def test_the_confusion_matrix_equals_sklearn(
    num_samples: int, num_classes: int, seed: int, batch_size: int, is_known: bool
) -> None:
    predictions, targets = ids(num_samples, num_classes, seed)
    metric = counted(lambda: ConfusionMatrix(num_classes if is_known else None), predictions, targets, batch_size)
    table = metric.table()
    assert table is not None
    size = len(table["values"])
    assert table["values"] == sklearn_metrics.confusion_matrix(targets, predictions, labels=range(size)).tolist()
    assert size == (num_classes if is_known else int(torch.cat([predictions, targets]).max()) + 1)


def test_the_confusion_matrix_is_a_table_without_outputs() -> None:
    metric = ConfusionMatrix()
    assert metric.table() is None
    metric.expect_classes(2, ["cat", "dog"])
    metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, IGNORED_LABEL]))
    assert metric.output_keys == []
    assert metric.compute() == {}
    assert metric.compute_rows() == [{}]
    names = ["cat", "dog"]
    assert metric.table() == {"name": "confusion_matrix", "rows": names, "columns": names, "values": [[1, 1], [0, 0]]}
    metric.reset()
    assert metric.table() is None
    with pytest.raises(ConfigError, match="Leave it out above 5000"):
        ConfusionMatrix(6_000).update(torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize("make", [Accuracy, TopKAccuracy, Precision, Recall, F1, Matthews])
def test_without_samples_and_after_a_reset_a_metric_is_nan(make: Callable[[], Metric]) -> None:
    metric = make()
    assert math.isnan(value(metric))
    logits = torch.eye(3)
    metric.update(logits, torch.tensor([0, 1, 2]))
    assert value(metric) == 1.0
    metric.reset()
    assert math.isnan(value(metric))
    assert metric.state() == {}
