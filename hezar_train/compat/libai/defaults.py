"""LiBai's defaults: the groups `train`, `optim` and `graph` that its configs begin with, made anew when asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hezar_train.compat.libai.config import LazyCall
from hezar_train.compat.libai.evaluation import ClsEvaluator
from hezar_train.compat.libai.optim import get_default_optimizer_params
from hezar_train.compat.libai.scheduler import WarmupCosineLR

__all__ = ["DEFAULTS", "graph_defaults", "optim_defaults", "train_defaults"]


def train_defaults() -> dict[str, Any]:
    """Return the group `train`."""
    return {
        "output_dir": "./output",
        "train_micro_batch_size": 32,
        "global_batch_size": None,
        "num_accumulation_steps": None,
        "train_iter": 10_000,
        "train_epoch": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "train_samples": None,
        "warmup_ratio": 0,
        "start_iter": 0,
        "resume": False,
        "amp": {"enabled": False},
        "activation_checkpoint": {"enabled": False},
        "nccl_fusion_threshold_mb": 16,
        "nccl_fusion_max_ops": 24,
        "zero_optimization": {"enabled": False, "stage": 1},
        "checkpointer": {"period": 5000, "max_to_keep": 100, "save_model_after_n_epoch": None},
        "test_micro_batch_size": 32,
        "evaluation": {
            "enabled": True,
            "evaluator": LazyCall(ClsEvaluator)(topk=(1, 5)),
            "eval_period": 5000,
            "eval_after_n_epoch": None,
            "eval_iter": 1e5,
            "eval_metric": "Acc@1",
            "eval_mode": "max",
        },
        "load_weight": "",
        "log_period": 20,
        "scheduler": LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.01, warmup_method="linear"),
        "dist": {
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "pipeline_num_layers": None,
            "custom_pipeline_stage_id": None,
        },
        "input_placement_device": "cuda",
        "rdma_enabled": True,
        "seed": 1234,
    }


def optim_defaults() -> Any:
    """Return the group `optim`: AdamW, norms and biases without weight decay, gradients clipped to 1."""
    params = LazyCall(get_default_optimizer_params)(
        clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_norm=0.0, weight_decay_bias=0.0
    )
    return LazyCall(torch.optim.AdamW)(params=params, lr=1e-4, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8)


def graph_defaults() -> dict[str, Any]:
    """Return the group `graph`."""
    return {"enabled": True, "debug": -1, "auto_parallel": {"enabled": False}, "global_mode": {"enabled": False}}


DEFAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "common/train.py": lambda: {"train": train_defaults()},
    "common/optim.py": lambda: {"optim": optim_defaults()},
    "common/models/graph.py": lambda: {"graph": graph_defaults()},
}
"""By the path under which LiBai has them."""
