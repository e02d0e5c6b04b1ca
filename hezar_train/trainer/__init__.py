"""The trainer: it owns the parts and offers the verbs."""

from hezar_train.trainer.assemble import Given, Parts, assemble
from hezar_train.trainer.invariance import Factoring, InvarianceReport
from hezar_train.trainer.trainer import RoutineResult, Trainer

__all__ = ["Factoring", "Given", "InvarianceReport", "Parts", "RoutineResult", "Trainer", "assemble"]
