"""The one place that builds an Accelerator, and the check that it did what was asked.

Accelerate drops requests silently (fp16 on a CPU runs as fp32, a launcher's processes may come up as separate
worlds), so everything asked for is compared with what came out, and a difference stops the run with a sentence. Data
order, windows, schedules and checkpoints are not Accelerate's business here: see `data`, `optim` and `checkpoint`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.utils.rnn import PackedSequence

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime.batch_norm import synchronised
from hezar_train.runtime.launchers import wanted_of_accelerate
from hezar_train.runtime.plugins import plugin_problems
from hezar_train.runtime.processes import Processes
from hezar_train.runtime.sharding import shard_model

__all__ = ["Runtime", "build_runtime", "logger", "prepare_model", "to_device", "use_threads"]

logger = logging.getLogger("hezar_train")

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
OWN_TRACKERS = frozenset({"tensorboard"})  # written by our own event writers
AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# numbers of glibc's mallopt(), and what to set each to
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20)}


@dataclass
class Runtime:
    """Processes, device and precision of a run, resolved once."""

    accelerator: Accelerator
    device: torch.device
    num_processes: int
    rank: int
    precision: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def processes(self) -> Processes:
        """The processes of the run."""
        return Processes(self.rank, self.num_processes, self.device)

    @property
    def has_fsdp_plugin(self) -> bool:
        """Tell whether the Accelerator was set up to spread the model (FSDP2)."""
        return bool(self.accelerator.is_fsdp2)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.accelerator.scaler  # type: ignore[no-any-return]

    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what to enter around each forward: autocast to the run's precision, or nothing in full precision."""
        if self.precision == "no":
            return contextlib.nullcontext
        if self.precision not in AUTOCAST_TYPES:
            return self.accelerator.autocast  # type: ignore[no-any-return]
        # not Accelerate's: it looks the precision up in a global, which a second trainer may have changed
        handler = self.accelerator.autocast_handler
        options = {} if handler is None else handler.to_kwargs()
        return functools.partial(torch.autocast, self.device.type, dtype=AUTOCAST_TYPES[self.precision], **options)


def build_runtime(config: TrainerConfig, accelerator: Accelerator | None = None) -> Runtime:
    """Build (or take) the Accelerator and check it against the config."""
    _make_visible(logger)
    if config.deterministic:
        _ask_for_deterministic_kernels()
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
    problems = _broken_promises(config, asked, runtime, own=own)
    if problems:
        raise ConfigError(problems)
    if runtime.device.type == "cpu":
        _keep_freed_memory()
    if runtime.num_processes > 1:
        _leave_group_at_exit()
    return runtime


