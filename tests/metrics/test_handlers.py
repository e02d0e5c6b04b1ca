from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError
from hezar_train.metrics import (
    ClassificationHandler,
    MetricsHandler,
    handler_for,
    interval,
    poisson_weights,
    settle_handler,
)
from hezar_train.types import TaskType

CLASSIFICATION = ["text_classification", "audio_classification", "image_classification"]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(2, 5), st.integers(0, 2**32))
def test_accuracy_is_the_fraction_of_the_whole_set_for_any_batch_size(
    num_samples: int, batch_size: int, num_classes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, num_classes, generator=generator)
    labels = torch.randint(num_classes, (num_samples,), generator=generator)
    handler = ClassificationHandler()
    handler.reset()
    for some_logits, some_labels in zip(logits.split(batch_size), labels.split(batch_size), strict=True):
        handler.update({"logits": some_logits}, some_labels)
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, labels, strict=True))
    assert handler.compute() == {"accuracy": right / num_samples}


def test_a_reset_forgets_what_was_counted() -> None:
    handler = ClassificationHandler()
    handler.reset()
    handler.update({"logits": torch.eye(2)}, torch.tensor([1, 0]))
    assert handler.compute() == {"accuracy": 0.0}
    handler.reset()
    handler.update({"logits": torch.eye(2)}, torch.tensor([0, 1]))
    assert handler.compute() == {"accuracy": 1.0}


def test_counts_have_no_gradient_and_no_logits_are_kept() -> None:
    handler = ClassificationHandler(["accuracy", "f1", "matthews"])
    handler.reset()
    for _ in range(3):
        handler.update({"logits": torch.eye(5, requires_grad=True).repeat(100, 1)}, torch.arange(5).repeat(100))
    kept = [tensor for metric in handler.metrics for tensor in metric.state().values()]
    assert kept
    assert all(not tensor.requires_grad and tensor.numel() <= 3 * 6 for tensor in kept)


@pytest.mark.parametrize(("outputs", "labels"), [({"logits": torch.eye(2)}, None), ({}, torch.tensor([0, 1]))])
def test_accuracy_of_nothing_is_not_a_number(outputs: dict[str, torch.Tensor], labels: torch.Tensor | None) -> None:
    handler = ClassificationHandler()
    handler.reset()
    handler.update(outputs, labels)
    assert math.isnan(handler.compute()["accuracy"])


def test_no_metrics_at_all_can_be_asked_for() -> None:
    handler = ClassificationHandler([])
    handler.reset()
    handler.update({"logits": torch.eye(2)}, torch.tensor([0, 1]))
    assert handler.compute() == {}
    assert handler.output_keys == []


@pytest.mark.parametrize("task", CLASSIFICATION)
def test_classification_tasks_have_accuracy(task: str) -> None:
    handler = handler_for(task, None)
    assert type(handler) is ClassificationHandler
    assert handler.output_keys == ["accuracy"]


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        ("sequence_labeling", ["accuracy", "precision", "recall", "f1"]),
        ("language_modeling", ["perplexity", "token_accuracy"]),
        ("mask_filling", ["perplexity", "token_accuracy"]),
        ("regression", ["mse", "mae", "r2"]),
        ("image2text", ["cer", "wer"]),
        ("speech_recognition", ["cer", "wer"]),
        ("text_generation", ["rouge1", "rouge2", "rougeL", "rougeLsum"]),
    ],
)
def test_every_other_task_has_its_own_metrics(task: str, keys: list[str]) -> None:
    assert handler_for(task, None).output_keys == keys


@pytest.mark.parametrize("task", [None, "backbone", "text_detection"])
def test_the_remaining_tasks_have_the_loss_only(task: str | None) -> None:
    handler = handler_for(task, None)
    assert type(handler) is MetricsHandler
    handler.reset()
    handler.update({"logits": torch.eye(2)}, torch.tensor([0, 1]))
    assert handler.compute() == {}
    assert handler.output_keys == []


def test_the_tasks_above_are_all_there_are() -> None:
    named = {"sequence_labeling", "language_modeling", "mask_filling", "regression", "image2text"}
    named |= {"speech_recognition", "text_generation", "backbone", "text_detection", *CLASSIFICATION}
    assert named == set(TaskType)


