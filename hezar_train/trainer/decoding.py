"""From ids to text and from a batch to generated ids: what the model or its preprocessor offers for that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.errors import DataError
from hezar_train.metrics import GENERATED_KEYS, without_ignored
from hezar_train.trainer.models import LABEL_KEYS

NAMELESS = "LABEL_"  # what transformers calls labels that nobody named

__all__ = ["decoder_of", "generates", "generator_of", "label_names_of"]


def label_names_of(model: nn.Module) -> Mapping[int, str] | None:
    """Return the names of the labels by their ids, where the model's config has them."""
    names = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(names, Mapping) or all(str(name).startswith(NAMELESS) for name in names.values()):
        return None
    return {int(number): str(name) for number, name in names.items()}


def decoder_of(model: nn.Module, preprocessor: Any) -> Callable[[Any], list[str]] | None:
    """Return how ids become texts: a tokenizer's `batch_decode`, else the model's `post_process`."""
    tokenizer = _tokenizer_of(preprocessor)
    if tokenizer is not None:
        filler = getattr(tokenizer, "pad_token_id", None) or 0

        def decode(ids: Any) -> list[str]:
            found: list[str] = tokenizer.batch_decode(without_ignored(_ids(ids), filler), skip_special_tokens=True)
            return found

        return decode
    if not callable(getattr(model, "post_process", None)):
        return None
    config = getattr(model, "config", None)
    filler = getattr(config, "pad_token_id", None) or getattr(config, "blank_id", None) or 0

    def post_process(ids: Any) -> list[str]:
        return [_text(one) for one in model.post_process(_decodable(ids, filler))]  # type: ignore[operator]

    return post_process if _is_equipped(model, post_process) else None


def generates(model: nn.Module) -> bool:
    """Tell whether a model can generate: it says so, or transformers does for it."""
    if not callable(getattr(model, "generate", None)):
        return False
    told = getattr(model, "can_generate", None)
    return bool(told()) if callable(told) else bool(getattr(model, "is_generative", True))


def generator_of(model: nn.Module, options: Mapping[str, Any] | None) -> Callable[[Any], Any]:
    """Return how a batch becomes generated ids: `generate` with what it takes of the batch, and the options."""
    named = inspect.signature(model.generate).parameters  # type: ignore[arg-type]
    known = inspect.signature(model.forward).parameters

    def generate(batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            raise DataError(f"generate() needs a batch with names; this one is a {type(batch).__name__}")
        inputs = {key: value for key, value in batch.items() if key not in LABEL_KEYS}
        chosen = {key: value for key, value in inputs.items() if key in named}
        if not chosen:  # transformers' generate takes the model's own arguments through **kwargs
            chosen = {key: value for key, value in inputs.items() if key in known and not key.startswith("decoder_")}
        return model.generate(**chosen, **(options or {}))  # type: ignore[operator]

    return generate


def _is_equipped(model: nn.Module, post_process: Callable[[Any], list[str]]) -> bool:
    """Tell whether `post_process` works; a model that lacks a preprocessor may not need it for that."""
    if getattr(model, "preprocessor", model) is not None:
        return True
    try:
        post_process(torch.zeros(1, 1, dtype=torch.long))
    except AttributeError:  # it asks the missing preprocessor for its tokenizer
        return False
    return True


def _tokenizer_of(preprocessor: Any) -> Any:
    for one in (preprocessor, getattr(preprocessor, "tokenizer", None)):
        if callable(getattr(one, "batch_decode", None)):
            return one
    return None


def _ids(generated: Any) -> torch.Tensor:
    if isinstance(generated, Mapping):
        generated = next((generated[key] for key in GENERATED_KEYS if key in generated), generated)
    return torch.as_tensor(generated)


def _decodable(ids: Any, filler: int) -> Any:
    return without_ignored(ids, filler) if isinstance(ids, torch.Tensor) else ids


def _text(one: Any) -> str:
    return str(one["text"] if isinstance(one, Mapping) else getattr(one, "text", one))
