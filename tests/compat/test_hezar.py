"""Hezar's door: every name is the very object of ours, under the same name or one that the door tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hezar_train import config, data, events, metrics, state, trainer, types
from hezar_train.compat import hezar
from hezar_train.metrics import handlers

OURS: dict[str, Any] = {
    **dict.fromkeys(("AverageMeter", "CSVLogger", "MetricsTracker"), events),
    **dict.fromkeys(("CharLevelOCRDataCollator", "ImageCaptioningDataCollator", "SequenceLabelingDataCollator"), data),
    **dict.fromkeys(("SpeechRecognitionDataCollator", "TextGenerationDataCollator", "TextPaddingDataCollator"), data),
    "RangedSampler": data,
    **dict.fromkeys(("LRSchedulerType", "MetricType", "OptimizerType", "PrecisionType", "TaskType"), types),
    **dict.fromkeys(("Metric", "MetricsHandler", "build_metric", "register_metric"), metrics),
    **dict.fromkeys(("MetricConfig", "TrainerConfig"), config),
    "Trainer": trainer,
    "TrainerState": state,
}
"""Where each name is ours as well."""

ALIASES: dict[str, Any] = {
    "Image2TextMetricHandler": handlers.ErrorRateHandler,
    "SequenceLabelingMetricsHandler": handlers.SequenceLabelingHandler,
    "SpeechRecognitionMetricsHandler": handlers.ErrorRateHandler,
    "TextClassificationMetricsHandler": handlers.ClassificationHandler,
    "TextGenerationMetricsHandler": handlers.TextGenerationHandler,
}
"""What is called otherwise here."""


def test_the_tables_have_every_name_once() -> None:
    assert sorted([*OURS, *ALIASES]) == sorted(hezar.__all__)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_name_of_both_is_the_same_object(name: str) -> None:
    assert getattr(hezar, name) is getattr(OURS[name], name)


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_a_name_of_hezars_alone_is_an_alias_that_the_door_tells(name: str) -> None:
    assert getattr(hezar, name) is ALIASES[name]
    lines = [line.split() for line in (hezar.__doc__ or "").splitlines()]
    assert [name, ALIASES[name].__name__] in lines


def test_a_run_is_written_as_in_hezars_own_tutorial(classifier: Any, rows: Callable[..., Any], tmp_path: Path) -> None:
    train_config = hezar.TrainerConfig(
        output_dir=str(tmp_path / "run"), task=hezar.TaskType.TEXT_CLASSIFICATION, batch_size=4, num_epochs=2,
        optimizer=hezar.OptimizerType.ADAMW, criterion="CrossEntropyLoss", metrics=["f1"], metric_for_best_model="f1",
    )  # fmt: skip
    run = hezar.Trainer(config=train_config, model=classifier(), train_dataset=rows(), eval_dataset=rows(6))
    run.train()
    assert run.state.epoch == 2
    assert run.state.metric_for_best_checkpoint == "evaluation.f1"


def test_a_tasks_handler_of_hezars_name_is_the_one_that_the_task_has(toy: Callable[..., Any], rows: Any) -> None:
    own = toy(eval_dataset=rows(6), metrics_handler=hezar.TextClassificationMetricsHandler(["accuracy", "f1"]))
    by_task = toy(out="other", eval_dataset=rows(6), task="text_classification", metrics=["accuracy", "f1"])
    assert own.evaluate() == by_task.evaluate()
