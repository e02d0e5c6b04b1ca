"""Metrics by name, by config and by object."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError
from hezar_train.metrics import AdditiveMetric, Metric, build_metric, known_metrics, register_metric, registry
from hezar_train.metrics.adapters import CollectedMetric
from hezar_train.metrics.classification import F1, Accuracy, share_counts
from hezar_train.types import MetricType

PREDICTIONS, TARGETS = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 2])


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registered."""
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    return


def test_every_metric_type_is_known_and_every_known_metric_is_a_type() -> None:
    assert known_metrics() == sorted(MetricType)


@pytest.mark.parametrize("name", sorted(MetricType))
def test_every_metric_is_built_by_name_type_and_config(name: str) -> None:
    for metric in (name, MetricType(name), MetricConfig(name=name), {"name": name}):
        built = build_metric(metric)
        assert isinstance(built, Metric)
        assert built.name == name
        assert built.n_decimals == 4


@pytest.mark.parametrize("name", sorted(set(MetricType) - {"confusion_matrix"}))
def test_every_metric_that_counted_nothing_is_nan_under_all_its_keys(name: str) -> None:
    metric = build_metric(name)
    assert metric.output_keys
    assert all(value != value for value in metric.compute().values())  # noqa: PLR0124
    assert list(metric.compute()) == metric.output_keys
    assert {metric.objective(key) for key in metric.output_keys} <= {"maximize", "minimize"}


def test_an_object_is_taken_as_it_is() -> None:
    metric = F1(average="micro")
    assert build_metric(metric) is metric


def test_options_are_keyword_arguments_and_falsy_ones_count() -> None:
    metric = build_metric(MetricConfig(name="accuracy", options={"normalize": False}, n_decimals=2))
    metric.update(PREDICTIONS, TARGETS)
    assert metric.compute() == {"accuracy": 2.0}
    assert metric.n_decimals == 2


def test_values_are_never_rounded() -> None:
    metric = build_metric(MetricConfig(name="accuracy", n_decimals=0))
    metric.update(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 0]))
    assert metric.compute() == {"accuracy": 1 / 3}


def test_an_unknown_option_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'f1' has no option 'avrage'.*average, labels.*Did you mean 'average'\?"):
        build_metric(MetricConfig(name="f1", options={"avrage": "micro"}))
    with pytest.raises(ConfigError, match=r"'perplexity' has no option 'x'. Its options: none"):
        build_metric(MetricConfig(name="perplexity", options={"x": 1}))


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"metric 'acuracy' is not known.*Did you mean 'accuracy'\?"):
        build_metric("acuracy")


def test_defaults_apply_where_a_metric_knows_them_and_the_config_is_silent() -> None:
    defaults = {"multilabel": True, "num_classes": 7, "causal": True}
    f1 = build_metric(MetricConfig(name="f1", options={"num_classes": 3}), defaults)
    assert isinstance(f1, F1)
    assert (f1.counts.multilabel, f1.counts.num_classes) == (True, 3)
    assert build_metric("perplexity", defaults).name == "perplexity"


def test_a_config_may_choose_outputs_and_the_objective() -> None:
    metric = build_metric(MetricConfig(name="seqeval", output_keys=["f1", "recall"], objective="minimize"))
    metric.update([["B-X", "O"]], [["B-X", "B-Y"]])
    assert metric.output_keys == ["f1", "recall"]
    assert metric.compute() == pytest.approx({"f1": 2 / 3, "recall": 1 / 2})
    assert metric.compute_rows() == [metric.compute()]
    assert metric.objective("f1") == "minimize"
    other = build_metric(MetricConfig(name="seqeval", output_keys=["f1"]))
    other.merge(metric.state())
    assert other.compute() == pytest.approx({"f1": 2 / 3})
    assert other.objective("f1") == "maximize"
    metric.reset()
    assert metric.state() == {}


def test_an_output_that_a_metric_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'mse' has no output 'mae'. It has: mse.*Did you mean 'mse'\?"):
        build_metric(MetricConfig(name="mse", output_keys=["mae"]))


def test_a_chosen_metric_shares_counts_and_knows_its_classes() -> None:
    chosen = build_metric(MetricConfig(name="precision", output_keys=["precision"]))
    plain = build_metric("f1")
    share_counts([plain, chosen])
    for metric in (chosen, plain):
        metric.expect_classes(3, ["a", "b", "c"])
        metric.update(PREDICTIONS, TARGETS)
    assert chosen.state() == {}
    assert chosen.table() is None
    assert plain.table()["rows"] == ["a", "b", "c"]
    assert chosen.compute() == pytest.approx({"precision": (1 + 1 / 3 + 0) / 3})


class Share(AdditiveMetric):
    """The share of predictions above a bound."""

    def __init__(self, bound: float = 0.5) -> None:
        super().__init__()
        self.bound = bound

    @property
    def output_keys(self) -> list[str]:
        return ["share"]

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        return torch.stack([predictions > self.bound, torch.ones_like(predictions)], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        return {"share": sums[0] / sums[1]}


def test_a_registered_metric_is_built_by_name_with_its_options() -> None:
    assert register_metric("share")(Share) is Share
    assert register_metric("share")(Share) is Share
    metric = build_metric(MetricConfig(name="share", options={"bound": 0.9}))
    metric.update(torch.tensor([0.6, 0.95]), torch.zeros(2))
    assert metric.name == "share"
    assert metric.compute() == {"share": 0.5}
    assert "share" in known_metrics()


def test_a_registered_class_with_compute_alone_sees_the_whole_set() -> None:
    @register_metric("agreement")
    class Agreement:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def compute(self, predictions: Any, targets: Any) -> dict[str, float]:
            return {"agreement": float((predictions == targets).mean()) * self.scale}

    metric = build_metric(MetricConfig(name="agreement", options={"scale": 10}))
    metric.update(PREDICTIONS[:3], TARGETS[:3])
    metric.update(PREDICTIONS[3:], TARGETS[3:])
    assert metric.compute() == {"agreement": 5.0}
    with pytest.raises(ConfigError, match="'agreement': missing a required argument: 'scale'"):
        build_metric("agreement")


def test_a_name_is_given_once_and_to_classes_only() -> None:
    with pytest.raises(ConfigError, match=r"register_metric\('f1'\): .*F1 has that name. Choose another"):
        register_metric("f1")(Share)
    with pytest.raises(ConfigError, match="give a class with a compute method"):
        register_metric("double")(lambda predictions, targets: 1.0)


@pytest.mark.parametrize("wrong", [3, None, ["f1"], object()])
def test_what_is_no_metric_is_told(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="give a name, a MetricConfig, a Metric"):
        build_metric(wrong)


def test_a_class_is_no_object() -> None:
    with pytest.raises(ConfigError, match=r"has the class Accuracy: give an object, as in Accuracy\(\)"):
        build_metric(Accuracy)


def test_a_function_is_a_metric_of_its_name() -> None:
    def double(predictions: Any, targets: Any) -> float:
        return 2.0 * float((predictions == targets).sum())

    metric = build_metric(double)
    assert isinstance(metric, CollectedMetric)
    metric.update(PREDICTIONS, TARGETS)
    assert metric.compute() == {"double": 4.0}


def test_neither_torchmetrics_nor_evaluate_is_imported_for_our_own() -> None:
    code = (
        "import sys; from hezar_train.metrics import build_metric, known_metrics; "
        "[build_metric(name) for name in known_metrics()]; build_metric(lambda p, t: 0.0); "
        "print(*{'torchmetrics', 'evaluate', 'sklearn', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
