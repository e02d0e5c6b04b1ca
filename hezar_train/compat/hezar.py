"""Hezar's names: what its users import from `hezar.trainer`, `hezar.data`, `hezar.metrics`, `hezar.configs` and
`hezar.constants`.

    from hezar_train.compat.hezar import Trainer, TrainerConfig

    config = TrainerConfig(output_dir="crnn-plate-fa-v1", task="image2text", batch_size=8, metrics=["cer"])
    trainer = Trainer(config=config, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
                      data_collator=train_dataset.data_collator, preprocessor=preprocessor)
    trainer.train()

Hezar's documented names are this package's own, so there is nothing to translate: every name but `Trainer` is the very
object that `hezar_train` has under the same name. This `Trainer` has a few attributes more than the plain one
(`total_steps`, `steps_in_epoch`, `checkpoints_dir`, `logs_dir`, `train_loss_tracker`), and differs in what two names
return:

    device             "cuda" or "cpu", a text (the plain one: a `torch.device`)
    load_csv_logs()    a row for each epoch, as `{column: {number of the row: value}}` (the plain one: every row logged)

The handlers of tasks are called otherwise here:

    Hezar                               hezar_train.metrics.handlers
    TextClassificationMetricsHandler    ClassificationHandler
    SequenceLabelingMetricsHandler      SequenceLabelingHandler
    SpeechRecognitionMetricsHandler     ErrorRateHandler
    Image2TextMetricHandler             ErrorRateHandler
    TextGenerationMetricsHandler        TextGenerationHandler
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from hezar_train.config import MetricConfig, TrainerConfig
from hezar_train.data import (
    CharLevelOCRDataCollator,
    ImageCaptioningDataCollator,
    RangedSampler,
    SequenceLabelingDataCollator,
    SpeechRecognitionDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
)
from hezar_train.events import AverageMeter, CSVLogger, LossTracker, MetricsTracker
from hezar_train.metrics import Metric, MetricsHandler, build_metric, register_metric
from hezar_train.metrics.handlers import ClassificationHandler as TextClassificationMetricsHandler
from hezar_train.metrics.handlers import ErrorRateHandler as Image2TextMetricHandler
from hezar_train.metrics.handlers import ErrorRateHandler as SpeechRecognitionMetricsHandler
from hezar_train.metrics.handlers import SequenceLabelingHandler as SequenceLabelingMetricsHandler
from hezar_train.metrics.handlers import TextGenerationHandler as TextGenerationMetricsHandler
from hezar_train.state import TrainerState
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.types import LRSchedulerType, MetricType, OptimizerType, PrecisionType, TaskType

__all__ = [
    "AverageMeter",
    "CSVLogger",
    "CharLevelOCRDataCollator",
    "Image2TextMetricHandler",
    "ImageCaptioningDataCollator",
    "LRSchedulerType",
    "Metric",
    "MetricConfig",
    "MetricType",
    "MetricsHandler",
    "MetricsTracker",
    "OptimizerType",
    "PrecisionType",
    "RangedSampler",
    "SequenceLabelingDataCollator",
    "SequenceLabelingMetricsHandler",
    "SpeechRecognitionDataCollator",
    "SpeechRecognitionMetricsHandler",
    "TaskType",
    "TextClassificationMetricsHandler",
    "TextGenerationDataCollator",
    "TextGenerationMetricsHandler",
    "TextPaddingDataCollator",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "build_metric",
    "register_metric",
]

ROW_NAMES = ("step", "train.loss")
EVALUATION = "evaluation."


class Trainer(PlainTrainer):
    """The Trainer, with the attributes of Hezar's, and what its `device` and `load_csv_logs` return."""

    @property
    def device(self) -> str:  # type: ignore[override]
        """Return the kind of device, as Hezar names it: "cuda" or "cpu"."""
        return str(self.runtime.device.type)

    @property
    def total_steps(self) -> int:
        """The steps of the whole run, or until the end of this call where a call does a part of it."""
        return self.parts.status.total_steps

    @property
    def steps_in_epoch(self) -> int | None:
        """The steps of an epoch, or of the run if that is shorter; None where the data does not tell its length."""
        steps = self.plan.steps_in_epoch
        return None if steps is None else min(steps, self.plan.total_steps)

    @property
    def checkpoints_dir(self) -> str:
        """The folder of the run's checkpoints."""
        return str(self.folder.checkpoints)

    @property
    def logs_dir(self) -> str:
        """The folder of this start's logs; asked for before the run begins, it is where they will be."""
        if self.state.logs_dir is None:
            new, root = self.folder.new_logs(), self.folder.root
            self.state.logs_dir = str(new.relative_to(root) if new.is_relative_to(root) else new.absolute())
        return str(self.folder.logs(self.state.logs_dir))

    @property
    def train_loss_tracker(self) -> LossTracker:
        """The mean of the training loss since the start of the run; the run updates it."""
        losses, state = self.storage.histories().get("train.step_loss"), self.state
        last = losses.latest() if losses is not None and losses.total else 0.0
        return LossTracker(state.loss_tracker_sum, state.loss_tracker_count, last)

    def load_csv_logs(self, logs_dir: str | os.PathLike[str] | None = None) -> dict[str, dict[int, float]]:
        """Read the CSV log as Hezar does: a row for each epoch that has ended, with the mean loss and the metrics."""
        columns = super().load_csv_logs(logs_dir)
        rows = _ends_of_epochs(columns)
        is_own = logs_dir is None and rows and not self.state.epoch_finished
        if is_own and self.state.stop_reason is None and rows[-1]["step"] != self.total_steps:
            rows.pop()  # of the epoch under way
        names = [*ROW_NAMES, *(name for name in columns if name.startswith(EVALUATION))]
        return {name: {number: row.get(name, math.nan) for number, row in enumerate(rows)} for name in names}


def _ends_of_epochs(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return for each epoch what its last step has logged, which may be in several rows."""
    last = dict(
        zip(columns["epoch"], columns["step"], strict=True)
    )  # rows are in order: the last step of an epoch stays
    found: dict[int, dict[str, Any]] = {epoch: {} for epoch in last}
    for number, (epoch, step) in enumerate(zip(columns["epoch"], columns["step"], strict=True)):
        if step == last[epoch]:
            values = {name: cells[number] for name, cells in columns.items()}
            found[epoch] |= {name: value for name, value in values.items() if not math.isnan(value)}
    return list(found.values())
