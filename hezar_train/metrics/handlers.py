"""What a handler is: it turns what a model returned into what metrics read, has them count, and asks for the result.

Metrics read class ids, label sequences, texts or values. A handler never keeps logits and never averages per-batch
values; the result is that of the whole set, for any batch size. `handler_for` names the handler of each task. A handler
of your own is a small class: name its metrics, and override `predictions` or `targets` where the task wants another
reading. A decision that is asked for twice in a batch (the largest logit, a decoded text) is made once.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from hezar_train.config import MetricConfig, metric_config_of
from hezar_train.errors import ConfigError, DataError, a_kind, choices, suggestion
from hezar_train.metrics.adapters import CollectedMetric
from hezar_train.metrics.classification import share_counts
from hezar_train.metrics.likelihood import (
    LossIntervals,
    num_counted,
    of_classes,
    of_labels,
    of_tokens,
    refuse_no_tokens,
)
from hezar_train.metrics.metric import IGNORED_LABEL, Metric, Table, interval, shown
from hezar_train.metrics.registry import build_metric, fits_any_task
from hezar_train.metrics.sequence_labeling import EntityScores
from hezar_train.metrics.text import edit_distance
from hezar_train.types import TaskType

__all__ = [
    "GENERATED_KEYS",
    "ClassificationHandler",
    "Decode",
    "ErrorRateHandler",
    "LanguageModelingHandler",
    "MadeOnce",
    "MetricsHandler",
    "RegressionHandler",
    "SequenceLabelingHandler",
    "TextGenerationHandler",
    "TextHandler",
    "TokenHandler",
    "WholeSetHandler",
    "generated_ids",
    "handler_for",
    "largest",
    "names_in_order",
    "settle_handler",
    "without_ignored",
]

Decode = Callable[[Any], list[str]]

GENERATED_KEYS = ("generated_ids", "sequences")
"""Where a model's `generate` puts the ids, if it returns a mapping."""

MOST_CLASSES_IN_A_TABLE = 64

TAGS = "BIESLU"  # of labels such as B-PER
TEXT_TASKS = {TaskType.IMAGE2TEXT, TaskType.SPEECH_RECOGNITION, TaskType.TEXT_GENERATION}

# `largest` searches this many classes at a time, if there are at least so many of these blocks.
BLOCK = 128
FEWEST_BLOCKS = 8


