"""The one place that builds an Accelerator; a promise of it that `promises` finds broken stops the run with a sentence.

Data order, windows, schedules and checkpoints are not Accelerate's business here: see `data`, `optim` and `checkpoint`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime.console import logger, make_visible
from hezar_train.runtime.devices import is_here, is_same
from hezar_train.runtime.process_wide import (
    ask_for_deterministic_kernels,
    keep_freed_memory,
    leave_group_at_exit,
    use_threads,
)
from hezar_train.runtime.promises import OWN_TRACKERS, broken_promises
from hezar_train.runtime.runtime import Runtime

__all__ = ["build_runtime"]

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def build_runtime(config: TrainerConfig, accelerator: Accelerator | None = None) -> Runtime:
    """Build (or take) the Accelerator and check it against the config."""
    make_visible(logger)
    if config.deterministic:
        ask_for_deterministic_kernels()
    use_threads(config.num_threads)
    asked = None if config.device is None else torch.device(config.device)
    own = accelerator is None
    if accelerator is None:
        _refuse_impossible(config, asked)
        accelerator = _new_accelerator(config, asked)
    runtime = Runtime(
        accelerator,
        accelerator.device,
        accelerator.num_processes,
        accelerator.process_index,
        str(accelerator.mixed_precision),
    )
    if problems := broken_promises(config, asked, runtime, own=own):
        raise ConfigError(problems)
    if runtime.device.type == "cpu":
        keep_freed_memory()
    if runtime.num_processes > 1:
        leave_group_at_exit()
    return runtime


def _refuse_impossible(config: TrainerConfig, asked: torch.device | None) -> None:
    if config.precision == "fp16" and _is_on_cpu(config, asked):
        raise ConfigError(
            "mixed_precision='fp16' needs an accelerator, and this run is on the CPU. "
            "Use mixed_precision='bf16' (works on the CPU) or None."
        )
    if asked is not None and asked.type not in {"cpu", "meta"} and not is_here(asked):
        raise ConfigError(f"device={str(asked)!r} is not on this machine. Use device=None to take what is there.")
    if asked is not None and asked.type == "meta":
        raise ConfigError("device='meta' holds no values, so nothing can be trained on it. Use device=None or 'cpu'.")


def _is_on_cpu(config: TrainerConfig, asked: torch.device | None) -> bool:
    return config.use_cpu or (asked is not None and asked.type == "cpu") or not torch.accelerator.is_available()


def _new_accelerator(config: TrainerConfig, asked: torch.device | None) -> Accelerator:
    cpu = _is_on_cpu(config, asked)
    _forget_other_settings(config, cpu, asked)
    others = [name for name in config.trackers or [] if name not in OWN_TRACKERS]
    try:
        # accumulation stays 1: the window is ours; split_batches and friends concern loaders we do not prepare
        with _device_wish(asked):
            return Accelerator(
                cpu=cpu,
                mixed_precision=config.precision,
                log_with=others or None,
                project_dir=config.output_dir if others else None,
                step_scheduler_with_optimizer=False,
            )
    except (ImportError, ValueError) as error:
        AcceleratorState._reset_state(reset_partial_state=True)  # half made: the next Accelerator would stumble over it
        world = os.environ.get("WORLD_SIZE", "1")
        message = f"Accelerate refused mixed_precision={config.precision!r}, trackers={others!r}, WORLD_SIZE={world!r}"
        raise ConfigError(f"{message}: {error}") from error


@contextlib.contextmanager
def _device_wish(asked: torch.device | None) -> Iterator[None]:
    """Tell Accelerate which of several devices to take: it reads that from the environment only."""
    if asked is None or asked.index is None:
        yield
        return
    before = os.environ.get(DEVICE_VARIABLE)
    os.environ[DEVICE_VARIABLE] = str(asked)
    try:
        yield
    finally:  # neither the next trainer nor a child process has this wish
        del os.environ[DEVICE_VARIABLE]
        if before is not None:
            os.environ[DEVICE_VARIABLE] = before


def _forget_other_settings(config: TrainerConfig, cpu: bool, asked: torch.device | None) -> None:
    """Let one process train twice with other settings: Accelerate keeps the first ones in a global."""
    if not AcceleratorState._shared_state or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    state = AcceleratorState()
    is_elsewhere = (state.device.type == "cpu") != cpu or (asked is not None and not is_same(asked, state.device))
    if is_elsewhere or state.mixed_precision != config.precision:
        AcceleratorState._reset_state(reset_partial_state=True)
