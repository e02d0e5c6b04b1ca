"""Several models in one run."""

from hezar_train.multi_model.optimizer_dict import OptimizerDict, ScheduleDict
from hezar_train.multi_model.trainer import MultiModelTrainer
from hezar_train.multi_model.turns import Turns, TurnsRoutine

__all__ = ["MultiModelTrainer", "OptimizerDict", "ScheduleDict", "Turns", "TurnsRoutine"]
