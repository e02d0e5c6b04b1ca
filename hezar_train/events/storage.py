"""`EventStorage`: everything measured during a run, a history per name, and the rows that writers turn into files.

Owns the numbers while they are in memory. Anyone may put a value at any time; a tensor stays on its device until
someone reads it, and is then read together with its neighbours. Images become 8-bit pixels and histograms counts per
bucket, both small and free of the graph they came from. A `Backlog` keeps a place mark for each writer: no writer gets
an item twice, and one that fails gets it again.

Owns no file format (`writers` does), and does not import torch before it meets a tensor.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hezar_train.errors import DataError, HezarTrainError, choices, suggestion
from hezar_train.events.history import (
    History,
    Scalar,
    as_scalar,
    read_histories,
    read_scalars,
    smooth_loss,
    write_histories,
)

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

__all__ = [
    "RESERVED_NAMES",
    "Backlog",
    "EventStorage",
    "Histogram",
    "Image",
    "Row",
    "get_event_storage",
    "make_histogram",
    "make_image",
]

RESERVED_NAMES = ("step", "epoch", "time")
"""Names a row already has; a logged value cannot take them."""

NUM_CHANNELS = (1, 3, 4)
"""Grey, RGB, RGB with transparency."""

_MAX_UNWRITTEN_IMAGES = 64  # a run without a writer of images must not fill the memory with them
_MAX_UNWRITTEN_HISTOGRAMS = 1024

T = TypeVar("T")

_current: list[EventStorage] = []  # entered and not left yet; `get_event_storage` returns the last one


@dataclass(frozen=True, slots=True)
class Row:
    """What was logged at one step."""

    step: int
    epoch: int
    time: float
    """Seconds since 1970."""
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture put at one step."""

    name: str
    step: int
    time: float
    """Seconds since 1970."""
    pixels: Tensor
    """Channels, rows, columns in 8 bits; on its device until a writer reads it."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How the finite numbers of a tensor were distributed at one step."""

    name: str
    step: int
    time: float
    """Seconds since 1970."""
    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    """The upper end of each bucket."""
    bucket_counts: list[int]


