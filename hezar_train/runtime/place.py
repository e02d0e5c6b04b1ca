"""Where each process of a run is, so that the others can say who is missing and what it was doing.

A collective ends with an error when its time is over or a connection breaks, and that error names nobody. So while a
run trains, each of several processes keeps a few numbers in a file of the run's folder: the moment of the loop that it
has come to, the update, how many collectives it has begun and whether it waits in one, and a count that a thread
raises twice a second. The file is memory (mmap), so that noting a moment costs no call of the system, and what a
process noted last is there when it is stopped or killed. Only who has lost the others reads the files, for two seconds:
whose count stands still is dead or stopped; else whoever has come less far keeps the others waiting.

The files are no part of a run: they are made anew by each start and deleted by its end. One of a foreign form counts as
none. Across hosts the shared file system decides how soon the others see what is noted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from hezar_train.errors import HezarTrainError, LostProcessError
from hezar_train.run_folder import open_file, read_file
from hezar_train.types import Mode

__all__ = ["PLACE", "Place", "is_loss", "loss_explained"]

BEAT_SECONDS = 0.5
LISTEN_SECONDS = 2.0
"""How long the counts are watched: several beats, also on a busy machine."""
FORM = struct.Struct("<8Q")
MAGIC = int.from_bytes(b"hzplace1", "little")
MAGIC_AT, BEATS_AT, STATUS_AT, MOMENT_AT, UPDATE_AT, STEP_AT, CALLS_AT, WAITS_AT = range(8)
SIGNS = ("Timed out waiting", "by peer", "pair closure", "Broken pipe")
"""What gloo says, in a RuntimeError like any other, of a collective that lasted too long or lost a connection."""
MODES = tuple(Mode)
LARGEST = 1 << 62


class Status(IntEnum):
    """How a process stands to the run."""

    RUNS = 1
    HAS_LOST_OTHERS = 2
    HAS_FAILED = 3


class Counters(Protocol):
    """What is read of a run's state."""

    update_step: int
    global_step: int


@dataclass(frozen=True)
class Seen:
    """What a process has noted last."""

    beats: int
    status: Status
    moment: int
    update: int
    step: int
    calls: int
    waits: bool

    @property
    def progress(self) -> tuple[int, int, int]:
        """How far it is: more collectives, else more steps, else a later moment."""
        return self.calls, self.step, self.moment % 256

    def told(self, moments: Sequence[str]) -> str:
        """Say where it is."""
        mode, number = divmod(self.moment, 256)
        if number == 0:
            return "before the first batch"
        words = f"at {moments[number - 1]} ({MODES[mode].value}), after update {self.update} and step {self.step}"
        return f"{words}, in an exchange with the others" if self.waits else words


class Place:
    """Where this process is; there is one for each process, shown to the others while a run trains."""

    def __init__(self) -> None:
        self._slots = memoryview(bytearray(FORM.size)).cast("Q")
        self._counters: Counters | None = None
        self.is_shown = False

    @contextlib.contextmanager
    def shown(self, folder: Path, rank: int, counters: Counters) -> Iterator[None]:
        """Show where this process is while the body runs; where the folder takes no file, nobody sees it."""
        path, slots, self._counters = folder / str(rank), self._slots, counters
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                memory = stack.enter_context(_mapped(path))
                slots = memory.cast("Q")
                stack.callback(slots.release)
            slots[:] = memoryview(FORM.pack(MAGIC, 0, Status.RUNS, 0, 0, 0, 0, 0)).cast("B").cast("Q")
            before, self._slots, self.is_shown = self._slots, slots, True
            stop = threading.Event()
            thread = threading.Thread(target=_beat, args=(slots, stop), name="heartbeat", daemon=True)
            thread.start()
            try:
                yield
                path.unlink(missing_ok=True)
            except BaseException as error:
                lost = isinstance(error, LostProcessError)
                slots[STATUS_AT] = Status.HAS_LOST_OTHERS if lost else Status.HAS_FAILED
                if isinstance(error, SystemExit):  # all have agreed to stop
                    path.unlink(missing_ok=True)
                raise
            finally:
                stop.set()
                thread.join()
                self._slots, self.is_shown = before, False

    def noting(self, mode: Mode, number: int) -> Callable[[object], None]:
        """Return what notes a moment of the loop, by its number from 0 on."""
        code = MODES.index(mode) * 256 + number + 1

        def note(_: object) -> None:
            slots, counters = self._slots, self._counters
            slots[MOMENT_AT] = code
            if counters is not None:
                slots[UPDATE_AT], slots[STEP_AT] = counters.update_step, counters.global_step

        return note

    def enter_collective(self) -> None:
        """Note that this process begins to talk to the others."""
        slots = self._slots
        slots[CALLS_AT] += 1
        slots[WAITS_AT] = 1

    def leave_collective(self) -> None:
        """Note that it has their answer."""
        self._slots[WAITS_AT] = 0

    def note_loss(self) -> None:
        """Note that this process has lost another one, so that nobody takes it for the one that is missing."""
        self._slots[STATUS_AT] = Status.HAS_LOST_OTHERS


