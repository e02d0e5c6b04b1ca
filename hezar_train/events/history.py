"""The values of one name over a run: held while it lasts, smoothed, saved to a file; and running averages for display.

`History` owns the numbers of one name while they are in memory: tensors wait on their device and are read together.
`write_histories` and `read_histories` own the one JSON file that keeps them exactly. `AverageMeter` and
`MetricsTracker` own no result that is saved or compared: metrics of a whole dataset are computed elsewhere, from
counts.

Nothing here knows who measures or writes the values, or imports torch before it meets a tensor.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hezar_train.config.files import write_atomically
from hezar_train.errors import DataError, HezarTrainError
from hezar_train.run_folder import read_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AverageMeter",
    "History",
    "HistoryBuffer",
    "LossTracker",
    "MetricsTracker",
    "SavedHistory",
    "Scalar",
    "as_scalar",
    "is_same_number",
    "read_histories",
    "read_scalars",
    "smooth_loss",
    "write_histories",
]

Scalar: TypeAlias = "float | Tensor"

_MAX_UNREAD = 1024
"""Values of one name that may wait on the device; then they are read, so that a name nobody reads stays small."""
_SLACK = 8
"""A history may hold one part in eight more than it shows: what is too old is let go together, not one by one."""
_MOST_STEPS = 1 << 63
_VERSION = 1  # of the file of histories
_MOST_BYTES = 512 << 20


class History:
    """The last `max_length` values of one name, each with its step; tensors become floats when they are read."""

    # Values and steps in lists of their own: a tuple for each would set off the garbage collector again and again.
    # What is read lies packed, in 16 bytes for each value: a million of them as objects would take 72.
    __slots__ = (
        "_max_length", "_newest", "_num_read", "_sum", "_unread", "_unread_steps", "_value_steps", "_values",
        "logged_total", "smoothing_hint",
    )  # fmt: skip

    def __init__(self, max_length: int = 1_000_000, smoothing_hint: bool | None = None) -> None:
        self.smoothing_hint = smoothing_hint
        self.logged_total = 0
        self._unread: list[Scalar] = []
        self._unread_steps: list[int] = []
        self._values, self._value_steps = array("d"), array("q")
        self._newest = 0.0  # the last value that was read, as the very object that was put
        self._max_length = max_length
        self._num_read = 0
        self._sum = 0.0

    def append(self, value: Scalar, step: int) -> None:
        """Add a value measured at `step`."""
        self._unread_steps.append(step)
        unread = self._unread
        unread.append(value)
        if len(unread) >= _MAX_UNREAD:
            self._read_all()

    def update(self, value: Scalar, iteration: int | None = None) -> None:
        """Add a value measured at `iteration`; without it, values are counted from 0."""
        self.append(as_scalar("value", value), self.total if iteration is None else iteration)

    def put_before(self, values: Sequence[float], steps: Sequence[int]) -> None:
        """Put values of an earlier time before those held; they count as logged."""
        self.put_whole_before(values, steps, len(values), sum(values))

    def put_whole_before(self, values: Sequence[float], steps: Sequence[int], num_ever: int, sum_ever: float) -> None:
        """Put an earlier history before the values held, with what it had ever counted but no longer held."""
        self._read_all()
        if len(values) and not self._values:
            self._newest = values[-1]
        self._values, self._value_steps = array("d", values) + self._values, array("q", steps) + self._value_steps
        self._forget_oldest()
        self._num_read += num_ever
        self.logged_total += num_ever
        self._sum += sum_ever

    @property
    def total(self) -> int:
        """How many values were ever added, those no longer held included."""
        return self._num_read + len(self._unread)

    @property
    def has_unlogged(self) -> bool:
        """Tell whether something was added since the name was last logged."""
        return self.total != self.logged_total

    def peek(self) -> tuple[Scalar, int]:
        """Return the last value and its step, without a host read."""
        if self._unread:
            return self._unread[-1], self._unread_steps[-1]
        return self._newest, self._value_steps[-1]

    def values(self) -> list[tuple[float, int]]:
        """Return all values held, oldest first, as (value, step)."""
        self._read_all()
        oldest = self._oldest
        return list(zip(self._values[oldest:], self._value_steps[oldest:], strict=True))

    def latest(self) -> float:
        """Return the last value."""
        return self._last(1)[0]

    def avg(self, window_size: int | None = None) -> float:
        """Return the mean of the last `window_size` values (of all held, if None)."""
        return statistics.fmean(self._last(window_size))

    def median(self, window_size: int | None = None) -> float:
        """Return the median of the last `window_size` values (of all held, if None)."""
        return statistics.median(self._last(window_size))

    def global_sum(self) -> float:
        """Return the sum of all values ever added, those no longer held included."""
        self._read_all()
        return self._sum

    def global_avg(self) -> float:
        """Return the mean of all values ever added, those no longer held included."""
        if not self.total:
            raise DataError("this history has no values yet: add one first")
        return self.global_sum() / self.total

    @property
    def _oldest(self) -> int:
        """Where the values begin that are still shown."""
        return max(0, len(self._values) - self._max_length)

    def _forget_oldest(self) -> None:
        if self._oldest > self._max_length // _SLACK:
            del self._value_steps[: self._oldest]
            del self._values[: self._oldest]

    def _last(self, window_size: int | None) -> array[float]:
        if window_size is not None and window_size < 1:
            raise DataError(f"window_size={window_size!r} must be at least 1, or None for all values")
        self._read_all()
        if not self._values:
            raise DataError("this history has no values yet: add one first")
        first = 0 if window_size is None else len(self._values) - window_size
        return self._values[max(first, self._oldest) :]

    def _read_all(self) -> None:
        """Turn what waits on the device into floats, all of it together."""
        if not self._unread:
            return
        floats = read_scalars(self._unread)
        self._newest = floats[-1]
        self._values.extend(floats)
        self._value_steps.extend(self._unread_steps)
        self._forget_oldest()
        self._num_read += len(floats)
        self._sum += sum(floats)
        self._unread.clear()
        self._unread_steps.clear()


HistoryBuffer = History
"""LiBai's name for it."""


