"""lernomatic's names: its Trainer, its models, its schedules, its finder of learning rates.

`stand_in()`, before anything imports lernomatic, puts them under lernomatic's own names; then no import changes.

from hezar_train.compat.lernomatic import Trainer              lernomatic.train.trainer
from hezar_train.compat.lernomatic import schedule             lernomatic.train.schedule
from hezar_train.compat.lernomatic import lr_finder            lernomatic.param.lr_common
from hezar_train.compat.lernomatic import models               lernomatic.models.common
"""

from hezar_train.compat.lernomatic import lr_finder, models, schedule, trainer
from hezar_train.compat.lernomatic.lr_finder import LogFinder, LRFinder, find_lr, lr_finder_auto_load
from hezar_train.compat.lernomatic.models import LernomaticModel
from hezar_train.compat.lernomatic.trainer import MultiModelTrainer, Trainer
from hezar_train.compat.standing_in import is_installed, put_in_place

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
    "stand_in",
    "trainer",
]


def stand_in(name: str = "lernomatic") -> list[str]:
    """Let `lernomatic.train.trainer` and its like be this door; return the modules' names.

    Where lernomatic is installed, its trainers, models and data are its own and train with this package's trainer.
    """
    ours = {"train.trainer": trainer, "train.schedule": schedule, "param.lr_common": lr_finder}
    return put_in_place(name, ours if is_installed(name) else {**ours, "models.common": models})