PLACE = Place()
"""That of this process."""


def is_loss(error: BaseException) -> bool:
    """Tell whether an error says that another process did not answer in time, or is gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)  # gloo has no class for it


def loss_explained(
    error: BaseException, folder: Path, rank: int, count: int, moments: Sequence[str]
) -> LostProcessError:
    """Return the error of this process, which has lost another, with the rank that is missing and where that was."""
    PLACE.note_loss()
    said = str(error).splitlines()[0].partition("] ")
    why = f"({said[2] or said[0]})"
    others = [other for other in range(count) if other != rank]
    first = {other: _read(folder / str(other), len(moments)) for other in others}
    time.sleep(LISTEN_SECONDS)
    last = {other: _read(folder / str(other), len(moments)) for other in others}
    missing = _missing(first, last, _own())
    if not missing:
        return LostProcessError(
            f"process {rank} of {count} has lost the others {why}, and none of them shows that it is missing. Look at "
            "what each of them said last."
        )
    found = "; ".join(f"process {other} {how}; it was {_told(last[other], moments)}" for other, how in missing.items())
    return LostProcessError(
        f"process {rank} of {count} got no answer {why}: {found}. Look at what it said last and at its machine, "
        "end what is left of it and start the run again, with resume_from_checkpoint=True. If it only was slow, raise "
        "collective_timeout_seconds."
    )


def _own() -> Seen:
    return _seen(PLACE._slots.tobytes(), 256) or Seen(0, Status.RUNS, 0, 0, 0, 0, False)


def _told(seen: Seen | None, moments: Sequence[str]) -> str:
    return "never seen" if seen is None else seen.told(moments)


def _missing(first: dict[int, Seen | None], last: dict[int, Seen | None], own: Seen) -> dict[int, str]:
    """Return who is missing, and how that shows: the surest sign that there is."""
    known = {rank: seen for rank, seen in last.items() if seen is not None}
    running = {rank: seen for rank, seen in known.items() if seen.status is Status.RUNS}
    failed = [rank for rank, seen in known.items() if seen.status is Status.HAS_FAILED]
    if failed:
        return dict.fromkeys(failed, "has failed with an error of its own")
    still = [rank for rank, seen in running.items() if (was := first[rank]) is None or was.beats == seen.beats]
    if still:
        return dict.fromkeys(still, "gives no sign of life")
    furthest = max([own.progress, *(seen.progress for seen in known.values())])
    behind = [rank for rank, seen in running.items() if seen.progress < furthest]
    if behind:
        return dict.fromkeys(behind, "is alive and has not come as far as the others")
    return dict.fromkeys((rank for rank in last if rank not in known), "is not to be seen")


def _read(path: Path, num_moments: int) -> Seen | None:
    """Return what a process has noted; None where there is nothing, or nothing of this form."""
    try:
        return _seen(read_file(path, FORM.size, follow_links=False), num_moments)
    except (OSError, HezarTrainError):
        return None


def _seen(content: bytes, num_moments: int) -> Seen | None:
    if len(content) != FORM.size:
        return None
    magic, beats, status, moment, update, step, calls, waits = FORM.unpack(content)
    mode, number = divmod(moment, 256)
    is_sound = mode < len(MODES) and number <= num_moments and max(beats, update, step, calls) < LARGEST
    if magic != MAGIC or status not in [*map(int, Status)] or not is_sound:
        return None
    return Seen(beats, Status(status), moment, update, step, calls, bool(waits))


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """Make a file of the size and yield it as memory."""
    path.unlink(missing_ok=True)
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, bytes(FORM.size))  # all of it, now: a full disk must not show when a moment is noted
        with mmap.mmap(descriptor, FORM.size) as memory, memoryview(memory) as view:
            yield view
    finally:
        os.close(descriptor)


def _beat(slots: memoryview, stop: threading.Event) -> None:
    """Count on for as long as this process lives and is not stopped."""
    while not stop.wait(BEAT_SECONDS):
        slots[BEATS_AT] += 1
