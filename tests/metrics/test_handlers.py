from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError
from hezar_train.metrics import ClassificationHandler, MetricsHandler, handler_for
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


def test_counts_stay_on_the_device_and_no_logits_are_kept() -> None:
    handler = ClassificationHandler()
    handler.reset()
    handler.update({"logits": torch.eye(3, requires_grad=True)}, torch.tensor([0, 1, 0]))
    kept = [value for value in vars(handler).values() if isinstance(value, torch.Tensor)]
    assert [(tensor.ndim, tensor.requires_grad) for tensor in kept] == [(0, False)]


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


@pytest.mark.parametrize("task", [None, *sorted(set(TaskType) - set(CLASSIFICATION))])
def test_other_tasks_have_the_loss_only(task: str | None) -> None:
    handler = handler_for(task, None)
    assert type(handler) is MetricsHandler
    handler.reset()
    handler.update({"logits": torch.eye(2)}, torch.tensor([0, 1]))
    assert handler.compute() == {}
    assert handler.output_keys == []


@pytest.mark.parametrize("metric", ["accuracy", MetricConfig(name="accuracy")])
def test_metrics_may_be_named_or_configured(metric: object) -> None:
    assert handler_for("text_classification", [metric]).output_keys == ["accuracy"]


def test_an_unknown_metric_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        handler_for("text_classification", ["acuracy"])
    assert str(caught.value) == (
        "metrics has 'acuracy', which ClassificationHandler does not compute. It computes: accuracy. "
        "Did you mean 'accuracy'?"
    )


def test_a_metric_of_a_task_without_metrics_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MetricsHandler does not compute. It computes: none, only the loss"):
        handler_for(None, ["accuracy"])


def test_a_smaller_loss_and_a_larger_accuracy_are_better() -> None:
    handler = ClassificationHandler()
    assert (handler.objective("loss"), handler.objective("accuracy")) == ("minimize", "maximize")
