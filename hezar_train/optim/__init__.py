"""Optimizers and learning-rate schedules: built by name, ticked at updates, saved as plain values.

Owns what `optimizer`, `lr_scheduler` and `lr_scheduling_steps` of the config mean. It neither runs the loop nor counts
its updates, and writes no files.
"""

from __future__ import annotations

from hezar_train.optim.optimizers import build_optimizer, optimizer_names
from hezar_train.optim.schedule import Schedule
from hezar_train.optim.schedulers import build_scheduler, scheduler_names

__all__ = ["Schedule", "build_optimizer", "build_scheduler", "optimizer_names", "scheduler_names"]
