"""The interface that a federated worker drives: a trainer with four methods; and what its algorithms cannot train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from hezar_train.errors import ConfigError
from hezar_train.multi_model import MultiModelTrainer
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer import Trainer

__all__ = ["BaseTrainer", "refuse_several_models"]


@runtime_checkable
class BaseTrainer(Protocol):
    """Anything that trains, evaluates, and gives and takes parameters; hooks are what only a `Trainer` has."""

    def train(self) -> Any:
        """Train for a round; the result unpacks as the number of samples, the parameters and the metrics."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        """Evaluate on a split, given as the only argument or as `target_data_split_name`."""

    def update(self, model_parameters: Mapping[str, Any], strict: bool = False) -> None:
        """Take parameters over."""

    def get_model_para(self) -> Any:
        """Return the parameters that are exchanged."""


def refuse_several_models(trainer: Trainer, hook: str) -> None:
    """Raise if a hook that knows of one model is given to a trainer of several, or of one that is spread."""
    if isinstance(trainer, MultiModelTrainer):
        raise ConfigError(f"{hook} goes with a Trainer of one model; this one has: {', '.join(trainer.models)}")
    if is_sharded(trainer.model):
        raise ConfigError(f"{hook} moves whole weights, of which each process has a share only. Use sharding='none'.")
