"""The shipped hooks: what is due, signals, progress."""

from hezar_train.hooks.due import Actions, Due
from hezar_train.hooks.progress import Progress, print_facts
from hezar_train.hooks.signals import StopFlag

__all__ = ["Actions", "Due", "Progress", "StopFlag", "print_facts"]
