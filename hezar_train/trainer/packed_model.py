"""Whether a model can be trained on packed batches, or on batches whose size tokens decide: refused before it trains.

What can be known from its class and config is told in those words. What is left is tried: the model is run on two short
documents in one row, then with another first document. If the second one's outputs change, it sees the first.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.data import Lengths, PackingDataCollator, preserved_randomness
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import UNLIMITED
from hezar_train.runtime import Runtime, to_device
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer.evaluator import inference_mode
from hezar_train.trainer.model_runner import ModelRunner

__all__ = ["refuse_lone_samples", "refuse_unpackable"]

SEEING_ALL = (
    "ForMaskedLM",
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForPreTraining",
)
POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
POSITION_TABLE = re.compile(r"position|\bwpe$")
FIRST, OTHER_FIRST, SECOND = [0, 1, 0, 0], [1, 0, 1, 1], [1, 0, 1, 0, 1]
TOLERANCE = 1e-4


def refuse_lone_samples(model: nn.Module) -> None:
    """Raise for a model with batch normalisation, where a step may hold a single sample."""
    if any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules()):
        raise ConfigError(
            "global_batch_tokens and max_tokens_per_batch make steps of any number of samples, also of one, and the "
            "model has batch normalisation, whose statistics are those of a step. Count samples (batch_size; "
            "group_by_length goes with it), or use layer normalisation."
        )


def refuse_unpackable(model: nn.Module, runtime: Runtime, lengths: Lengths, *, weighs_labels: bool) -> None:
    """Raise if a model cannot take several documents in one row, or if its loss would be weighed wrongly."""
    bare = unwrap(model)
    inner: Any = getattr(bare, "get_base_model", lambda: bare)()  # of an adapter
    name = type(inner).__name__
    settings = getattr(inner, "config", None)
    if getattr(settings, "is_encoder_decoder", False):
        raise _refused(name, "it is an encoder with a decoder, whose inputs and outputs are two sequences")
    if name.endswith(SEEING_ALL):
        raise _refused(name, "each of its tokens sees all others of the row, so that documents would see each other")
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise _refused(name, "its forward() takes no position_ids, by which it could tell documents apart")
    if not weighs_labels:
        raise ConfigError(
            f"packing=True makes the loss of {name} a mean over labels, and it is weighed by samples. Set "
            "loss_weight='labels', or task='language_modeling'."
        )
    limit = _learned_positions(inner)
    if lengths.longest > limit:
        raise DataError(
            f"sample {int(lengths.tokens.argmax())} of the training data has {lengths.longest} tokens, and {name} has "
            f"learned {limit} positions. Truncate the samples where they are tokenized."
        )
    if _sees_another(model, runtime):
        raise _refused(name, "a document in a row changed with the one before it, so that it sees it")


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"packing=True cannot be used with {name}: {reason}. Use group_by_length or max_tokens_per_batch, which pad."
    )


def _learned_positions(model: nn.Module) -> int:
    """Return how many positions a model has an embedding for; those that are computed have no end."""
    tables = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and POSITION_TABLE.search(name)
    ]
    told = [getattr(getattr(model, "config", None), field, None) for field in POSITION_LIMITS]
    return min([*tables, *(one for one in told if isinstance(one, int))]) if tables else UNLIMITED


def _sees_another(model: nn.Module, runtime: Runtime) -> bool:
    """Tell whether what a model says of a document depends on the one before it in the row."""
    runner = ModelRunner(model if is_sharded(model) else unwrap(model), None)

    def second(first: list[int]) -> Any:
        batch = to_device(PackingDataCollator()([{"input_ids": first}, {"input_ids": SECOND}]), runtime.device)
        with runtime.autocast()():
            outputs = runner.forward(batch)
        logits = outputs.get("logits")
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != batch["input_ids"].shape:
            raise ConfigError(
                "packing=True needs a model that returns 'logits' for each token of a row, to see that documents do "
                "not see each other. Return them from forward()."
            )
        return logits[0, len(FIRST) :].float()

    with preserved_randomness(), inference_mode(model):
        one, other = second(FIRST), second(OTHER_FIRST)
    return bool((one - other).abs().max() > TOLERANCE * one.abs().max().clamp(min=1e-3))
