"""The one place that builds an Accelerator, checks it against the config, and brings a model into the run.

`build_runtime` builds or takes the Accelerator. What Accelerate made is compared with what was asked for, because it
drops requests silently: fp16 on a CPU runs as fp32, a launcher's processes may come up as separate worlds. Whatever is
not as asked stops the run with a sentence, but for fp16 with `use_cpu`, which trains in full precision and says so.
`prepare_model` brings a model to the device, spread over the processes and
compiled, as the config says; `to_device` does so for a batch.

Of Accelerate's plug-ins FSDP2 (`accelerate launch --use_fsdp --fsdp_version 2`) is honoured: it decides how the model
is cut, and from there on it trains and is saved like one that `sharding="full"` cut. DeepSpeed and Megatron-LM step by
themselves and keep the state of a run in pickles of their own; FSDP1 has no state that can be taken apart without one.

Some settings hold for all of this process, whatever it trains: threads, kernels, memory, and what happens at its exit.
Data order, windows, schedules and checkpoints are not Accelerate's business: see `data`, `optim` and `checkpoint`.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD, Adam, Optimizer

from hezar_train.config import TrainerConfig
from hezar_train.config.names import OWN_TRACKERS
from hezar_train.errors import ConfigError
from hezar_train.runtime.blocks import recompute_blocks
from hezar_train.runtime.data_parallel import convert_sync_batchnorm
from hezar_train.runtime.group import leave_group_at_exit, limit_waiting
from hezar_train.runtime.logging import logger, make_visible
from hezar_train.runtime.meta import give_memory, refuse_unknowable
from hezar_train.runtime.processes import Runtime
from hezar_train.runtime.sharding import COMPUTE_TYPES, Sharding, broadcast_from_main, shard_model
from hezar_train.user_cache import is_closed, make_closed, own_folder

__all__ = [
    "build_runtime",
    "enable_gradient_checkpointing",
    "is_present",
    "is_same_device",
    "keep_compiled_code_apart",
    "keep_freed_memory",
    "plugin_problems",
    "prepare_model",
    "prepare_with_plugin",
    "processes_asked_for",
    "to_device",
    "unmet_requests",
    "use_deterministic_kernels",
    "use_threads",
]

ENGINE_VARIABLES = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
REFUSED_ENGINES = ("DEEPSPEED", "MEGATRON_LM")
DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
COMPILED_VARIABLE, COMPILED_FOLDER = "TORCHINDUCTOR_CACHE_DIR", "compiled"
USUAL_COMPILED_FOLDER = "torchinductor_"  # and the user's name
HEADERS_VARIABLE = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"

# The numbers of glibc's mallopt(), and what to set each to: to keep much, and to give back what is large.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20, 1 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20, 1 << 20)}


def build_runtime(config: TrainerConfig, accelerator: Accelerator | None = None) -> Runtime:
    """Build (or take) the Accelerator and check it against the config."""
    make_visible(logger)
    keep_compiled_code_apart()
    if config.deterministic:
        use_deterministic_kernels()
    use_threads(config.num_threads)
    asked = None if config.device is None else torch.device(config.device)
    own = accelerator is None
    if accelerator is None:
        _refuse_impossible(config, asked)
        accelerator = _new_accelerator(config, asked)
    if accelerator.num_processes > 1:
        leave_group_at_exit()
        if config.collective_timeout_seconds is not None:
            limit_waiting(config.collective_timeout_seconds)
    runtime = Runtime(
        accelerator,
        accelerator.device,
        accelerator.num_processes,
        accelerator.process_index,
        str(accelerator.mixed_precision),
    )
    if problems := unmet_requests(config, asked, runtime, own=own):
        raise ConfigError(problems)
    if runtime.device.type == "cpu":
        keep_freed_memory(large=runtime.num_processes == 1 or config.sharding == "none")
    return runtime


def _precision(config: TrainerConfig) -> str:
    """Return the precision to ask for; who says `use_cpu` wants the run to go on there, whatever a GPU would do."""
    return "no" if config.use_cpu and config.precision == "fp16" else config.precision


def _refuse_impossible(config: TrainerConfig, asked: torch.device | None) -> None:
    if _precision(config) != config.precision:
        logger.warning(
            "mixed_precision='fp16' needs an accelerator, so this run, with use_cpu=True, trains in full precision; "
            "'bf16' works on the CPU"
        )
    elif config.precision == "fp16" and _is_on_cpu(config, asked):
        raise ConfigError(
            "mixed_precision='fp16' needs an accelerator, and this run is on the CPU. "
            "Use mixed_precision='bf16' (works on the CPU) or 'no'."
        )
    if asked is not None and asked.type not in {"cpu", "meta"} and not is_present(asked):
        raise ConfigError(f"device={str(asked)!r} is not on this machine. Leave device out to take what is there.")
    if asked is not None and asked.type == "meta":
        raise ConfigError(
            "device='meta' holds no values, so nothing can be trained on it. Leave device out, or use 'cpu'."
        )


def _is_on_cpu(config: TrainerConfig, asked: torch.device | None) -> bool:
    if config.use_cpu or (asked is not None and asked.type == "cpu") or not torch.accelerator.is_available():
        return True
    return asked is None and os.environ.get(DEVICE_VARIABLE) == "cpu"  # a worker of Ray's that was given no GPU


def _new_accelerator(config: TrainerConfig, asked: torch.device | None) -> Accelerator:
    cpu = _is_on_cpu(config, asked)
    _reset_other_settings(config, cpu, asked)
    others = [name for name in config.trackers or [] if name not in OWN_TRACKERS]
    try:
        # Accumulation stays 1: the window is ours; split_batches and friends concern loaders we do not prepare.
        with _requested_device(asked):
            return Accelerator(
                cpu=cpu,
                mixed_precision=_precision(config),
                log_with=others or None,
                project_dir=config.output_dir if others else None,
                step_scheduler_with_optimizer=False,
            )
    except (ImportError, ValueError) as error:
        AcceleratorState._reset_state(reset_partial_state=True)  # half made: the next Accelerator would stumble over it
        world = os.environ.get("WORLD_SIZE", "1")
        message = f"Accelerate refused mixed_precision={config.precision!r}, trackers={others!r}, WORLD_SIZE={world!r}"
        raise ConfigError(f"{message}: {error}") from error


def _reset_other_settings(config: TrainerConfig, cpu: bool, asked: torch.device | None) -> None:
    """Let one process train twice with other settings: Accelerate keeps the first ones in a global."""
    if not AcceleratorState._shared_state or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    state = AcceleratorState()
    is_elsewhere = (state.device.type == "cpu") != cpu or (
        asked is not None and not is_same_device(asked, state.device)
    )
    if is_elsewhere or state.mixed_precision != _precision(config):
        AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def _requested_device(asked: torch.device | None) -> Iterator[None]:
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


def unmet_requests(config: TrainerConfig, asked: torch.device | None, runtime: Runtime, *, own: bool) -> list[str]:
    """List every way in which Accelerate did not do what the config or the launcher asked for.

    `asked` is the config's device; `own` says whether the Accelerator was built here, and not passed in.
    """
    return [
        *plugin_problems(runtime.accelerator),
        *_process_problems(config, runtime, own=own),
        *_window_and_precision_problems(config, runtime, own=own),
        *_compression_problems(config, runtime),
        *_sharding_problems(config, runtime),
        *_device_problems(config, asked, runtime.device),
        *(_tracker_problems(config, runtime) if own else ()),
    ]


def _process_problems(config: TrainerConfig, runtime: Runtime, *, own: bool) -> Iterator[str]:
    if runtime.num_processes > 1:
        return
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        yield (
            f"the launcher started {launched} processes (WORLD_SIZE) but Accelerate sees one: each would train alone "
            "and write the same folder. On a CPU, set ACCELERATE_USE_CPU=true."
        )
    elif own and (wanted := processes_asked_for()) > 1:
        yield (
            f"accelerate launch was asked for {wanted} processes and has started one, as it does with --cpu. Use "
            f"torchrun --nproc-per-node {wanted}, or hezar-train train --num-processes {wanted}."
        )
    if config.distributed:
        yield "distributed=True, but there is one process. Start the script with a launcher, or drop the field."


def processes_asked_for() -> int:
    """Return the processes that `accelerate launch` was asked for, if it started this one; else 1.

    With `--cpu` it starts one process whatever was asked for, and says nothing.
    """
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("-", "_").split("\0")
    except OSError:  # a system without /proc
        return 1
    if "launch" not in words or not any(word.endswith("accelerate") for word in words):
        return 1
    asked = [after for word, after in itertools.pairwise(words) if word == "__num_processes"]
    asked += [word.partition("=")[2] for word in words if word.startswith("__num_processes=")]
    return int(asked[-1]) if asked and asked[-1].isdecimal() else 1


def _window_and_precision_problems(config: TrainerConfig, runtime: Runtime, *, own: bool) -> Iterator[str]:
    """Tell of another precision, and of a window that is not the trainer's."""
    if runtime.precision != _precision(config) and (own or config.mixed_precision is not None):
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


