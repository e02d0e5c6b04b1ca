"""A line per logged row in the words of LiBai's printer, for those who read its logs.

Owns the wording only. The trainer's own display shows place, loss, rate, pace and time left without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TextIO

from hezar_train.events.storage import EventStorage, Row, get_event_storage
from hezar_train.events.writers import EventWriter

__all__ = ["CommonMetricPrinter"]

_RATE_NAMES = ("train.learning_rate", "lr")
_DATA_TIME_NAMES = ("train.data_seconds", "data_time")
_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024


class CommonMetricPrinter(EventWriter):
    """Print a line per training row, and put `eta_seconds` into the storage of the run under way.

    Each line has the iteration, the samples consumed, the losses (the median of the last `window_size` values where
    they were put with a smoothing hint), the learning rate and the peak of memory; from the second line on also the
    time left, the seconds per iteration and the samples per second since the line before.
    """

    def __init__(
        self, batch_size: int, max_iter: int | None = None, window_size: int = 200, stream: TextIO | None = None
    ) -> None:
        self._batch_size, self._max_iter, self._window_size = batch_size, max_iter, window_size
        self._stream = sys.stdout if stream is None else stream
        self._mark: tuple[float, int] | None = None

    def write(self, rows: Sequence[Row]) -> None:
        storage = get_event_storage()
        for row in rows:
            if any(not name.startswith("evaluation.") for name in row.values):
                self._stream.write("  ".join(self._parts(row, storage)) + "\n")

    def flush(self) -> None:
        self._stream.flush()

    def _parts(self, row: Row, storage: EventStorage) -> Iterator[str]:
        seconds = self._seconds_per_iteration(row)
        if seconds is not None and self._max_iter is not None:
            eta_seconds = seconds * max(0, self._max_iter - row.step)
            storage.put_scalar("eta_seconds", eta_seconds, smoothing_hint=False)
            yield f"eta: {timedelta(seconds=round(eta_seconds))}"
        yield f"iteration: {row.step}" if self._max_iter is None else f"iteration: {row.step}/{self._max_iter}"
        yield f"consumed_samples: {storage.samples}"
        smooth = storage.latest_with_smoothing_hint(self._window_size)
        yield from (f"{name}: {value:.4g}" for name, (value, _) in smooth.items() if _is_training_loss(name))
        if seconds is not None:
            yield f"time: {seconds:.4g} s/iter"
        yield from (f"data_time: {row.values[name]:.4g} s/iter" for name in _DATA_TIME_NAMES if name in row.values)
        if seconds:
            yield f"total_throughput: {self._batch_size / seconds:.2f} samples/s"
        yield from (f"lr: {row.values[name]:.2e}" for name in _RATE_NAMES if name in row.values)
        yield f"max_mem: {_peak_bytes() / 2**20:.0f}M"

    def _seconds_per_iteration(self, row: Row) -> float | None:
        before, self._mark = self._mark, (row.time, row.step)
        if before is None or row.step <= before[1]:
            return None
        return (row.time - before[0]) / (row.step - before[1])


def _is_training_loss(name: str) -> bool:
    return name.endswith("loss") and not name.startswith("evaluation.")


def _peak_bytes() -> int:
    """Return the most memory held so far: of the GPU if torch uses one, else of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS
