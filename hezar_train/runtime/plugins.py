"""What Accelerate's plug-ins change: FSDP2 is honoured; what cannot keep the trainer's promises is refused in words.

An FSDP2 plug-in (`accelerate launch --use_fsdp --fsdp_version 2`) decides how the model is cut; from there on it trains
and is saved like one that `sharding="full"` cut. DeepSpeed and Megatron-LM step by themselves and keep the state of a
run in pickles of their own; FSDP1 has no state that can be taken apart without one.
"""

from __future__ import annotations

import os

from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from hezar_train.runtime.sharding import COMPUTE_TYPES, take_over_from_main

__all__ = ["plugin_problems", "prepare_with_plugin"]

VARIABLES = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
OWN_WAY = ("DEEPSPEED", "MEGATRON_LM")


def plugin_problems(accelerator: Accelerator) -> list[str]:
    """List what is wrong with the engine that an Accelerator was to use, or does use."""
    kind, precision = str(accelerator.distributed_type.value), str(accelerator.mixed_precision)
    problems = [
        f"{variable} asks Accelerate for {engine}, but it made {kind}: where it finds no accelerator, it drops the "
        "plug-in silently. Use sharding='full' in the config, which works on any device."
        for variable, engine in VARIABLES.items()
        if os.environ.get(variable, "false").lower() == "true" and kind != engine
    ]
    if kind == "FSDP" and not accelerator.is_fsdp2:
        problems.append(
            "the Accelerator has an FSDP1 plug-in, whose state cannot be saved without pickles. Give it "
            "fsdp_version=2, or use sharding='full' in the config."
        )
    if kind == "FSDP" and precision not in COMPUTE_TYPES:
        problems.append(f"mixed_precision={precision!r} cannot be used with FSDP. Use 'bf16' or None.")
    if kind in OWN_WAY:
        problems.append(
            f"the Accelerator uses {kind}, which steps by itself and keeps the state of a run in pickles of its own, "
            "so that no run could be resumed exactly. Use sharding='full' in the config: it shares out the same state."
        )
    return problems


def prepare_with_plugin(
    model: nn.Module, optimizer: Optimizer, accelerator: Accelerator
) -> tuple[nn.Module, Optimizer]:
    """Let an Accelerator that has an FSDP2 plug-in spread model and optimizer; without one, leave them as they are."""
    if not accelerator.is_fsdp2:
        return model, optimizer
    if not any(parameter.is_meta for parameter in model.parameters()):
        take_over_from_main(model, accelerator.device)
    ours = {id(parameter) for parameter in model.parameters()}
    is_ours = all(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
    for group in optimizer.param_groups if not isinstance(optimizer, Adam) else ():
        group["fused"] = None  # torch has no such kernel for parameters that are shared out among processes
    # Accelerate asks for an optimizer, also where nothing will be stepped and the trainer's holds nothing.
    model, wrapped = accelerator.prepare(model, optimizer if is_ours else SGD(model.parameters()))
    return model, wrapped.optimizer if is_ours else optimizer
