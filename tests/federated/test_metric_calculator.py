from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hezar_train.errors import ConfigError, DataError
from hezar_train.federated import MetricCalculator, is_larger_better, register_metric
from hezar_train.loop import Context

THE_LARGER_THE_BETTER = {"correct", "acc", "ap", "f1", "roc_auc", "imp_ratio", "hits@1", "hits@100"}
THE_SMALLER_THE_BETTER = {"loss", "avg_loss", "total", "rmse", "mse", "loss_regular", "std"}


def context(task: str = "text_classification", **values: Any) -> Context:
    """Return what the end of an evaluation of three samples looks like."""
    ctx = Context(config=SimpleNamespace(task=task))
    ended = {"split": "test", "loss_batch_total": 6.0, "num_samples": 3, "loss_regular_total": 0.5}
    ctx.merge_from_dict({**ended, "ys_true": [0, 1, 1], "ys_prob": [[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]], **values})
    return ctx


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