class RowReader(Protocol):
    """What the storage needs of a writer."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def write_images(self, images: Sequence[Image]) -> None: ...

    def write_histograms(self, histograms: Sequence[Histogram]) -> None: ...

    def flush(self) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class EventStorage:
    """Collect values from anywhere in the run and hand logged rows to the writers.

    `put_scalar` records a measurement and costs next to nothing. `log` makes a row of values; `flush` gives each writer
    the rows, images and histograms it has not seen. What every writer has seen is forgotten; of images and histograms
    that nobody writes only the newest few are held. Inside `with storage:` it is what `get_event_storage()` returns.

    `step` is a number that the loop sets (`iter` is another name for it); `advance()` adds one to it.
    """

    def __init__(self, step: int = 0, writers: Iterable[RowReader] = (), max_length: int = 1_000_000) -> None:
        self.step = step
        self.samples = 0
        """Samples consumed so far; whoever runs the loop sets it."""
        self.writers: list[RowReader] = list(writers)
        self._max_length = max_length
        self._histories: dict[str, History] = {}
        self._prefix = ""
        self._rows: Backlog[Row] = Backlog()
        self._images: Backlog[Image] = Backlog(_MAX_UNWRITTEN_IMAGES)
        self._histograms: Backlog[Histogram] = Backlog(_MAX_UNWRITTEN_HISTOGRAMS)

    @property
    def rows(self) -> list[Row]:
        """The logged rows that some writer has not seen."""
        return list(self._rows.items)

    @property
    def iter(self) -> int:
        """The current step, under LiBai's name."""
        return self.step

    @iter.setter
    def iter(self, step: int) -> None:
        self.step = step

    def advance(self) -> None:
        """Go to the next step; for loops of your own, the trainer sets the step itself."""
        self.step += 1

    def put_scalar(self, name: str, value: Scalar, smoothing_hint: bool = True) -> None:
        """Record a number measured at the current step; a tensor must not be written to afterwards."""
        # On the path of every step: no call but those that are needed, and nothing waits for the device.
        if self._prefix:
            name = self._prefix + name
        if type(value) is not float:
            value = as_scalar(name, value)
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

    def put_image(self, name: str, image: Any) -> None:
        """Copy a picture for the writers: channels, height, width, in floats 0..1 or uint8."""
        self._images.add(make_image(self._prefix + name, self.step, image))

    def put_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Count the finite numbers of a tensor in `bins` buckets for the writers; reads the tensor at once."""
        self._histograms.add(make_histogram(self._prefix + name, self.step, values, bins))

    def clear_images(self) -> None:
        """Forget the images that are not written yet."""
        self._images.clear()

    def clear_histograms(self) -> None:
        """Forget the histograms that are not written yet."""
        self._histograms.clear()

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
            raise _UnknownNameError(message + suggestion(name, self._histories)) from None

    def histories(self) -> dict[str, History]:
        """Return the values of every name."""
        return dict(self._histories)

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return the last value of every name with its step."""
        last = {name: history.peek() for name, history in self._histories.items()}
        floats = read_scalars([value for value, _ in last.values()])
        return {name: (value, step) for value, (name, (_, step)) in zip(floats, last.items(), strict=True)}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Return `latest()`, with the median of the last `window_size` values for names that were put with a hint."""
        return {
            name: (history.median(window_size) if history.smoothing_hint else history.latest(), history.peek()[1])
            for name, history in self._histories.items()
        }

    def smoothing_hints(self) -> dict[str, bool]:
        """Tell for every name whether it asks to be smoothed; what was only ever logged does not."""
        return {name: bool(history.smoothing_hint) for name, history in self._histories.items()}

    def unlogged(self) -> dict[str, Scalar]:
        """Return the last value of every name that was put since it was last logged, to be logged with the next row."""
        return {name: history.peek()[0] for name, history in self._histories.items() if history.has_unlogged}

    def log(self, values: Mapping[str, Scalar], step: int, epoch: int) -> Row:
        """Make a row of `values`, reading all tensors at once; it reaches the writers at the next flush."""
        _check_names(values)
        checked = [as_scalar(name, value) for name, value in values.items()]
        row = Row(step, epoch, time.time(), dict(zip(values, read_scalars(checked), strict=True)))
        self._add_to_histories(row, values)
        self._rows.add(row)
        return row

    def recall(self, rows: Iterable[Row]) -> None:
        """Put rows that were logged before a resume in front of the histories; no writer gets them.

        A name that this storage has logged itself is left as it is: a second start finds its own rows here already.
        """
        points: dict[str, list[tuple[float, int]]] = {}
        for row in rows:
            for name, value in row.values.items():
                points.setdefault(name, []).append((value, row.step))
        for name, found in points.items():
            history = self._history_of(name)
            if not history.logged_total:
                history.put_before([value for value, _ in found], [step for _, step in found])

    def save_history(self, path: str | os.PathLike[str]) -> Path:
        """Write every value held into one JSON file, exactly; it is whole at every moment."""
        return write_histories(path, self._histories)

    def load_history(self, path: str | os.PathLike[str]) -> None:
        """Put the values of a saved file in front of what is held; what is measured from now on follows them."""
        for name, saved in read_histories(path).items():
            history = self._history_of(name)
            history.put_whole_before(saved.values, saved.steps, saved.num_ever, saved.sum_ever)
            if history.smoothing_hint is None:
                history.smoothing_hint = saved.smoothing_hint

    def plot(self, ax: Any, name: str, smoothing: float | None = None) -> None:
        """Draw the values of one name over their steps into matplotlib axes, smoothed by `smooth_loss` if asked for."""
        points = self.history(name).values()
        values = [value for value, _ in points]
        curve = values if smoothing is None else smooth_loss(values, smoothing)
        ax.plot([step for _, step in points], curve, label=name)

    def flush(self) -> None:
        """Let each writer write what it has not seen and hand it to the operating system."""
        for writer in self.writers:
            self._rows.deliver_to(id(writer), writer.write)
            self._images.deliver_to(id(writer), writer.write_images)
            self._histograms.deliver_to(id(writer), writer.write_histograms)
            writer.flush()
        readers = [id(writer) for writer in self.writers]
        self._rows.forget_read(readers)
        self._images.forget_read(readers)
        self._histograms.forget_read(readers)

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

    def _add_to_histories(self, row: Row, given: Mapping[str, Scalar]) -> None:
        """Add a row's values to the histories, except a value that was put there and is only now logged."""
        for name, value in row.values.items():
            history = self._history_of(name)
            if not (history.has_unlogged and _is_same(history.peek(), (given[name], row.step))):
                history.append(value, row.step)
            history.logged_total = history.total

    def _history_of(self, name: str) -> History:
        """Return the values of a name, none yet if it is new."""
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = History(self._max_length)
        return history

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


