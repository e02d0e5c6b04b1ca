"""Models by name: which names are possible, and one module of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.runtime import enable_gradient_checkpointing

__all__ = ["ModelDict", "named", "refuse_misnamed"]


class ModelDict(nn.ModuleDict):
    """Models by name; what is switched on for all is switched on in each, because each is called by itself."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each model in place."""
        for model in self.values():
            model.compile(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Switch gradient checkpointing on in each model."""
        for name, model in self.items():
            enable_gradient_checkpointing(model, f"the model {name!r} ({type(model).__name__})")


def named(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return models by name; those of a list are called model0, model1 and so on."""
    if isinstance(models, Mapping):
        return dict(models)
    return {f"model{number}": model for number, model in enumerate(models)}


def refuse_misnamed(models: Mapping[str, nn.Module], asked: Iterable[str]) -> None:
    """Raise if models cannot go by their names, or if a name that was asked for is none of theirs."""
    if not models or not all(isinstance(model, nn.Module) for model in models.values()):
        raise ConfigError(f"models must be torch modules by name, at least one; given: {models!r}")
    for name in models:
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
            raise ConfigError(
                f"a model is named {name!r}; expected a word without dots that is no method of torch's ModuleDict"
            )
    if strangers := [str(name) for name in asked if name not in models]:
        raise ConfigError(
            f"there is no model {choices(strangers)}. There are: {choices(models)}.{suggestion(strangers[0], models)}"
        )
