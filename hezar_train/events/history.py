"""The values of one name over a run, and how to smooth them.

Owns the numbers of one name while they are in memory: tensors wait on their device and are read together. Does not
know who measures or writes them, and does not import torch before it meets a tensor.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from hezar_train.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["History", "HistoryBuffer", "Scalar", "as_scalar", "read_scalars", "smooth_loss"]

Scalar: TypeAlias = "float | Tensor"

_MAX_UNREAD = 1024
"""Values of one name that may wait on the device; then they are read, so that a name nobody reads stays small."""


class History:
    """The last `max_length` values of one name, each with its step; tensors become floats when they are read."""

    # Values and steps in lists of their own: a tuple for each would set off the garbage collector again and again.
    __slots__ = (
        "_num_settled", "_settled", "_settled_steps", "_steps", "_sum", "_unread", "logged_total", "smoothing_hint",
    )  # fmt: skip

    def __init__(self, max_length: int = 1_000_000, smoothing_hint: bool | None = None) -> None:
        self.smoothing_hint = smoothing_hint
        self.logged_total = 0
        self._unread: list[Scalar] = []
        self._steps: list[int] = []
        self._settled: deque[float] = deque(maxlen=max_length)
        self._settled_steps: deque[int] = deque(maxlen=max_length)
        self._num_settled = 0
        self._sum = 0.0

    def append(self, value: Scalar, step: int) -> None:
        """Add a value measured at `step`."""
        self._steps.append(step)
        unread = self._unread
        unread.append(value)
        if len(unread) >= _MAX_UNREAD:
            self._settle()

    def update(self, value: Scalar, iteration: int | None = None) -> None:
        """Add a value measured at `iteration`; without it, values are counted from 0."""
        self.append(as_scalar("value", value), self.total if iteration is None else iteration)

    def put_before(self, values: Sequence[float], steps: Sequence[int]) -> None:
        """Put values of an earlier time before those held; they count as logged."""
        self.put_whole_before(values, steps, len(values), sum(values))

    def put_whole_before(self, values: Sequence[float], steps: Sequence[int], num_ever: int, sum_ever: float) -> None:
        """Put an earlier history before the values held, with what it had ever counted but no longer held."""
        self._settle()
        max_length = self._settled.maxlen
        self._settled = deque(itertools.chain(values, self._settled), max_length)
        self._settled_steps = deque(itertools.chain(steps, self._settled_steps), max_length)
        self._num_settled += num_ever
        self.logged_total += num_ever
        self._sum += sum_ever

    @property
    def total(self) -> int:
        """How many values were ever added, those no longer held included."""
        return self._num_settled + len(self._unread)

    @property
    def has_unlogged(self) -> bool:
        """Tell whether something was added since the name was last logged."""
        return self.total != self.logged_total

    def peek(self) -> tuple[Scalar, int]:
        """Return the last value and its step, without a host read."""
        if self._unread:
            return self._unread[-1], self._steps[-1]
        return self._settled[-1], self._settled_steps[-1]

    def values(self) -> list[tuple[float, int]]:
        """Return all values held, oldest first, as (value, step)."""
        self._settle()
        return list(zip(self._settled, self._settled_steps, strict=True))

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
        self._settle()
        return self._sum

    def global_avg(self) -> float:
        """Return the mean of all values ever added, those no longer held included."""
        if not self.total:
            raise DataError("this history has no values yet: add one first")
        return self.global_sum() / self.total

    def _last(self, window_size: int | None) -> list[float]:
        if window_size is not None and window_size < 1:
            raise DataError(f"window_size={window_size!r} must be at least 1, or None for all values")
        self._settle()
        if not self._settled:
            raise DataError("this history has no values yet: add one first")
        return list(itertools.islice(reversed(self._settled), window_size))

    def _settle(self) -> None:
        floats = read_scalars(self._unread)
        self._settled.extend(floats)
        self._settled_steps.extend(self._steps)
        self._num_settled += len(floats)
        self._sum += sum(floats)
        self._unread.clear()
        self._steps.clear()


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
    requires_grad = getattr(value, "requires_grad", None)
    if requires_grad is not None:
        tensor: Tensor = _one_element(name, value) if value.ndim else value
        return tensor.detach() if requires_grad else tensor
    try:
        return float(value)
    except (TypeError, ValueError):
        raise DataError(f"{name!r} is {value!r}, expected a number or a tensor of one element") from None


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """Convert to floats exactly, with one host read per device and dtype."""
    floats: list[Any] = list(values)
    on_device: dict[tuple[object, object], list[int]] = {}
    for index, value in enumerate(values):
        if not isinstance(value, float):
            on_device.setdefault((value.device, value.dtype), []).append(index)
    for indices in on_device.values():
        for index, number in zip(indices, _read_tensors([values[index] for index in indices]), strict=True):
            floats[index] = float(number)
    return floats


def _one_element(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise DataError(f"{name!r} is a tensor of shape {shape}, expected one element; put its mean, or its parts")
    return value.reshape(())


def _read_tensors(tensors: list[Any]) -> list[float]:
    if len(tensors) == 1:
        return [tensors[0].item()]
    import torch

    read: list[float] = torch.stack(tensors).tolist()
    return read