@pytest.mark.parametrize("metric", ["accuracy", MetricConfig(name="accuracy")])
def test_metrics_may_be_named_or_configured(metric: object) -> None:
    assert handler_for("text_classification", [metric]).output_keys == ["accuracy"]


def test_an_unknown_metric_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        handler_for("text_classification", ["acuracy"])
    assert str(caught.value) == (
        "metrics has 'acuracy', which ClassificationHandler does not compute. It computes: accuracy, auroc, "
        "confusion_matrix, f1, matthews, precision, recall, top_k_accuracy. "
        "Did you mean 'accuracy'?"
    )


def test_a_metric_of_a_task_without_metrics_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MetricsHandler does not compute. It computes: none, only the loss"):
        handler_for(None, ["accuracy"])


def test_a_smaller_loss_and_a_larger_accuracy_are_better() -> None:
    handler = ClassificationHandler()
    assert (handler.objective("loss"), handler.objective("accuracy")) == ("minimize", "maximize")


@pytest.mark.parametrize("metric", ["rouge", MetricConfig(name="rouge"), {"name": "rouge"}])
def test_a_metric_of_another_task_is_refused_in_every_form(metric: object) -> None:
    with pytest.raises(ConfigError, match="metrics has 'rouge', which ClassificationHandler does not compute"):
        handler_for("text_classification", [metric])


def test_an_object_is_welcome_in_any_task_whatever_its_name() -> None:
    class Mine:
        name = "rouge"

        def compute(self, predictions: Any, targets: Any) -> float:
            return float(len(targets))

    handler = handler_for("text_classification", [Mine()])
    handler.reset()
    handler.update({"logits": torch.eye(2)}, torch.tensor([0, 1]))
    assert handler.compute() == {"rouge": 2.0}


def test_two_metrics_with_one_output_are_refused() -> None:
    with pytest.raises(ConfigError, match="metrics gives f1 more than once"):
        handler_for("text_classification", ["f1", MetricConfig(name="f1", options={"average": "micro"})])


def test_falsy_options_are_options() -> None:
    options = {"accuracy": {"normalize": False}, "f1": {"average": "binary", "pos_label": 0}}
    handler = handler_for("text_classification", [MetricConfig(name, options=some) for name, some in options.items()])
    handler.reset()
    handler.update({"logits": torch.eye(2)[[0, 0, 1, 1]]}, torch.tensor([0, 1, 1, 1]))
    assert handler.compute() == {"accuracy": 3.0, "f1": pytest.approx(2 / 3)}


def test_a_single_logit_says_yes_or_no() -> None:
    for logits in (torch.tensor([[0.3], [-2.0], [0.1]]), torch.tensor([0.3, -2.0, 0.1])):
        handler = ClassificationHandler(["accuracy", "f1"])
        handler.reset()
        handler.update({"logits": logits}, torch.tensor([1, 0, 0]))
        assert handler.compute()["accuracy"] == pytest.approx(2 / 3)


def test_a_config_that_names_too_few_classes_hides_none() -> None:
    handler = ClassificationHandler(["f1"])
    handler.expect({0: "no", 1: "yes"}, None)
    handler.reset()
    handler.update({"logits": torch.eye(4)}, torch.tensor([0, 1, 3, 3]))
    assert handler.compute() == {"f1": pytest.approx((1 + 1 + 0 + 2 / 3) / 4)}
    (matrix,) = (table for table in handler.tables() if table["name"] == "confusion_matrix")
    assert matrix["rows"] == ["no", "yes", "2", "3"]


def test_a_causal_model_is_ranked_on_the_next_token() -> None:
    logits = torch.eye(4)[torch.tensor([[1, 2, 3, 0]])]  # at each place the next token
    handler = handler_for("language_modeling", [MetricConfig("top_k_accuracy", options={"k": 1}), "token_accuracy"])
    handler.reset()
    handler.update({"logits": logits}, torch.tensor([[0, 1, 2, 3]]))
    assert handler.compute() == {"top_k_accuracy": 1.0, "token_accuracy": 1.0}


