"""Say which world this process finds itself in. Arguments: flags of the config; `own` brings an Accelerator along."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime import build_runtime

if __name__ == "__main__":
    flags = sys.argv[1:]
    config = TrainerConfig.from_dict({"output_dir": "run", **{name: True for name in flags if name != "own"}})
    try:
        runtime = build_runtime(config, Accelerator() if "own" in flags else None)
    except ConfigError as error:
        sys.exit(f"refused: {error}")
    ranks = runtime.accelerator.gather(torch.tensor([runtime.rank])).tolist()
    print(f"rank {runtime.rank} of {runtime.num_processes} sees {ranks}\n", end="", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # a process that leaves its peers without a word may abort