def _compression_problems(config: TrainerConfig, runtime: Runtime) -> Iterator[str]:
    """Tell of gradients that cannot be sent as the config says; one process sends none."""
    given = config.gradient_compression
    if given is None or runtime.num_processes == 1:
        return
    if runtime.has_fsdp_plugin:
        yield (
            f"gradient_compression={given!r} cannot be used with the Accelerator's FSDP plug-in, which exchanges "
            "gradients itself. Leave one of the two out."
        )
    elif given == "bf16" and (backend := torch.distributed.get_backend()) != "nccl":
        yield (
            f"gradient_compression='bf16' needs GPUs whose processes talk through NCCL; these talk through {backend}. "
            "Use 'fp16' or None."
        )


def _sharding_problems(config: TrainerConfig, runtime: Runtime) -> Iterator[str]:
    """Tell of what the Accelerator's own plug-in decides."""
    if runtime.has_fsdp_plugin and config.sharding == "full":
        fields = {"sharding_group_size": config.sharding_group_size, "sharding_offload": config.sharding_offload}
        for name, value in fields.items():
            if value:
                yield (
                    f"{name}={value!r} cannot be used with the Accelerator's FSDP plug-in, which decides how the model "
                    "is spread. Leave one of the two out."
                )


def _device_problems(config: TrainerConfig, asked: torch.device | None, got: torch.device) -> Iterator[str]:
    if asked is not None and not is_same_device(asked, got):
        yield f"device={str(asked)!r} was asked for, but the accelerator uses {str(got)!r}."
    if config.use_cpu and got.type != "cpu":
        yield f"use_cpu=True, but the accelerator passed in uses {str(got)!r}."


