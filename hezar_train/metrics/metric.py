"""What a metric is: counts that add up over batches and processes, and one computation at the end.

A metric never keeps predictions if a sum will do. Most are additive: each sample contributes a short row of
statistics, the state is the sum of these rows, and the result is a function of the sum. So states merge by adding,
the result does not depend on the batch size, and a bootstrap is the same sum with other weights: row 0 of the state
is the data as it is, every further row the data with each sample counted a random number of times
(`poisson_weights`); `interval` makes a confidence interval of the results of these rows.

Sums are float64 on the device of the predictions; nothing waits for the device before `compute`.
"""

from __future__ import annotations

import hashlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from hezar_train.errors import ConfigError, choices, suggestion

__all__ = [
    "DEVICES_WITHOUT_FLOAT64",
    "IGNORED_LABEL",
    "AdditiveMetric",
    "Blocks",
    "Inputs",
    "Metric",
    "RowMetric",
    "SelectedMetric",
    "Table",
    "check_outputs",
    "in_float64",
    "interval",
    "poisson_weights",
    "shown",
]

IGNORED_LABEL = -100
"""A target that is no label: padding, or a token that is not to be judged."""

Inputs = Literal["predictions", "scores", "loss"]
"""What a metric reads: decided predictions (class ids, values, texts), a model's logits, or (mean loss, units)."""

DEVICES_WITHOUT_FLOAT64 = frozenset({"mps"})

BLOCK_SIZE = 65_536  # samples

# The bootstrap: a hash of 64 bits, cut into pieces of 16, of which each is the random number of one row.
NUM_PIECES = 4
PIECE_BITS = 16
NUM_RECENT_SEEDS = 32
FIRST_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)
SECOND_MULTIPLIER = np.uint64(0xC4CEB9FE1A85EC53)
FIRST_FOLD = np.uint64(32)
SECOND_FOLD = np.uint64(29)


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


class Table(TypedDict):
    """A table for a report: `values[i][j]` belongs to `rows[i]` and `columns[j]`."""

    name: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]


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


class Blocks:
    """Rows appended into blocks of a fixed size: nothing is copied twice, and at most one block is not full."""

    def __init__(self, like: torch.Tensor) -> None:
        self.num_columns = like.shape[1]
        self._like = like[:0]
        self._blocks: list[torch.Tensor] = []
        self._room = 0  # rows free in the last block

    def append(self, rows: torch.Tensor) -> None:
        """Add rows at the end."""
        while len(rows):
            if not self._room:
                self._blocks.append(self._like.new_empty(BLOCK_SIZE, rows.shape[1]))
                self._room = BLOCK_SIZE
            taken = min(self._room, len(rows))
            start = BLOCK_SIZE - self._room
            self._blocks[-1][start : start + taken] = rows[:taken]
            self._room -= taken
            rows = rows[taken:]

    def joined(self) -> torch.Tensor:
        """Return all rows."""
        joined = torch.cat([self._like, *self._blocks])
        return joined[: len(joined) - self._room]


class SelectedMetric(Metric):
    """A metric of which a config chose some outputs, or the objective."""

    def __init__(self, metric: Metric, output_keys: Sequence[str] | None, objective: str | None) -> None:
        self.name = metric.name
        self.consumes = metric.consumes
        self._metric = metric
        self._keys = None if output_keys is None else list(output_keys)
        self._objective = objective
        if metric.output_keys:  # one with an output per class has none until the classes are known
            check_outputs(self.name, self._keys or (), metric.output_keys)

    @property
    def output_keys(self) -> list[str]:
        return self._metric.output_keys if self._keys is None else list(self._keys)

    @property
    def unwrapped(self) -> Metric:
        return self._metric.unwrapped

    def objective(self, key: str) -> str:
        return self._objective or self._metric.objective(key)

    def expect_classes(self, num_classes: int, names: Sequence[str] | None = None) -> None:
        self._metric.expect_classes(num_classes, names)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        self._metric.update(predictions, targets, weights)

    def compute(self) -> dict[str, float]:
        return self._selected(self._metric.compute())

    def compute_rows(self) -> list[dict[str, float]]:
        return [self._selected(row) for row in self._metric.compute_rows()]

    def table(self) -> Table | None:
        return self._metric.table()

    def state(self) -> dict[str, torch.Tensor]:
        return self._metric.state()

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        self._metric.merge(state)

    def _selected(self, outputs: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in outputs.items() if key in self.output_keys}