def smooth_loss(history: Iterable[float], beta: float = 0.98) -> list[float]:
    """Return the exponential moving average of a curve, corrected for its start at zero.

    Each value weighs `beta` times as much as the one after it; a constant curve stays what it is.
    """
    if not 0 <= beta < 1:
        raise DataError(
            f"beta={beta!r} must lie in 0 <= beta < 1; 0 does not smooth, 0.98 looks back on about 50 values"
        )
    smooth, average = [], 0.0
    for count, value in enumerate(history, start=1):
        average = beta * average + (1 - beta) * value
        smooth.append(average / (1 - beta**count))
    return smooth


def as_scalar(name: str, value: Any) -> Scalar:
    """Return `value` as a float or a 0-d tensor without a graph, or say why it cannot be one."""
    # Instead of `isinstance`: no torch is imported for the sake of a float.
    requires_grad = getattr(value, "requires_grad", None)
    if requires_grad is not None:
        tensor: Tensor = _one_element(name, value) if value.ndim else value
        return tensor.detach() if requires_grad else tensor
    try:
        return float(value)
    except (TypeError, ValueError):
        raise DataError(f"{name!r} is {value!r}, expected a number or a tensor of one element") from None


def _one_element(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise DataError(f"{name!r} is a tensor of shape {shape}, expected one element; put its mean, or its parts")
    return value.reshape(())


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """Convert to floats exactly, with one host read per device and dtype."""
    floats: list[Any] = list(values)
    on_device: dict[tuple[object, object], list[int]] = {}
    # By dtype too: stacking would convert to a common one, and not every whole number fits into a float.
    for index, value in enumerate(values):
        if not isinstance(value, float):
            on_device.setdefault((value.device, value.dtype), []).append(index)
    for indices in on_device.values():
        for index, number in zip(indices, _read_tensors([values[index] for index in indices]), strict=True):
            floats[index] = float(number)
    return floats


def _read_tensors(tensors: list[Any]) -> list[float]:
    if len(tensors) == 1:
        return [tensors[0].item()]
    import torch

    read: list[float] = torch.stack(tensors).tolist()
    return read


class SavedHistory(NamedTuple):
    """The values of one name as a file holds them."""

    values: list[float]
    steps: list[int]
    num_ever: int
    sum_ever: float
    smoothing_hint: bool | None


def write_histories(path: str | os.PathLike[str], histories: Mapping[str, History]) -> Path:
    """Write all values held, whole or not at all; floats are written so that they read back exactly.

    A number that is not finite is written as NaN or Infinity, as Python's `json` does.
    """
    saved = {name: _saved(history)._asdict() for name, history in histories.items()}
    content = json.dumps({"version": _VERSION, "histories": saved}, ensure_ascii=False)
    return write_atomically(path, content + "\n")


def read_histories(path: str | os.PathLike[str]) -> dict[str, SavedHistory]:
    """Read what `write_histories` wrote."""
    try:
        content = json.loads(read_file(path, _MOST_BYTES))
        version, histories = content["version"], content["histories"]
        saved = {name: _parse(fields) for name, fields in histories.items()} if version == _VERSION else {}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DataError(f"{path} is not a file of histories, as save_history() writes it") from None
    if version != _VERSION:
        raise DataError(f"{path} has version {version!r} of the format, expected {_VERSION}")
    return saved


def _saved(history: History) -> SavedHistory:
    points = history.values()
    values, steps = [value for value, _ in points], [step for _, step in points]
    return SavedHistory(values, steps, history.total, history.global_sum(), history.smoothing_hint)


def _parse(fields: dict[str, Any]) -> SavedHistory:
    saved = SavedHistory(**fields)
    pairs = zip(saved.values, saved.steps, strict=True)  # a ValueError if one list is shorter
    values, steps = zip(*[(float(value), int(step)) for value, step in pairs], strict=True)
    if not all(-_MOST_STEPS <= step < _MOST_STEPS for step in steps):
        raise ValueError("no step of a run")
    return saved._replace(values=list(values), steps=list(steps))


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


class LossTracker(AverageMeter):
    """The mean of a run's training loss when it was asked for; only the run itself adds to it."""

    def __init__(self, total: float, weight: float, last: float) -> None:
        super().__init__("train.loss")
        self.sum, self.count, self.val = total, weight, last  # type: ignore[assignment]
        self.avg = self._mean()

    def update(self, val: float, n: int = 1) -> None:
        del n
        raise HezarTrainError(
            f"train_loss_tracker.update({val!r}) would change nothing: the run counts the loss of each step itself. "
            "A step of your own returns its loss from training_step(), or tells it with trainer.note_loss(loss)."
        )

    def reset(self) -> None:
        raise HezarTrainError(
            "train_loss_tracker.reset() would change nothing: the mean is that of the whole run, which a resume goes "
            "on with. The mean since the last row is logged as train.recent_loss."
        )


def is_same_number(one: float | None, other: float | None) -> bool:
    """Tell whether two numbers are the same, as NaN is itself here; None is none."""
    return one is not None and other is not None and (one == other or (math.isnan(one) and math.isnan(other)))


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
