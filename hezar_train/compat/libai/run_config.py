"""What a config of LiBai's means here: batch sizes worked out, lengths scaled, and its keys as a `TrainerConfig`.

An iteration is a micro-batch in eager mode (`graph.enabled=False`) and a whole batch of `num_accumulation_steps`
micro-batches in graph mode, as in LiBai; a step of the loop is always a micro-batch.
"""

from __future__ import annotations

import math
from typing import Any

from hezar_train.compat.libai import distributed as dist
from hezar_train.compat.libai.config import as_config, try_get_key
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime import logger

__all__ = ["check_batch_size", "completed", "run_config", "scale_hyperparams", "steps_per_iteration"]

MAPPED = frozenset(
    {
        "amp", "activation_checkpoint", "checkpointer", "dist", "evaluation", "global_batch_size", "load_weight",
        "log_period", "num_accumulation_steps", "output_dir", "resume", "scheduler", "seed", "test_micro_batch_size",
        "train_epoch", "train_iter", "train_micro_batch_size", "warmup_ratio", "zero_optimization",
    }
)  # fmt: skip
"""Keys of `train` that mean something here."""
MOOT = frozenset(
    {
        "consumed_train_samples", "consumed_valid_samples", "input_placement_device", "nccl_fusion_max_ops",
        "nccl_fusion_threshold_mb", "rdma_enabled", "samples", "start_iter", "train_samples", "warmup_iter",
    }
)  # fmt: skip
"""Keys that LiBai works out itself, or that tune OneFlow's transport: they change no number."""
NEEDED = {
    "train.output_dir": "./output", "train.train_iter": 10_000, "train.train_epoch": 0, "train.warmup_ratio": 0,
    "train.seed": 1234, "train.log_period": 20, "train.load_weight": "", "train.resume": False,
    "train.test_micro_batch_size": 32, "train.amp.enabled": False, "train.activation_checkpoint.enabled": False,
    "train.zero_optimization.enabled": False, "train.checkpointer.period": 5000, "train.checkpointer.max_to_keep": 100,
    "train.evaluation.enabled": True, "train.evaluation.eval_period": 5000, "train.evaluation.eval_iter": 1e5,
    "train.evaluation.eval_metric": "Acc@1", "train.evaluation.eval_mode": "max",
    "train.input_placement_device": "cuda", "graph.enabled": False,
}  # fmt: skip
"""What a config that leaves a key out gets: LiBai's defaults, but no graph."""


def completed(cfg: Any) -> Any:
    """Return a config with every key that is needed, changed in place if it is one already; say which mean nothing."""
    found = as_config(cfg)
    if try_get_key(found, "train") is None:
        raise ConfigError("the config has no group `train`; expected those of LiBai: model, optim, dataloader, train")
    for key, value in NEEDED.items():
        if try_get_key(found, key) is None:
            _set(found, key, value)
    if unknown := sorted(str(key) for key in found.train if key not in MAPPED | MOOT):
        logger.warning(
            "nothing here reads these keys of the config's group `train`: %s. Your own code may.", ", ".join(unknown)
        )
    return found


