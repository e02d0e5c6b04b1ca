"""What was asked for, compared with what Accelerate made of it.

It drops requests silently: fp16 on a CPU runs as fp32, a launcher's processes may come up as separate worlds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from hezar_train.config import TrainerConfig
from hezar_train.runtime.devices import is_same
from hezar_train.runtime.launchers import wanted_of_accelerate
from hezar_train.runtime.plugins import plugin_problems
from hezar_train.runtime.runtime import Runtime

__all__ = ["OWN_TRACKERS", "broken_promises"]

OWN_TRACKERS = frozenset({"tensorboard"})  # written by our own event writers


def broken_promises(config: TrainerConfig, asked: torch.device | None, runtime: Runtime, *, own: bool) -> list[str]:
    """List every way in which Accelerate did not do what the config or the launcher asked for.

    `asked` is the config's device; `own` says whether the Accelerator was built here, and not passed in.
    """
    return [
        *plugin_problems(runtime.accelerator),
        *_of_processes(config, runtime, own=own),
        *_of_numbers(config, runtime, own=own),
        *_of_device(config, asked, runtime.device),
        *(_of_trackers(config, runtime) if own else ()),
    ]


def _of_processes(config: TrainerConfig, runtime: Runtime, *, own: bool) -> Iterator[str]:
    if runtime.num_processes > 1:
        return
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        yield (
            f"the launcher started {launched} processes (WORLD_SIZE) but Accelerate sees one: each would train alone "
            "and write the same folder. On a CPU, set ACCELERATE_USE_CPU=true."
        )
    elif own and (wanted := wanted_of_accelerate()) > 1:
        yield (
            f"accelerate launch was asked for {wanted} processes and has started one, as it does with --cpu. Use "
            f"torchrun --nproc-per-node {wanted}, or hezar-train train --num-processes {wanted}."
        )
    if config.distributed:
        yield "distributed=True, but there is one process. Start the script with a launcher, or drop the field."


def _of_numbers(config: TrainerConfig, runtime: Runtime, *, own: bool) -> Iterator[str]:
    """Tell of another precision, and of a window that is not the trainer's."""
    if runtime.precision != config.precision and (own or config.mixed_precision is not None):
        yield (
            f"mixed_precision={config.precision!r} in the config, but the accelerator runs {runtime.precision!r}. "
            "Give both the same value."
        )
    accumulation = runtime.accelerator.gradient_accumulation_steps
    if accumulation not in {1, config.gradient_accumulation_steps}:
        yield (
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} in the config, but the accelerator has "
            f"{accumulation}. The window is the trainer's: leave it out of the accelerator."
        )


def _of_device(config: TrainerConfig, asked: torch.device | None, got: torch.device) -> Iterator[str]:
    if asked is not None and not is_same(asked, got):
        yield f"device={str(asked)!r} was asked for, but the accelerator uses {str(got)!r}."
    if config.use_cpu and got.type != "cpu":
        yield f"use_cpu=True, but the accelerator passed in uses {str(got)!r}."


def _of_trackers(config: TrainerConfig, runtime: Runtime) -> Iterator[str]:
    ready = {str(name) for name in runtime.accelerator.log_with}
    for name in config.trackers or []:
        if name not in OWN_TRACKERS | ready:
            yield f"trackers has {name!r}, but its package is not installed. Install it, or take it out of trackers."
