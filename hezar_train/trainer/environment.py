"""What a run is started with, for whoever wants to believe or repeat it: command, versions, hardware, data.

No names of users or hosts, no environment variables, no tokens are kept. Fetching samples is left to the training: a
dataset is described by what it says of itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from hezar_train.checkpoint.format import raw_bytes
from hezar_train.config.credentials import shown_arguments
from hezar_train.events import add_start, read_starts
from hezar_train.hub import redact

__all__ = ["changed_ground", "describe_data", "record_environment", "threads_before"]

MOST_HASHED_BYTES = 1 << 30  # a second or so
MOST_SHOWN = 80  # characters of what a record says
RAY_WORKER = ("ray", "_private", "workers", "default_worker.py")
PACKAGES = ("hezar-train", "torch", "accelerate", "safetensors", "numpy", "transformers", "datasets", "hezar")


def record_environment(
    run_folder: Path,
    *,
    device: str,
    num_processes: int,
    precision: str,
    num_parameters: int,
    model_class: str,
    train_data: Any,
    eval_data: Mapping[str, Any] | None = None,
    command: list[str] | None = None,
    step: int = 0,
) -> Path:
    """Append what this start of a run is made of, and the step it goes on from, to its folder; return the file."""
    start = {
        "time": time.time(),
        "step": step,
        "command": command_line(sys.argv if command is None else command),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": _hardware(device, num_processes, precision),
        "model": {"class": model_class, "num_parameters": num_parameters},
        "data": {
            "train": describe_data(train_data),
            "evaluation": {name: describe_data(data) for name, data in (eval_data or {}).items()},
        },
    }
    return add_start(run_folder, start)


def threads_before(run_folder: Path) -> int | None:
    """Return the number of threads that the newest start of a run computed with, if it is known."""
    starts = read_starts(run_folder)
    hardware = starts[-1].get("hardware") if starts else None
    threads = hardware.get("threads") if isinstance(hardware, dict) else None
    return threads if isinstance(threads, int) else None


def changed_ground(run_folder: Path, device: str, num_processes: int, precision: str) -> list[str]:
    """List, in plain words, what the newest start of a run computed with and this one does not, beside its threads."""
    starts = read_starts(run_folder)
    now = {"versions": _versions(), "hardware": _hardware(device, num_processes, precision)}
    changes = []
    for part, names in (("versions", ("torch", "numpy")), ("hardware", ("device", "precision", "system"))):
        before = starts[-1].get(part) if starts else None
        known = before if isinstance(before, dict) else {}
        for name in names:
            if isinstance(old := known.get(name), str) and old != now[part].get(name):
                changes.append(f"{name} {old[:MOST_SHOWN]} before, {now[part].get(name)} now")
    return changes


def command_line(arguments: list[str]) -> str:
    """Return a command as it can be typed again, without secrets and without the folder of its program.

    A worker of Ray's has none: Ray starts it, with addresses of its hosts for arguments.
    """
    program, *rest = arguments or [""]
    if Path(program).parts[-len(RAY_WORKER) :] == RAY_WORKER:
        return ""
    name = Path(program).name
    if name == "__main__.py":  # started as `python -m package`
        name = f"python -m {Path(program).parent.name}"
    elif name.endswith(".py"):
        name = f"python {name}"
    return redact(" ".join([name, *shown_arguments(rest)])).strip()


def describe_data(data: Any) -> dict[str, Any]:
    """Return what a dataset says of itself: kind, size, and a fingerprint of its content where it has one."""
    found: dict[str, Any] = {"kind": type(data).__name__, "size": _size(data), "fingerprint": _fingerprint(data)}
    info = getattr(data, "info", None)
    for name in ("dataset_name", "config_name", "license", "version"):
        if value := getattr(info, name, None):
            found[name] = str(value)
    if split := getattr(data, "split", None):
        found["split"] = str(split)
    return {name: value for name, value in found.items() if value is not None}


def _size(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _fingerprint(data: Any) -> str | None:
    own = getattr(data, "_fingerprint", None)  # of the `datasets` library, over content and transforms
    if isinstance(own, str):
        return own
    if type(data) is not TensorDataset or sum(tensor.nbytes for tensor in data.tensors) > MOST_HASHED_BYTES:
        return None
    digest = hashlib.sha256()
    for tensor in data.tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hardware(device: str, num_processes: int, precision: str) -> dict[str, Any]:
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device,
        "processes": num_processes,
        "precision": {"no": "fp32"}.get(precision, precision),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
