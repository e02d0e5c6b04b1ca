"""One metric as a config asks for it; what the metric computes is not known here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hezar_train.config.checks import keywords, one_of, text, whole, wrong_type
from hezar_train.config.files import to_plain
from hezar_train.config.unknown import tells_unknown_fields
from hezar_train.errors import ConfigError

__all__ = ["MetricConfig", "metric_to_plain", "metrics_from_plain", "problems_of_metric"]


@tells_unknown_fields
@dataclass
class MetricConfig:
    """A metric by name, with the options that its computation takes."""

    name: str
    """Name of the metric, as its task's handler knows it."""

    objective: str | None = None
    """"maximize" or "minimize"; None: what the metric itself says."""

    output_keys: list[str] | None = None
    """Which of the metric's results to report; None: all."""

    n_decimals: int = 4
    """Decimals shown; stored values are never rounded."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the metric's computation, such as `average`."""

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise ConfigError(problems)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake."""
        yield from text("name", self.name)
        yield from one_of("objective", self.objective, ("maximize", "minimize"))
        if self.output_keys is not None and not isinstance(self.output_keys, list | tuple):
            yield wrong_type("output_keys", self.output_keys, "a list of names")
        for key in self.output_keys if isinstance(self.output_keys, list | tuple) else ():
            yield from text("output_keys", key)
        yield from whole("n_decimals", self.n_decimals, least=0)
        yield from keywords("options", self.options)

    def to_dict(self) -> dict[str, Any]:
        """Return the metric in plain values, as a file holds it."""
        return {name: to_plain(value) for name, value in vars(self).items()}


def metric_to_plain(metric: Any) -> Any:
    """Return a metric as a file holds it: a name, or a mapping; a metric object is held by its name."""
    if isinstance(metric, str):
        return str(metric)
    if isinstance(metric, MetricConfig):
        return metric.to_dict()
    return str(getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__))


def metrics_from_plain(metrics: Any) -> Any:
    """Rebuild the mappings of a list of metrics; what cannot be rebuilt is left as it is, for the checks to tell."""
    if not isinstance(metrics, list | tuple):
        return metrics
    return [_rebuilt(metric) for metric in metrics]


def _rebuilt(metric: Any) -> Any:
    if not isinstance(metric, Mapping) or list(problems_of_metric(metric)):
        return metric
    return MetricConfig(**metric)


def problems_of_metric(metric: Any) -> Iterator[str]:
    """Yield what is wrong with one item of a list of metrics."""
    if isinstance(metric, str):
        yield from text("a name", metric)
    elif isinstance(metric, MetricConfig):
        yield from metric.problems()
    elif isinstance(metric, Mapping):
        try:
            MetricConfig(**{str(key): value for key, value in metric.items()})
        except ConfigError as error:
            yield from error.problems
    elif not callable(metric) and not callable(getattr(metric, "compute", None)):
        yield wrong_type("a metric", metric, "a name, a MetricConfig, a function or an object with compute()")