class _Console(logging.Handler):
    """Print records to whatever standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201


def _make_visible(log: logging.Logger) -> None:
    """Show what the package says to a user who has not set up logging: the main process speaks, others only warn."""
    if log.handlers or logging.getLogger().handlers:
        return
    log.addHandler(_Console())
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


def prepare_model(model: torch.nn.Module, config: TrainerConfig, runtime: Runtime) -> torch.nn.Module:
    """Bring a model to the device, ready for the run: with gradient checkpointing, compiled, as the config says."""
    if config.sync_batchnorm and runtime.num_processes > 1:
        model = synchronised(model)
    is_spread = runtime.has_fsdp_plugin or (config.sharding == "full" and runtime.num_processes > 1)
    if is_spread:
        _refuse_with_sharding(config)
    else:  # what is spread comes to the device share by share
        model = model.to(runtime.device)
    if config.gradient_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                f"gradient_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable() to "
                "switch it on. Give the model one, or leave the field out."
            )
        enable()
    if is_spread and not runtime.has_fsdp_plugin:
        shard_model(model, runtime.num_processes, runtime.precision, runtime.device)
    if config.compile:
        model.compile()  # in place: the names of its parameters stay
    return model


def _refuse_with_sharding(config: TrainerConfig) -> None:
    reasons = {
        "finetune_reinit": "new weights are drawn for whole parameters",
        "offload_after_routine": "no process has the model to move it",
    }
    problems = [
        f"{name}=True cannot be used with a sharded model: {why}. Leave one of the two out."
        for name, why in reasons.items()
        if getattr(config, name)
    ]
    if problems:
        raise ConfigError(problems)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch (nested in mappings, lists, tuples) to `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, PackedSequence):  # a named tuple with a part that must stay on the CPU
        return batch.to(device, non_blocking=True)  # type: ignore[arg-type]
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _refuse_impossible(config: TrainerConfig, asked: torch.device | None) -> None:
    on_cpu = config.use_cpu or (asked is not None and asked.type == "cpu") or not torch.accelerator.is_available()
    if config.precision == "fp16" and on_cpu:
        raise ConfigError(
            "mixed_precision='fp16' needs an accelerator, and this run is on the CPU. "
            "Use mixed_precision='bf16' (works on the CPU) or None."
        )
    if asked is not None and asked.type not in {"cpu", "meta"} and not _has(asked):
        raise ConfigError(f"device={str(asked)!r} is not on this machine. Use device=None to take what is there.")
    if asked is not None and asked.type == "meta":
        raise ConfigError("device='meta' holds no values, so nothing can be trained on it. Use device=None or 'cpu'.")


def _has(device: torch.device) -> bool:
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != device.type:
        return False
    return device.index is None or device.index < torch.accelerator.device_count()


def _new_accelerator(config: TrainerConfig, asked: torch.device | None) -> Accelerator:
    cpu = config.use_cpu or (asked is not None and asked.type == "cpu") or not torch.accelerator.is_available()
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
    is_elsewhere = (state.device.type == "cpu") != cpu or (asked is not None and not _same_device(asked, state.device))
    if is_elsewhere or state.mixed_precision != config.precision:
        AcceleratorState._reset_state(reset_partial_state=True)


def _broken_promises(config: TrainerConfig, asked: torch.device | None, runtime: Runtime, *, own: bool) -> list[str]:
    """List every way in which Accelerate did not do what the config or the launcher asked for."""
    problems = plugin_problems(runtime.accelerator)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and runtime.num_processes == 1:
        problems.append(
            f"the launcher started {launched} processes (WORLD_SIZE) but Accelerate sees one: each would train alone "
            "and write the same folder. On a CPU, set ACCELERATE_USE_CPU=true."
        )
    elif own and runtime.num_processes == 1 and (wanted := wanted_of_accelerate()) > 1:
        problems.append(
            f"accelerate launch was asked for {wanted} processes and has started one, as it does with --cpu. Use "
            f"torchrun --nproc-per-node {wanted}, or hezar-train train --num-processes {wanted}."
        )
    if config.distributed and runtime.num_processes == 1:
        problems.append(
            "distributed=True, but there is one process. Start the script with a launcher, or drop the field."
        )
    if runtime.precision != config.precision and (own or config.mixed_precision is not None):
        problems.append(
            f"mixed_precision={config.precision!r} in the config, but the accelerator runs {runtime.precision!r}. "
            "Give both the same value."
        )
    accumulation = runtime.accelerator.gradient_accumulation_steps
    if accumulation not in {1, config.gradient_accumulation_steps}:
        problems.append(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} in the config, but the accelerator has "
            f"{accumulation}. The window is the trainer's: leave it out of the accelerator."
        )
    if asked is not None and not _same_device(asked, runtime.device):
        problems.append(f"device={str(asked)!r} was asked for, but the accelerator uses {str(runtime.device)!r}.")
    if config.use_cpu and runtime.device.type != "cpu":
        problems.append(f"use_cpu=True, but the accelerator passed in uses {str(runtime.device)!r}.")
    ready = {str(name) for name in runtime.accelerator.log_with}
    problems += [
        f"trackers has {name!r}, but its package is not installed. Install it, or take it out of trackers."
        for name in config.trackers or []
        if own and name not in OWN_TRACKERS | ready
    ]
    return problems


def _same_device(asked: torch.device, got: torch.device) -> bool:
    return asked.type == got.type and (asked.index is None or got.index in {asked.index, None})


@functools.cache
def _keep_freed_memory() -> None:
    """Let the process keep up to 256 MB that a step frees for the next step, instead of giving it back each time.

    Touching fresh pages for each batch's outputs costs up to a third of an evaluation. An environment that sets one of
    glibc's own variables is left as it is, and so is a C library without them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name in os.environ for name in KEPT_MEMORY):
        for number, value in KEPT_MEMORY.values():
            mallopt(number, value)


@functools.cache
def _leave_group_at_exit() -> None:
    """Take leave of the other processes when this one ends: torch warns of those who do not."""
    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())


def use_threads(count: int | None) -> None:
    """Let torch compute with so many threads, in all of this process; None leaves it as it is."""
    if count is not None and count != torch.get_num_threads():
        torch.set_num_threads(count)


def _ask_for_deterministic_kernels() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