def check_outputs(metric: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Refuse a chosen output that the metric of this name does not have."""
    for key in chosen:
        if key not in known:
            has, hint = choices(known) or "none", suggestion(key, known)
            raise ConfigError(f"metric {metric!r} has no output {key!r}. It has: {has}.{hint}")


def shown(value: float, n_decimals: int) -> str:
    """Return a value with so many decimals; one that would vanish, with so many digits."""
    text = f"{value:.{n_decimals}f}"
    return f"{value:.{max(1, n_decimals)}g}" if value and not float(text) else text


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the interval that covers the truth with chance `level`, from the metric of each row but row 0.

    It lies between two percentiles of the rows. Those in which the metric is undefined are left out; (NaN, NaN) if none
    is left.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level={level!r} of an interval must lie between 0 and 1, as in 0.95")
    rows = np.asarray(values, dtype=np.float64)
    rows = rows[~np.isnan(rows)]
    if not len(rows):
        return float("nan"), float("nan")
    low, high = np.quantile(rows, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def poisson_weights(seed: int, sample_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return how often each row counts each sample, (1 + num_rows, samples) in float32; row 0 is all ones.

    In every further row a sample counts 0, 1, 2, ... times, 1 on average: a Poisson bootstrap. The number is a function
    of (seed, row, sample number) alone. So an interval does not depend on the batch size, the order or the number of
    processes, nothing is drawn from a generator, and each row is a sum that merges as the metric itself does.
    """
    words = sample_ids.detach().cpu().numpy().astype(np.uint64)
    first_key, keys = _keys(operator.index(seed), math.ceil(num_rows / NUM_PIECES))
    hashes = _mixed(_mixed(words + first_key)[None, :] + keys[:, None])  # (groups of rows, samples)
    shifts = np.arange(NUM_PIECES, dtype=np.uint64) * np.uint64(PIECE_BITS)
    pieces = (hashes[:, None, :] >> shifts[None, :, None]).astype(np.uint16)
    weights = np.ones((1 + num_rows, len(words)), dtype=np.float32)
    weights[1:] = _counts_by_piece()[pieces.reshape(-1, len(words))[:num_rows]]
    return torch.from_numpy(weights).to(sample_ids.device)


@cache
def _counts_by_piece() -> npt.NDArray[np.uint8]:
    """Return the inverse of Poisson(1)'s distribution function, at the middle of each of 2^16 equal steps.

    The shares of the numbers are Poisson(1)'s to 2^-16, far below what any number of rows could tell.
    """
    shares = [math.exp(-1.0) / math.factorial(count) for count in range(20)]
    middles = (np.arange(2**PIECE_BITS) + 0.5) / 2**PIECE_BITS
    counts: npt.NDArray[np.uint8] = np.searchsorted(np.cumsum(shares), middles, side="right").astype(np.uint8)
    return counts


@lru_cache(maxsize=NUM_RECENT_SEEDS)
def _keys(seed: int, num_groups: int) -> tuple[np.uint64, npt.NDArray[np.uint64]]:
    """Return the key of a bootstrap and those of its groups of rows."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=16, person=b"hezar_train boot").digest()
    first_key, group_key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return first_key, _mixed(np.arange(num_groups, dtype=np.uint64) + group_key)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> FIRST_FOLD)) * FIRST_MULTIPLIER
    words = (words ^ (words >> SECOND_FOLD)) * SECOND_MULTIPLIER
    return words ^ (words >> FIRST_FOLD)
