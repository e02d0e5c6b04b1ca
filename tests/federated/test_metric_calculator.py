"""FederatedScope's metrics: names and directions, and that each equals scikit-learn's or its definition by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

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

from hezar_train.errors import ConfigError, DataError
from hezar_train.federated import MetricCalculator, is_larger_better, register_metric
from hezar_train.loop import Context

THE_LARGER_THE_BETTER = {"correct", "acc", "ap", "f1", "roc_auc", "imp_ratio", "hits@1", "hits@100"}
THE_SMALLER_THE_BETTER = {"loss", "avg_loss", "total", "rmse", "mse", "loss_regular", "std"}

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(4, size=60)
LOGITS = GENERATOR.normal(size=(60, 4)).round(1)  # rounded: ties must count as scikit-learn counts them
SHARES = torch.tensor(LOGITS).softmax(1).numpy()


def context(task: str = "text_classification", **values: Any) -> Context:
    """Return what the end of an evaluation of three samples looks like."""
    ctx = Context(config=SimpleNamespace(task=task))
    ended = {"split": "test", "loss_batch_total": 6.0, "num_samples": 3, "loss_regular_total": 0.5}
    ctx.merge_from_dict({**ended, "ys_true": [0, 1, 1], "ys_prob": [[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]], **values})
    return ctx


def score(name: str, labels: Any, outputs: Any, task: str = "text_classification") -> float:
    """Return a metric of labels and outputs alone."""
    ended = context(task, ys_true=torch.as_tensor(labels), ys_prob=torch.as_tensor(outputs))
    return MetricCalculator(name).eval(ended)[f"test_{name}"]


def test_loss_mean_loss_and_count_are_always_there() -> None:
    assert MetricCalculator().eval(context()) == {"test_loss": 6.0, "test_avg_loss": 2.0, "test_total": 3.0}


@pytest.mark.parametrize("asked", ["acc", ["acc"], {"acc"}])
def test_metrics_are_asked_for_by_one_name_or_several(asked: Any) -> None:
    assert MetricCalculator(asked).eval(context())["test_acc"] == pytest.approx(2 / 3)


def test_arrays_that_hooks_gathered_in_parts_are_joined() -> None:
    parts = {"ys_true": [torch.tensor([0, 1]), torch.tensor([1])], "ys_prob": [torch.eye(2), torch.tensor([[3.0, 0]])]}
    assert MetricCalculator("correct").eval(context(**parts))["test_correct"] == 2


def test_predicted_classes_may_stand_in_for_outputs() -> None:
    assert MetricCalculator("acc").eval(context(ys_prob=None, ys_pred=[0, 0, 0]))["test_acc"] == pytest.approx(1 / 3)


def test_the_improvement_is_a_share_of_the_base_in_percent() -> None:
    assert MetricCalculator("imp_ratio", base=0.5).eval(context())["test_imp_ratio"] == pytest.approx(100 / 3)
    of_numbers = context("regression", ys_true=[1.0, 2.0], ys_prob=[1.0, 3.0])
    assert MetricCalculator("imp_ratio", base=2.0).eval(of_numbers)["test_imp_ratio"] == pytest.approx(75.0)


def test_a_regression_has_errors_and_the_regularised_loss_its_total() -> None:
    ctx = context("regression", ys_true=[1.0, 2.0], ys_prob=[1.0, 4.0])
    found = MetricCalculator(["mse", "rmse", "loss_regular"]).eval(ctx)
    assert (found["test_mse"], found["test_rmse"], found["test_loss_regular"]) == (2.0, pytest.approx(2**0.5), 0.5)


@pytest.mark.parametrize("name", sorted(THE_LARGER_THE_BETTER | THE_SMALLER_THE_BETTER))
def test_each_name_has_its_direction_with_and_without_a_split(name: str) -> None:
    assert is_larger_better(name) == is_larger_better(f"val_{name}") == (name in THE_LARGER_THE_BETTER)
    assert not is_larger_better(f"val_{name}_std")


def test_a_metric_of_ones_own_gets_everything_by_keyword() -> None:
    def share_of_ones(*, ctx: Context, y_true: Any, y_pred: Any, y_prob: Any, metric: str) -> float:
        assert (metric, ctx.split, y_prob.shape) == ("ones", "test", (3, 2, 1))
        return float((y_pred == 1).double().mean() + (y_true == 1).double().mean())

    register_metric("ones", share_of_ones, the_larger_the_better=False)
    assert MetricCalculator("ones").eval(context())["test_ones"] == pytest.approx(1.0)
    assert not is_larger_better("test_ones")


@pytest.mark.parametrize("name", ["acc", "hits@3"])
def test_a_name_of_the_package_cannot_be_taken(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*has that name"):
        register_metric(name, lambda **_: 0.0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("accc", r"'accc' is not a metric. Did you mean 'acc'\? There are: acc, ap, .*hits@1 to hits@100"),
        ("hits@101", "'hits@101' is not a metric"),
        ("std", "format_eval_res"),
        ("imp_ratio", "base=None"),
    ],
)
def test_what_cannot_be_computed_is_refused_at_once(asked: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MetricCalculator(asked)


def test_a_context_without_labels_is_refused() -> None:
    with pytest.raises(DataError, match=r"ys_true.*add a Monitor"):
        MetricCalculator("acc").eval(context(ys_true=None))


def test_scores_of_many_classes_are_those_of_scikit_learn() -> None:
    predicted = LOGITS.argmax(1)
    one_hot = np.eye(4)[LABELS]
    assert score("acc", LABELS, LOGITS) == pytest.approx(accuracy_score(LABELS, predicted))
    assert score("correct", LABELS, LOGITS) == accuracy_score(LABELS, predicted, normalize=False)
    assert score("f1", LABELS, LOGITS) == pytest.approx(f1_score(LABELS, predicted, average="macro"))
    assert score("roc_auc", LABELS, LOGITS) == pytest.approx(roc_auc_score(LABELS, SHARES, multi_class="ovr"))
    assert score("ap", LABELS, LOGITS) == pytest.approx(average_precision_score(one_hot, SHARES, average="macro"))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_hits_are_the_share_of_labels_among_the_highest(count: int) -> None:
    logits = GENERATOR.normal(size=(60, 4))
    expected = top_k_accuracy_score(LABELS, logits, k=count) if count < 4 else 1.0
    assert score(f"hits@{count}", LABELS, logits) == pytest.approx(expected)


def test_of_equal_outputs_the_lower_class_is_higher() -> None:
    assert score("hits@2", [0, 1, 2], np.zeros((3, 3))) == pytest.approx(2 / 3)


@pytest.mark.parametrize("as_pairs", [False, True])
def test_two_classes_may_come_as_one_logit_or_two(as_pairs: bool) -> None:
    labels, logit = LABELS % 2, LOGITS[:, 0]
    outputs = np.stack([np.zeros(60), logit], axis=1) if as_pairs else logit
    assert score("roc_auc", labels, outputs) == pytest.approx(roc_auc_score(labels, logit))
    assert score("ap", labels, outputs) == pytest.approx(average_precision_score(labels, logit))
    assert score("acc", labels, outputs) == pytest.approx(accuracy_score(labels, logit > 0))
    assert score("f1", labels, outputs) == pytest.approx(f1_score(labels, logit > 0, average="macro"))


def test_unlabelled_places_are_left_out_of_their_own_column_alone() -> None:
    labels = (GENERATOR.random((60, 3)) > 0.4).astype(float)
    labels[::7, 0] = labels[::3, 1] = np.nan
    labels[5] = np.nan  # a row without any
    logits = GENERATOR.normal(size=(60, 3))
    columns = [(labels[known, i], logits[known, i]) for i in range(3) for known in [~np.isnan(labels[:, i])]]
    for name, theirs in (
        ("acc", lambda y, z: accuracy_score(y, z > 0)),
        ("f1", lambda y, z: f1_score(y, z > 0)),
        ("roc_auc", roc_auc_score),
        ("ap", average_precision_score),
    ):
        assert score(name, labels, logits) == pytest.approx(np.mean([theirs(y, z) for y, z in columns]))


def test_several_columns_of_labels_without_gaps_give_the_multilabel_f1_of_scikit_learn() -> None:
    labels, logits = (GENERATOR.random((60, 3)) > 0.4).astype(int), GENERATOR.normal(size=(60, 3))
    assert score("f1", labels, logits) == pytest.approx(f1_score(labels, logits > 0, average="macro"))


def test_classes_may_stand_before_columns() -> None:
    labels, logits = GENERATOR.integers(3, size=(20, 2)), GENERATOR.normal(size=(20, 3, 2))
    expected = np.mean([accuracy_score(labels[:, i], logits[:, :, i].argmax(1)) for i in range(2)])
    assert score("acc", labels, logits) == pytest.approx(expected)


def test_the_ignored_label_counts_as_none() -> None:
    assert score("acc", [0, -100, 1], [[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]) == 0.5


@pytest.mark.parametrize("num_columns", [1, 2])
def test_errors_of_a_regression_are_means_over_columns_without_gaps(num_columns: int) -> None:
    labels, outputs = GENERATOR.normal(size=(2, 30, num_columns))
    labels[3, 0] = np.nan
    columns = [(labels[known, i], outputs[known, i]) for i in range(num_columns) for known in [~np.isnan(labels[:, i])]]
    assert score("mse", labels, outputs, "regression") == pytest.approx(
        np.mean([mean_squared_error(*one) for one in columns])
    )
    expected = np.mean([root_mean_squared_error(*one) for one in columns])
    assert score("rmse", labels, outputs, "regression") == pytest.approx(expected)


def test_negative_targets_of_a_regression_count() -> None:
    assert score("mse", [-1.0, -3.0], [0.0, 0.0], "regression") == 5.0


@pytest.mark.parametrize("name", ["roc_auc", "ap"])
def test_a_curve_of_one_class_alone_is_not_a_number(name: str) -> None:
    assert math.isnan(score(name, [1, 1, 1], [0.1, 0.2, 0.3]))


def test_predicted_classes_alone_give_what_needs_no_outputs() -> None:
    alone = context(ys_true=[0, 1, 1], ys_prob=None, ys_pred=[0, 1, 0])
    assert MetricCalculator("acc").eval(alone)["test_acc"] == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="only the predicted classes: ask for acc, correct or f1"):
        MetricCalculator("roc_auc").eval(alone)


@pytest.mark.parametrize(
    ("name", "task", "words"),
    [
        ("acc", "regression", "predicts no classes"),
        ("roc_auc", "regression", "no classes to tell apart"),
        ("mse", "text_classification", "task='regression'"),
    ],
)
def test_a_score_of_another_task_is_refused_with_one_that_fits(name: str, task: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        score(name, [1.0], [1.0], task)


@pytest.mark.parametrize(("labels", "outputs"), [((5,), (4, 3)), ((5, 2), (5, 3, 4)), ((5, 2, 2), (5, 3, 2, 2))])
def test_labels_and_outputs_that_do_not_go_together_are_refused(
    labels: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match=r"do not go with predictions of shape"):
        score("acc", np.zeros(labels), np.zeros(outputs))
