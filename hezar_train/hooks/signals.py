"""SIGTERM and Ctrl-C set a flag; the loop finishes its window, saves and leaves.

Handlers are set in the main thread only, as Python wants it, and put back afterwards. A run in another thread, such as
Ray Train's, goes without and says so once: signals do there what the rest of the program makes of them. A Ctrl-C after
another signal does not wait for the window and saves nothing: it is raised where the run is, as a KeyboardInterrupt.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from hezar_train.runtime.logging import ERASE_BELOW, can_draw_on, columns_of, fold_lines, logger

__all__ = ["StopFlag"]

WATCHED = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """A context manager that turns the first signal into a flag."""

    def __init__(self, *, waits_for_others: bool = False) -> None:
        """With `waits_for_others`, a signal counts once all processes know of it."""
        self._waits, self._agreed = waits_for_others, False
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._draws = False
        self.signal: signal.Signals | None = None

    @property
    def asked(self) -> bool:
        """Tell whether the run is to end now: a signal has come and, with several processes, all know of it."""
        return self.signal is not None and (self._agreed or not self._waits)

    def agree(self) -> None:
        """Note that a process got a signal, and that all know it."""
        self._agreed, self.signal = True, self.signal or signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """Return the conventional exit code of the signal: 128 and its number."""
        return 128 + int(self.signal or 0)

    def __enter__(self) -> StopFlag:
        self._pid = os.getpid()
        self._draws = sys.__stderr__ is not None and not sys.__stderr__.closed and can_draw_on(sys.__stderr__)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in WATCHED}
        else:
            _tell_of_other_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._put_back()
        self.signal, self._agreed = None, False  # the next run starts unasked

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child inherited the handler; it has no update to finish
            self._put_back()
            signal.raise_signal(number)
            return
        if self.signal is not None and number == signal.SIGINT:
            self._leave_the_line()
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        words = f"{self.signal.name}: finishing this update, then saving. Ctrl-C again leaves at once."
        if self._draws and sys.__stderr__:
            self._leave_the_line()
            _write_at_once(fold_lines(words, columns_of(sys.__stderr__)) + "\n")
        else:
            _write_at_once(f"\n{words}\n")

    def _leave_the_line(self) -> None:
        """Go below the ^C that a terminal shows; what was drawn there is erased."""
        if self._draws:
            _write_at_once(f"{ERASE_BELOW}\n")


@functools.cache
def _tell_of_other_thread() -> None:
    logger.info(
        "This run is not in the main thread, the only one that can handle signals: SIGTERM and Ctrl-C will not be "
        "followed by a save. What was saved last is what a resume goes on from."
    )


def _write_at_once(text: str) -> None:
    """Write unbuffered: a handler may interrupt a print, and Python's own streams refuse to be entered twice."""
    with suppress(OSError):  # nobody is looking
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
