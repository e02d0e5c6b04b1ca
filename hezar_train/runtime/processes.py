"""The processes of a run and what they tell one another, and the `Runtime`: processes, device and precision together.

Every method of `Processes` that sends is a collective: all processes call it, in the same order. On one process each
costs next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from hezar_train.errors import HezarTrainError
from hezar_train.runtime.messages import pack_message, unpack_message
from hezar_train.runtime.place import PLACE

__all__ = [
    "Processes",
    "Runtime",
]

FEW = 8
"""So many processes send a few numbers to each of the others rather than round all of them twice."""

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

T = TypeVar("T")


class Processes:
    """The processes of a run, and this one's number among them."""

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.count = rank, count
        self._device = device or torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[Any]) -> list[float]:
        """Return the sum of each value over all processes, in full precision."""
        if self.count == 1:
            return [float(value) for value in values]
        own = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in values])
        PLACE.enter_collective()
        found: list[float] = self._total(own).tolist()
        PLACE.leave_collective()
        return found

    def _total(self, own: torch.Tensor) -> torch.Tensor:
        if self.count > FEW:
            dist.all_reduce(own)
            return own
        # Gloo sums in two rounds, and each waits for the others' threads to wake up; it gathers in one.
        gathered = own.new_empty(self.count, len(own)).unbind()
        dist.all_gather(list(gathered), own)
        return functools.reduce(torch.add, gathered)  # in the order of the ranks, so that all have the same bits

    def total(self, value: Any) -> float:
        """Return the sum of one value over all processes, in full precision."""
        return self.sum([value])[0]

    def sum_and_compare(self, values: Sequence[Any], mark: int) -> tuple[list[float], bool]:
        """Return the sum of each value over all processes, and whether all have the same mark below 2^20."""
        *sums, marks, squares = self.sum([*values, float(mark), float(mark * mark)])
        # One message instead of two: numbers are equal if the mean of their squares is the square of their mean.
        return sums, self.count * int(squares) == int(marks) ** 2

    def agree(self, values: Sequence[int]) -> bool:
        """Tell whether all processes have the same whole numbers."""
        if self.count == 1:
            return True
        # One reduction instead of two: the largest of the negated values is the smallest.
        both = torch.tensor([*values, *(-value for value in values)], device=self._device)
        PLACE.enter_collective()
        dist.all_reduce(both, dist.ReduceOp.MAX)
        largest, smallest = both.view(2, -1)
        is_same = bool((largest == -smallest).all())
        PLACE.leave_collective()
        return is_same

    def share(self, value: T) -> T:
        """Return the main process's value on all: plain values, tensors and arrays (`messages`)."""
        if self.count == 1:
            return value
        # Not torch's `broadcast_object_list`, which sends pickles; the size goes first, to make room for the message.
        message = pack_message(value) if self.is_main else b""
        size = torch.tensor([len(message)], device=self._device)
        PLACE.enter_collective()
        dist.broadcast(size, 0)
        data = self._padded(message, int(size))
        dist.broadcast(data, 0)
        PLACE.leave_collective()
        return value if self.is_main else self._read(data)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their numbers, on all; what may be sent: `messages`."""
        if self.count == 1:
            return [value]
        # Not torch's `all_gather_object`, which sends pickles.
        message = pack_message(value)
        sizes = [torch.empty(1, dtype=torch.int64, device=self._device) for _ in range(self.count)]
        PLACE.enter_collective()
        dist.all_gather(sizes, torch.tensor([len(message)], device=self._device))
        room = max(int(size) for size in sizes)
        found = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in sizes]
        dist.all_gather(found, self._padded(message, room))
        PLACE.leave_collective()
        return [self._read(data) for data in found]

    def _padded(self, message: bytes, size: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8).to(self._device)

    def _read(self, data: torch.Tensor) -> Any:
        return unpack_message(data.cpu().numpy().tobytes(), self._device)

    def on_main(self, act: Callable[[], T]) -> T | None:
        """Let the main process act while the others wait; return what it returned there, and None elsewhere.

        If it fails with an `Exception`, all fail: the others with a `HezarTrainError` that quotes it. What fails on one
        process outside of this is told to nobody, but for a sharded save: the others wait in their next collective
        until that process ends and its connections break, the time limit is over, or the launcher ends them.
        """
        if self.count == 1:
            return act()
        result, failure = None, None
        if self.is_main:
            try:
                result = act()
            except Exception as error:  # noqa: BLE001 - raised again below
                failure = error
        message = self.share(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if message is not None:
            raise HezarTrainError(f"the main process stopped: {message}")
        return result

    def wait(self) -> None:
        """Wait for all processes."""
        self.sum([0.0])


@dataclass
class Runtime:
    """Processes, device and precision of a run, resolved once."""

    accelerator: Accelerator
    device: torch.device
    num_processes: int
    rank: int
    precision: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def processes(self) -> Processes:
        """The processes of the run."""
        return Processes(self.rank, self.num_processes, self.device)

    @property
    def has_fsdp_plugin(self) -> bool:
        """Tell whether the Accelerator was set up to spread the model (FSDP2)."""
        return bool(self.accelerator.is_fsdp2)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.accelerator.scaler  # type: ignore[no-any-return]

    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what to enter around each forward: autocast to the run's precision, or nothing in full precision."""
        if self.precision == "no":
            return contextlib.nullcontext
        if self.precision not in AUTOCAST_TYPES:
            return self.accelerator.autocast  # type: ignore[no-any-return]
        # Not Accelerate's: it looks the precision up in a global, which a second trainer may have changed.
        handler = self.accelerator.autocast_handler
        options = {} if handler is None else handler.to_kwargs()
        return functools.partial(torch.autocast, self.device.type, dtype=AUTOCAST_TYPES[self.precision], **options)
