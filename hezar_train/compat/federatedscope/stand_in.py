"""Let code that imports `federatedscope.core.trainers` and its like find this door there, with no import changed.

`stand_in()`, called once before that code is imported, puts modules of FederatedScope's names into `sys.modules`. Where
FederatedScope itself is installed, only what a trainer is made of is replaced: its workers, runners, data and models
then train with this package's trainer. Where it is not, the modules below are all there is of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["stand_in"]

REPLACED: dict[str, tuple[str, ...]] = {
    "core.trainers": (
        "BaseTrainer", "Context", "CtxVar", "GeneralMultiModelTrainer", "GeneralTorchTrainer", "Trainer",
        "wrap_DittoTrainer", "wrap_fedprox_trainer",
    ),
    "core.trainers.base_trainer": ("BaseTrainer",),
    "core.trainers.trainer": ("GeneralTorchTrainer", "Trainer"),
    "core.trainers.torch_trainer": ("GeneralTorchTrainer",),
    "core.trainers.trainer_multi_model": ("GeneralMultiModelTrainer",),
    "core.trainers.context": ("Context", "CtxVar", "MODE", "lifecycle"),
    "core.trainers.enums": ("LIFECYCLE", "MODE", "TRIGGER"),
    "core.trainers.utils": (
        "calculate_batch_epoch_num", "filter_by_specified_keywords", "format_log_hooks", "move_to",
    ),
    "core.auxiliaries.trainer_builder": ("get_trainer",),
    "core.auxiliaries.decorators": ("use_diff",),
    "core.auxiliaries.ReIterator": ("ReIterator",),
    "core.optimizer": ("wrap_regularized_optimizer",),
}  # fmt: skip
"""Modules that are a trainer's alone."""

ADDED: dict[str, tuple[str, ...]] = {
    "register": (
        "register_criterion", "register_metric", "register_optimizer", "register_regularizer", "register_scheduler",
        "register_trainer",
    ),
    "core.auxiliaries.optimizer_builder": ("get_optimizer",),
    "core.auxiliaries.scheduler_builder": ("get_scheduler",),
    "core.auxiliaries.criterion_builder": ("get_criterion",),
    "core.auxiliaries.regularizer_builder": ("get_regularizer",),
    "core.auxiliaries.utils": ("merge_param_dict", "param2tensor"),
    "core.auxiliaries.model_builder": ("get_trainable_para_names",),
    "core.auxiliaries.enums": ("LIFECYCLE", "MODE"),
    "core.monitors": ("Monitor",),
    "core.monitors.monitor": ("Monitor",),
    "core.monitors.metric_calculator": ("MetricCalculator",),
    "core.configs.config": ("CN", "global_cfg"),
}  # fmt: skip
"""Modules that have more than a trainer's names; where FederatedScope is installed, its own are used."""

REGISTER = "register"


def stand_in(name: str = "federatedscope") -> list[str]:
    """Put the modules in place; return their names."""
    is_installed = name not in sys.modules and importlib.util.find_spec(name) is not None
    made = {**REPLACED, **({} if is_installed else ADDED)}
    for module, names in made.items():
        _put(f"{name}.{module}", names, _folder_of(f"{name}.{module}") if is_installed else None)
    if is_installed:  # its own workers register with it, and trainers are found with us
        theirs = importlib.import_module(f"{name}.{REGISTER}")
        theirs.register_trainer = _ours("register_trainer")  # type: ignore[attr-defined]
    return [f"{name}.{module}" for module in made]


def _put(path: str, names: tuple[str, ...], folder: str | None) -> None:
    """Make a module, and packages above it where there are none."""
    parent, _, last = path.rpartition(".")
    if parent and parent not in sys.modules:
        if folder is not None:
            importlib.import_module(parent)
        else:
            _put(parent, (), None)
    module = ModuleType(path, __doc__)
    module.__path__ = [] if folder is None else [folder]
    for one in names:
        setattr(module, one, _ours(one))
    sys.modules[path] = module
    if parent:
        setattr(sys.modules[parent], last, module)


def _folder_of(path: str) -> str:
    """Return where a package of the installed FederatedScope lies, from which its other modules are imported."""
    root = importlib.util.find_spec(path.split(".", maxsplit=1)[0])
    assert root is not None
    assert root.origin is not None
    return str(Path(root.origin).parent.joinpath(*path.split(".")[1:]))


def _ours(name: str) -> object:
    return getattr(importlib.import_module("hezar_train.compat.federatedscope"), name)