def _tracker_problems(config: TrainerConfig, runtime: Runtime) -> Iterator[str]:
    ready = {str(name) for name in runtime.accelerator.log_with}
    for name in config.trackers or []:
        if name not in OWN_TRACKERS | ready:
            yield f"trackers has {name!r}, but its package is not installed. Install it, or take it out of trackers."


def plugin_problems(accelerator: Accelerator) -> list[str]:
    """List what is wrong with the engine that an Accelerator was to use, or does use."""
    kind, precision = str(accelerator.distributed_type.value), str(accelerator.mixed_precision)
    problems = [
        f"{variable} asks Accelerate for {engine}, but it made {kind}: where it finds no accelerator, it drops the "
        "plug-in silently. Use sharding='full' in the config, which works on any device."
        for variable, engine in ENGINE_VARIABLES.items()
        if os.environ.get(variable, "false").lower() == "true" and kind != engine
    ]
    if kind == "FSDP" and not accelerator.is_fsdp2:
        problems.append(
            "the Accelerator has an FSDP1 plug-in, whose state cannot be saved without pickles. Give it "
            "fsdp_version=2, or use sharding='full' in the config."
        )
    if kind == "FSDP" and precision not in COMPUTE_TYPES:
        problems.append(f"mixed_precision={precision!r} cannot be used with FSDP. Use 'bf16' or 'no'.")
    if kind in REFUSED_ENGINES:
        problems.append(
            f"the Accelerator uses {kind}, which steps by itself and keeps the state of a run in pickles of its own, "
            "so that no run could be resumed exactly. Use sharding='full' in the config: it shares out the same state."
        )
    return problems


def prepare_model(model: nn.Module, config: TrainerConfig, runtime: Runtime) -> nn.Module:
    """Bring a model to the device, ready for the run: with gradient checkpointing, compiled, as the config says."""
    if config.sync_batchnorm and runtime.num_processes > 1:
        model = convert_sync_batchnorm(model)
    is_spread = runtime.has_fsdp_plugin or (config.sharding == "full" and runtime.num_processes > 1)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty:
        _refuse_empty(model, runtime)
    if is_spread:
        _refuse_with_sharding(config)
    elif not is_empty:  # what is spread comes to the device share by share
        model = model.to(runtime.device)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model, type(model).__name__)
    if is_spread and not runtime.has_fsdp_plugin:
        how = Sharding(runtime.precision, config.sharding_group_size, config.sharding_offload)
        shard_model(model, runtime.num_processes, how, runtime.device)
    if is_empty:
        offloads = is_spread and config.sharding_offload
        give_memory(model, runtime.device, shares_device=torch.device("cpu") if offloads else None)
    if config.compile:
        model.compile()  # in place: the names of its parameters stay
    return model


