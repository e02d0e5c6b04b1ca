"""The questions about processes that LiBai's code asks: `from hezar_train.compat.libai import distributed as dist`.

Every process has the whole model (data parallel); tensors are local ones, so what makes them global leaves them as they
are.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import distributed

from hezar_train.compat.libai.config import try_get_key
from hezar_train.errors import ConfigError

__all__ = [
    "broadcast_py_object",
    "convert_to_distributed_default_setting",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_last_process",
    "is_main_process",
    "setup_dist_util",
    "synchronize",
    "tensor_to_rank0",
    "ttol",
]

T = TypeVar("T")


def _is_open() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def get_rank() -> int:
    """Return this process's number."""
    return distributed.get_rank() if _is_open() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if _is_open() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return this process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", str(get_rank())))


get_data_parallel_rank, get_data_parallel_size = get_rank, get_world_size


def is_main_process() -> bool:
    """Tell whether this is the first process."""
    return get_rank() == 0


def is_last_process() -> bool:
    """Tell whether this is the last process."""
    return get_rank() == get_world_size() - 1


def synchronize() -> None:
    """Wait for all processes."""
    if _is_open() and get_world_size() > 1:
        distributed.barrier()


def broadcast_py_object(obj: T, src: int = 0) -> T:
    """Return one process's object on all of them."""
    if not _is_open() or get_world_size() == 1:
        return obj
    box = [obj]
    distributed.broadcast_object_list(box, src=src)
    return box[0]


def setup_dist_util(cfg: Any) -> None:
    """Check what a config says of parallelism: data parallel is what there is."""
    cut = {name: try_get_key(cfg, f"{name}_parallel_size", default=1) or 1 for name in ("tensor", "pipeline")}
    if asked := [f"{name}_parallel_size={size}" for name, size in cut.items() if size > 1]:
        raise ConfigError(
            f"train.dist: {', '.join(asked)} would cut the model as OneFlow's global tensors do, which is not offered "
            "here. Set them to 1; every process has the whole model."
        )
    size, world = try_get_key(cfg, "data_parallel_size"), get_world_size()
    if size is not None and size != world:
        raise ConfigError(
            f"train.dist.data_parallel_size={size}, but the number of processes is {world}. Start as many, e.g. with "
            f"`torchrun --nproc-per-node {size}`, or set it to {world}."
        )


def convert_to_distributed_default_setting(module: T) -> T:
    """Return a tensor or a module as it is; the trainer places it."""
    return module


def tensor_to_rank0(tensor: torch.Tensor, device: Any = "cpu", to_local: bool = False) -> torch.Tensor:
    """Return a tensor on a device; it is local already."""
    del to_local
    return tensor.detach().to(device)


def ttol(tensor: torch.Tensor, pure_local: bool = False, ranks: Any = None) -> torch.Tensor:
    """Return a tensor as it is: it is local already."""
    del pure_local, ranks
    return tensor