class _UnknownNameError(DataError, KeyError):
    """A name under which nothing was measured; also a KeyError, as of any mapping."""

    __str__ = Exception.__str__  # a KeyError would show the message in quotes


def _agree_on_hint(name: str, history: History, smoothing_hint: bool) -> None:
    if history.smoothing_hint is not None:
        raise DataError(f"{name!r} was put with smoothing_hint={history.smoothing_hint}; keep it the same throughout")
    history.smoothing_hint = smoothing_hint


def _is_same(put: tuple[Scalar, int], logged: tuple[Scalar, int]) -> bool:
    """Tell whether a logged value is the one that was put: the very object, or one of the same step."""
    return put[0] is logged[0] or put[1] == logged[1]


def _close_all(writers: Sequence[RowReader]) -> None:
    """Close each writer, also after one before it has raised; the errors are chained."""
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


class Backlog(Generic[T]):
    """Items that some reader has not had; beyond `limit` of them the oldest is forgotten."""

    def __init__(self, limit: int | None = None) -> None:
        self.items: deque[T] = deque(maxlen=limit)
        self._num_added = 0
        self._num_read: dict[int, int] = {}

    def add(self, item: T) -> None:
        """Add an item for every reader."""
        self.items.append(item)
        self._num_added += 1

    def deliver_to(self, reader: int, read: Callable[[Sequence[T]], None]) -> None:
        """Give a reader what it has not had; if it fails, it gets the same again next time."""
        end = self._num_added  # taken before the reader runs: it may add items, which are then still unread
        num_unread = min(self._num_unread(reader), len(self.items))
        if num_unread:
            read(list(self.items)[-num_unread:])
        self._num_read[reader] = end

    def forget_read(self, readers: Iterable[int]) -> None:
        """Forget what all `readers` have had, and the marks of others."""
        self._num_read = {reader: self._num_added - self._num_unread(reader) for reader in readers}
        num_kept = max((self._num_unread(reader) for reader in self._num_read), default=0)
        while len(self.items) > num_kept:
            self.items.popleft()

    def clear(self) -> None:
        """Forget everything, read or not."""
        self.items.clear()

    def _num_unread(self, reader: int) -> int:
        return self._num_added - self._num_read.get(reader, 0)


def make_image(name: str, step: int, image: Any) -> Image:
    """Copy a picture of channels, rows, columns; floats lie in 0..1 and are cut off there."""
    import torch

    pixels = torch.as_tensor(image).detach()
    if pixels.ndim != 3 or pixels.shape[0] not in NUM_CHANNELS or not pixels.numel():
        shape = tuple(pixels.shape)
        raise DataError(f"{name!r} has the shape {shape}, expected (channels, height, width) with 1, 3 or 4 channels")
    if pixels.is_floating_point():
        pixels = pixels.float().nan_to_num().clamp(0, 1).mul(255).round().to(torch.uint8)
    elif pixels.dtype == torch.uint8:
        pixels = pixels.clone()  # a view would hold the whole batch, and change with it
    else:
        raise DataError(f"{name!r} is of {pixels.dtype}, expected floats in 0..1 or torch.uint8")
    return Image(name, step, time.time(), pixels)


def make_histogram(name: str, step: int, values: Any, bins: int) -> Histogram:
    """Count the finite numbers of `values` in `bins` buckets of equal width."""
    import numpy as np
    import torch

    if bins < 1:
        raise DataError(f"bins={bins!r} of {name!r} must be at least 1")
    numbers = torch.as_tensor(values).detach().cpu().double().numpy().ravel()
    finite = numbers[np.isfinite(numbers)]
    counts, edges = np.histogram(finite, bins)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    total, squares = float(finite.sum()), float(np.square(finite).sum())
    return Histogram(
        name, step, time.time(), low, high, finite.size, total, squares, edges[1:].tolist(), counts.tolist()
    )
