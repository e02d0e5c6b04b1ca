"""How a user's model is run: what it is called with, and where its loss comes from.

Every part is optional. A model takes a tensor, a tuple or keywords; returns a tensor, a mapping or a `ModelOutput`;
and brings its loss as `compute_loss`, through the config's `criterion`, or as `outputs["loss"]`, in this order.

What a loss is the mean of, and so how much it counts in its window, is in `loss_weight`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import base_of, unwrap
from hezar_train.data import form_of
from hezar_train.errors import ConfigError, DataError, HezarTrainError, a_kind, choices, suggestion
from hezar_train.loop import Context
from hezar_train.optim.lookup import import_dotted, is_dotted
from hezar_train.runtime import logger
from hezar_train.trainer.loss_refusals import (
    DIFFERENCE_LOSSES,
    REFUSED_BY_LOSS,
    needs_arguments,
    no_labels,
    no_logits,
    no_loss_tensor,
    no_tensor,
    refused_loss,
    unlike_shapes,
    usable_criterion,
)
from hezar_train.trainer.model_refusals import remedy_for

__all__ = [
    "DeviceHold",
    "ModelRunner",
    "Regularizer",
    "as_outputs",
    "build_criterion",
    "find_regularizer",
    "forward_signature",
    "labels_of",
    "others_of",
    "refuse_unused_criterion",
    "register_regularizer",
]

LABEL_KEYS = ("labels", "label")
MAPPING = (dict, Mapping)
"""For isinstance(), which asks them in this order: `Mapping` alone takes ten times as long to see a dict."""
TAKEN_NAMES = frozenset({"self", "model_outputs"})
"""Names that no key of a batch can have, because it is passed to compute_loss() by name."""


class ModelRunner:
    """Call a model with the batches it understands; signatures are read once, from the unwrapped model."""

    def __init__(self, model: nn.Module, criterion: Callable[..., torch.Tensor] | None) -> None:
        unwrapped = unwrap(model)
        self._model, self._criterion = model, criterion
        self._signature = forward_signature(unwrapped)
        self._parameters = self._signature.parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._accepted: dict[tuple[str, ...], list[str] | None] = {}
        self._own_loss = getattr(unwrapped, "compute_loss", None)
        self._own_loss_names = _names_of(self._own_loss)
        self._own_loss_needs = frozenset() if self._own_loss is None else _needs_of(self._own_loss)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Run the model on a batch; return its outputs as a new dict, a bare tensor under "logits"."""
        try:
            if isinstance(batch, list | tuple) and batch:
                return as_outputs(self._model(*batch[:-1] if len(batch) > 1 else batch))
            if isinstance(batch, torch.Tensor):
                return as_outputs(self._model(batch))
            if isinstance(batch, MAPPING):
                return as_outputs(self._model(**self._arguments(batch)))
        except Exception as error:
            self._tell_of(batch, error)
            raise
        raise DataError(
            f"the batch is {form_of(batch)}; expected a mapping of the model's arguments, a tensor, or a tuple "
            "(inputs..., labels). Change what the dataset, the data_collator or prepare_input_batch() returns."
        )

    def _tell_of(self, batch: Any, error: Exception) -> None:
        """Note what the model was called with; refuse a batch of more or fewer parts than it takes."""
        name = type(unwrap(self._model)).__name__
        num_inputs = max(len(batch) - 1, 1) if isinstance(batch, list | tuple) else 1
        is_named = isinstance(batch, Mapping)
        if isinstance(error, TypeError) and not is_named and not _can_take(self._signature, num_inputs):
            raise DataError(
                f"the batch is {form_of(batch)}, so that {name}.forward{self._signature} is called with "
                f"{num_inputs} input{'s' * (num_inputs != 1)}, which it does not take. Expected (inputs..., labels), "
                "of which the last is not given to forward(), or a mapping, of which forward() gets what it names: "
                "change the dataset, the data_collator or forward()."
            ) from error
        if not isinstance(error, HezarTrainError):
            model = unwrap(self._model)
            has_labels = isinstance(batch, list | tuple) and len(batch) > 1
            lacks = self._own_loss is None and self._criterion is not None and labels_of(batch) is None
            error.add_note(
                f"This was raised while the model {name} was called with a batch that is {form_of(batch)}"
                f"{', of which the last counts as the labels' if has_labels else ''}. "
                f"{remedy_for(error, model, batch, lacks_labels=lacks and model.training)}"
            )

    def loss(self, outputs: Mapping[str, Any], labels: Any, others: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss: the model's `compute_loss`, else the criterion, else what the model returned."""
        if self._own_loss is not None:
            known = {**others, **outputs, "labels": labels}
            names = self._own_loss_names
            given = {key: value for key, value in known.items() if names is None or key in names}
            self._refuse_missing(given, known)
            found: torch.Tensor = self._own_loss(**given)
        elif self._criterion is not None:
            if labels is None:
                raise no_labels(others)
            logits, labels = _fitted(_logits(outputs), labels, self._criterion)
            try:
                found = self._criterion(logits, labels)
            except REFUSED_BY_LOSS as error:
                _tell_of_loss(self._criterion, logits, labels, error)
                raise
        elif outputs.get("loss") is not None:
            found = outputs["loss"]
        else:
            raise DataError(
                f"no loss: the model has no compute_loss(), returned no 'loss' (it returned: {choices(outputs)}), and "
                "criterion is not set. Set criterion='CrossEntropyLoss' or another loss of torch.nn, or return a loss."
            )
        if not isinstance(found, torch.Tensor) or _is_nothing(found):
            raise no_loss_tensor(self._source_of_loss(), found)
        return found if found.ndim == 0 else found.mean()

    @property
    def uses_criterion(self) -> bool:
        """Whether the criterion, if there is one, is called: the model has no loss of its own."""
        return self._own_loss is None or self._criterion is None

    def _refuse_missing(self, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Raise if the model's own loss needs what neither the batch nor the outputs have."""
        if missing := self._own_loss_needs - given.keys():
            raise DataError(
                f"the model's compute_loss() needs {choices(missing)}, which neither the batch nor the outputs have. "
                f"There are: {choices(known)}. Name the arguments so, return them from forward(), add them to the "
                "samples, or give them a default."
            )

    def _source_of_loss(self) -> str:
        if self._own_loss is not None:
            return "the model's compute_loss()"
        return "the model's outputs" if self._criterion is None else "the criterion"

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
        by_position = [key for key in accepted if self._parameters[key].kind is inspect.Parameter.POSITIONAL_ONLY]
        if by_position:
            raise DataError(
                f"the model's forward{self._signature} takes {choices(by_position)} by position only, and what a "
                "mapping holds is given by name. Take the '/' out of forward(), or make the samples tuples "
                "(inputs..., labels)."
            )
        needed = [
            name for name, p in self._parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]
        missing = [name for name in needed if name not in accepted]
        if missing:
            raise DataError(
                f"the model's forward() needs {choices(missing)}, but the batch has only: {choices(keys)}. "
                "forward() gets each key as an argument of its name: name its arguments so, or give the samples such "
                "keys in the dataset or the data_collator, or override prepare_input_batch()."
            )
        return None if len(accepted) == len(keys) else accepted


def refuse_unused_criterion(runners: Iterable[ModelRunner], *, resumes: bool) -> None:
    """Raise if no model would call the criterion; warn where a run that began so goes on."""
    if any(runner.uses_criterion for runner in runners):
        return
    words = (
        "criterion is set, but the model has a compute_loss() of its own, which comes first: the criterion would never "
        "be called. Take `criterion` out of the config, or compute_loss() out of the model; to use both, override "
        "compute_loss() of the Trainer."
    )
    if not resumes:
        raise ConfigError(words)
    logger.warning("%s", words)


def labels_of(batch: Any) -> Any:
    """Find a batch's labels: under "labels" or "label", or last in a tuple."""
    if isinstance(batch, MAPPING):
        for key in LABEL_KEYS:
            if key in batch:
                return batch[key]
        return None
    if isinstance(batch, list | tuple):
        return batch[-1] if len(batch) > 1 else None
    return None


def others_of(batch: Any) -> Mapping[str, Any]:
    """Return what a batch holds beside "labels", by name; labels under "label" are told under that name, too."""
    if not isinstance(batch, MAPPING):
        return {}
    if not TAKEN_NAMES.isdisjoint(batch):
        raise DataError(
            f"the batch has the key {choices(TAKEN_NAMES & batch.keys())}, which is the name of an argument of "
            "compute_loss(model_outputs, labels, **others). Give it another name in the dataset or the data_collator."
        )
    return {key: value for key, value in batch.items() if key != "labels"}


def as_outputs(outputs: Any) -> dict[str, Any]:
    """Return what a model gave as a new dict, a bare tensor under "logits", or "loss" if it is a single number."""
    if isinstance(outputs, torch.Tensor):
        return {"loss" if outputs.ndim == 0 else "logits": outputs}
    if isinstance(outputs, Mapping):
        return dict(outputs)
    hint = " Is a return missing in forward()?" if outputs is None else ""
    given = form_of(outputs) if isinstance(outputs, list | tuple) else a_kind(outputs)
    raise DataError(
        f"the model returned {given}; expected a tensor (the logits, or a "
        f"0-d loss) or a mapping: return {{'logits': ..., 'loss': ...}}, or one of them.{hint}"
    )


def forward_signature(model: nn.Module) -> inspect.Signature:
    """Return what a model is called with; of adapters that hand everything on, what the model beneath takes."""
    own = inspect.signature(model.forward)
    hands_on = all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in own.parameters.values())
    return inspect.signature(base_of(model).forward) if hands_on else own


def build_criterion(name: str | None) -> Callable[..., torch.Tensor] | None:
    """Build a loss of `torch.nn` by name, or call what a dotted path names."""
    if name is None:
        return None
    if "." not in name:
        try:
            return getattr(nn, name)()  # type: ignore[no-any-return]
        except TypeError as error:
            raise needs_arguments(f"criterion={name!r}", error) from error
    return usable_criterion(f"criterion={name!r}", import_dotted(name, setting="criterion"))


def _tell_of_loss(criterion: object, logits: torch.Tensor, labels: torch.Tensor, error: Exception) -> None:
    """Say why a loss of torch's has failed; note what a user's own was called with."""
    if _is_torchs(criterion):
        raise refused_loss(criterion, logits, labels, error) from error
    error.add_note(f"This was raised by the criterion for logits ({form_of(logits)}), labels ({form_of(labels)}).")


def _is_torchs(criterion: object) -> bool:
    module = type(criterion).__module__ if isinstance(criterion, nn.Module) else getattr(criterion, "__module__", None)
    return str(module).partition(".")[0] in {"torch", "None", "builtins"}


def _can_take(signature: inspect.Signature, num_inputs: int) -> bool:
    try:
        signature.bind(*[None] * num_inputs)
    except TypeError:
        return False
    return True


def _is_nothing(loss: torch.Tensor) -> bool:
    """Tell whether a loss holds no number and comes from no model; one that does may be of a batch without a label."""
    return not loss.numel() and torch.is_grad_enabled() and not loss.requires_grad


def _logits(outputs: Mapping[str, Any]) -> torch.Tensor:
    if "logits" not in outputs:
        raise no_logits(outputs)
    return outputs["logits"]  # type: ignore[no-any-return]


def _fitted(logits: torch.Tensor, labels: Any, criterion: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring logits and labels to the shapes that losses expect."""
    if not (isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor)):
        raise no_tensor(logits, labels)
    if isinstance(criterion, nn.CrossEntropyLoss) and logits.ndim > 2 and labels.ndim == logits.ndim - 1:
        return logits.flatten(0, -2), labels.flatten()
    if logits.ndim == labels.ndim + 1 and logits.shape[-1] == 1:
        return logits.squeeze(-1), labels  # (n, 1) against (n,) would silently broadcast to (n, n)
    if labels.ndim == logits.ndim + 1 and labels.shape[-1] == 1:
        return logits, labels.squeeze(-1)
    if isinstance(criterion, DIFFERENCE_LOSSES) and logits.shape != labels.shape:
        raise unlike_shapes(criterion, logits, labels)  # one would be spread over the other, which nobody meant
    return logits, labels


def _names_of(function: Callable[..., Any] | None) -> frozenset[str] | None:
    """Return the keywords a function takes, None if it takes all."""
    if function is None:
        return frozenset()
    parameters = inspect.signature(function).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else frozenset(parameters)


def _needs_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the arguments that a function has no default for."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in kinds and p.default is p.empty)


class DeviceHold:
    """Keep a model on its device while routines run; with offloading, only while the outermost one does."""

    def __init__(self, model: nn.Module, device: torch.device, *, offloads: bool) -> None:
        self._model, self._device, self._offloads, self._depth = model, device, offloads, 0

    def follow(self, *, offloads: bool) -> None:
        """Offload from the next routine on, or no longer."""
        self._offloads = offloads

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the model on its device while the body runs; bodies may nest."""
        moves = self._offloads and self._depth == 0
        self._depth += 1
        if moves:
            self._model.to(self._device)
        try:
            yield
        finally:
            self._depth -= 1
            if moves:
                self._model.to("cpu")


Regularizer = Callable[[Context], object]

_REGISTERED: dict[str, Regularizer] = {}


def register_regularizer(name: str, regularizer: Regularizer) -> None:
    """Make a function of the context known as `regularizer=name`."""
    _REGISTERED[name] = regularizer


def find_regularizer(name: str | None) -> Regularizer | None:
    """Return what a config names; None for none."""
    if name is None:
        return None
    if name in _REGISTERED:
        return _REGISTERED[name]
    if not is_dotted(name):
        raise ConfigError(
            f"regularizer={name!r} is not registered. Registered: {choices(_REGISTERED) or 'none'}."
            f"{suggestion(name, _REGISTERED)} Register a function f(ctx) that returns what is added to the loss, in "
            f"recipe.py or before the Trainer is made: hezar_train.trainer.model_runner.register_regularizer({name!r}, "
            "f); or name one of an installed package by its dotted path, such as 'my_package.my_module.l2'. Set "
            "regularizer_mu, its factor, too: it is 0.0 if left out."
        )
    found: Regularizer = import_dotted(name, setting="regularizer")
    if not callable(found):
        raise ConfigError(
            f"regularizer={name!r} is {a_kind(found)}, which cannot be called. Expected the name of a registered "
            "regularizer, or the dotted path of a function f(ctx) that returns what is added to the loss: correct the "
            "path."
        )
    return found
