"""The one walk of the loop; train and evaluate differ in mode, data and hooks only.

run                             FIT_START
  for epoch                     EPOCH_START
    walk(windows)
      for batch                 BATCH_START
        run_step()              BATCH_FORWARD, BATCH_BACKWARD, UPDATE (by the methods it calls)
                                BATCH_END
                                EPOCH_END
                                FIT_END      also after a failure, with ctx.failed set
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hezar_train.data import Window
from hezar_train.loop.context import Context
from hezar_train.loop.hook_set import HookSet
from hezar_train.loop.moments import Moment
from hezar_train.types import Mode

__all__ = ["Routine"]


class Routine:
    """One walk with a mode, a split and a hook set; what runs at each moment is frozen when it is made."""

    def __init__(
        self, ctx: Context, hooks: HookSet, mode: Mode, split: str, run_step: Callable[[], object] | None = None
    ) -> None:
        """Walk with `run_step` for each batch; without one, a step is the forward moment alone."""
        self._ctx = ctx
        self._run_step = run_step or (lambda: self.fire(Moment.BATCH_FORWARD))
        self._calls = {moment: hooks.calls(moment) for moment in Moment}
        self.mode, self.split = mode, split

    def fire(self, moment: Moment) -> None:
        """Run a moment's hooks."""
        ctx = self._ctx
        for call in self._calls[moment]:
            call(ctx)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open the routine's frame, with FIT_START before and FIT_END after the body, also when it fails."""
        failure: BaseException | None = None
        with self._ctx.frame(self.mode, self.split):
            try:
                self.fire(Moment.FIT_START)
                yield
            except BaseException as error:  # noqa: BLE001 - raised again below
                self._ctx.failed = failure = error
            try:
                self.fire(Moment.FIT_END)
            finally:
                if failure is not None:  # what went wrong first is what the caller must see
                    raise failure

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Fire EPOCH_START before and EPOCH_END after the body."""
        self.fire(Moment.EPOCH_START)
        yield
        self.fire(Moment.EPOCH_END)

    def walk(self, windows: Iterable[Window]) -> None:
        """Step through the micro-batches of each window."""
        ctx, run_step = self._ctx, self._run_step
        starts, ends = self._calls[Moment.BATCH_START], self._calls[Moment.BATCH_END]
        for window in windows:
            ctx.window = window
            last = len(window.batches) - 1
            for number, batch in enumerate(window.batches):
                ctx.batch, ctx.batch_in_window, ctx.closes_window = batch, number, number == last
                for call in starts:
                    call(ctx)
                run_step()
                for call in ends:
                    call(ctx)
