"""Let code that imports `libai.engine`, `libai.config` and their like find this door there, with no import changed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from hezar_train.compat.standing_in import put_in_place
from hezar_train.errors import ConfigError

__all__ = ["stand_in"]

DOOR = "hezar_train.compat.libai"

MODULES = {
    "config": ("config", "config.arguments", "config.config", "config.instantiate", "config.lazy"),
    "data": ("data", "data.build", "data.structures"),
    "engine": ("engine", "engine.default", "engine.trainer"),
    "hooks": ("engine.hooks",),
    "evaluation": ("evaluation", "evaluation.cls_evaluator", "evaluation.evaluator", "evaluation.ppl_evaluator"),
    "optim": ("optim", "optim.build"),
    "scheduler": ("scheduler", "scheduler.build", "scheduler.lr_scheduler"),
    "distributed": ("utils.distributed",),
    "logger": ("utils.logger",),
    "": ("utils.checkpoint", "utils.events", "utils.history_buffer"),
}
"""The modules of the door, and those of LiBai that each stands in for."""

NOT_OFFERED = (
    "not offered where hezar_train stands in for LiBai. There are libai.config, .engine, .data, .evaluation, .optim, "
    ".scheduler and .utils; write models, layers, tokenizers and datasets in torch, take those of another package, or "
    "turn LiBai's into torch and say where they are: stand_in(rest='path/to/libai')."
)


def stand_in(name: str = "libai", rest: str | os.PathLike[str] | None = None) -> list[str]:
    """Put the modules in place; return their names.

    An installed LiBai is not used: it wants OneFlow. What else there is of it, turned into torch, is taken from the
    folder `rest`, that of the package: `libai.models` from `rest/models`.
    """
    if rest is not None and not Path(rest).is_dir():
        raise ConfigError(f"stand_in(rest={str(rest)!r}): no such folder; expected that of the package, with models/")
    ours = {
        path: importlib.import_module(f"{DOOR}.{module}" if module else DOOR)
        for module, paths in MODULES.items()
        for path in paths
    }
    return put_in_place(name, ours, NOT_OFFERED, None if rest is None else Path(rest))
