"""What an error of a model that was called with a batch means, and what to do; asked only after a call has failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["remedy_for"]

NO_FORWARD = re.compile(r"Module \[(\w+)\] is missing the required \"forward\" function")
UNLIKE_WIDTHS = re.compile(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)")
UNLIKE_DTYPES = (
    re.compile(r"must have the same dtype, but got (?P<given>[\w ]+) and (?P<own>[\w ]+)"),
    re.compile(r"Input type \((?P<given>[\w. ]+)\) and (?:bias|weight) type \((?P<own>[\w. ]+)\) should be the same"),
)
HOLDERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
USUAL = "If that is not what it takes, change the dataset, the data_collator or the model."
SWAPPED = "Are they in the wrong order? Return the inputs first and the label last: (inputs, label)."
OF_LAYERS = {
    "index out of range in self": (
        "An index is as high as its nn.Embedding has rows, or negative: has the tokenizer more tokens than those?"
    ),
    "more than 1 value per channel when training": (
        "A batch norm cannot learn from a single sample, and the last batch of an epoch may have one: set "
        "drop_last=True, or another batch_size."
    ),
    "Expected tensor for argument #1 'indices'": (
        "An nn.Embedding takes whole numbers: convert them in the dataset or the data_collator, x.long()."
    ),
}
"""What sentences of torch mean that name their layer."""
TO_FLOAT = "a tensor by x.float(), an array by x.astype('float32')"
NO_LABELS = (
    "It has no labels, which the criterion needs; expected samples (inputs..., label), or mappings with 'labels'. "
    "Change the dataset."
)


def remedy_for(error: Exception, model: nn.Module, batch: Any, *, lacks_labels: bool) -> str:
    """Say what a well-known sentence of torch means, and what to change."""
    words = str(error)
    if (found := NO_FORWARD.search(words)) is not None:
        return _about_forward(found[1])
    if lacks_labels:
        is_numbers = isinstance(batch, torch.Tensor) and not batch.is_floating_point()
        return NO_LABELS if is_numbers else f"{NO_LABELS} {_hint_of(error, batch)}".rstrip()
    if (found := UNLIKE_WIDTHS.search(words)) is not None:
        return f"{USUAL} {_about_width(model, batch, *map(int, found.groups()))}"
    if _unlike_dtypes(words) is not None:
        return SWAPPED if _is_swapped(batch) else f"{USUAL} {_hint_of(error, batch)}"
    return f"{USUAL} {_hint_of(error, batch)}".rstrip()


def _about_forward(name: str) -> str:
    if name in HOLDERS:
        return (
            f"A {name} only holds what is put into it and cannot be called: use torch.nn.Sequential, or call its "
            "layers one after the other in forward()."
        )
    return (
        f"The class {name} has no forward(); expected def forward(self, ...). Define it there: is its name misspelt, "
        "or its indentation wrong?"
    )


def _about_width(model: nn.Module, batch: Any, num_rows: int, given: int, expected: int) -> str:
    """Say which of two numbers is the layer's and which the data's."""
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if num_rows == 1 and isinstance(inputs, torch.Tensor) and inputs.shape == (given,):
        return f"A layer that takes {expected} features got one number a sample: give each sample {expected} numbers."
    is_of_samples = isinstance(inputs, torch.Tensor) and inputs.shape[-1:] == (given,)
    remedy = (
        f"{f'give every sample {expected}' if is_of_samples else 'change what it is given'}, or make it for {given}"
    )
    if not model.training:
        remedy = "samples to evaluate or to predict for must have the shape of those trained on"
    return f"A layer (such as torch.nn.Linear) that takes {expected} features got {given}: {remedy}."


def _is_swapped(batch: Any) -> bool:
    """Tell whether a batch looks as if its labels came first: whole numbers, one a sample, before rows of others."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(p, torch.Tensor) for p in batch):
        return False
    first, last = batch
    return not first.is_floating_point() and last.is_floating_point() and first.ndim < last.ndim


def _hint_of(error: Exception, batch: Any) -> str:
    if (known := next((hint for words, hint in OF_LAYERS.items() if words in str(error)), None)) is not None:
        return known
    if (found := _unlike_dtypes(str(error))) is not None:
        return _about_dtypes(*found)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(error, TypeError) and isinstance(parts, list | tuple) and any(isinstance(p, str) for p in parts):
        return "The model takes tensors: make numbers of texts (a tokenizer) in the dataset or the data_collator."
    if isinstance(error, TypeError) and isinstance(parts, list | tuple) and any(map(_is_untensored, parts)):
        return "Make tensors of lists and arrays, and numbers of texts (a tokenizer), in the dataset or data_collator."
    return ""


def _unlike_dtypes(words: str) -> tuple[str, str] | None:
    """Return the dtypes of what a layer was given and of its weights, in torch's words, if they were not the same."""
    found = next((found for pattern in UNLIKE_DTYPES if (found := pattern.search(words)) is not None), None)
    return None if found is None else (found["given"], found["own"])


def _about_dtypes(given: str, own: str) -> str:
    """Say which of both to convert: what is not float32, which torch calls Float."""
    told = f"A layer with weights of the type {own} got {given}"
    is_float = [name.lower().removeprefix("torch.").removesuffix("tensor") == "float" for name in (given, own)]
    if is_float == [True, False]:
        return f"{told}: convert the model, model.float()."
    if is_float == [False, True]:
        return f"{told}: convert the inputs to float32 in the dataset or the data_collator: {TO_FLOAT}."
    return f"{told}: convert both to float32: the model by model.float(); of the inputs {TO_FLOAT}."


def _is_untensored(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return True
    return isinstance(part, list | tuple) and bool(part) and isinstance(part[0], str | list | tuple | torch.Tensor)
