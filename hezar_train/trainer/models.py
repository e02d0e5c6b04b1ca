"""The protocol between the loop and a user's model: how to call it, where its loss comes from.

Every part is optional. A model takes a tensor, a tuple or keywords; returns a tensor, a mapping or a `ModelOutput`;
and brings its loss as `compute_loss`, through the config's `criterion`, or as `outputs["loss"]`, in this order.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.errors import ConfigError, DataError, choices

__all__ = ["ModelCaller", "as_outputs", "build_criterion", "labels_of", "others_of"]

LABEL_KEYS = ("labels", "label")


class ModelCaller:
    """Call a model with the batches it understands; signatures are read once, from the unwrapped model."""

    def __init__(
        self, model: Callable[..., Any], unwrapped: nn.Module, criterion: Callable[..., torch.Tensor] | None
    ) -> None:
        self._model, self._criterion = model, criterion
        self._parameters = inspect.signature(unwrapped.forward).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._accepted: dict[tuple[str, ...], list[str] | None] = {}
        self._own_loss = getattr(unwrapped, "compute_loss", None)
        self._own_loss_names = _names_of(self._own_loss)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Run the model on a batch; return its outputs as a new dict, a bare tensor under "logits"."""
        if isinstance(batch, list | tuple) and batch:
            return as_outputs(self._model(*batch[:-1] if len(batch) > 1 else batch))
        if isinstance(batch, torch.Tensor):
            return as_outputs(self._model(batch))
        if isinstance(batch, Mapping):
            return as_outputs(self._model(**self._arguments(batch)))
        raise DataError(
            f"a batch of type {type(batch).__name__} was given; expected a mapping of the model's arguments, a "
            "tensor, or a tuple (inputs..., labels). Change what the data_collator returns."
        )

    def loss(self, outputs: Mapping[str, Any], labels: Any, others: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss: the model's `compute_loss`, else the criterion, else what the model returned."""
        if self._own_loss is not None:
            known = {**others, **outputs, "labels": labels}
            names = self._own_loss_names
            found: torch.Tensor = self._own_loss(**{k: v for k, v in known.items() if names is None or k in names})
        elif self._criterion is not None:
            found = self._criterion(*_fitted(_logits(outputs), labels, self._criterion))
        elif outputs.get("loss") is not None:
            found = outputs["loss"]
        else:
            raise DataError(
                f"no loss: the model has no compute_loss(), returned no 'loss' (it returned: {choices(outputs)}), and "
                "criterion is not set. Set criterion='CrossEntropyLoss' (any loss of torch.nn), or return a loss."
            )
        return found if found.ndim == 0 else found.mean()

    def _arguments(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._takes_all:
            return batch
        keys = tuple(batch)
        if keys not in self._accepted:
            self._accepted[keys] = self._choose(keys)
        accepted = self._accepted[keys]
        return batch if accepted is None else {key: batch[key] for key in accepted}

    def _choose(self, keys: tuple[str, ...]) -> list[str] | None:
        """Return the keys that forward() takes, None for all of them; raise if it lacks one it needs."""
        accepted = [key for key in keys if key in self._parameters]
        needed = [
            name for name, p in self._parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]
        missing = [name for name in needed if name not in accepted]
        if missing:
            raise DataError(
                f"the model's forward() needs {choices(missing)}, but the batch has only: {choices(keys)}. Rename "
                "the keys in the data_collator or override prepare_input_batch()."
            )
        return None if len(accepted) == len(keys) else accepted


def labels_of(batch: Any) -> Any:
    """Find a batch's labels: under "labels" or "label", or last in a tuple."""
    if isinstance(batch, list | tuple):
        return batch[-1] if len(batch) > 1 else None
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    return None


def others_of(batch: Any) -> Mapping[str, Any]:
    """Return what a batch holds beside its labels, by name."""
    if not isinstance(batch, Mapping):
        return {}
    return {key: value for key, value in batch.items() if key != "labels"}


def as_outputs(outputs: Any) -> dict[str, Any]:
    """Return what a model gave as a new dict, a bare tensor under "logits", or "loss" if it is a single number."""
    if isinstance(outputs, torch.Tensor):
        return {"loss" if outputs.ndim == 0 else "logits": outputs}
    if isinstance(outputs, Mapping):
        return dict(outputs)
    raise DataError(
        f"the model returned a {type(outputs).__name__}; expected a tensor (the logits, or a 0-d loss) or a "
        "mapping such as {'logits': ..., 'loss': ...}."
    )


def build_criterion(name: str | None) -> Callable[..., torch.Tensor] | None:
    """Build a loss of `torch.nn` by name, or call what a dotted path names."""
    if name is None:
        return None
    if "." not in name:
        return getattr(nn, name)()  # type: ignore[no-any-return]
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"criterion={name!r} cannot be imported: {error}") from error
    return found() if isinstance(found, type) else found  # type: ignore[no-any-return]


def _logits(outputs: Mapping[str, Any]) -> torch.Tensor:
    if "logits" not in outputs:
        raise DataError(f"criterion is set, but the model returned no 'logits': it returned {choices(outputs)}.")
    return outputs["logits"]  # type: ignore[no-any-return]


def _fitted(logits: torch.Tensor, labels: Any, criterion: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring logits and labels to the shapes that losses expect."""
    if labels is None:
        raise DataError("criterion is set, but the batch has no labels. Put them under 'labels', or last in the tuple.")
    if isinstance(criterion, nn.CrossEntropyLoss) and logits.ndim > 2 and labels.ndim == logits.ndim - 1:
        return logits.flatten(0, -2), labels.flatten()
    if logits.ndim == labels.ndim + 1 and logits.shape[-1] == 1:
        return logits.squeeze(-1), labels  # (n, 1) against (n,) would silently broadcast to (n, n)
    if labels.ndim == logits.ndim + 1 and labels.shape[-1] == 1:
        return logits, labels.squeeze(-1)
    return logits, labels


def _names_of(function: Callable[..., Any] | None) -> frozenset[str] | None:
    """Return the keywords a function takes, None if it takes all."""
    if function is None:
        return frozenset()
    parameters = inspect.signature(function).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else frozenset(parameters)
