"""Class counts: kept once for several metrics, growing, merging."""

from __future__ import annotations

import pytest
import torch

from hezar_train.errors import ConfigError
from hezar_train.metrics import IGNORED_LABEL
from hezar_train.metrics.classification import F1, Accuracy, ClassCounts, Matthews, Precision, Recall, share_counts

PREDICTIONS = torch.tensor([0, 1, 1, 2, 0, 2])
TARGETS = torch.tensor([0, 1, 2, 2, 1, IGNORED_LABEL])


def test_metrics_that_share_counts_count_once_and_agree_with_those_that_do_not() -> None:
    shared, alone = ([Precision(), Accuracy(), F1("micro"), Recall(), Matthews()] for _ in range(2))
    share_counts(shared)
    for metric in (*shared, *alone):
        metric.update(PREDICTIONS, TARGETS)
    assert [metric.compute() for metric in shared] == [metric.compute() for metric in alone]
    # Precision counts for all, accuracy keeps its two sums, the others read.
    assert [len(metric.state()) for metric in shared] == [1, 1, 0, 0, 0]
    assert [metric.table() is not None for metric in shared] == [True, False, False, False, False]


def test_shared_counts_merge_and_reset_once() -> None:
    ours, theirs = [Precision(), F1()], [Precision(), F1()]
    for metrics in (ours, theirs):
        share_counts(metrics)
        for metric in metrics:
            metric.update(PREDICTIONS, TARGETS)
    for metric, other in zip(ours, theirs, strict=True):
        metric.merge(other.state())
    assert ours[1].counts.read().actual.tolist() == [[2, 4, 4]]
    ours[1].reset()
    assert ours[0].counts.read() is not None
    ours[0].reset()
    assert ours[1].counts.read() is None


def test_counts_of_classes_and_of_labels_are_not_shared() -> None:
    classes, labels = F1(), F1(multilabel=True)
    share_counts([classes, labels])
    assert classes.counts is not labels.counts


def test_the_table_per_class_has_names_and_supports() -> None:
    metric = F1()
    metric.expect_classes(4, ["a", "b", "c", "never"])
    metric.update(PREDICTIONS, TARGETS)
    assert metric.table() == {
        "name": "per_class",
        "rows": ["a", "b", "c", "never"],
        "columns": ["precision", "recall", "f1", "support"],
        "values": [
            [1 / 2, 1.0, 2 / 3, 1.0],
            [1 / 2, 1 / 2, 1 / 2, 2.0],
            [1.0, 1 / 2, 2 / 3, 2.0],
            [0.0, 0.0, 0.0, 0.0],
        ],
    }


def test_processes_that_saw_other_classes_merge() -> None:
    first, second = ClassCounts(), ClassCounts()
    first.update(torch.tensor([0]), torch.tensor([0]))
    second.update(torch.tensor([4]), torch.tensor([2]))
    first.merge(second.state())
    second.merge({})
    counts = first.read()
    assert counts is not None
    assert counts.hits.tolist() == [[1, 0, 0, 0, 0]]
    assert counts.predicted.tolist() == [[1, 0, 0, 0, 1]]
    assert counts.actual.tolist() == [[1, 0, 1, 0, 0]]


def test_targets_beyond_the_known_classes_are_skipped_and_predictions_beyond_are_misses() -> None:
    counts = ClassCounts(num_classes=2)
    counts.update(torch.tensor([0, 0, 5, 1]), torch.tensor([0, 7, 1, -3]))
    read = counts.read()
    assert read is not None
    assert [part.tolist() for part in read] == [[[1, 0]], [[1, 0]], [[1, 1]]]


def test_an_empty_batch_counts_nothing() -> None:
    metric = F1()
    metric.update(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    metric.update(PREDICTIONS, TARGETS)
    alone = F1()
    alone.update(PREDICTIONS, TARGETS)
    assert metric.compute() == alone.compute()


def test_a_number_of_classes_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_classes=0 must be at least 1"):
        ClassCounts(0)
