"""From ids to text and from a batch to generated ids: what the model or its preprocessor offers for that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.errors import DataError
from hezar_train.metrics import GENERATED_KEYS, IGNORED_LABEL, largest, without_ignored
from hezar_train.trainer.model_runner import LABEL_KEYS, forward_signature

__all__ = [
    "TextDecoder",
    "collapse",
    "decoded_inputs",
    "decoder_of",
    "generates",
    "generator_of",
    "label_names_of",
]

NAMELESS = "LABEL_"  # what transformers calls labels that nobody named


def label_names_of(model: nn.Module) -> Mapping[int, str] | None:
    """Return the names of the labels by their ids, where the model's config has them."""
    names = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(names, Mapping) or all(str(name).startswith(NAMELESS) for name in names.values()):
        return None
    return {int(number): str(name) for number, name in names.items()}


class TextDecoder:
    """How ids become texts: called with what was generated; labels and logits are read by methods of their own.

    `blank` is the class of a CTC model that stands for no symbol. Such a model repeats a symbol for as long as it
    lasts, so what it predicts is collapsed; labels never are, for there a letter that is written twice is two letters.
    """

    def __init__(
        self,
        to_texts: Callable[[Any], list[str]],
        blank: int | None = None,
        *,
        is_time_first: bool = False,
        collapses_generated: bool = False,
    ) -> None:
        self._to_texts, self._blank = to_texts, blank
        self._is_time_first, self._collapses_generated = is_time_first, collapses_generated

    def __call__(self, generated: Any) -> list[str]:
        """Return the texts of generated ids."""
        return self._to_texts(self._collapsed(_ids(generated)) if self._collapses_generated else generated)

    def of_labels(self, labels: Any) -> list[str]:
        """Return the texts of labels, as they are."""
        return self._to_texts(labels)

    def of_logits(self, logits: torch.Tensor, num_samples: int | None) -> list[str]:
        """Return the texts of the largest logits; a CTC model may give them as `nn.CTCLoss` takes them, time first."""
        if self._is_time_first and num_samples in (None, logits.shape[1]):
            logits = logits.transpose(0, 1)
        return self._to_texts(self._collapsed(largest(logits)))

    def _collapsed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self._blank is None else collapse(ids, self._blank)


def collapse(ids: torch.Tensor, blank: int) -> torch.Tensor:
    """Return rows with repeats merged and blanks behind what is left, as a greedy CTC decoder reads them."""
    is_kept = ids != blank
    is_kept[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    order = (~is_kept).byte().argsort(dim=1, stable=True)
    return ids.masked_fill(~is_kept, blank).gather(1, order)


def decoder_of(model: nn.Module, preprocessor: Any) -> TextDecoder | None:
    """Return how ids become texts: a tokenizer's `batch_decode`, else the model's `post_process`."""
    tokenizer = _tokenizer_of(preprocessor)
    if tokenizer is not None:
        return _decoder_by_tokenizer(model, tokenizer)
    if not callable(getattr(model, "post_process", None)):
        return None
    config = getattr(model, "config", None)
    filler = getattr(config, "pad_token_id", None) or getattr(config, "blank_id", None) or 0

    def post_process(ids: Any) -> list[str]:
        return [_text(one) for one in model.post_process(_decodable(ids, filler))]  # type: ignore[operator]

    if not _is_equipped(model, post_process):
        return None
    blank = _blank_of(model)
    return TextDecoder(post_process, blank, is_time_first=blank is not None)


def decoded_inputs(preprocessor: Any, rows: list[list[int]]) -> list[str] | None:
    """Return the texts of a model's inputs, by a tokenizer's `batch_decode` or `decode`; None where there is none."""
    tokenizer = _tokenizer_of(preprocessor)
    if tokenizer is not None:
        return [str(tokenizer.batch_decode([row], skip_special_tokens=True)[0]) for row in rows]
    decode = getattr(preprocessor, "decode", None)
    return [str(decode(row)) for row in rows] if callable(decode) else None


def _decoder_by_tokenizer(model: nn.Module, tokenizer: Any) -> TextDecoder:
    filler = getattr(tokenizer, "pad_token_id", None) or 0
    # Left to itself a CTC tokenizer merges repeats in labels too, and drops the blanks between two letters first.
    groups = _groups_repeats(tokenizer)
    options = {"group_tokens": False} if groups else {}

    def decode(ids: Any) -> list[str]:
        rows = without_ignored(_ids(ids), filler)
        found: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True, **options)
        return found

    if groups and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return TextDecoder(decode, filler, collapses_generated=True)
    blank = _blank_of(model)
    return TextDecoder(decode, blank, is_time_first=blank is not None)


