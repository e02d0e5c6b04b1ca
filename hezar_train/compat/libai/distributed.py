"""The questions about processes that LiBai's code asks: `from hezar_train.compat.libai import distributed as dist`.

Every process has the whole model (data parallel); tensors are local ones, so what makes them global leaves them as they
are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from hezar_train.compat.libai.config import try_get_key
from hezar_train.errors import ConfigError
from hezar_train.runtime import Processes, logger

__all__ = [
    "DistUtil",
    "broadcast_py_object",
    "convert_to_distributed_default_setting",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_dist_util",
    "get_hidden_sbp",
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
    "same_sbp",
    "set_device_type",
    "setup_dist_util",
    "synchronize",
    "tensor_to_rank0",
    "ttol",
    "tton",
]

T = TypeVar("T")

CUTTING = ("tensor_parallel_size", "pipeline_parallel_size")
"""The sizes of `train.dist` that cut a model."""


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


def get_hidden_sbp() -> Any:
    """Return None, as `get_nd_sbp`."""
    return None


def same_sbp(lhs_sbp: Any, rhs_sbp: Any) -> bool:
    """Tell that two are the same: tensors are local ones."""
    del lhs_sbp, rhs_sbp
    return True


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
    """Work out the sizes of a config from the number of processes, as LiBai does; what would cut a model is refused."""
    world = get_world_size()
    asked = {name: None if cfg is None else try_get_key(cfg, name) for name in ("data_parallel_size", *CUTTING)}
    tensor, pipeline = (int(asked[name] or 1) for name in CUTTING)
    tensor = min(tensor, world)
    pipeline = min(pipeline, world // tensor)
    if tensor * pipeline > 1:
        raise ConfigError(
            f"train.dist: {', '.join(f'{name}={asked[name]}' for name in CUTTING)} on {world} processes would cut the "
            "model as OneFlow's global tensors do, which is not offered here. Set them to 1; every process has the "
            "whole model."
        )
    counted = {"data_parallel_size": world, **dict.fromkeys(CUTTING, 1)}
    if other := [f"{name}={asked[name]}" for name, size in counted.items() if asked[name] not in {None, size}]:
        logger.warning(
            "train.dist: %s: the number of processes is %d, so that, as in LiBai, the sizes are %s.",
            ", ".join(other), world, ", ".join(f"{name}={size}" for name, size in counted.items()),
        )  # fmt: skip
    if cfg is not None:
        cfg.update({**counted, "num_nodes": get_num_nodes(), "num_gpus_per_node": world // get_num_nodes()})
        if try_get_key(cfg, "pipeline_num_layers") is None:
            cfg["pipeline_num_layers"] = 10_000  # as LiBai writes it where nothing is cut


@dataclass
class DistUtil:
    """What LiBai's code asks of `get_dist_util()`: every process has the whole model."""

    world_size: int
    num_nodes: int
    device_type: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    model_parallel_size: int = 1
    parallel_hierarchy: None = None

    @property
    def data_parallel_size(self) -> int:
        """Return the number of processes."""
        return self.world_size

    @property
    def num_gpus_per_node(self) -> int:
        """Return the number of processes on a machine."""
        return self.world_size // self.num_nodes

    def get_layer_stage_id(self, layer_idx: int) -> int:
        """Return 0: all layers are in one stage."""
        del layer_idx
        return 0

    def is_data_parallel(self) -> bool:
        """Tell whether there are several processes."""
        return self.world_size > 1

    def is_tensor_model_parallel(self) -> bool:
        """Tell that the model is not cut."""
        return False

    is_pipeline_model_parallel = is_data_model_parallel = is_tensor_model_parallel


def get_dist_util() -> DistUtil:
    """Return what knows the sizes."""
    return DistUtil(get_world_size(), get_num_nodes(), "cuda" if torch.cuda.is_available() else "cpu")


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
