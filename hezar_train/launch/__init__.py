"""Run one command in several processes on this machine: a thin launcher around torchrun's elastic agent.

The agent starts the processes, notices a death and starts all of them again. What it lacks for a training that saves
itself is added here: a meeting point that no other user of the machine can reach, an environment in which restarts are
reliable, signals that reach every process and are never followed by a restart, exit codes that pass through, the output
of one process instead of as many as there are, and nothing left running. What the processes do is not known here;
several machines are torchrun's own business.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from hezar_train.launch.process import join_group, num_restarts, reported_exit

__all__ = ["join_group", "num_restarts", "reported_exit", "run_group"]


def run_group(
    command: Sequence[str], num_processes: int, max_restarts: int, progress: Callable[[], Any], *, on_cpu: bool = False
) -> int:
    """Run a command in several processes until it is done; return the exit code.

    After a death all processes start again, at most `max_restarts` times. Processes that died of errors alone start
    again only if `progress()` has changed since they began: an error that comes back at once is not tried again.
    """
    from hezar_train.launch.agent import launch_group

    return launch_group(command, num_processes, max_restarts, progress, on_cpu=on_cpu)


def __getattr__(name: str) -> Any:
    """Find what recipes of version 0.1 import from here: it lies in `hezar_train.recipes` now.

    A run knows its recipe by a hash, so the recipes on users' disks cannot be changed.
    """
    recipes = importlib.import_module("hezar_train.recipes")  # when asked: the two packages do not need each other
    if name not in recipes.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(recipes, name)
