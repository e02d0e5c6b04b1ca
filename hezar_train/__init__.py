"""Train any PyTorch model from one dataclass; kill it anywhere and get the same model, bit by bit.

The public names are looked up when they are first used: importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hezar_train.config import MetricConfig, TrainerConfig
    from hezar_train.data import RangedSampler
    from hezar_train.events import EventStorage, get_event_storage
    from hezar_train.loop import LIFECYCLE, CtxVar, Hook, Lifecycle, Moment, lifecycle
    from hezar_train.multi_model import MultiModelTrainer
    from hezar_train.recipes import Recipe
    from hezar_train.runtime import without_weights
    from hezar_train.state import TrainerState
    from hezar_train.trainer import RoutineResult, Trainer
    from hezar_train.types import Mode

__version__ = "0.1.0"

__all__ = [
    "LIFECYCLE",
    "CtxVar",
    "EventStorage",
    "Hook",
    "Lifecycle",
    "MetricConfig",
    "Mode",
    "Moment",
    "MultiModelTrainer",
    "RangedSampler",
    "Recipe",
    "RoutineResult",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "__version__",
    "get_event_storage",
    "lifecycle",
    "without_weights",
]

_MODULE_OF_NAME = {
    "CtxVar": "hezar_train.loop",
    "EventStorage": "hezar_train.events",
    "Hook": "hezar_train.loop",
    "LIFECYCLE": "hezar_train.loop",
    "Lifecycle": "hezar_train.loop",
    "MetricConfig": "hezar_train.config",
    "Mode": "hezar_train.types",
    "Moment": "hezar_train.loop",
    "MultiModelTrainer": "hezar_train.multi_model",
    "RangedSampler": "hezar_train.data",
    "Recipe": "hezar_train.recipes",
    "RoutineResult": "hezar_train.trainer",
    "Trainer": "hezar_train.trainer",
    "TrainerConfig": "hezar_train.config",
    "TrainerState": "hezar_train.state",
    "get_event_storage": "hezar_train.events",
    "lifecycle": "hezar_train.loop",
    "without_weights": "hezar_train.runtime",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
