"""The fields of a config, one file per owner; each group knows and checks its own fields and no others."""

from __future__ import annotations

from hezar_train.config.fields.checkpoint import CheckpointFields
from hezar_train.config.fields.data import DataFields
from hezar_train.config.fields.evaluation import EvaluationFields
from hezar_train.config.fields.finetune import FinetuneFields
from hezar_train.config.fields.hardware import HardwareFields
from hezar_train.config.fields.hub import HubFields
from hezar_train.config.fields.log import LogFields
from hezar_train.config.fields.optimizer import OptimizerFields
from hezar_train.config.fields.regularizer import RegularizerFields
from hezar_train.config.fields.rounds import RoundFields
from hezar_train.config.fields.run import RunFields
from hezar_train.config.fields.schedule import ScheduleFields
from hezar_train.config.fields.stopping import StoppingFields

__all__ = [
    "CheckpointFields",
    "DataFields",
    "EvaluationFields",
    "FinetuneFields",
    "HardwareFields",
    "HubFields",
    "LogFields",
    "OptimizerFields",
    "RegularizerFields",
    "RoundFields",
    "RunFields",
    "ScheduleFields",
    "StoppingFields",
]