class MetricsHandler:
    """Loss only: the handler of tasks without metrics, and the shape of all others."""

    valid_metrics: ClassVar[tuple[str, ...]] = ()
    """Names that make sense for the task; objects of your own always do."""

    default_metrics: ClassVar[tuple[str, ...]] = ()
    """What is computed unless the config says otherwise."""

    reads_text: ClassVar[bool] = False
    """Whether metrics compare texts: a generative model then generates, and ids are decoded."""

    sample_loss_name: ClassVar[str] = "loss"
    """What `sample_losses` returns, in words: it is not the loss of the training for every task."""

    def __init__(self, metrics: Sequence[Any] | None = None, trainer: Any = None) -> None:
        self.trainer = trainer
        self.is_default = metrics is None
        self._specs = list(self.default_metrics if metrics is None else metrics)
        self.metrics: list[Metric] = self._built()
        self.decode: Decode | None = None
        self._loss_intervals = LossIntervals()
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

    def shown(self, name: str, value: float) -> str:
        """Return a value for people, with its metric's decimals; `name` is as in a log, `evaluation.dev.f1.low`."""
        path = f".{name.removesuffix('.low').removesuffix('.high')}"
        owners = (one for one in self.metrics if any(path.endswith(f".{key}") for key in one.output_keys))
        owner = next(owners, None)
        return f"{value:.4g}" if owner is None else shown(value, owner.n_decimals)

    def attach(self, trainer: Any) -> None:
        """Learn which trainer evaluates, for handlers that want to know more than they are given."""
        self.trainer = self.trainer or trainer

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        """Learn what the labels are called and how ids become text, before the first batch."""
        self.decode = self.decode or decode
        if label_names:
            names = names_in_order(label_names, max(label_names) + 1)
            for metric in self.metrics:
                metric.expect_classes(len(names), names)

    def options(self) -> dict[str, Any]:
        """Return options that metrics by name receive if they know them."""
        return {}

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        """Return what the model decided, one item per sample."""
        return outputs.get("logits")

    def targets(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        """Return what would have been right, one item per sample."""
        return labels

    def scores(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        """Return the logits and what would have been right, for metrics that rank."""
        return outputs.get("logits"), self.targets(outputs, labels)

    def compared(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        """Return predictions and targets place by place, for the list of the worst."""
        return self.predictions(outputs, labels), self.targets(outputs, labels)

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        """Return how wrong each sample is, for the list of the worst; None: not known for this task."""
        return None

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        """Return how many units each sample's loss is a mean of; None: these losses do not make the batch's."""
        return None

    def reset(self) -> None:
        """Forget everything counted."""
        self._loss_intervals.reset()
        for metric in self.metrics:
            metric.reset()

    def update(
        self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor | None = None, num_units: float = 1.0
    ) -> None:
        """Count one batch; `weights` are the rows of a bootstrap, `num_units` what the loss is a mean of."""
        consumed = {metric.consumes for metric in self.metrics}
        given: dict[str, tuple[Any, Any]] = {"loss": (outputs.get("loss"), num_units)}
        if labels is not None and "predictions" in consumed:
            given["predictions"] = self.predictions(outputs, labels), self.targets(outputs, labels)
        if labels is not None and "scores" in consumed:
            given["scores"] = self.scores(outputs, labels)
        for metric in self.metrics:
            decided, right = given.get(metric.consumes, (None, None))
            if decided is not None:
                metric.update(decided, right, weights)
        if weights is not None and labels is not None:
            self._count_losses(outputs, labels, weights, num_units)

    @property
    def can_merge(self) -> bool:
        """Whether what several processes count can be put together: not if a class counts by itself and cannot say."""
        own = [one for one in type(self).__mro__ if not one.__module__.startswith("hezar_train.metrics")]
        counts = any({"update", "compute"} & vars(one).keys() for one in own)
        return not counts or any({"state", "merge"} <= vars(one).keys() for one in own)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """Return everything counted, as tensors that another process can merge."""
        return [metric.state() for metric in (*self.metrics, *self._loss_intervals.parts)]

    def merge(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Add what another process counted."""
        for metric, state in zip((*self.metrics, *self._loss_intervals.parts), states, strict=True):
            metric.merge(state)

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since the last reset."""
        return {key: value for metric in self.metrics for key, value in metric.compute().items()}

    def intervals(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Return the bootstrap interval of each output, of the metrics that have one."""
        found = self._loss_intervals.compute(self.metrics, level)
        for metric in self.metrics:
            rows = metric.compute_rows()
            for key in metric.output_keys if len(rows) > 1 else ():
                found[key] = interval([row[key] for row in rows[1:]], level)
        return found

    def tables(self) -> list[Table]:
        """Return what a report shows beside the numbers: a confusion matrix, a row per class."""
        return [table for metric in self.metrics if (table := metric.table()) is not None]

    def _count_losses(self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor, num_units: float) -> None:
        losses, units = self.sample_losses(outputs, labels), self.sample_units(outputs, labels)
        if losses is not None and units is not None and outputs.get("loss") is not None:
            self._loss_intervals.update((outputs["loss"], num_units), (losses, units), weights)

    def _built(self) -> list[Metric]:
        """Return the metrics that were asked for, with the options that hold now."""
        metrics = [self._build(spec) for spec in self._specs]
        share_counts(metrics)
        return metrics

    def _build(self, metric: Any) -> Metric:
        spec = metric_config_of(metric)
        name = spec.name if isinstance(spec, MetricConfig) else spec
        if isinstance(name, str) and not self._computes(name):
            known = choices(self.valid_metrics) or "none, only the loss"
            remedy = suggestion(str(name), self.valid_metrics)
            if not self.valid_metrics:
                remedy = (
                    " Set task, such as task='text_classification', whose metrics they are; or pass metrics_handler=."
                )
            raise ConfigError(
                f"metrics has {str(name)!r}, which {type(self).__name__} does not compute. It computes: "
                f"{known}.{remedy}"
            )
        return build_metric(spec, self.options())

    def _computes(self, name: str) -> bool:
        return name in (*self.valid_metrics, *self.default_metrics) or fits_any_task(name)


def names_in_order(names: Mapping[int, str], count: int) -> list[str]:
    """Return the names of the ids below `count`; an id without one is called by its number."""
    return [str(names.get(number, number)) for number in range(count)]


def _refuse_clashes(metrics: Sequence[Metric]) -> None:
    keys = ["loss"] + [key for metric in metrics for key in metric.output_keys]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"metrics gives {choices(twice)} more than once: leave one out, or choose output_keys")


class ClassificationHandler(MetricsHandler):
    """One label per sample, the largest logit's; or several, those whose logit is positive (labels as 0/1 rows).

    It learns from the data which of the two it is. Beside the metrics asked for it counts what a report shows (a
    confusion matrix, a row per class), unless the classes are too many for a table.
    """

    valid_metrics = ("accuracy", "top_k_accuracy", "precision", "recall", "f1", "matthews", "auroc", "confusion_matrix")
    default_metrics = ("accuracy",)

    def __init__(
        self, metrics: Sequence[Any] | None = None, trainer: Any = None, *, is_multilabel: bool = False
    ) -> None:
        self._is_multilabel = is_multilabel
        self._reported: list[Metric] = []  # for tables only: they add no output
        self._label_names: Mapping[int, str] = {}
        self._num_classes = 0
        super().__init__(metrics, trainer)

    def expect(self, label_names: Mapping[int, str] | None, decode: Decode | None) -> None:
        super().expect(label_names, decode)
        self._label_names = label_names or {}

    def options(self) -> dict[str, Any]:
        return {"multilabel": True} if self._is_multilabel else {}

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        logits = outputs.get("logits")
        if logits is None:
            return None
        if self._is_multilabel:
            return (logits > 0).long()
        if logits.ndim == 1 or logits.shape[-1] == 1:  # one logit says yes or no
            return (logits.reshape(len(logits)) > 0).long()
        return largest(logits)

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        logits = outputs.get("logits")
        if logits is None:
            return None
        if logits.ndim == 2 and labels.ndim == 1 and logits.shape[1] > 1:
            return of_classes(logits, labels)
        if logits.numel() != labels.numel():
            return None
        return of_labels(logits.reshape(len(labels), -1), labels.reshape(len(labels), -1))

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        return torch.ones(len(labels), device=labels.device)

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
        self._look_at(logits, labels)
        super().update(outputs, labels, weights, num_units)
        predicted = self.predictions(outputs, labels) if self._reported else None
        for metric in self._reported:
            metric.update(predicted, labels)

    def state(self) -> list[dict[str, torch.Tensor]]:
        kind = {"kind": torch.tensor([int(self._is_multilabel), self._num_classes])}
        return [kind, *super().state(), *(metric.state() for metric in self._reported)]

    def merge(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        is_multilabel, num_classes = states[0]["kind"].tolist()
        if num_classes == 0:  # a process without a batch
            return
        self._learn_kind(bool(is_multilabel), num_classes)
        first_reported = len(states) - len(self._reported)
        super().merge(states[1:first_reported])
        for metric, state in zip(self._reported, states[first_reported:], strict=True):
            metric.merge(state)

    def tables(self) -> list[Table]:
        found = {table["name"]: table for table in super().tables()}
        for metric in self._reported:
            if (table := metric.table()) is not None:
                found.setdefault(table["name"], table)
        return list(found.values())

    def _look_at(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Learn from a batch whether samples have several labels, and how many classes there are."""
        is_multilabel = self._is_multilabel or (labels.ndim > 1 and logits.shape == labels.shape)
        num_columns = logits.shape[-1] if logits.ndim > 1 else 1
        self._learn_kind(is_multilabel, num_columns if is_multilabel else max(2, num_columns))

    def _learn_kind(self, is_multilabel: bool, num_classes: int) -> None:
        if (is_multilabel, num_classes) == (self._is_multilabel, self._num_classes):
            return
        if is_multilabel != self._is_multilabel:
            self._is_multilabel = is_multilabel
            self.metrics = self._built()
        self._num_classes = num_classes
        self._reported = self._built_for_report()
        names = names_in_order(self._label_names, num_classes)  # a config may name fewer classes than the model has
        for metric in (*self.metrics, *self._reported):
            metric.expect_classes(num_classes, names)

    def _built_for_report(self) -> list[Metric]:
        if self._num_classes > MOST_CLASSES_IN_A_TABLE:
            return []
        names = ["f1"] if self._is_multilabel else ["confusion_matrix", "f1"]
        return [build_metric(name, self.options()) for name in names]


class RegressionHandler(MetricsHandler):
    """A number per sample."""

    valid_metrics = ("mse", "rmse", "mae", "r2", "pearson", "spearman")
    default_metrics = ("mse", "mae", "r2")
    sample_loss_name = "squared error"

    def update(
        self, outputs: Mapping[str, Any], labels: Any, weights: torch.Tensor | None = None, num_units: float = 1.0
    ) -> None:
        logits = outputs.get("logits")
        if self.metrics and labels is not None and logits is not None and logits.numel() != labels.numel():
            raise DataError(
                f"task='regression' measures {choices(metric.name for metric in self.metrics)}, of predictions of "
                f"shape {tuple(logits.shape)} for targets of shape {tuple(labels.shape)}; expected one shape: "
                "(samples) or (samples, outputs) for both. Give the model one output for each target, and set "
                "criterion='MSELoss'; or, for classes, "
                f"leave task out, or set task='{TaskType.TEXT_CLASSIFICATION}' (or image_, audio_)."
            )
        super().update(outputs, labels, weights, num_units)

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        logits = outputs["logits"]
        if labels is None:
            return logits.squeeze(-1) if logits.ndim > 1 and logits.shape[-1] == 1 else logits
        return logits.reshape(labels.shape) if logits.numel() == labels.numel() else logits

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        predictions = self.predictions(outputs, labels)
        is_number_each = labels.ndim == 1 and predictions.shape == labels.shape  # the metrics refuse other shapes
        return (predictions - labels).square() if is_number_each else None

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        return torch.ones(len(labels), device=labels.device)


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


def _has_tag(label: str) -> bool:
    """Tell whether a label begins or ends with a tag, as B-PER and PER-B do."""
    return label in TAGS or (label[:1] in TAGS and label[1:2] == "-") or (label[-1:] in TAGS and label[-2:-1] == "-")


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
        if self._is_causal:
            refuse_no_tokens(labels)
        # Labels move, not logits: these would be copied.
        return pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if self._is_causal else labels

    def compared(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        return self.predictions(outputs, labels), self.counted(self.targets(outputs, labels))

    def scores(self, outputs: Mapping[str, Any], labels: Any) -> tuple[Any, Any]:
        logits, targets = super().scores(outputs, labels)
        return (logits[:, :-1], targets[:, 1:]) if self._is_causal else (logits, targets)


class TextHandler(MetricsHandler):
    """Texts: what the model generated, or the largest logits, against the labels, both decoded.

    How ids become text is told from outside: `decode` returns a list of texts for ids; it may have methods
    `of_labels(labels)` and `of_logits(logits, num_samples)` where these want another reading. A batch is decoded once,
    whoever asks for its texts.
    """

    valid_metrics = ("cer", "wer", "exact_match", "rouge", "bleu", "chrf")
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


class WholeSetHandler(MetricsHandler):
    """Serve a handler that has only `compute_metrics(predictions, labels)`: it is given the whole set, from memory."""

    def __init__(self, handler: Any, *, reads_text: bool = False) -> None:
        self._handler = handler
        self.reads_text = bool(getattr(handler, "reads_text", False)) or reads_text  # type: ignore[misc]
        function = CollectedMetric(
            handler.compute_metrics, type(handler).__name__, consumes="predictions", drops_ignored=False,
            told_as=f"{type(handler).__name__}.compute_metrics()",
        )  # fmt: skip
        super().__init__([function], getattr(handler, "trainer", None))

    @property
    def output_keys(self) -> list[str] | None:
        return None

    def objective(self, key: str) -> str:
        found = getattr(self._handler, "objective", None)
        told = found(key) if callable(found) else found
        return told if told in {"maximize", "minimize"} else ("minimize" if "loss" in key else "maximize")

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        if getattr(self._handler, "trainer", self) is None:
            self._handler.trainer = trainer

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:  # noqa: ARG002
        ids = generated_ids(outputs.get("generated"))
        return outputs.get("logits") if ids is None else ids


HANDLERS: dict[TaskType, Callable[..., MetricsHandler]] = {
    TaskType.TEXT_CLASSIFICATION: ClassificationHandler,
    TaskType.AUDIO_CLASSIFICATION: ClassificationHandler,
    TaskType.IMAGE_CLASSIFICATION: ClassificationHandler,
    TaskType.SEQUENCE_LABELING: SequenceLabelingHandler,
    TaskType.LANGUAGE_MODELING: LanguageModelingHandler,
    TaskType.MASK_FILLING: partial(LanguageModelingHandler, is_causal=False),
    TaskType.REGRESSION: RegressionHandler,
    TaskType.IMAGE2TEXT: ErrorRateHandler,
    TaskType.SPEECH_RECOGNITION: ErrorRateHandler,
    TaskType.TEXT_GENERATION: TextGenerationHandler,
}


def handler_for(task: str | None, metrics: Sequence[Any] | None) -> MetricsHandler:
    """Build the handler of a task; tasks without one have the loss only."""
    build = HANDLERS.get(TaskType(task), MetricsHandler) if task is not None else MetricsHandler
    return build(metrics)


def settle_handler(given: Any, task: str | None, metrics: Sequence[Any] | None) -> MetricsHandler:
    """Take the handler given, serving one that only computes on the whole set; else build the task's."""
    if given is None:
        return handler_for(task, metrics)
    if metrics:
        listed = ", ".join(map(str, metrics))
        warnings.warn(f"metrics ({listed}) has no effect beside a metrics_handler, which has its own", stacklevel=2)
    if isinstance(given, MetricsHandler) and not hasattr(given, "compute_metrics"):
        return given
    if callable(getattr(given, "compute_metrics", None)) and not isinstance(given, type):
        _refuse_other_arguments(given)
        return WholeSetHandler(given, reads_text=task in TEXT_TASKS)
    raise ConfigError(
        f"metrics_handler is {a_kind(given)}; expected a MetricsHandler, or an object with "
        "compute_metrics(predictions, labels). Metrics by name go to the config: task=..., metrics=['accuracy']."
    )


def _refuse_other_arguments(handler: Any) -> None:
    """Raise before a whole epoch is trained, if what computes the metrics does not take what it will get."""
    try:
        inspect.signature(handler.compute_metrics).bind(None, None)
    except TypeError as error:
        name = f"{type(handler).__name__}.compute_metrics{inspect.signature(handler.compute_metrics)}"
        raise ConfigError(
            f"{name} cannot be called with two arguments, predictions and labels ({error}). Write it so: "
            "def compute_metrics(self, predictions, labels)."
        ) from error
    except ValueError:  # one in C that does not tell
        return


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the class of the largest logit, the first of equal ones."""
    if logits.device.type == "cpu" and logits.shape[-1] >= BLOCK * FEWEST_BLOCKS:
        return _largest_by_blocks(logits)
    return logits.max(dim=-1).indices


def _largest_by_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Find the block that has it, then the place in the block: on the CPU torch finds maxima fast, but not where."""
    num_classes = logits.shape[-1]
    num_blocks = num_classes // BLOCK
    num_in_blocks = num_blocks * BLOCK
    tops = logits[..., :num_in_blocks].reshape(*logits.shape[:-1], num_blocks, BLOCK).amax(dim=-1)
    if num_in_blocks < num_classes:
        tops = torch.cat([tops, logits[..., num_in_blocks:].amax(dim=-1, keepdim=True)], dim=-1)
    first = tops.max(dim=-1).indices * BLOCK
    # Behind the end of a short block its last place is repeated: of equal ones the first counts.
    places = (first[..., None] + torch.arange(BLOCK)).clamp_(max=num_classes - 1)
    return first + logits.gather(-1, places).max(dim=-1).indices


class MadeOnce:
    """What was made of the last tensor, for as long as that lives; the tensor itself is not held."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._made: Any = None

    def get(self, tensor: Any, make: Callable[[], Any]) -> Any:
        """Return what was made of the tensor, or make it."""
        if self._of is None or self._of() is not tensor or not isinstance(tensor, torch.Tensor):
            self._made = make()
            self._of = weakref.ref(tensor) if isinstance(tensor, torch.Tensor) else None
        return self._made
