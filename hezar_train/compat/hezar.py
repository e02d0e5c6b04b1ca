"""Hezar's names: what its users import from `hezar.trainer`, `hezar.data`, `hezar.metrics`, `hezar.configs` and
`hezar.constants`.

    from hezar_train.compat.hezar import Trainer, TrainerConfig

    config = TrainerConfig(output_dir="crnn-plate-fa-v1", task="image2text", batch_size=8, metrics=["cer"])
    trainer = Trainer(config=config, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
                      data_collator=train_dataset.data_collator, preprocessor=preprocessor)
    trainer.train()

Hezar's documented names are this package's own, so there is nothing to translate: every name is the very object that
`hezar_train` has under the same name. Only the handlers of tasks are called otherwise here:

    Hezar                               hezar_train.metrics.handlers
    TextClassificationMetricsHandler    ClassificationHandler
    SequenceLabelingMetricsHandler      SequenceLabelingHandler
    SpeechRecognitionMetricsHandler     ErrorRateHandler
    Image2TextMetricHandler             ErrorRateHandler
    TextGenerationMetricsHandler        TextGenerationHandler
"""

from __future__ import annotations

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
from hezar_train.events import AverageMeter, CSVLogger, MetricsTracker
from hezar_train.metrics import Metric, MetricsHandler, build_metric, register_metric
from hezar_train.metrics.handlers import ClassificationHandler as TextClassificationMetricsHandler
from hezar_train.metrics.handlers import ErrorRateHandler as Image2TextMetricHandler
from hezar_train.metrics.handlers import ErrorRateHandler as SpeechRecognitionMetricsHandler
from hezar_train.metrics.handlers import SequenceLabelingHandler as SequenceLabelingMetricsHandler
from hezar_train.metrics.handlers import TextGenerationHandler as TextGenerationMetricsHandler
from hezar_train.state import TrainerState
from hezar_train.trainer import Trainer
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
