"""Metrics handlers: a batch's outputs and labels go in, mergeable counts are kept, one result comes out.

A handler turns what a model returned into what metrics read: class ids, label sequences, texts, values. It never keeps
logits and never averages per-batch values; the result is that of the whole set, for any batch size. A handler of your
own is a small class: name its metrics, and override `predictions` or `targets` where the task wants another reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.metrics.bootstrap import interval
from hezar_train.metrics.class_counts import share_counts
from hezar_train.metrics.metric import IGNORED_LABEL, Metric, Table
from hezar_train.metrics.registry import build_metric, known_metrics

__all__ = [
    "ClassificationHandler",
    "LanguageModelingHandler",
    "MetricsHandler",
    "RegressionHandler",
    "SequenceLabelingHandler",
    "TextHandler",
    "WholeSetHandler",
]

Decode = Callable[[Any], list[str]]

MOST_CLASSES_IN_A_TABLE = 64


class MetricsHandler:
    """Loss only: the handler of tasks without metrics, and the shape of all others."""

    valid_metrics: ClassVar[tuple[str, ...]] = ()
    """Names that make sense for the task; objects of your own always do."""

    default_metrics: ClassVar[tuple[str, ...]] = ()
    """What is computed unless the config says otherwise."""

    reads_text: ClassVar[bool] = False
    """Whether metrics compare texts: a generative model then generates, and ids are decoded."""

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        self.trainer = trainer
        self.is_default = metrics is None
        self._specs = list(self.default_metrics if metrics is None else metrics)
        self.metrics: list[Metric] = [self._build(spec) for spec in self._specs]
        self.decode: Decode | None = None
        share_counts(self.metrics)
        _refuse_clashes(self.metrics)

    @property
    def output_keys(self) -> list[str] | None:
        """List the names that `compute` returns; None if that cannot be known beforehand."""
        if type(self).compute is not MetricsHandler.compute and not self.metrics:  # a handler that counts for itself
            return list(self.valid_metrics) or None
        return [key for metric in self.metrics for key in metric.output_keys]

    def objective(self, key: str) -> str:
        """Tell whether a larger or a smaller value of an output is better."""
        owner = next((metric for metric in self.metrics if key in metric.output_keys), None)
        if owner is not None:
            return owner.objective(key)
        return "minimize" if key == "loss" else "maximize"

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        """Learn what the labels are called and how ids become text, before the first batch."""
        self.decode = self.decode or decode
        if label_names:
            names = [str(label_names.get(number, number)) for number in range(max(label_names) + 1)]
            for metric in self.metrics:
                metric.expect_classes(len(names), names)

    def reset(self) -> None:
        """Forget everything counted."""
        for metric in self.metrics:
            metric.reset()

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        """Return what the model decided, one item per sample."""
        return outputs.get("logits")

    def targets(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        """Return what would have been right, one item per sample."""
        return labels

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        """Return how wrong each sample is, for the list of the worst; None: not known for this task."""
        return None

    def update(
        self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor | None = None, num_units: float = 1.0
    ) -> None:
        """Count one batch; `weights` are the rows of a bootstrap, `num_units` what the loss is a mean of."""
        if not self.metrics or labels is None:
            return
        kinds = {metric.consumes for metric in self.metrics}
        predictions = self.predictions(outputs, labels) if "predictions" in kinds else None
        targets = self.targets(outputs, labels) if kinds - {"loss"} else None
        for metric in self.metrics:
            if metric.consumes == "loss":
                metric.update(outputs["loss"], num_units)
            elif metric.consumes == "scores":
                metric.update(outputs["logits"], targets, weights)
            elif predictions is not None:
                metric.update(predictions, targets, weights)

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since the last reset."""
        return {key: value for metric in self.metrics for key, value in metric.compute().items()}

    def intervals(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Return the bootstrap interval of each output, of the metrics that have one."""
        found = {}
        for metric in self.metrics:
            rows = metric.compute_rows()
            for key in metric.output_keys if len(rows) > 1 else ():
                found[key] = interval([row[key] for row in rows[1:]], level)
        return found

    def tables(self) -> list[Table]:
        """Return what a report shows beside the numbers: a confusion matrix, a row per class."""
        return [table for metric in self.metrics if (table := metric.table()) is not None]

    def _build(self, metric: Any) -> Metric:
        name = metric if isinstance(metric, str) else getattr(metric, "name", None)
        is_own = isinstance(name, str) and name in known_metrics() and not isinstance(metric, Metric)
        if is_own and name not in self.valid_metrics and name in ALL_VALID:
            known = choices(self.valid_metrics) or "none, only the loss"
            raise ConfigError(
                f"metrics has {name!r}, which {type(self).__name__} does not compute. It computes: {known}."
                f"{suggestion(str(name), self.valid_metrics)}"
            )
        return build_metric(metric, self.options())

    def options(self) -> dict[str, Any]:
        """Return options that metrics by name receive if they know them."""
        return {}


class ClassificationHandler(MetricsHandler):
    """One label per sample, the largest logit's; or several, those whose logit is positive (labels as 0/1 rows)."""

    valid_metrics = (
        *("accuracy", "top_k_accuracy", "precision", "recall", "f1", "matthews", "auroc", "confusion_matrix"),
    )
    default_metrics = ("accuracy",)

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        self._is_multilabel = False
        self._reported: list[Metric] = []  # for tables only: they add no output
        self._label_names: Mapping[int, str] | None = None
        super().__init__(metrics, trainer)

    def options(self) -> dict[str, Any]:
        return {"multilabel": True} if self._is_multilabel else {}

    def reset(self) -> None:
        super().reset()
        for metric in self._reported:
            metric.reset()

    def update(
        self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor | None = None, num_units: float = 1.0
    ) -> None:
        logits = outputs.get("logits")
        if logits is None or labels is None:
            return
        if not self._is_multilabel and labels.ndim > 1 and logits.shape == labels.shape:
            self._is_multilabel = True
            self.metrics = [self._build(spec) for spec in self._specs]
            share_counts(self.metrics)
            self.expect(self._label_names, None)
        super().update(outputs, labels, weights, num_units)
        if not self._is_multilabel and logits.ndim == 2 and logits.shape[1] <= MOST_CLASSES_IN_A_TABLE:
            self._report(outputs, labels)

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        logits = outputs.get("logits")
        if logits is None:
            return None
        return (logits > 0).long() if self._is_multilabel else logits.argmax(dim=-1)

    def tables(self) -> list[Table]:
        found = {table["name"]: table for table in super().tables()}
        for metric in self._reported:
            if (table := metric.table()) is not None:
                found.setdefault(table["name"], table)
        return list(found.values())

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        super().expect(label_names, decode)
        self._label_names = label_names

    def _report(self, outputs: Mapping[str, Any], labels: Any) -> None:
        if not self._reported:
            self._reported = [build_metric("confusion_matrix"), build_metric("f1")]
            names = self._label_names or {}
            shown = [str(names.get(number, number)) for number in range(outputs["logits"].shape[1])]
            for metric in self._reported:
                metric.expect_classes(len(shown), shown)
                metric.reset()
        predicted = self.predictions(outputs, labels)
        for metric in self._reported:
            metric.update(predicted, labels)

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        logits = outputs.get("logits")
        if logits is None or logits.ndim != 2 or labels.ndim != 1:
            return None
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


class SequenceLabelingHandler(MetricsHandler):
    """A label per token, the largest logit's; entities are compared whole."""

    valid_metrics = ("seqeval", "token_accuracy", "confusion_matrix")
    default_metrics = ("seqeval",)

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        return outputs["logits"].argmax(dim=-1)

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        if not label_names and self.is_default:
            self.metrics = [build_metric("token_accuracy", self.options())]  # entities need the labels' names
        super().expect(label_names, decode)


class LanguageModelingHandler(MetricsHandler):
    """The next token, or the masked one: how likely the right one was, and how often it was the first choice."""

    valid_metrics = ("perplexity", "token_accuracy", "top_k_accuracy")
    default_metrics = ("perplexity", "token_accuracy")

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None, *, is_causal: bool = True) -> None:
        self._is_causal = is_causal
        super().__init__(metrics, trainer)

    def options(self) -> dict[str, Any]:
        return {"causal": self._is_causal}

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        return outputs["logits"].argmax(dim=-1)


