"""Everything measured during a run: a history per name, and the rows that writers turn into files.

Owns the numbers while they are in memory. Anyone may put a value at any time; a tensor stays on its device until
someone reads it, and is then read together with its neighbours. Owns no file format (`writers` does), and does not
import torch before it meets a tensor.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hezar_train.errors import DataError, HezarTrainError, choices, suggestion

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

__all__ = ["RESERVED_NAMES", "EventStorage", "History", "Row", "Scalar", "get_event_storage"]

Scalar: TypeAlias = "float | Tensor"

RESERVED_NAMES = ("step", "epoch", "time")
"""Names a row already has; a logged value cannot take them."""

_MAX_UNREAD = 1024
"""Values of one name that may wait on the device; then they are read, so that a name nobody reads stays small."""

_current: list[EventStorage] = []


@dataclass(frozen=True, slots=True)
class Row:
    """What was logged at one step."""

    step: int
    epoch: int
    time: float
    """Seconds since 1970."""
    values: dict[str, float] = field(default_factory=dict)


class RowReader(Protocol):
    """What the storage needs of a writer."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def flush(self) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class History:
    """The last `max_length` values of one name, each with its step; tensors become floats when they are read."""

    # Values and steps in lists of their own: a tuple for each would set off the garbage collector again and again.
    __slots__ = ("_num_settled", "_settled", "_settled_steps", "_steps", "_unread", "logged_total", "smoothing_hint")

    def __init__(self, max_length: int = 1_000_000, smoothing_hint: bool | None = None) -> None:
        self.smoothing_hint = smoothing_hint
        self.logged_total = 0
        self._unread: list[Scalar] = []
        self._steps: list[int] = []
        self._settled: deque[float] = deque(maxlen=max_length)
        self._settled_steps: deque[int] = deque(maxlen=max_length)
        self._num_settled = 0

    def append(self, value: Scalar, step: int) -> None:
        """Add a value measured at `step`."""
        self._steps.append(step)
        unread = self._unread
        unread.append(value)
        if len(unread) >= _MAX_UNREAD:
            self._settle()

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
        self._settle()
        return self._settled[-1]

    def average(self, window: int | None = None) -> float:
        """Return the mean of the last `window` values (of all held, if None)."""
        return statistics.fmean(self._last(window))

    def median(self, window: int | None = None) -> float:
        """Return the median of the last `window` values (of all held, if None)."""
        return statistics.median(self._last(window))

    def _last(self, window: int | None) -> list[float]:
        if window is not None and window < 1:
            raise DataError(f"window={window!r} must be at least 1, or None for all values")
        self._settle()
        return list(itertools.islice(reversed(self._settled), window))

    def _settle(self) -> None:
        self._settled.extend(_host_floats(self._unread))
        self._settled_steps.extend(self._steps)
        self._num_settled += len(self._unread)
        self._unread.clear()
        self._steps.clear()