def _set(cfg: Any, key: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(cfg, key, value, merge=True, force_add=True)


def check_batch_size(cfg: Any) -> None:
    """Work out the one of the three batch sizes that is missing; raise if they do not go together."""
    train, world = cfg.train, dist.get_data_parallel_size()
    micro, whole, parts = (
        try_get_key(train, name) for name in ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps")
    )
    if micro is None and whole is None:
        raise ConfigError("train.train_micro_batch_size and train.global_batch_size are both missing; set one of them")
    if micro is None:
        parts = parts or 1
        micro = _divided("train.global_batch_size", whole, world * parts)
    elif whole is None:
        parts = parts or 1
        whole = micro * world * parts
    elif parts is None:
        parts = _divided("train.global_batch_size", whole, micro * world)
    if whole != micro * world * parts:
        raise ConfigError(
            f"train.global_batch_size={whole} is not train_micro_batch_size x processes x num_accumulation_steps = "
            f"{micro} x {world} x {parts}. Leave one of them out."
        )
    sizes = {"train_micro_batch_size": micro, "global_batch_size": whole, "num_accumulation_steps": parts}
    for name, value in {**sizes, "samples": train.train_iter * whole}.items():
        _set(cfg, f"train.{name}", value)


def _divided(name: str, whole: int, by: int) -> int:
    if whole % by:
        raise ConfigError(f"{name}={whole} is no multiple of {by} (micro-batch, processes, accumulation)")
    return int(whole // by)


def scale_hyperparams(cfg: Any, data_loader: Any) -> None:
    """Work out how long the run is and what is counted in shares or epochs of it, in iterations, as LiBai does."""
    train, size = cfg.train, len(data_loader.dataset)
    ratio = train.warmup_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"train.warmup_ratio={ratio!r} is a share of the run; expected a number from 0 to below 1")
    length = max(math.ceil(size * train.train_epoch / train.global_batch_size), train.train_iter)
    warmup = math.ceil(length * ratio)
    factor = 1 if cfg.graph.enabled else train.num_accumulation_steps  # in eager mode a micro-batch is an iteration
    scaled = {"train.train_iter": length * factor, "train.warmup_iter": warmup * factor}
    for key, value in scaled.items():
        _set(cfg, key, value)
    if try_get_key(train, "scheduler") is not None:
        _scale_schedule(cfg)
    per_epoch = size // train.global_batch_size
    if epochs := try_get_key(train, "evaluation.eval_after_n_epoch"):
        _set(cfg, "train.evaluation.eval_period", per_epoch * epochs)
    if epochs := try_get_key(train, "checkpointer.save_model_after_n_epoch"):
        _set(cfg, "train.checkpointer.period", per_epoch * epochs)


def _scale_schedule(cfg: Any) -> None:
    train = cfg.train
    if shares := try_get_key(train, "scheduler.milestones"):
        if any(not 0 <= one < 1 for one in shares):
            raise ConfigError(
                f"train.scheduler.milestones={list(shares)}: each is a share of the run, from 0 to below 1"
            )
        _set(cfg, "train.scheduler.milestones", [int(one * train.train_iter) for one in shares])
    _set(cfg, "train.scheduler.warmup_iter", train.warmup_iter)
    _set(cfg, "train.scheduler.max_iter", train.train_iter)


def steps_per_iteration(cfg: Any) -> int:
    """Return how many micro-batches an iteration has."""
    return int(cfg.train.num_accumulation_steps) if cfg.graph.enabled else 1


def run_config(cfg: Any, model: Any) -> TrainerConfig:
    """Return what a checked and scaled config means, as ours."""
    train, parts, steps = cfg.train, int(cfg.train.num_accumulation_steps), steps_per_iteration(cfg)
    return TrainerConfig(
        train.output_dir,
        max_steps=train.train_iter * steps,
        num_epochs=max(1, train.train_iter * steps),  # the steps end the run
        batch_size=train.train_micro_batch_size,
        eval_batch_size=train.test_micro_batch_size,
        gradient_accumulation_steps=parts,
        loss_weight="samples",  # LiBai divides by the micro-batches, whatever the model is called
        drop_last=parts > 1,  # so that windows and iterations keep step over the epochs
        seed=train.seed,
        log_steps=-(-train.log_period * steps // parts) * parts,  # at the end of an update
        save_total_limit=train.checkpointer.max_to_keep,
        do_evaluate=False,  # EvalHook does
        init_weights_from=train.load_weight or None,
        resume_from_checkpoint=train.resume or None,
        compile=_compiles(cfg),
        mixed_precision=_precision(cfg),
        gradient_checkpointing=_recomputes(cfg, model),
    )


def _compiles(cfg: Any) -> bool:
    if cfg.graph.enabled:
        logger.info("graph.enabled: instead of building a OneFlow graph, the model is compiled (compile=True)")
    if try_get_key(cfg, "graph.auto_parallel.enabled"):
        raise ConfigError("graph.auto_parallel is OneFlow's and not offered here; set it to enabled=False")
    return bool(cfg.graph.enabled)


def _precision(cfg: Any) -> str | None:
    if cfg.train.amp.enabled and not cfg.graph.enabled:
        logger.warning("train.amp.enabled has no effect without graph.enabled, as in LiBai: training in full precision")
    return "bf16" if cfg.train.amp.enabled and cfg.graph.enabled else None


def _recomputes(cfg: Any, model: Any) -> bool:
    """Tell whether activations are computed again instead of kept; say what costs memory and changes no number."""
    if cfg.train.zero_optimization.enabled:
        logger.warning("train.zero_optimization is not offered: every process keeps the whole state of the optimizer")
    if not cfg.train.activation_checkpoint.enabled:
        return False
    if hasattr(model, "gradient_checkpointing_enable"):
        return True
    logger.warning(
        "train.activation_checkpoint: the model has no gradient_checkpointing_enable(), so it keeps them all"
    )
    return False
