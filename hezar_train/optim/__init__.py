"""Optimizers and the schedules of their rates and momenta: built by name, ticked at updates, saved as plain values.

Owns what `optimizer`, `momentum`, `lr_scheduler`, `momentum_scheduler`, `lr_scheduling_steps`, `warmup_steps` and the
weight decays of the config mean. It neither runs the loop nor counts its updates, and writes no files.
"""

from __future__ import annotations

from hezar_train.optim.curves import Pace
from hezar_train.optim.forecast import idle_part, idle_warning
from hezar_train.optim.optimizers import DirectStep, build_optimizer, largest_group, optimizer_names, parameter_groups
from hezar_train.optim.schedule import (
    MomentumSchedule,
    Schedule,
    build_momentum_schedule,
    get_momentum,
    set_learning_rate,
    set_momentum,
)
from hezar_train.optim.schedulers import CurveLR, build_scheduler, scheduler_names, watches_metric

__all__ = [
    "CurveLR",
    "DirectStep",
    "MomentumSchedule",
    "Pace",
    "Schedule",
    "build_momentum_schedule",
    "build_optimizer",
    "build_scheduler",
    "get_momentum",
    "idle_part",
    "idle_warning",
    "largest_group",
    "optimizer_names",
    "parameter_groups",
    "scheduler_names",
    "set_learning_rate",
    "set_momentum",
    "watches_metric",
]
