"""Every score equals scikit-learn's, or what its definition gives by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_squared_error,
    roc_auc_score,
    root_mean_squared_error,
    top_k_accuracy_score,
)

from hezar_train.errors import DataError
from hezar_train.federated import scores
from hezar_train.federated.scores import Judged, judged

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(4, size=60)
LOGITS = GENERATOR.normal(size=(60, 4)).round(1)  # rounded: ties must count as scikit-learn counts them
SHARES = torch.tensor(LOGITS).softmax(1).numpy()
FOUND = judged(LABELS, LOGITS)


def test_scores_of_many_classes_are_those_of_scikit_learn() -> None:
    predicted = LOGITS.argmax(1)
    one_hot = np.eye(4)[LABELS]
    assert scores.accuracy(FOUND) == pytest.approx(accuracy_score(LABELS, predicted))
    assert scores.correct(FOUND) == accuracy_score(LABELS, predicted, normalize=False)
    assert scores.macro_f1(FOUND) == pytest.approx(f1_score(LABELS, predicted, average="macro"))
    assert scores.roc_auc(FOUND) == pytest.approx(roc_auc_score(LABELS, SHARES, multi_class="ovr"))
    assert scores.average_precision(FOUND) == pytest.approx(average_precision_score(one_hot, SHARES, average="macro"))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_hits_are_the_share_of_labels_among_the_highest(count: int) -> None:
    logits = GENERATOR.normal(size=(60, 4))
    expected = top_k_accuracy_score(LABELS, logits, k=count) if count < 4 else 1.0
    assert scores.hits(judged(LABELS, logits), count) == pytest.approx(expected)


def test_of_equal_outputs_the_lower_class_is_higher() -> None:
    assert scores.hits(judged([0, 1, 2], np.zeros((3, 3))), 2) == pytest.approx(2 / 3)


@pytest.mark.parametrize("as_pairs", [False, True])
def test_two_classes_may_come_as_one_logit_or_two(as_pairs: bool) -> None:
    labels, logit = LABELS % 2, LOGITS[:, 0]
    found = judged(labels, np.stack([np.zeros(60), logit], axis=1) if as_pairs else logit)
    assert scores.roc_auc(found) == pytest.approx(roc_auc_score(labels, logit))
    assert scores.average_precision(found) == pytest.approx(average_precision_score(labels, logit))
    assert scores.accuracy(found) == pytest.approx(accuracy_score(labels, logit > 0))
    assert scores.macro_f1(found) == pytest.approx(f1_score(labels, logit > 0, average="macro"))


def test_unlabelled_places_are_left_out_of_their_own_column_alone() -> None:
    labels = (GENERATOR.random((60, 3)) > 0.4).astype(float)
    labels[::7, 0] = labels[::3, 1] = np.nan
    labels[5] = np.nan  # a row without any
    logits = GENERATOR.normal(size=(60, 3))
    found = judged(labels, logits)
    columns = [(labels[known, i], logits[known, i]) for i in range(3) for known in [~np.isnan(labels[:, i])]]
    for score, theirs in (
        (scores.accuracy, lambda y, z: accuracy_score(y, z > 0)),
        (scores.macro_f1, lambda y, z: f1_score(y, z > 0)),
        (scores.roc_auc, roc_auc_score),
        (scores.average_precision, average_precision_score),
    ):
        assert score(found) == pytest.approx(np.mean([theirs(y, z) for y, z in columns]))


def test_several_columns_of_labels_without_gaps_give_the_multilabel_f1_of_scikit_learn() -> None:
    labels, logits = (GENERATOR.random((60, 3)) > 0.4).astype(int), GENERATOR.normal(size=(60, 3))
    assert scores.macro_f1(judged(labels, logits)) == pytest.approx(f1_score(labels, logits > 0, average="macro"))


def test_classes_may_stand_before_columns() -> None:
    labels, logits = GENERATOR.integers(3, size=(20, 2)), GENERATOR.normal(size=(20, 3, 2))
    expected = np.mean([accuracy_score(labels[:, i], logits[:, :, i].argmax(1)) for i in range(2)])
    assert scores.accuracy(judged(labels, logits)) == pytest.approx(expected)


def test_the_ignored_label_counts_as_none() -> None:
    assert scores.accuracy(judged([0, -100, 1], [[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])) == 0.5


@pytest.mark.parametrize("num_columns", [1, 2])
def test_errors_of_a_regression_are_means_over_columns_without_gaps(num_columns: int) -> None:
    labels, outputs = GENERATOR.normal(size=(2, 30, num_columns))
    labels[3, 0] = np.nan
    found = judged(labels, outputs, is_regression=True)
    columns = [(labels[known, i], outputs[known, i]) for i in range(num_columns) for known in [~np.isnan(labels[:, i])]]
    assert scores.mean_squared_error(found) == pytest.approx(np.mean([mean_squared_error(*one) for one in columns]))
    expected = np.mean([root_mean_squared_error(*one) for one in columns])
    assert scores.root_mean_squared_error(found) == pytest.approx(expected)


def test_negative_targets_of_a_regression_count() -> None:
    assert scores.mean_squared_error(judged([-1.0, -3.0], [0.0, 0.0], is_regression=True)) == 5.0


@pytest.mark.parametrize("score", [scores.roc_auc, scores.average_precision])
def test_a_curve_of_one_class_alone_is_not_a_number(score: scores.Score) -> None:
    assert math.isnan(score(judged([1, 1, 1], [0.1, 0.2, 0.3])))


def test_predicted_classes_alone_give_what_needs_no_outputs() -> None:
    found = judged([0, 1, 1], None, [0, 1, 0])
    assert scores.accuracy(found) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="only the predicted classes: ask for acc, correct or f1"):
        scores.roc_auc(found)


@pytest.mark.parametrize(
    ("score", "found", "words"),
    [
        (scores.accuracy, judged([1.0], [1.0], is_regression=True), "predicts no classes"),
        (scores.roc_auc, judged([1.0], [1.0], is_regression=True), "no classes to tell apart"),
        (scores.mean_squared_error, FOUND, "task='regression'"),
    ],
)
def test_a_score_of_another_task_is_refused_with_one_that_fits(score: scores.Score, found: Judged, words: str) -> None:
    with pytest.raises(DataError, match=words):
        score(found)


@pytest.mark.parametrize(("labels", "outputs"), [((5,), (4, 3)), ((5, 2), (5, 3, 4)), ((5, 2, 2), (5, 3, 2, 2))])
def test_labels_and_outputs_that_do_not_go_together_are_refused(
    labels: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match=r"do not go with predictions of shape"):
        judged(np.zeros(labels), np.zeros(outputs))