class RegressionHandler(MetricsHandler):
    """A number per sample."""

    valid_metrics = ("mse", "rmse", "mae", "r2", "pearson", "spearman")
    default_metrics = ("mse", "mae", "r2")

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        logits = outputs["logits"]
        return logits.reshape(labels.shape) if logits.numel() == labels.numel() else logits

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        difference = self.predictions(outputs, labels) - labels
        return difference.square() if difference.ndim == 1 else None


class TextHandler(MetricsHandler):
    """Texts: what the model generated, or the largest logits, against the labels, both decoded."""

    valid_metrics = ("cer", "wer", "rouge", "bleu", "chrf")
    reads_text = True

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        super().__init__(metrics, trainer)
        self._predicted: tuple[Any, list[str]] = (None, [])
        self._expected: tuple[Any, list[str]] = (None, [])

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

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        if self._predicted[0] is not outputs:  # asked for more than once per batch, decoded once
            generated = outputs.get("generated")
            ids = outputs["logits"].argmax(dim=-1) if generated is None else generated
            self._predicted = outputs, self._texts(ids)
        return self._predicted[1]

    def targets(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        if self._expected[0] is not outputs:
            self._expected = outputs, labels if isinstance(labels, list) else self._texts(labels)
        return self._expected[1]

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        from hezar_train.metrics.text_edit import edit_distance

        if not self.metrics:
            return None
        pairs = zip(self.predictions(outputs, labels), self.targets(outputs, labels), strict=True)
        return torch.tensor([edit_distance(got, right) / max(1, len(right)) for got, right in pairs])

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


class WholeSetHandler(MetricsHandler):
    """Serve a handler that has only `compute_metrics(predictions, labels)`: it is given the whole set, from memory."""

    def __init__(self, handler: Any) -> None:
        from hezar_train.metrics.adapters import CollectedMetric

        self._handler = handler
        function = CollectedMetric(handler.compute_metrics, type(handler).__name__, consumes="predictions")
        super().__init__([function], getattr(handler, "trainer", None))

    @property
    def output_keys(self) -> list[str] | None:
        return None

    def objective(self, key: str) -> str:
        found = getattr(self._handler, "objective", None)
        told = found(key) if callable(found) else found
        return told if told in {"maximize", "minimize"} else ("minimize" if "loss" in key else "maximize")

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        return outputs.get("generated", outputs.get("logits"))


ALL_VALID = frozenset(
    name
    for handler in (
        ClassificationHandler,
        SequenceLabelingHandler,
        LanguageModelingHandler,
        RegressionHandler,
        TextHandler,
    )
    for name in handler.valid_metrics
)


def without_ignored(labels: torch.Tensor, filler: int) -> torch.Tensor:
    """Replace ignored labels by an id that can be decoded."""
    return torch.where(labels == IGNORED_LABEL, filler, labels)


def _refuse_clashes(metrics: Sequence[Metric]) -> None:
    keys = [key for metric in metrics for key in metric.output_keys]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"metrics gives {choices(twice)} more than once: leave one out, or choose output_keys")
