"""Handlers of tasks whose answer is a text: what a model generated, or its largest logits, is decoded and compared.

How ids become text is told from outside (`decode`). A batch is decoded once, whoever asks for its texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics.decisions import MadeOnce, largest
from hezar_train.metrics.handlers.handler import Decode, MetricsHandler
from hezar_train.metrics.metric import IGNORED_LABEL
from hezar_train.metrics.text_edit import edit_distance

__all__ = [
    "GENERATED_KEYS",
    "ErrorRateHandler",
    "TextGenerationHandler",
    "TextHandler",
    "generated_ids",
    "without_ignored",
]

GENERATED_KEYS = ("generated_ids", "sequences")
"""Where a model's `generate` puts the ids, if it returns a mapping."""


class TextHandler(MetricsHandler):
    """Texts: what the model generated, or the largest logits, against the labels, both decoded.

    `decode` returns a list of texts for ids; it may have methods `of_labels(labels)` and `of_logits(logits,
    num_samples)` where these want another reading.
    """

    valid_metrics = ("cer", "wer", "rouge", "bleu", "chrf")
    reads_text = True
    sample_loss_name = "error rate"

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        super().__init__(metrics, trainer)
        self._predicted, self._expected = MadeOnce(), MadeOnce()

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        super().expect(label_names, decode)
        if self.decode is not None or not self.metrics:
            return
        if not self.is_default:
            raise ConfigError(
                "text metrics need a way from ids to text: pass a preprocessor with batch_decode() (a tokenizer), use "
                "a model with post_process(), or set handler.decode to a function that returns a list of texts."
            )
        self.metrics = []  # nobody asked for metrics: the loss alone will do

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        generated = outputs.get("generated")
        if generated is not None:
            return self._predicted.get(generated_ids(generated), partial(self._texts, generated))
        logits = outputs["logits"]
        return self._predicted.get(logits, partial(self._texts_of_logits, logits, labels))

    def targets(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        if isinstance(labels, list):
            return labels
        read = getattr(self.decode, "of_labels", self._texts)
        return self._expected.get(labels, partial(read, labels))

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        if not self.metrics:
            return None
        pairs = zip(self.predictions(outputs, labels), self.targets(outputs, labels), strict=True)
        return torch.tensor([edit_distance(got, right) / max(1, len(right)) for got, right in pairs])

    def _texts_of_logits(self, logits: torch.Tensor, labels: Any) -> list[str]:
        num_samples = None if labels is None else len(labels)
        read = getattr(self.decode, "of_logits", None)
        found = self._texts(largest(logits)) if read is None else read(logits, num_samples)
        if num_samples not in (None, len(found)):
            raise DataError(
                f"logits of shape {tuple(logits.shape)} gave {len(found)} texts for {num_samples} labels; expected "
                "(samples, places, classes). If the model is of the CTC kind, with time first, name its blank: "
                "config.blank_id; or evaluate what it generates: evaluate_with_generate=True."
            )
        return found

    def _texts(self, ids: Any) -> list[str]:
        if self.decode is None:
            raise DataError("there is no way from ids to text: set decode")
        return self.decode(ids)


class ErrorRateHandler(TextHandler):
    """Texts that were read or heard."""

    default_metrics = ("cer", "wer")


class TextGenerationHandler(TextHandler):
    """Texts that were written."""

    default_metrics = ("rouge",)


def generated_ids(generated: Any) -> Any:
    """Return the ids of what a model generated; a mapping without any comes back as it is."""
    if not isinstance(generated, Mapping):
        return generated
    return next((generated[key] for key in GENERATED_KEYS if key in generated), generated)


def without_ignored(labels: torch.Tensor, filler: int) -> torch.Tensor:
    """Replace ignored labels by an id that can be decoded."""
    return torch.where(labels == IGNORED_LABEL, filler, labels)
