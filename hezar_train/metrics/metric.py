"""What a metric is: counts that add up over batches and processes, and one computation at the end.

A metric never keeps predictions if a sum will do. Most are additive: each sample contributes a short row of
statistics, the state is the sum of these rows, and the result is a function of the sum. So states merge by adding,
the result does not depend on the batch size, and a bootstrap is the same sum with other weights: row 0 of the state
is the data as it is, every further row the data with each sample counted a random number of times.

Sums are float64 on the device of the predictions; nothing waits for the device before `compute`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypedDict

import torch

__all__ = [
    "DEVICES_WITHOUT_FLOAT64",
    "IGNORED_LABEL",
    "AdditiveMetric",
    "Inputs",
    "Metric",
    "RowMetric",
    "Table",
    "in_float64",
    "shown",
]

IGNORED_LABEL = -100
"""A target that is no label: padding, or a token that is not to be judged."""

Inputs = Literal["predictions", "scores", "loss"]
"""What a metric reads: decided predictions (class ids, values, texts), a model's logits, or (mean loss, units)."""

DEVICES_WITHOUT_FLOAT64 = frozenset({"mps"})


class Table(TypedDict):
    """A table for a report: `values[i][j]` belongs to `rows[i]` and `columns[j]`."""

    name: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]


class Metric(ABC):
    """One metric; `output_keys` are the names that `compute` returns, all in 0..1 where the metric is a score."""

    name: str
    minimized: ClassVar[frozenset[str]] = frozenset()
    """Outputs of which a smaller value is better."""

    consumes: Inputs = "predictions"
    """What `update` expects as its first argument."""

    n_decimals: int = 4
    """Decimals shown; values are never rounded."""

    @property
    @abstractmethod
    def output_keys(self) -> list[str]:
        """List the names that `compute` returns."""

    @property
    def unwrapped(self) -> Metric:
        """Return the metric that does the counting."""
        return self

    def objective(self, key: str) -> str:
        """Tell whether a larger or a smaller value of an output is better."""
        return "minimize" if key in self.minimized else "maximize"

    def expect_classes(self, num_classes: int, names: Sequence[str] | None = None) -> None:  # noqa: B027
        """Learn how many classes there are, and what they are called in tables and keys."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything counted."""

    @abstractmethod
    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        """Count a batch of samples; `weights` (rows, samples) says how often each row counts each sample."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the metric of everything counted."""

    @abstractmethod
    def compute_rows(self) -> list[dict[str, float]]:
        """Return the metric of each row of weights, the first of which is what `compute` returns.

        A metric that returns one row only, whatever the weights were, has no interval.
        """

    def table(self) -> Table | None:
        """Return what a report shows beside the outputs."""
        return None

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """Return the counts, as tensors that another process can merge."""

    @abstractmethod
    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        """Add the counts of another process."""

    def _undefined(self) -> dict[str, float]:
        return dict.fromkeys(self.output_keys, float("nan"))


class RowMetric(Metric):
    """A metric that counts for every row of weights, and so has an interval."""

    def compute(self) -> dict[str, float]:
        return self._results(1)[0]

    def compute_rows(self) -> list[dict[str, float]]:
        return self._results(None)

    @abstractmethod
    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        """Return the outputs of the first `num_rows` rows of weights (None: all); of one row if nothing was counted."""


class AdditiveMetric(RowMetric):
    """A metric whose state is a weighted sum of per-sample statistics, in float64."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    @abstractmethod
    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        """Return a row of statistics per sample, (samples, statistics), on the device of the predictions."""

    @abstractmethod
    def result(self, sums: list[float]) -> dict[str, float]:
        """Return the outputs for the sum of the statistics."""

    def reset(self) -> None:
        self._sums = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        rows = in_float64(self.statistics(predictions, targets))
        added = rows.sum(0, keepdim=True) if weights is None else weights.to(rows) @ rows
        self._sums = added if self._sums is None else self._sums + added

    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        if self._sums is None:
            return [self._undefined()]
        return [self.result(row) for row in self._sums[:num_rows].tolist()]

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self._sums is None else {"sums": self._sums}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "sums" in state:
            self._sums = state["sums"] if self._sums is None else self._sums + state["sums"].to(self._sums)


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """Return the values in float64, without a gradient; on the host if their device has no float64."""
    values = values.detach()
    return (values.cpu() if values.device.type in DEVICES_WITHOUT_FLOAT64 else values).double()


def shown(value: float, n_decimals: int) -> str:
    """Return a value with so many decimals; one that would vanish, with so many digits."""
    text = f"{value:.{n_decimals}f}"
    return f"{value:.{max(1, n_decimals)}g}" if value and not float(text) else text
