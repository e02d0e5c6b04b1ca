"""A stream in several files, of which each process reads its own; nobody reads what another one trains on.

Only where the files divide evenly among the processes, and only where the batch is each process's own: the updates of
one process over the whole stream could not be made of it. All processes take the same number of steps: they tell one
another before each window how much they have, and one whose files have ended keeps the others company. Each has a
place of its own in the checkpoint, so that another number of processes can go on only at an epoch's end.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from hezar_train.data.cursor_source import seeded_each
from hezar_train.data.fetch import Collator
from hezar_train.data.seeds import sample_seed, seed_python_numpy_torch
from hezar_train.data.stream_source import stream_resume_problem
from hezar_train.data.windows import NUM_COMPANY_ITEMS, Order, Window
from hezar_train.errors import DataError
from hezar_train.plan import UNLIMITED, Plan
from hezar_train.runtime import Processes

__all__ = ["SplitStreamSource", "divides"]


def divides(stream: Any, num_processes: int) -> bool:
    """Tell whether a stream is one of `datasets` whose files can be shared out evenly."""
    files = getattr(stream, "num_shards", None)
    is_known = hasattr(stream, "_distributed") and hasattr(stream, "state_dict")
    return num_processes > 1 and is_known and isinstance(files, int) and files % num_processes == 0


class SplitStreamSource:
    """This process's files of a stream, in step with the other processes."""

    num_samples: int | None = None
    num_batches: int | None = None
    drop_last = False

    def __init__(self, stream: Any, order: Order, collate: Collator, processes: Processes) -> None:
        self._stream, self._collate, self._order, self._processes = stream, collate, order, processes
        self.batch_size = order.batch_size
        self._part = self._own_part()
        self._place = 0
        self._cursor: Any = None

    @property
    def resume_problem(self) -> str | None:
        return stream_resume_problem(self._stream)

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        del samples_left  # of a global batch, which this source is not for
        samples = self._samples(epoch, position)

        def read(count: int) -> tuple[list[Any], Any]:
            return list(itertools.islice(samples, count)), self._state()

        quota = min(plan.accumulation, steps_left) * plan.batch_size
        held, after = read(quota)
        while True:
            steps_left -= plan.accumulation
            coming = min(plan.accumulation, max(steps_left, 1)) * plan.batch_size  # one is read to see if there are any
            ahead, after_ahead = read(coming)
            counts, more, places = zip(*self._processes.gather((len(held), len(ahead), after)), strict=True)
            if not any(counts) or (plan.drop_last and min(counts) < quota):
                return
            ends = not any(more) or (plan.drop_last and min(more) < coming)
            yield self._window(held, counts, epoch, position, ends_epoch=ends, cursor={"parts": list(places)})
            if ends or steps_left <= 0:
                return
            position += sum(counts)
            held, after, quota = ahead, after_ahead, coming

    def restore(self, cursor: Any) -> None:
        self._cursor = cursor

    def close(self) -> None:
        """Nothing is held."""

    def _samples(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield the rest of this process's samples; what reading one draws follows from its place."""
        cursor, self._cursor = self._cursor, None
        self._part, self._place = self._own_part(), 0  # anew: one that was put back begins there again and again
        self._part.set_epoch(epoch)
        if position:
            self._go_to(cursor)
        for sample, _ in seeded_each(self._part, partial(self._seed_of, epoch), self._place, lambda _: 1):
            self._place += 1
            yield sample

    def _own_part(self) -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(self._stream, self._order.rank, self._order.num_processes)

    def _go_to(self, cursor: Any) -> None:
        parts = (cursor or {}).get("parts", [])
        if len(parts) != self._processes.count:
            raise DataError(
                f"this epoch of the stream was begun by {len(parts)} processes, each with files of its own; there are "
                f"{self._processes.count} now. Go on with as many, or give a global_batch_size from the start."
            )
        own = parts[self._processes.rank]
        self._part.load_state_dict(copy.deepcopy(own["state"]))
        self._place = int(own["place"])

    def _seed_of(self, epoch: int, place: int) -> int:
        return sample_seed(self._order.seed, epoch, place * self._processes.count + self._processes.rank)

    def _state(self) -> Any:
        if self.resume_problem:
            return None
        return {"place": self._place, "state": copy.deepcopy(self._part.state_dict())}

    def _window(
        self, samples: list[Any], counts: tuple[int, ...], epoch: int, position: int, *, ends_epoch: bool, cursor: Any
    ) -> Window:
        window = Window(position, sum(counts), ends_epoch, [], cursor=cursor)
        first = position + sum(counts[: self._processes.rank])
        for start in range(0, max(counts), self.batch_size):
            own = samples[start : start + self.batch_size]
            seed_python_numpy_torch(self._seed_of(epoch, first + start))
            window.batches.append(self._collate(own or samples[-NUM_COMPANY_ITEMS:] or self._company()))
            window.sizes.append(len(own))
            window.firsts.append(first + start)
        return window

    def _company(self) -> list[Any]:
        """Return samples to keep other processes company with, when this one's files have ended."""
        found = list(itertools.islice(iter(self._own_part()), NUM_COMPANY_ITEMS))
        if not found:
            raise DataError(f"the files of process {self._processes.rank} hold no sample: give each process some")
        return found
