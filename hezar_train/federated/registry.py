"""Trainers and plug-ins by name: `get_trainer` builds one and adds the other in an order that does not vary.

A plug-in is a function of a trainer and of settings by keyword; it adds hooks and returns the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.federated.ditto import DittoTrainer
from hezar_train.federated.fedprox import wrap_fedprox_trainer
from hezar_train.federated.monitor import Monitor
from hezar_train.federated.sam import wrap_sam_trainer
from hezar_train.federated.worker import BaseTrainer
from hezar_train.trainer import Trainer

__all__ = ["PLUGIN_ORDER", "get_trainer", "register_plugin", "register_trainer"]

PLUGIN_ORDER = (
    "nbafl", "sgdmf", "pfedme", "ditto", "fedem", "fedrep", "attack", "fedprox", "sam",
)  # fmt: skip
"""The order in which plug-ins are added; those of other names follow, in the order in which they are given."""

TrainerBuilder = Callable[..., Any]
Plugin = Callable[..., Trainer]

_TRAINERS: dict[str, TrainerBuilder] = {"general": Trainer, "ditto": DittoTrainer}
_PLUGINS: dict[str, Plugin] = {"fedprox": wrap_fedprox_trainer, "sam": wrap_sam_trainer}


def register_trainer(key: str, build: TrainerBuilder) -> None:
    """Make a trainer known by a name: a class, or a function, of a config, a model and data."""
    _TRAINERS[key] = build


def register_plugin(key: str, wrap: Plugin) -> None:
    """Make a plug-in known by a name."""
    _PLUGINS[key] = wrap


def get_trainer(
    config: TrainerConfig,
    model: nn.Module | None = None,
    data: Any = None,
    *,
    trainer_type: str = "general",
    plugins: Mapping[str, Mapping[str, Any]] | None = None,
    device: Any = None,
    only_for_eval: bool = False,
    monitor: Monitor | None = None,
    kinds: Mapping[TrainerBuilder, TrainerBuilder] | None = None,
    **arguments: Any,
) -> Any:
    """Build a trainer by name and add plug-ins to it, each with its settings; `arguments` go to the trainer as well.

    `kinds` are classes to build instead of those that the names stand for.
    """
    build = _find(trainer_type, _TRAINERS, "trainer_type")
    build = (kinds or {}).get(build, build)
    chosen = [(_find(name, _PLUGINS, "plug-in"), settings) for name, settings in _in_order(plugins or {})]
    if device is not None:
        config = copy.copy(config)
        config.device = str(device)
    if only_for_eval:
        data = _without_training(data)
    if monitor is not None:
        arguments["hooks"] = [*arguments.get("hooks", ()), monitor]
    trainer = build(config, model, data, **arguments)
    _refuse_misfit(trainer, trainer_type, with_hooks=bool(chosen))
    for wrap, settings in chosen:
        trainer = wrap(trainer, **settings)
    return trainer


def _find(name: str, known: Mapping[str, Any], word: str) -> Any:
    if name not in known:
        raise ConfigError(f"{word} {name!r} is not registered. Registered: {choices(known)}.{suggestion(name, known)}")
    return known[name]


def _in_order(plugins: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    places = {name: place for place, name in enumerate(PLUGIN_ORDER)}
    return sorted(plugins.items(), key=lambda item: places.get(item[0], len(places)))


def _without_training(data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"only_for_eval=True needs data as a dict of splits, not a {type(data).__name__}")
    return {split: value for split, value in data.items() if split != "train"}


def _refuse_misfit(trainer: Any, trainer_type: str, *, with_hooks: bool) -> None:
    if not isinstance(trainer, BaseTrainer):
        raise ConfigError(
            f"trainer_type {trainer_type!r} built a {type(trainer).__name__}; expected something with the methods "
            "train, evaluate, update and get_model_para"
        )
    if with_hooks and not isinstance(trainer, Trainer):
        raise ConfigError(f"plug-ins are hooks, and trainer_type {trainer_type!r} is no Trainer: it has none")