def _groups_repeats(tokenizer: Any) -> bool:
    """Tell whether a tokenizer decodes what a CTC model puts out, as that of Wav2Vec2 does."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
    ways = (getattr(inner, name, None) for name in ("_decode", "decode", "batch_decode"))
    return any("group_tokens" in _parameters_of(way) for way in ways if callable(way))


def _parameters_of(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # one that is not written in Python may not tell
        return ()


def _blank_of(model: nn.Module) -> int | None:
    """Return the blank of a model that is trained by `nn.CTCLoss` and says so, as Hezar's do; 0 is that loss's own."""
    blank = getattr(getattr(model, "config", None), "blank_id", None)
    if blank is None and getattr(model, "loss_func_name", None) == "ctc":
        return 0
    return None if blank is None else int(blank)


def generates(model: nn.Module) -> bool:
    """Tell whether a model can generate: it says so, or transformers does for it."""
    if not callable(getattr(model, "generate", None)):
        return False
    told = getattr(model, "can_generate", None)
    return bool(told()) if callable(told) else bool(getattr(model, "is_generative", True))


def generator_of(model: nn.Module, options: Mapping[str, Any] | None) -> Callable[[Any], Any]:
    """Return how a batch becomes generated ids: `generate` with what it takes of the batch, and the options.

    A decoder's batch may hold the answers behind their questions, with labels there (`hezar_train.data.chat`): then
    each row is cut before its answer, and what is returned are new tokens alone. It runs in full precision, as in
    Hezar: a model may hand its logits to code that knows no bf16.
    """
    named = inspect.signature(model.generate).parameters  # type: ignore[arg-type]
    known = forward_signature(model).parameters

    def generate(batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            raise DataError(f"generate() needs a batch with names; this one is a {type(batch).__name__}")
        if _holds_answers(model, batch):
            return _answers(model, batch, options or {})
        inputs = {key: value for key, value in batch.items() if key not in LABEL_KEYS}
        chosen = {key: value for key, value in inputs.items() if key in named}
        if not chosen:  # transformers' generate takes the model's own arguments through **kwargs
            chosen = {key: value for key, value in inputs.items() if key in known and not key.startswith("decoder_")}
        with torch.autocast(_device_type(model), enabled=False):
            return model.generate(**chosen, **(options or {}))  # type: ignore[operator]

    return generate


def _holds_answers(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Tell whether a batch's labels are a part of its own tokens, behind others: answers to what stands before them."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", True):  # or no model of transformers
        return False
    if not isinstance(ids, torch.Tensor) or not isinstance(labels, torch.Tensor) or ids.shape != labels.shape:
        return False
    is_answer = labels != IGNORED_LABEL
    return bool((labels == ids)[is_answer].all() and not is_answer[:, :2].any())


def _answers(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any]) -> torch.Tensor:
    """Let a decoder write what follows each row's question, and return that alone; a row without labels is one."""
    ids, labels = batch["input_ids"], batch["labels"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    is_answer = labels != IGNORED_LABEL
    if bool((is_answer[:, 1:] & ~is_answer[:, :-1]).sum(1).gt(1).any()):
        raise DataError(
            "a sample to be evaluated by generation has several answers; expected one, behind all that is asked. "
            "Encode the evaluation data with answers='last'."
        )
    prompts = [row[kept & (answer.cumsum(0) == 0)] for row, kept, answer in zip(ids, mask, is_answer, strict=True)]
    width = max(map(len, prompts))
    rows = ids.new_full((len(prompts), width), _filler_of(model))
    seen = torch.zeros_like(rows)
    for row, is_seen, prompt in zip(rows, seen, prompts, strict=True):
        row[width - len(prompt) :], is_seen[width - len(prompt) :] = prompt, 1
    with torch.autocast(_device_type(model), enabled=False):
        written: torch.Tensor = model.generate(input_ids=rows, attention_mask=seen, **options)  # type: ignore[operator]
    return written[:, width:]


def _filler_of(model: nn.Module) -> int:
    """Return what fills rows on the left: the model's pad token, if it has one; it is masked in any case."""
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) else 0


def _device_type(model: nn.Module) -> str:
    first = next(model.parameters(), None)
    return "cpu" if first is None else first.device.type


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