@pytest.mark.parametrize("labels", [["O", "PER", "LOC"], ["O", "B-PER", "B-LOC"]])
def test_labels_without_tags_are_entities_of_one_token(labels: list[str]) -> None:
    handler = handler_for("sequence_labeling", None)
    handler.expect(dict(enumerate(labels)), None)
    handler.reset()
    handler.update({"logits": torch.eye(3)[torch.tensor([[1, 1, 0, 2]])]}, torch.tensor([[1, 1, 2, -100]]))
    assert handler.compute()["f1"] == pytest.approx(2 * 1.0 * (2 / 3) / (1.0 + 2 / 3))


def test_entities_without_names_of_labels_are_refused_before_the_first_batch() -> None:
    handler = handler_for("sequence_labeling", ["seqeval"])
    with pytest.raises(ConfigError, match="seqeval needs the names of the labels"):
        handler.expect(None, None)
    named = handler_for("sequence_labeling", [MetricConfig("seqeval", options={"id2label": ["O", "B-X"]})])
    named.expect(None, None)


class TestSampleLosses:
    """How wrong each sample is: what torch says of the sample alone."""

    @pytest.mark.parametrize("task", ["sequence_labeling", "mask_filling", "language_modeling"])
    def test_of_sequences_they_are_means_over_the_labels_that_count(self, task: str) -> None:
        logits, labels = sequences(9)
        found = handler_for(task, ["token_accuracy"]).sample_losses({"logits": logits}, labels)
        assert found is not None
        for loss, some, their in zip(found, logits, labels, strict=True):
            shifted = (some[:-1], their[1:]) if task == "language_modeling" else (some, their)
            assert float(loss) == pytest.approx(float(cross_entropy(*shifted).nan_to_num(0.0)), rel=1e-5)

    def test_of_several_labels_they_are_means_over_labels(self) -> None:
        logits, labels = torch.randn(4, 3), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, -100]])
        found = ClassificationHandler().sample_losses({"logits": logits}, labels)
        assert found is not None
        alone = [binary_cross_entropy_with_logits(logits[n], labels[n].float()) for n in range(3)]
        alone.append(binary_cross_entropy_with_logits(logits[3, :2], labels[3, :2].float()))
        assert found.tolist() == pytest.approx([float(loss) for loss in alone], rel=1e-5)

    @pytest.mark.parametrize("shape", [(4,), (4, 1)])
    def test_of_one_logit_they_tell_yes_from_no(self, shape: tuple[int, ...]) -> None:
        logits, labels = torch.randn(shape), torch.tensor([1, 0, 1, 0])
        found = ClassificationHandler().sample_losses({"logits": logits}, labels)
        alone = binary_cross_entropy_with_logits(logits.reshape(4), labels.float(), reduction="none")
        assert torch.equal(torch.as_tensor(found), alone)

    def test_a_causal_model_is_compared_with_the_token_after_the_place(self) -> None:
        logits, labels = torch.eye(5)[1:4][None], torch.tensor([[0, 1, 2]])
        predicted, expected = handler_for("language_modeling", None).compared({"logits": logits}, labels)
        assert (predicted.tolist(), expected.tolist()) == ([[1, 2, 3]], [[1, 2, -100]])


