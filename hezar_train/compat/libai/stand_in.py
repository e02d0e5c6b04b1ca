"""Let code that imports `libai.engine`, `libai.config` and their like find this door there, with no import changed."""

from __future__ import annotations

import importlib

from hezar_train.compat.standing_in import put_in_place

__all__ = ["stand_in"]

DOOR = "hezar_train.compat.libai"

MODULES = {
    "config": ("config", "config.config", "config.instantiate", "config.lazy"),
    "data": ("data", "data.build", "data.structures"),
    "engine": ("engine", "engine.default", "engine.trainer"),
    "hooks": ("engine.hooks",),
    "evaluation": ("evaluation", "evaluation.evaluator"),
    "optim": ("optim", "optim.build"),
    "scheduler": ("scheduler", "scheduler.lr_scheduler"),
    "distributed": ("utils.distributed",),
    "logger": ("utils.logger",),
    "": ("utils.checkpoint", "utils.events"),
}
"""The modules of the door, and those of LiBai that each stands in for."""

NOT_OFFERED = (
    "not offered where hezar_train stands in for LiBai. There are libai.config, .engine, .data, .evaluation, .optim, "
    ".scheduler and .utils; write models, layers, tokenizers and datasets in torch, or take those of another package."
)


def stand_in(name: str = "libai") -> list[str]:
    """Put the modules in place; return their names. An installed LiBai is not used: it wants OneFlow."""
    ours = {
        path: importlib.import_module(f"{DOOR}.{module}" if module else DOOR)
        for module, paths in MODULES.items()
        for path in paths
    }
    return put_in_place(name, ours, NOT_OFFERED)
