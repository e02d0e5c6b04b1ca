"""The one walk of the loop; train and evaluate differ in mode, data and hooks only.

running()                       FIT_START
  epoch()                       EPOCH_START
    walk(), or over batches()
      for batch                 BATCH_START
        run_step()              BATCH_FORWARD, BATCH_BACKWARD, UPDATE (by the methods it calls)
                                BATCH_END
                                EPOCH_END
                                FIT_END      also after a failure, with ctx.failed set
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from hezar_train.data import Window
from hezar_train.loop.context import Context, Lifecycle
from hezar_train.loop.hooks import HookSet, Moment
from hezar_train.types import Mode

__all__ = [
    "Routine",
]


class Routine:
    """One walk with a mode, a split and a hook set; what runs at each moment is frozen when it is made."""

    def __init__(
        self, ctx: Context, hooks: HookSet, mode: Mode, split: str, run_step: Callable[[], object] | None = None
    ) -> None:
        """Walk with `run_step` for each batch; without one, a step is the moments of forward and backward."""
        self._ctx = ctx
        self._run_step = run_step or self._forward_and_backward
        self._calls = {moment: hooks.calls(moment) for moment in Moment}
        self.mode, self.split = mode, split
        self._keep_at_hand()

    def _keep_at_hand(self) -> None:
        """Have what runs in every step without a look-up, which costs more than an empty moment."""
        self.forward_calls = self._calls[Moment.BATCH_FORWARD]
        self.backward_calls = self._calls[Moment.BATCH_BACKWARD]
        self.update_calls = self._calls[Moment.UPDATE]

    def fire(self, moment: Moment) -> None:
        """Run a moment's hooks."""
        ctx = self._ctx
        for call in self._calls[moment]:
            call(ctx)

    def _forward_and_backward(self) -> None:
        self.fire(Moment.BATCH_FORWARD)
        self.fire(Moment.BATCH_BACKWARD)

    @contextmanager
    def running(self, announce: Callable[[], None] | None = None) -> Iterator[None]:
        """Open the routine's frame, with FIT_START before and FIT_END after the body, also when it fails.

        `announce` may set names in the frame before the first hook runs.
        """
        failure: BaseException | None = None
        with self._ctx.frame(self.mode, self.split):
            try:
                if announce is not None:
                    announce()
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
        """Fire EPOCH_START before and EPOCH_END after the body; the epoch's variables end with it."""
        try:
            self.fire(Moment.EPOCH_START)
            yield
            self.fire(Moment.EPOCH_END)
        finally:
            self._ctx.clear(Lifecycle.EPOCH)

    def walk(self, windows: Iterable[Window]) -> None:
        """Step through the micro-batches of each window."""
        run_step = self._run_step
        with closing(self.batches(windows)) as batches:  # a failed step must end its batch here, not some time later
            for _ in batches:
                run_step()

    def batches(
        self, windows: Iterable[Window], number_in_epoch: int = 0, settle: Callable[[], None] | None = None
    ) -> Generator[Any, None, None]:
        """Yield each micro-batch between its BATCH_START and its BATCH_END; the batch's variables end with it.

        Where something is learned, `settle` is called before the BATCH_END of a batch whose loss is not known by then.
        """
        ctx = self._ctx
        own = ctx.__dict__  # written directly: this runs for every batch
        names = own["_lives"][Lifecycle.BATCH]
        starts, ends = self._calls[Moment.BATCH_START], self._calls[Moment.BATCH_END]
        for window in windows:
            own["window"] = window
            last = len(window.batches) - 1
            for number, batch in enumerate(window.batches):
                own["batch"], own["batch_in_window"], own["closes_window"] = batch, number, number == last
                own["cur_batch_i"] = number_in_epoch
                own["is_loss_noted"], own["loss_value"], own["applied"] = False, None, False
                number_in_epoch += 1
                try:
                    for call in starts:
                        call(ctx)
                    yield own["batch"]
                    if settle is not None and (own["loss_value"] is None or not own["is_loss_noted"]):
                        settle()
                    for call in ends:
                        call(ctx)
                finally:
                    for name in names:
                        own.pop(name, None)
