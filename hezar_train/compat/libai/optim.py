"""LiBai's parameter groups, and its clipping: each group of an optimizer by its own norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hezar_train.compat.libai.config import instantiate
from hezar_train.errors import ConfigError

__all__ = ["build_optimizer", "clip_groups", "get_default_optimizer_params", "reduce_param_groups"]

NORMS = (
    nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip


def build_optimizer(cfg: Any, model: nn.Module) -> Optimizer:
    """Make the optimizer that a config describes, over a model's parameters."""
    cfg.params.model = model
    made: Optimizer = instantiate(cfg)
    cfg.params.model = None  # a config that is written or copied must not hold the weights
    return made


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
    clip_grad_max_norm: float | None = None,
    clip_grad_norm_type: float | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trainable parameters in groups of equal settings; `overrides` are by a parameter's last name."""
    settings = {"lr": base_lr, "weight_decay": weight_decay}
    if clip_grad_max_norm is not None and clip_grad_norm_type is not None:
        settings |= {"clip_grad_max_norm": clip_grad_max_norm, "clip_grad_norm_type": clip_grad_norm_type}
    by_name = {str(name): dict(values) for name, values in (overrides or {}).items()}
    if weight_decay_bias is not None:
        if "bias" in by_name:
            raise ConfigError("weight_decay_bias and overrides['bias'] were both given; give one of them")
        by_name["bias"] = {"weight_decay": weight_decay_bias}
    groups = []
    for module, name, parameter in _trainable(model):
        own = {name: value for name, value in settings.items() if value is not None}
        if weight_decay_norm is not None and _is_norm(module):
            own["weight_decay"] = weight_decay_norm
        groups.append({"params": [parameter], **own, **by_name.get(name, {})})
    return reduce_param_groups(groups)


def _is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalizes; LiBai's own LayerNorm, turned into torch, is not derived from torch's."""
    return isinstance(module, NORMS) or any(one.__name__ == "LayerNorm" for one in type(module).__mro__)


def reduce_param_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join groups of equal settings; of a parameter in several, the later settings count."""
    single: dict[int, tuple[nn.Parameter, dict[str, Any]]] = {}
    for group in params:
        own = {name: value for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            single.setdefault(id(parameter), (parameter, {}))[1].update(own)
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for parameter, settings in single.values():
        groups.setdefault(tuple(settings.items()), []).append(parameter)
    return [{**dict(key), "params": parameters} for key, parameters in groups.items()]


def _trainable(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return each trainable parameter once, with the module it is in and its name there."""
    found: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(id(parameter), (module, name, parameter))
    return list(found.values())


def clip_groups(optimizer: Optimizer, error_if_nonfinite: bool = False) -> None:
    """Limit the gradients of each group that has a `clip_grad_max_norm`, by the norm of that group alone.

    With `error_if_nonfinite` a norm that is not finite raises, as in OneFlow; a run has a guard that looks before.
    """
    for group in optimizer.param_groups:
        if group.get("clip_grad_max_norm") is not None:
            kind = group.get("clip_grad_norm_type", 2.0)
            torch.nn.utils.clip_grad_norm_(group["params"], group["clip_grad_max_norm"], kind, error_if_nonfinite)
