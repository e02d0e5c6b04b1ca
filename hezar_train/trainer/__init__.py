"""The trainer: it assembles all parts and offers the verbs."""

from hezar_train.trainer.invariance import Factoring, InvarianceReport
from hezar_train.trainer.trainer import RoutineResult, Trainer

__all__ = ["Factoring", "InvarianceReport", "RoutineResult", "Trainer"]
