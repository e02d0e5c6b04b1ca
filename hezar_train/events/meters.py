"""Running averages for display: one meter, and a set of them.

Owns no result that is saved or compared; metrics of a whole dataset are computed elsewhere, from counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["AverageMeter", "MetricsTracker"]


class AverageMeter:
    """Keep the last value and the weighted mean of all values."""

    def __init__(
        self,
        name: str,
        avg: float | None = None,
        sum: float | None = None,
        count: int | None = None,
        fmt: str = ":f",
    ) -> None:
        self.name = name
        self.fmt = fmt
        self.val = 0.0
        self.sum = sum or 0.0
        self.count = count or 0
        self.avg = self._mean() if avg is None else avg

    def update(self, val: float, n: int = 1) -> None:
        """Add a value that stands for `n` items."""
        self.val = float(val)
        self.sum += self.val * n
        self.count += n
        self.avg = self._mean()

    def reset(self) -> None:
        """Forget everything."""
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def __str__(self) -> str:
        spec = self.fmt.removeprefix(":")
        return f"{self.name} {self.val:{spec}} ({self.avg:{spec}})"

    def _mean(self) -> float:
        return self.sum / self.count if self.count else 0.0


class MetricsTracker:
    """Keep one meter per output of the metrics, and one for the loss.

    `metrics` names the outputs, or maps names to metrics that list their outputs in `config.output_keys`.
    """

    def __init__(self, metrics: Iterable[str] | Mapping[str, Any]) -> None:
        self.metrics = metrics
        self.trackers = {name: AverageMeter(name) for name in dict.fromkeys((*_output_names(metrics), "loss"))}

    def update(self, results: Mapping[str, float]) -> None:
        """Add the results of one batch; what has no meter is passed over."""
        for name, meter in self.trackers.items():
            if name in results:
                meter.update(results[name])

    def avg(self) -> dict[str, float]:
        """Return the mean of every name."""
        return {name: meter.avg for name, meter in self.trackers.items()}

    def reset(self) -> None:
        """Forget everything but the names."""
        for meter in self.trackers.values():
            meter.reset()


def _output_names(metrics: Iterable[str] | Mapping[str, Any]) -> Iterable[str]:
    if not isinstance(metrics, Mapping):
        return metrics
    return [name for metric in metrics.values() for name in metric.config.output_keys]
