"""lernomatic's names: its Trainer, its models, its schedules, its finder of learning rates.

from hezar_train.compat.lernomatic import Trainer              lernomatic.train.trainer
from hezar_train.compat.lernomatic import schedule             lernomatic.train.schedule
from hezar_train.compat.lernomatic import lr_finder            lernomatic.param.lr_common
from hezar_train.compat.lernomatic import models               lernomatic.models.common
"""

from hezar_train.compat.lernomatic import lr_finder, models, schedule, trainer
from hezar_train.compat.lernomatic.lr_finder import LogFinder, LRFinder, find_lr, lr_finder_auto_load
from hezar_train.compat.lernomatic.models import LernomaticModel
from hezar_train.compat.lernomatic.trainer import MultiModelTrainer, Trainer

__all__ = [
    "LRFinder",
    "LernomaticModel",
    "LogFinder",
    "MultiModelTrainer",
    "Trainer",
    "find_lr",
    "lr_finder",
    "lr_finder_auto_load",
    "models",
    "schedule",
    "trainer",
]
