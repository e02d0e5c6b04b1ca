"""A model on its way into a run: brought to the device, spread over the processes, compiled, as the config says."""

from __future__ import annotations

from torch import nn

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime.batch_norm import synchronised
from hezar_train.runtime.runtime import Runtime
from hezar_train.runtime.sharding import shard_model

__all__ = ["enable_gradient_checkpointing", "prepare_model"]


def prepare_model(model: nn.Module, config: TrainerConfig, runtime: Runtime) -> nn.Module:
    """Bring a model to the device, ready for the run: with gradient checkpointing, compiled, as the config says."""
    if config.sync_batchnorm and runtime.num_processes > 1:
        model = synchronised(model)
    is_spread = runtime.has_fsdp_plugin or (config.sharding == "full" and runtime.num_processes > 1)
    if is_spread:
        _refuse_with_sharding(config)
    else:  # what is spread comes to the device share by share
        model = model.to(runtime.device)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model, type(model).__name__)
    if is_spread and not runtime.has_fsdp_plugin:
        shard_model(model, runtime.num_processes, runtime.precision, runtime.device)
    if config.compile:
        model.compile()  # in place: the names of its parameters stay
    return model


def enable_gradient_checkpointing(model: nn.Module, called: str) -> None:
    """Switch gradient checkpointing on in a model that can do it; an error calls the model as given."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            f"gradient_checkpointing=True, but {called} has no gradient_checkpointing_enable() to switch it on. Give "
            "the model one, or leave the field out."
        )
    enable()


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