class TestLossIntervals:
    @pytest.mark.parametrize("batch_size", [1, 3, 7, 40])
    @pytest.mark.parametrize("task", ["mask_filling", "language_modeling"])
    def test_loss_and_perplexity_are_those_of_the_resampled_sets(self, task: str, batch_size: int) -> None:
        logits, labels = sequences(40)
        weights = poisson_weights(3, torch.arange(40), 50)
        handler = handler_for(task, ["perplexity"])
        for some, their, rows in zip(
            logits.split(batch_size), labels.split(batch_size), weights.split(batch_size, dim=1), strict=True
        ):
            loss, units = told(some, their, task)
            handler.update({"logits": some, "loss": loss}, their, rows, units)
        parts = [told(logits[n : n + 1], labels[n : n + 1], task) for n in range(40)]
        totals, units = (torch.tensor([float(part[n]) for part in parts], dtype=torch.float64) for n in (0, 1))
        rows = (weights.double() @ (totals.nan_to_num(0.0) * units)) / (weights.double() @ units)
        low, high = interval(rows[1:].tolist())
        found = handler.intervals()
        assert found["loss"] == pytest.approx((low, high), rel=1e-5)
        assert found["perplexity"] == pytest.approx((math.exp(low), math.exp(high)), rel=1e-3)
        assert low < float(rows[0]) < high

    def test_a_loss_that_is_not_the_samples_own_has_none(self) -> None:
        logits, labels = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3
        for smoothing, keys in ((0.0, {"loss", "accuracy"}), (0.3, {"accuracy"})):
            handler = ClassificationHandler()
            loss = cross_entropy(logits, labels, label_smoothing=smoothing)
            handler.update({"logits": logits, "loss": loss}, labels, poisson_weights(0, torch.arange(20), 20), 20)
            assert set(handler.intervals()) == keys

    def test_a_reset_forgets_them(self) -> None:
        handler = ClassificationHandler([])
        outputs = {"logits": torch.zeros(2, 2), "loss": torch.tensor(math.log(2))}
        handler.update(outputs, torch.tensor([0, 1]), poisson_weights(0, torch.arange(2), 20), 2)
        assert set(handler.intervals()) == {"loss"}
        handler.reset()
        assert handler.intervals() == {}


class TestShown:
    @pytest.fixture
    def handler(self) -> MetricsHandler:
        return handler_for("text_classification", [MetricConfig("accuracy", n_decimals=2), "f1"])

    @pytest.mark.parametrize("name", ["accuracy", "evaluation.accuracy", "evaluation.dev.accuracy.low"])
    def test_a_value_has_the_decimals_of_its_metric(self, handler: MetricsHandler, name: str) -> None:
        assert handler.shown(name, 2 / 3) == "0.67"
        assert handler.shown("evaluation.dev.f1", 2 / 3) == "0.6667"

    def test_what_is_no_metric_has_four_digits(self, handler: MetricsHandler) -> None:
        assert handler.shown("evaluation.loss", 12.34567) == "12.35"
        assert handler.shown("train.inaccuracy", 2e-5 / 3) == "6.667e-06"

    def test_a_small_value_does_not_vanish(self, handler: MetricsHandler) -> None:
        assert [handler.shown("accuracy", value) for value in (0.0, 0.0012, float("nan"))] == ["0.00", "0.0012", "nan"]


def test_texts_are_decoded_once_a_batch_and_no_logits_are_held() -> None:
    decoded: list[Any] = []

    def decode(ids: torch.Tensor) -> list[str]:
        decoded.append(ids)
        return ["".join(map(str, row)) for row in ids.tolist()]

    handler = handler_for("text_generation", ["cer"])
    handler.expect(None, decode)
    outputs, labels = {"logits": torch.eye(3)[None]}, torch.tensor([[0, 1, 2]])
    handler.update(outputs, labels)
    assert handler.compared(outputs, labels) == (["012"], ["012"])
    assert handler.sample_losses(outputs, labels).tolist() == [0.0]  # type: ignore[union-attr]
    assert len(decoded) == 2
    alive = weakref.ref(outputs["logits"])
    del outputs
    assert alive() is None


def sequences(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, and labels of which some do not count, in one sample not a single one."""
    generator = torch.Generator().manual_seed(num_samples)
    logits = torch.randn(num_samples, 5, 4, generator=generator)
    labels = torch.randint(4, (num_samples, 5), generator=generator)
    labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, -100)
    labels[0] = -100
    return logits, labels


def told(logits: torch.Tensor, labels: torch.Tensor, task: str) -> tuple[torch.Tensor, float]:
    """Return a batch's mean loss, as a model tells it, and what it is a mean of."""
    if task == "language_modeling":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten()), float((labels != -100).sum())


def test_metrics_that_a_given_handler_leaves_without_effect_are_told() -> None:
    own = ClassificationHandler()
    with pytest.warns(UserWarning, match=r"metrics \(f1\) has no effect beside a metrics_handler"):
        assert settle_handler(own, "text_classification", ["f1"]) is own
