"""Metrics of other makers: whole sets, own states, merged over processes."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError, MissingDependencyError
from hezar_train.metrics import IGNORED_LABEL, Metric, build_metric
from hezar_train.metrics.adapters import CollectedMetric, EvaluateMetric, TorchMetric

torchmetrics = pytest.importorskip("torchmetrics")
evaluate = pytest.importorskip("evaluate")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric"),
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all"),
]

SCRIPT = """
import datasets
import evaluate


class Agreement(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, scale=1.0):
        share = sum(p == r for p, r in zip(predictions, references)) / len(references)
        return {"agreement": share * scale, "num": len(references), "note": "text"}
"""


def samples(num_samples: int = 40, num_classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, num_classes, generator=generator), torch.randint(
        num_classes, (num_samples,), generator=generator
    )


def counted(make: Callable[[], Metric], predictions: Any, targets: Any, batch_size: int) -> Metric:
    """Count batches on two processes in turn, and merge into the first and into one without a batch."""
    processes = [make(), make(), make()]
    for number, start in enumerate(range(0, len(targets), batch_size)):
        processes[number % 2].update(predictions[start : start + batch_size], targets[start : start + batch_size])
    states = [process.state() for process in processes]
    assert states[2] == {}
    processes[2].merge(states[0])
    processes[2].merge(states[1])
    processes[0].merge(states[1])
    processes[0].merge(states[2])
    assert processes[0].compute() == pytest.approx(processes[2].compute(), abs=1e-6)
    return processes[0]


def single(make: Callable[[], Metric], predictions: Any, targets: Any, batch_size: int) -> Metric:
    metric = make()
    for start in range(0, len(targets), batch_size):
        metric.update(predictions[start : start + batch_size], targets[start : start + batch_size])
    return metric


TORCHMETRICS = [
    lambda: torchmetrics.classification.MulticlassF1Score(3, average="macro"),
    lambda: torchmetrics.classification.MulticlassAUROC(3),
    lambda: torchmetrics.classification.MulticlassAUROC(3, thresholds=50),
    lambda: torchmetrics.classification.MulticlassMatthewsCorrCoef(3),
    lambda: torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro"),
    lambda: 2 * torchmetrics.classification.MulticlassRecall(3) + torchmetrics.classification.MulticlassPrecision(3),
]


@pytest.mark.parametrize("make", TORCHMETRICS)
@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_a_torchmetric_is_that_of_the_whole_set_on_one_process_and_on_several(make: Any, batch_size: int) -> None:
    logits, targets = samples()
    whole = make()
    whole.update(logits.softmax(-1), targets)
    metric = counted(lambda: build_metric(make()), logits, targets, batch_size)
    assert isinstance(metric, TorchMetric)
    name = type(whole).__name__
    assert metric.output_keys == [name]
    assert metric.compute() == pytest.approx({name: float(whole.compute())}, abs=1e-6)
    assert single(lambda: build_metric(make()), logits, targets, batch_size).compute() == pytest.approx(
        {name: float(whole.compute())}, abs=1e-6
    )


@pytest.mark.parametrize(
    "make", [torchmetrics.MeanSquaredError, torchmetrics.PearsonCorrCoef, torchmetrics.SpearmanCorrCoef]
)
def test_a_torchmetric_of_regression_receives_the_values(make: Any) -> None:
    predictions = torch.randn(30, generator=torch.Generator().manual_seed(1))
    targets = predictions + torch.randn(30, generator=torch.Generator().manual_seed(2))
    whole = make()
    whole.update(predictions, targets)
    metric = counted(lambda: build_metric(make()), predictions, targets, 8)
    assert metric.consumes == "predictions"
    assert metric.compute() == pytest.approx({make.__name__: float(whole.compute())}, abs=1e-5)
    expected = "minimize" if make is torchmetrics.MeanSquaredError else "maximize"
    assert metric.objective(make.__name__) == expected


def test_metrics_of_a_collection_that_share_a_state_merge_it_too() -> None:
    kinds = torchmetrics.PearsonCorrCoef, torchmetrics.ConcordanceCorrCoef
    predictions, targets = samples()[0][:, 0], samples()[0].sum(1)
    whole = torchmetrics.MetricCollection([kind() for kind in kinds])
    whole.update(predictions, targets)
    collection = lambda: build_metric(torchmetrics.MetricCollection([kind() for kind in kinds]))  # noqa: E731
    metric = counted(collection, predictions, targets, 6)
    assert metric.compute() == pytest.approx({key: float(each) for key, each in whole.compute().items()}, abs=1e-5)


def test_a_collection_of_torchmetrics_has_the_keys_of_its_metrics() -> None:
    kinds = torchmetrics.classification.MulticlassRecall, torchmetrics.classification.MulticlassPrecision
    logits, targets = samples()
    whole = torchmetrics.MetricCollection([kind(3) for kind in kinds])
    whole.update(logits.softmax(-1), targets)
    metric = counted(
        lambda: build_metric(torchmetrics.MetricCollection([kind(3) for kind in kinds])), logits, targets, 6
    )
    assert sorted(metric.output_keys) == ["MulticlassPrecision", "MulticlassRecall"]
    assert metric.objective("MulticlassRecall") == "maximize"
    assert metric.compute() == pytest.approx({key: float(each) for key, each in whole.compute().items()}, abs=1e-6)


def test_a_binary_torchmetric_receives_the_probability_of_the_second_class() -> None:
    logits, targets = samples(num_classes=2)
    # All differences lie in 0..1 here, where torchmetrics would take logits for probabilities.
    logits = torch.stack([torch.zeros(40), logits[:, 0].sigmoid() / 2], dim=1)
    whole = torchmetrics.classification.BinaryPrecision(threshold=0.55)
    whole.update(logits.softmax(-1)[:, 1], targets)
    for given_form in (logits, logits[:, 1], logits[:, 1:]):
        metric = TorchMetric(torchmetrics.classification.BinaryPrecision(threshold=0.55))
        metric.update(given_form, targets)
        assert metric.compute()["BinaryPrecision"] == pytest.approx(float(whole.compute()))
    as_it_is = TorchMetric(torchmetrics.classification.BinaryPrecision(threshold=0.55), from_logits=False)
    as_it_is.update(logits.softmax(-1)[:, 1], targets)
    assert as_it_is.compute()["BinaryPrecision"] == float(whole.compute())


def test_a_multilabel_torchmetric_receives_a_probability_per_label() -> None:
    logits, targets = samples()[0] / 10, (samples()[0] > 0.3).long()
    whole = torchmetrics.classification.MultilabelF1Score(3, threshold=0.52)
    whole.update(logits.sigmoid(), targets)
    metric = TorchMetric(torchmetrics.classification.MultilabelF1Score(3, threshold=0.52))
    metric.update(logits, targets)
    assert metric.compute()["MultilabelF1Score"] == float(whole.compute())


def test_ignored_tokens_do_not_reach_a_torchmetric() -> None:
    logits, targets = samples()
    with_padding = torch.cat([targets.view(10, 4), torch.full((10, 1), IGNORED_LABEL)], dim=1)
    wide = torch.cat([logits.view(10, 4, 3), torch.zeros(10, 1, 3)], dim=1)
    metric, plain = (TorchMetric(torchmetrics.classification.MulticlassAccuracy(3)) for _ in range(2))
    metric.update(wide, with_padding)
    plain.update(logits.view(10, 4, 3), targets.view(10, 4))
    assert metric.compute() == plain.compute()


def test_a_torchmetric_without_samples_is_nan_and_has_no_rows_of_weights() -> None:
    metric = TorchMetric(torchmetrics.classification.MulticlassAccuracy(3), name="right")
    assert math.isnan(metric.compute()["right"])
    logits, targets = samples()
    metric.update(logits, targets, torch.ones(5, 40))
    assert metric.compute_rows() == [metric.compute()]
    metric.reset()
    assert metric.state() == {}
    assert math.isnan(metric.compute()["right"])


def test_several_values_of_a_torchmetric_are_numbered() -> None:
    metric = TorchMetric(torchmetrics.classification.MulticlassAccuracy(3, average=None), name="right")
    metric.update(*samples())
    assert list(metric.compute()) == ["right.0", "right.1", "right.2"] == metric.output_keys


def test_a_torchmetric_that_must_not_merge_says_so() -> None:
    metric = TorchMetric(torchmetrics.classification.MulticlassAccuracy(3, sync_on_compute=False))
    other = TorchMetric(torchmetrics.classification.MulticlassAccuracy(3))
    other.update(*samples())
    with pytest.raises(ConfigError, match="sync_on_compute=False, so processes cannot be merged"):
        metric.merge(other.state())


def same_share(predictions: Any, targets: Any) -> float:
    return sum(bool(np.all(p == t)) for p, t in zip(predictions, targets, strict=True)) / len(targets)


def test_a_function_receives_the_whole_set_as_arrays() -> None:
    seen: list[Any] = []

    def spy(predictions: Any, targets: Any) -> float:
        seen.append((predictions, targets))
        return float((predictions == targets).mean())

    logits, targets = samples()
    metric = counted(lambda: build_metric(spy), logits.argmax(-1), targets, 7)
    assert metric.compute() == {"spy": float((logits.argmax(-1) == targets).double().mean())}
    predictions, received = seen[-1]
    assert isinstance(predictions, np.ndarray)
    assert sorted(zip(predictions.tolist(), received.tolist(), strict=True)) == sorted(
        zip(logits.argmax(-1).tolist(), targets.tolist(), strict=True)
    )


def test_texts_arrive_as_lists_and_travel_between_processes() -> None:
    predictions, targets = ["سلام", "b", "c", "d", "e"], ["سلام", ["b", "x"], "c", "y", "z"]
    metric = counted(lambda: CollectedMetric(same_share, "same"), predictions, targets, 2)
    assert metric.compute() == {"same": 2 / 5}


def test_samples_of_different_lengths_arrive_as_lists() -> None:
    metric = CollectedMetric(same_share, "same")
    metric.update(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]))
    metric.update(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3]]))
    assert metric.compute() == {"same": 2 / 3}


def test_ignored_tokens_do_not_reach_a_function() -> None:
    metric = CollectedMetric(same_share, "same")
    metric.update(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 9], [3, IGNORED_LABEL]]))
    metric.update(torch.tensor([[5, 6]]), torch.tensor([[5, 6]]))
    assert metric.compute() == {"same": 4 / 5}


def test_a_batch_may_change_after_it_was_counted() -> None:
    metric = CollectedMetric(same_share, "same")
    predictions = torch.tensor([1, 2])
    metric.update(predictions, torch.tensor([1, 2]))
    predictions.zero_()
    assert metric.compute() == {"same": 1.0}


def test_collecting_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    metric = CollectedMetric(same_share, "same")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            metric.update(torch.tensor([1]), torch.tensor([1]))
    assert [record.getMessage() for record in caplog.records] == [
        "metric 'same' needs the whole set at once: its predictions are kept in memory"
    ]


def test_outputs_of_any_form_become_numbers_under_keys() -> None:
    outcome = {
        "f1": np.float32(0.5),
        "by": [1, 2],
        "PER": {"f1": 0.25, "n": torch.tensor(3)},
        "note": "text",
        "no": None,
    }
    metric = CollectedMetric(lambda predictions, targets: outcome, "mixed")
    assert metric.output_keys == ["mixed"]
    metric.update([1], [1])
    assert metric.compute() == {"f1": 0.5, "by.0": 1.0, "by.1": 2.0, "PER.f1": 0.25, "PER.n": 3.0}
    assert metric.output_keys == ["f1", "by.0", "by.1", "PER.f1", "PER.n"]


def test_an_output_that_does_not_come_is_told() -> None:
    metric = CollectedMetric(lambda predictions, targets: {"f1": 1.0}, "mine", output_keys=["f1x"])
    metric.update([1], [1])
    with pytest.raises(ConfigError, match=r"'mine' has no output 'f1x'. It has: f1.*Did you mean 'f1'\?"):
        metric.compute()


def test_error_rates_are_minimized_unless_told_otherwise() -> None:
    assert CollectedMetric(same_share, "wer").objective("wer") == "minimize"
    assert CollectedMetric(same_share, "same").objective("same") == "maximize"
    assert CollectedMetric(same_share, "same", objective="minimize").objective("same") == "minimize"


def test_an_object_like_hezars_metrics_computes_on_the_whole_set() -> None:
    class Agreement:
        config = MetricConfig(name="agreement", objective="minimize", output_keys=["agreement"])

        def compute(self, predictions: Any, targets: Any, **options: Any) -> dict[str, float]:
            return {"agreement": same_share(predictions, targets), "other": 1.0}

    metric = build_metric(Agreement())
    metric.update(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert metric.compute() == {"agreement": 0.5}
    assert metric.objective("agreement") == "minimize"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a metric script, and keep what evaluate caches in the test's folder."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    monkeypatch.syspath_prepend(tmp_path / "modules")
    path = tmp_path / "agreement.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_a_script_of_evaluate_is_loaded_by_path_and_merges(script: Path) -> None:
    logits, targets = samples()
    config = MetricConfig(name=f"evaluate:{script}", options={"scale": 10.0}, output_keys=["agreement"])
    metric = counted(lambda: build_metric(config), logits.argmax(-1), targets, 7)
    assert isinstance(metric, EvaluateMetric)
    assert metric.name == "agreement"
    share = float((logits.argmax(-1) == targets).double().mean())
    assert metric.compute() == pytest.approx({"agreement": 10 * share})
    assert metric.compute() == pytest.approx({"agreement": 10 * share})
    assert not [path for path in (script.parent / "metrics").rglob("*") if path.is_file()]


def test_a_module_of_evaluate_and_a_combination_are_taken_as_objects(script: Path) -> None:
    logits, targets = samples()
    share = float((logits.argmax(-1) == targets).double().mean())
    module = evaluate.load(str(script))
    for given_form in (module, evaluate.combine([module])):
        metric = build_metric(given_form)
        metric.update(logits.argmax(-1), targets)
        assert metric.compute() == pytest.approx({"agreement": share, "num": 40})
        assert not [path for path in (script.parent / "metrics").rglob("*") if path.is_file()]


def test_without_network_a_name_of_the_hub_says_what_to_do(script: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)'evaluate:f1' was not found.*Connect, or give the path.*metric 'f1' of"
    ):
        build_metric("evaluate:f1")
    with pytest.raises(
        ConfigError, match=r"(?s)Connect, or give the path of a local script, as in 'evaluate:./mauve.py'"
    ):
        build_metric("evaluate:mauve")


def test_a_script_that_is_not_there_is_told_with_its_path(script: Path) -> None:
    missing = script.parent / "nowhere.py"
    with pytest.raises(ConfigError, match=f"there is no such script \\({missing}\\)"):
        build_metric(f"evaluate:{missing}")


def test_without_evaluate_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(
        MissingDependencyError, match=r"'evaluate:f1' needs the package 'evaluate'.*hezar-train\[evaluate\]"
    ):
        build_metric("evaluate:f1")
