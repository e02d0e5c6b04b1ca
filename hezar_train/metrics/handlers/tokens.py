"""Handlers of tasks that decide about each token: sequence labelling and language modelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from hezar_train.errors import ConfigError
from hezar_train.metrics.decisions import MadeOnce, largest
from hezar_train.metrics.handlers.handler import Decode, MetricsHandler
from hezar_train.metrics.metric import IGNORED_LABEL
from hezar_train.metrics.registry import build_metric
from hezar_train.metrics.sample_losses import num_counted, of_tokens
from hezar_train.metrics.spans import EntityScores

__all__ = ["LanguageModelingHandler", "SequenceLabelingHandler", "TokenHandler"]

TAGS = "BIESLU"


class TokenHandler(MetricsHandler):
    """A decision per token, the largest logit's."""

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        super().__init__(metrics, trainer)
        self._decided = MadeOnce()

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        logits = outputs["logits"]
        return self._decided.get(logits, partial(largest, logits))

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        logits = outputs.get("logits")
        if logits is None or logits.ndim != 3 or logits.shape[:2] != labels.shape:
            return None
        return of_tokens(logits, self.counted(labels))

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        return num_counted(self.counted(labels))

    def counted(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels as the logits at the same places are judged by."""
        return labels


class SequenceLabelingHandler(TokenHandler):
    """A label per token, the largest logit's; entities are compared whole."""

    valid_metrics = ("seqeval", "token_accuracy", "confusion_matrix")
    default_metrics = ("seqeval",)

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        self._has_tags = True
        super().__init__(metrics, trainer)

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        if not label_names and self.is_default:
            self.metrics = [build_metric("token_accuracy")]  # entities need the labels' names
        if label_names and not any(_has_tag(name) for name in label_names.values()):
            self._has_tags = False
            self.metrics = self._built()
        super().expect(label_names, decode)
        self._refuse_nameless()

    def options(self) -> dict[str, Any]:
        return {} if self._has_tags else {"add_prefix": True}

    def _refuse_nameless(self) -> None:
        reads_ids = type(self).predictions is TokenHandler.predictions
        counted = [metric.unwrapped for metric in self.metrics]
        if reads_ids and any(isinstance(one, EntityScores) and not one.knows_ids for one in counted):
            raise ConfigError(
                "seqeval needs the names of the labels: put id2label into the model's config, or into the metric's "
                "options, as in MetricConfig('seqeval', options={'id2label': ['O', 'B-PER', 'I-PER']})."
            )


class LanguageModelingHandler(TokenHandler):
    """The next token, or the masked one: how likely the right one was, and how often it was the first choice."""

    valid_metrics = ("perplexity", "token_accuracy", "top_k_accuracy")
    default_metrics = ("perplexity", "token_accuracy")

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None, *, is_causal: bool = True) -> None:
        self._is_causal = is_causal
        super().__init__(metrics, trainer)

    def options(self) -> dict[str, Any]:
        return {"causal": self._is_causal}

    def counted(self, labels: torch.Tensor) -> torch.Tensor:
        # Labels move, not logits: these would be copied.
        return pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if self._is_causal else labels

    def compared(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        return self.predictions(outputs, labels), self.counted(self.targets(outputs, labels))

    def scores(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        logits, targets = super().scores(outputs, labels)
        return (logits[:, :-1], targets[:, 1:]) if self._is_causal else (logits, targets)


def _has_tag(label: str) -> bool:
    """Tell whether a label begins or ends with a tag, as B-PER and PER-B do."""
    return label in TAGS or (label[:1] in TAGS and label[1:2] == "-") or (label[-1:] in TAGS and label[-2:-1] == "-")
