"""LiBai's `PeriodicWriter`: rows of its own for writers of the user's, every so many steps.

It owns those rows, what of them a checkpoint carries, and how the writers' files go on after a kill; the rows of the
default log are the storage's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from time import time
from typing import Any

from hezar_train.errors import HookError
from hezar_train.events import (
    CSVWriter,
    EventWriter,
    Histogram,
    Image,
    JSONLinesWriter,
    Row,
    TensorBoardWriter,
    keep_until,
)
from hezar_train.events.storage import RESERVED_NAMES
from hezar_train.hooks.periodic import checked_period
from hezar_train.loop import Hook

__all__ = ["PeriodicWriter"]


class PeriodicWriter(Hook, EventWriter):
    """Give writers a row every `period` steps, at the last step, and when the run's files are closed.

    A row holds the last value of each name that was put since the row before; `time`, `step` and `epoch`, which a row
    has of its own, as `train.time` and so on. At a resume, a JSON lines file is cut back to the checkpoint, and
    TensorBoard is told to forget what follows it; other writers get the rows past it twice. The hook stands among the
    storage's own writers only to be closed with them, after every `after_train`: nothing that is put there is lost.
    """

    def __init__(self, writers: Iterable[EventWriter], period: int = 20) -> None:
        self._period = checked_period("PeriodicWriter", "period", period, least=1)
        self._writers = [_checked_writer(writer) for writer in writers]
        self._num_written: dict[str, int] = {}
        self._carried: dict[str, float] = {}
        self._sizes: dict[str, int] | None = None
        self._is_closed = False

    def before_train(self) -> None:
        storage = self.trainer.storage
        if self._sizes is not None:  # resumed: what the storage has by now is written, or carried by the state
            self._num_written = {name: storage.history(name).total for name in storage.latest()}
            self._go_back(self._sizes)
        elif self._is_closed:
            self._go_back({})
        self._sizes, self._is_closed = None, False
        storage.writers.append(self)

    def after_step(self) -> None:
        if self.trainer.state.global_step % self._period == 0 or self.trainer.reached_end:
            self._write_row()

    def state_dict(self) -> dict[str, Any]:
        sizes = {os.fspath(one.path): one.size for one in self._writers if isinstance(one, JSONLinesWriter)}
        return {"values": self._unwritten(), "sizes": sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._carried, self._sizes = dict(state["values"]), dict(state["sizes"])

    def write(self, rows: Sequence[Row]) -> None:
        """Pass over the rows of the default log: this hook makes its own."""

    def write_images(self, images: Sequence[Image]) -> None:
        for writer in self._writers:
            writer.write_images(images)

    def write_histograms(self, histograms: Sequence[Histogram]) -> None:
        for writer in self._writers:
            writer.write_histograms(histograms)

    def sync(self) -> None:
        for writer in self._writers:
            writer.sync()

    def close(self) -> None:
        with ExitStack() as every_one:  # also if another one fails
            for writer in self._writers:
                every_one.callback(writer.close)
            self._is_closed = True
            self._write_row()

    def _unwritten(self) -> dict[str, float]:
        storage, written = self.trainer.storage, self._num_written
        latest = {name: value for name, (value, _) in storage.latest().items()}
        fresh = {name: value for name, value in latest.items() if storage.history(name).total > written.get(name, 0)}
        return dict(sorted((self._carried | fresh).items()))

    def _write_row(self) -> None:
        values = self._unwritten()
        if not values:
            return
        state, storage = self.trainer.state, self.trainer.storage
        named = {f"train.{name}" if name in RESERVED_NAMES else name: value for name, value in values.items()}
        for writer in self._writers:
            writer.write([Row(state.global_step, state.epoch, time(), named)])
            writer.flush()
        self._carried = {}
        self._num_written = {name: storage.history(name).total for name in storage.latest()}

    def _go_back(self, sizes: Mapping[str, int]) -> None:
        """Open again the files that were closed, or hold more than they should."""
        next_step = self.trainer.state.global_step + 1
        self._writers = [_opened_again(writer, sizes, next_step) for writer in self._writers]


def _checked_writer(writer: Any) -> EventWriter:
    if isinstance(writer, EventWriter):
        return writer
    raise HookError(f"PeriodicWriter: {writer!r} is not an EventWriter. Subclass it and override write(rows).")


def _opened_again(writer: EventWriter, sizes: Mapping[str, int], next_step: int) -> EventWriter:
    """Return a writer that goes on behind what belongs to the run; one of the user's own kind is returned as it is."""
    if type(writer) is JSONLinesWriter:
        writer.close()
        if (size := sizes.get(os.fspath(writer.path))) is not None:
            keep_until(writer.path, size)
        return JSONLinesWriter(writer.path)
    if type(writer) is CSVWriter:
        writer.close()
        return CSVWriter(writer.path)
    if type(writer) is TensorBoardWriter:
        writer.close()
        return TensorBoardWriter(writer.path.parent, purge_step=next_step)
    return writer
