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
from hezar_train.runtime import Processes, logger

__all__ = [
    "broadcast_py_object",
    "convert_to_distributed_default_setting",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_layer_placement",
    "get_local_rank",
    "get_nd_sbp",
    "get_num_nodes",
    "get_pipeline_parallel_size",
    "get_rank",
    "get_tensor_parallel_size",
    "get_world_size",
    "is_last_process",
    "is_main_process",
    "set_device_type",
    "setup_dist_util",
    "synchronize",
    "tensor_to_rank0",
    "ttol",
    "tton",
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


def get_tensor_parallel_size() -> int:
    """Return 1: `setup_dist_util` refuses more."""
    return 1


get_pipeline_parallel_size = get_tensor_parallel_size


def get_num_nodes() -> int:
    """Return the number of machines."""
    return max(1, get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", str(get_world_size()))))


def set_device_type(device_type: str) -> None:
    """Say so where this is no device of torch's, such as OneFlow's "cuda+remat"; the trainer has its own."""
    if device_type not in {"cpu", "cuda"}:
        logger.warning(
            "set_device_type(%r): torch has no such device, and the trainer's own is used. To save memory instead, set "
            "train.activation_checkpoint.enabled=True.",
            device_type,
        )


def get_layer_placement(layer_idx: int, device_type: str | None = None) -> Any:
    """Return None: a layer is where its model is. OneFlow's `to_global(placement=...)` has no counterpart."""
    del layer_idx, device_type
    return None


def get_nd_sbp(sbp_list: Any) -> Any:
    """Return None: tensors are local ones. OneFlow's `to_global(sbp=...)` has no counterpart."""
    del sbp_list
    return None


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
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    found = Processes(get_rank(), get_world_size(), device).gather(obj if get_rank() == src else None)
    return found[src]  # type: ignore[return-value]


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


def ttol(tensor: torch.Tensor, pure_local: bool = False, device: Any = None, ranks: Any = None) -> torch.Tensor:
    """Return a tensor as it is: it is local already."""
    del pure_local, device, ranks
    return tensor


def tton(tensor: torch.Tensor, local_only: bool = False, ranks: Any = None) -> Any:
    """Return a tensor as an array of numpy's."""
    del local_only, ranks
    return tensor.detach().cpu().numpy()