class EventStorage:
    """Collect values from anywhere in the run and hand logged rows to the writers.

    `put_scalar` records a measurement and costs next to nothing. `log` makes a row of values; `flush` gives each writer
    the rows it has not seen. Rows that every writer has seen are forgotten. Inside `with storage:` it is what
    `get_event_storage()` returns.
    """

    def __init__(self, step: int = 0, writers: Iterable[RowReader] = (), max_length: int = 1_000_000) -> None:
        self.step = step
        self.rows: list[Row] = []
        self.writers: list[RowReader] = list(writers)
        self._max_length = max_length
        self._histories: dict[str, History] = {}
        self._prefix = ""
        # How many of `rows` each writer has; matters when one fails, so that the others do not write a row twice.
        self._cursors: dict[int, int] = {}

    def put_scalar(self, name: str, value: Scalar, smoothing_hint: bool = True) -> None:
        """Record a number measured at the current step; a tensor must not be written to afterwards."""
        if self._prefix:
            name = self._prefix + name
        if type(value) is not float:
            value = _checked(name, value)
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = History(self._max_length, smoothing_hint)
        elif history.smoothing_hint is not smoothing_hint:
            _agree_on_hint(name, history, smoothing_hint)
        history.append(value, self.step)

    def put_scalars(self, *, smoothing_hint: bool = True, **values: Scalar) -> None:
        """Record several numbers measured at the current step."""
        for name, value in values.items():
            self.put_scalar(name, value, smoothing_hint)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prefix every name that is put inside with `name/`."""
        outer = self._prefix
        self._prefix = f"{outer}{name}/"
        try:
            yield
        finally:
            self._prefix = outer

    def history(self, name: str) -> History:
        """Return the values of one name."""
        try:
            return self._histories[name]
        except KeyError:
            known = choices(self._histories) or "nothing yet"
            message = f"nothing was measured under the name {name!r}. Measured: {known}."
            raise DataError(message + suggestion(name, self._histories)) from None

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return the last value of every name with its step."""
        last = {name: history.peek() for name, history in self._histories.items()}
        floats = _host_floats([value for value, _ in last.values()])
        return {name: (value, step) for value, (name, (_, step)) in zip(floats, last.items(), strict=True)}

    def unlogged(self) -> dict[str, Scalar]:
        """Return the last value of every name that was put since it was last logged, to be logged with the next row."""
        return {name: history.peek()[0] for name, history in self._histories.items() if history.has_unlogged}

    def log(self, values: Mapping[str, Scalar], step: int, epoch: int) -> Row:
        """Make a row of `values`, reading all tensors at once; it reaches the writers at the next flush."""
        _check_names(values)
        checked = [_checked(name, value) for name, value in values.items()]
        row = Row(step, epoch, time.time(), dict(zip(values, _host_floats(checked), strict=True)))
        self._remember(row)
        self.rows.append(row)
        return row

    def flush(self) -> None:
        """Let each writer write the rows it has not seen and hand them to the operating system."""
        end = len(self.rows)
        for writer in self.writers:
            seen = self._cursors.get(id(writer), 0)
            if seen < end:
                writer.write(self.rows[seen:])
                self._cursors[id(writer)] = end
            writer.flush()
        self.rows.clear()
        self._cursors.clear()

    def sync(self) -> None:
        """Make what was flushed survive a power cut; safe to call from another thread."""
        for writer in tuple(self.writers):
            writer.sync()

    def close(self) -> None:
        """Flush and close the writers, every one of them even if one fails."""
        try:
            self.flush()
        finally:
            _close_all(self.writers)
            self.writers.clear()

    def _remember(self, row: Row) -> None:
        """Add a row's values to the histories, except where this step's value was put and is only now logged."""
        for name, value in row.values.items():
            history = self._histories.get(name)
            if history is None:
                history = self._histories[name] = History(self._max_length)
            if not (history.has_unlogged and history.peek()[1] == row.step):
                history.append(value, row.step)
            history.logged_total = history.total

    def __enter__(self) -> EventStorage:
        _current.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.remove(self)


def get_event_storage() -> EventStorage:
    """Return the storage of the run that is under way."""
    if not _current:
        raise HezarTrainError(
            "there is no event storage here: get_event_storage() works while a trainer runs (in the model's forward, "
            "in a hook), or inside `with EventStorage():`"
        )
    return _current[-1]


def _agree_on_hint(name: str, history: History, smoothing_hint: bool) -> None:
    if history.smoothing_hint is not None:
        raise DataError(f"{name!r} was put with smoothing_hint={history.smoothing_hint}; keep it the same throughout")
    history.smoothing_hint = smoothing_hint


def _close_all(writers: Sequence[RowReader]) -> None:
    if not writers:
        return
    try:
        writers[0].close()
    finally:
        _close_all(writers[1:])


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name in RESERVED_NAMES:
            raise DataError(f"a row has its own {name!r}; log the value under another name")
        if "\n" in name or "\r" in name:
            raise DataError(f"{name!r} has a line break, which a line of a log cannot hold; use another name")


def _checked(name: str, value: Any) -> Scalar:
    """Return `value` as a float or a 0-d tensor without a graph, or say why it cannot be one."""
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


def _host_floats(values: Sequence[Scalar]) -> list[float]:
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


def _read_tensors(tensors: list[Any]) -> list[float]:
    if len(tensors) == 1:
        return [tensors[0].item()]
    import torch

    read: list[float] = torch.stack(tensors).tolist()
    return read