def _refuse_empty(model: nn.Module, runtime: Runtime) -> None:
    """Raise if a model on `meta` could not be filled."""
    if runtime.has_fsdp_plugin:
        raise ConfigError(
            "the model is on the device 'meta', and the Accelerator's FSDP plug-in spreads it, which cannot fill it. "
            "Use sharding='full' in the config instead of the plug-in."
        )
    refuse_unknowable(model)


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


def enable_gradient_checkpointing(model: nn.Module, called: str) -> None:
    """Switch gradient checkpointing on, by the model's own method or block by block; an error calls it as given."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable()
    elif not recompute_blocks(model):
        raise ConfigError(
            f"gradient_checkpointing=True, but {called} has no gradient_checkpointing_enable() to switch it on, and no "
            "list of blocks of one class (nn.ModuleList) to compute again one by one. Give the model one, or leave the "
            "field out."
        )


def prepare_with_plugin(
    model: nn.Module, optimizer: Optimizer, accelerator: Accelerator
) -> tuple[nn.Module, Optimizer]:
    """Let an Accelerator that has an FSDP2 plug-in spread model and optimizer; without one, leave them as they are."""
    if not accelerator.is_fsdp2:
        return model, optimizer
    if not any(parameter.is_meta for parameter in model.parameters()):
        broadcast_from_main(model, accelerator.device)
    ours = {id(parameter) for parameter in model.parameters()}
    is_ours = all(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
    for group in optimizer.param_groups if not isinstance(optimizer, Adam) else ():
        group["fused"] = None  # torch has no such kernel for parameters that are shared out among processes
    # Accelerate asks for an optimizer, also where nothing will be stepped and the trainer's holds nothing.
    model, wrapped = accelerator.prepare(model, optimizer if is_ours else SGD(model.parameters()))
    return model, wrapped.optimizer if is_ours else optimizer


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


def is_present(device: torch.device) -> bool:
    """Tell whether this machine has a device."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != device.type:
        return False
    return device.index is None or device.index < torch.accelerator.device_count()


def is_same_device(asked: torch.device, got: torch.device) -> bool:
    """Tell whether a device is the one that was asked for; where one has no number, its kind decides."""
    return asked.type == got.type and (asked.index is None or got.index in {asked.index, None})


def use_threads(count: int | None) -> None:
    """Let torch compute with so many threads, in all of this process; None leaves it as it is."""
    if count is not None and count != torch.get_num_threads():
        torch.set_num_threads(count)


def keep_compiled_code_apart() -> None:
    """Let torch keep compiled code where only this user can write, unless the environment says where.

    Its own place is below the folder for temporary files, by a name that any user of the machine can take first: what
    lies there is unpickled and run, and a file in its place ends every training.
    """
    temporary = tempfile.gettempdir()
    usual = os.path.join(temporary, USUAL_COMPILED_FOLDER)
    named = os.environ.get(COMPILED_VARIABLE)
    if not named or os.path.abspath(named).startswith(usual):  # torch writes its own choice there, too
        os.environ[COMPILED_VARIABLE] = str(own_folder(COMPILED_FOLDER))
    user = re.sub(r'[\\/:*?"<>|]', "_", _user_name())
    if not is_closed(make_closed(Path(os.path.realpath(temporary), USUAL_COMPILED_FOLDER + user))):
        # Headers go to the usual place, whatever the environment says, and into all that is compiled.
        os.environ[HEADERS_VARIABLE] = "0"
        if (compiler := sys.modules.get("torch._inductor.config")) is not None:
            compiler.cpp_cache_precompile_headers = False  # type: ignore[attr-defined]


def _user_name() -> str:
    """Return the name that torch's folder for compiled code ends with."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user of a container whom nobody has given a name
        return f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"


def use_deterministic_kernels() -> None:
    """Let torch compute the same bits each time, or raise where it cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def keep_freed_memory(*, large: bool = True) -> None:
    """Let the process keep up to 256 MB that a step frees for the next step, instead of giving it back each time.

    Touching fresh pages for each batch's outputs costs up to a third of an evaluation. Without `large`, what has a
    megabyte or more is given back: blocks that are gathered and let go one after another would leave holes in the heap
    and so, after some steps, all of a model that is shared out. An environment that sets one of glibc's own variables
    is left as it is, and so is a C library without them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name in os.environ for name in KEPT_MEMORY):
        for number, value, value_without_large in KEPT_MEMORY.values():
            mallopt(number, value if large else value_without_large)
