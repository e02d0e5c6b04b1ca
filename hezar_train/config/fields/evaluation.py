"""Fields of evaluation: when, with which metrics, and by which of them a model is the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hezar_train.config.checks import flag, keywords, steps, text, whole, wrong_type
from hezar_train.config.metric_config import problems_of_metric

__all__ = ["EvaluationFields"]


@dataclass(kw_only=True)
class EvaluationFields:
    do_evaluate: bool | None = None
    """Evaluate during training. None: if there is data for it; True without data is refused."""

    eval_steps: int | float | None = None
    """Steps between evaluations besides those at epoch ends; a float below 1 is a share of the run. None or 0: none."""

    max_eval_batches: int | None = None
    """Evaluate on so many batches of a set only. None: on all of it."""

    evaluate_with_generate: bool = True
    """Evaluate a generative model on what it generates."""

    generation_kwargs: dict[str, Any] | None = None
    """Arguments for the model's `generate` in evaluations, such as max_new_tokens."""

    bootstrap_samples: int = 0
    """Resamples behind the 95 % interval of each metric; 0: no intervals. 500 is a good number."""

    metrics: list[Any] | None = None
    """Names, `MetricConfig`s or metric objects. None: those of the task; the loss is always there."""

    metric_for_best_model: str = "loss"
    """Metric that tells the best checkpoint: "f1", "evaluation.f1" or "train.loss"."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("do_evaluate", self.do_evaluate, optional=True)
        yield from steps("eval_steps", self.eval_steps, least=0)
        yield from whole("max_eval_batches", self.max_eval_batches, least=1, optional=True)
        yield from flag("evaluate_with_generate", self.evaluate_with_generate)
        yield from keywords("generation_kwargs", self.generation_kwargs)
        yield from whole("bootstrap_samples", self.bootstrap_samples, least=0)
        yield from self._problems_of_metrics()
        yield from text("metric_for_best_model", self.metric_for_best_model)
        yield from self._problems_of_best_metric()

    def _problems_of_metrics(self) -> Iterator[str]:
        if self.metrics is None:
            return
        if not isinstance(self.metrics, list | tuple):
            yield wrong_type("metrics", self.metrics, "a list of names or MetricConfigs")
            return
        for number, metric in enumerate(self.metrics):
            for problem in problems_of_metric(metric):
                yield f"metrics[{number}]: {problem}"

    def _problems_of_best_metric(self) -> Iterator[str]:
        given = self.metric_for_best_model
        if not isinstance(given, str):
            return
        if given in ("evaluation.", "train."):
            yield f"metric_for_best_model={given!r} lacks the metric's name, as in '{given}loss'"
        elif given.startswith("evaluation.") and self.do_evaluate is False:
            yield (
                f"metric_for_best_model={given!r} needs evaluations, but do_evaluate=False. "
                "Choose 'train.loss', or evaluate"
            )
