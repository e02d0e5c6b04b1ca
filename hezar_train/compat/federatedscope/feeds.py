"""Where FederatedScope's loops take their batches from: `next(ctx.train_loader)`.

`BatchFeed` hands out the batches of the walk below. Each turn of a loop over batches is one step of that walk: `open`
begins it, `finish` counts it and does what is due (log, save). A loader that was handed in stays whole: batches come in
its order, an epoch of the loop begins with its first one, and where the loop asks for more than there are it begins
again. `EvalFeed` and `ReIterator` hand out batches of which nothing is learned.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from hezar_train.data import Source, Window, batch_length
from hezar_train.errors import DataError, HookError
from hezar_train.loop import Context as LoopContext
from hezar_train.loop import Fit, Loop
from hezar_train.plan import UNLIMITED, End, Plan, one_pass

__all__ = [
    "BatchFeed",
    "EvalFeed",
    "LoaderSource",
    "ProcessDraws",
    "ReIterator",
    "StopAsked",
    "refuse_no_step",
    "size_of_batch",
]


class StopAsked(Exception):  # noqa: N818 - no error: somebody called request_stop()
    """The run was asked to stop, and a loop of the user's own has asked for another batch."""


class ProcessDraws:
    """What the process would draw next, put aside while the steps of a routine draw by seeds of their own.

    A server that samples its clients, and a loader that shuffles with numpy, go on with the process's generators from
    round to round, as in FederatedScope, and not with what the last step has left in them.
    """

    def __init__(self) -> None:
        self._aside: tuple[Any, Any, torch.Tensor] | None = None

    def put_aside(self) -> None:
        """Note the process's generators, before the first step of a routine seeds them."""
        if self._aside is None:
            self._aside = _generators()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generators back at the end of a routine."""
        try:
            yield
        finally:
            if self._aside is not None:
                _set_generators(self._aside)
            self._aside = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let code within a routine draw from the process's generators."""
        if self._aside is None:
            yield
            return
        of_step = _generators()
        _set_generators(self._aside)
        try:
            yield
        finally:
            self._aside = _generators()
            _set_generators(of_step)


def _generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_generators(states: tuple[Any, Any, torch.Tensor]) -> None:
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.default_generator.set_state(of_torch)


class ReIterator:
    """Walk over a loader again and again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.reset()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            self.reset()
            return next(self.iterator)

    def reset(self) -> None:
        """Begin with the first batch."""
        self.iterator = iter(self.loader)


class EvalFeed(ReIterator):
    """The batches of a source in order; of several processes each has its share."""

    def __init__(self, source: Source, loader: Any) -> None:
        self._source = source
        self.is_filler = False
        """Whether the batch under way is another process's."""
        super().__init__(loader)

    def __next__(self) -> Any:
        try:
            window: Window = next(self.iterator)
        except StopIteration:
            self.reset()
            window = next(self.iterator)
        self.is_filler = window.is_filler(0)
        return window.batches[0]

    def reset(self) -> None:
        """Begin with the first batch."""
        plan = one_pass(self._source.num_samples, self._source.batch_size)
        self.iterator = self._source.windows(plan, 0, 0, UNLIMITED)

    def close(self) -> None:
        """Give back what the source holds."""
        self._source.close()


class BatchFeed:
    """The batches of a walk that learns, for loops that call `next`."""

    def __init__(
        self,
        loop: Loop,
        fit: Fit,
        ctx: LoopContext,
        loader: Any,
        before_count: Callable[[], None],
        draws: ProcessDraws,
    ) -> None:
        """Hand out the batches of a fit; `before_count` is called before a step is counted, to tell its loss."""
        self.loader, self._draws = loader, draws
        self._loop, self._fit, self._ctx, self._before_count = loop, fit, ctx, before_count
        self._epoch: ExitStack | None = None
        self._walk: Iterator[Any] | None = None
        self._next: list[Any] = []  # the batch of a step that is begun and not handed out
        self._unused: deque[Any] = deque()
        self._has_more = False  # whether the epoch was over before its data was
        self.is_open = False
        """Whether a step is under way."""
        self.num_steps = 0
        """Steps that were begun."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.open()
        return self._unused.popleft()

    @property
    def is_filler(self) -> bool:
        """Whether the batch under way is another process's."""
        step = self._ctx.step
        return bool(self.is_open and step.window.is_filler(step.batch_in_window))

    @property
    def num_unused(self) -> int:
        """Batches that steps have gone by with and no hook has taken."""
        return len(self._unused)

    def open(self, *, is_kept: bool = True) -> None:
        """Begin a step; its batch waits for the hook that takes it, or is dropped."""
        self.finish()
        if self._fit.state.stop_reason is not None:
            raise StopAsked
        if not self._next:
            self._fetch()
        if is_kept:
            self._unused.extend(self._next)
        self._next, self.is_open, self.num_steps = [], True, self.num_steps + 1

    def finish(self) -> None:
        """Count the step under way and do what is due."""
        if self.is_open:
            self._before_count()
            self.is_open = False
            self._advance()

    def reset(self) -> None:
        """Begin with the first batch: what is left of the epoch is passed over."""
        self.finish()
        if self._next or self._epoch is not None:
            self._cut()
        self._has_more = False
        self._unused.clear()

    def close(self, *, has_failed: bool) -> None:
        """End the walk; a step that is done is counted."""
        if not has_failed:
            self.finish()
        if self._epoch is not None:
            self._cut()

    def _fetch(self) -> None:
        """Get the next batch, of the next epoch where this one has no more."""
        fit = self._fit
        self._draws.put_aside()
        if fit.ends:  # a loop of the user's own that is longer than the config says
            fit.end = End(fit.state.global_step + 1)
            if fit.state.call_end is not None:
                fit.state.call_end = fit.end.step
        if self._walk is None and self._has_more:
            self._go_on_with_epoch()
        for _ in range(2):
            if self._walk is None:
                self._begin_epoch()
            self._advance()
            if self._next:
                return
        raise DataError("the training data gave no batch: it is empty")

    def _go_on_with_epoch(self) -> None:
        """Let an epoch be longer than the config says: a loop that asks for more gets the loader's next batch."""
        fit, self._has_more = self._fit, False
        fit.state.epoch_finished = False
        fit.batches_in_epoch = max(fit.batches_in_epoch, fit.state.epoch_step + 1)

    def _begin_epoch(self) -> None:
        self._fit.enter_next_epoch()
        self._epoch = ExitStack()
        self._epoch.enter_context(self._fit.routine.epoch())
        batches = self._epoch.enter_context(self._loop.epoch_batches(self._fit.state.epoch))
        self._walk = iter(batches)

    def _advance(self) -> None:
        """Go to the next batch, which counts the one before; at the epoch's end leave it."""
        if self._walk is None:
            return
        try:
            self._next = [next(self._walk)]
        except StopIteration:
            epoch, self._epoch, self._walk = self._epoch, None, None
            self._has_more = self._fit.is_cut_short or not self._fit.state.epoch_finished
            if epoch is not None:
                epoch.close()

    def _cut(self) -> None:
        """Leave the epoch before its end."""
        epoch, self._epoch, self._walk, self._next = self._epoch, None, None, []
        if epoch is not None:
            epoch.__exit__(GeneratorExit, GeneratorExit(), None)
            self._fit.state.epoch_finished = True


class LoaderSource:
    """Any other iterable of batches, as it is: a list of graphs, a loader of another library."""

    num_batches: int | None = None
    drop_last = False

    def __init__(
        self,
        loader: Iterable[Any],
        num_samples: int | None,
        batch_size: int,
        num_processes: int,
        draws: ProcessDraws,
    ) -> None:
        if num_processes > 1:
            raise DataError(
                f"the batches come from a {type(loader).__name__}, which cannot be shared out among {num_processes} "
                "processes. Pass a dataset or a torch DataLoader, or train with one process."
            )
        self._loader, self.batch_size, self._draws = loader, batch_size, draws
        self.num_samples = None if num_samples is None else int(num_samples)  # libraries count in types of their own
        self._left: tuple[Iterator[Any], Any] | None = None  # of an epoch that was left before its data was over

    @property
    def resume_problem(self) -> str | None:
        """Say why a run cannot go on in the middle of an epoch."""
        return f"the batches come from a {type(self._loader).__name__}, of which no checkpoint knows the place"

    def windows(
        self, plan: Plan, epoch: int, position: int, steps_left: int, samples_left: int = UNLIMITED
    ) -> Iterator[Window]:
        """Yield the batches; one is read ahead, because only that tells where the epoch ends."""
        del plan, epoch, samples_left
        if position == 0 or self._left is None:
            with self._draws.in_use():
                batches = iter(self._loader)
                batch = next(batches, None)
        else:
            batches, batch = self._left
        while batch is not None and steps_left > 0:
            with self._draws.in_use():
                ahead = next(batches, None)
            size, self._left = size_of_batch(batch), (batches, ahead)
            yield Window(position, size, ahead is None, [batch], sizes=[size], firsts=[position])
            position, steps_left, batch = position + size, steps_left - 1, ahead

    def restore(self, cursor: Any) -> None:
        """Nothing can be restored."""

    def close(self) -> None:
        """Nothing is held."""


def size_of_batch(batch: Any) -> int:
    """Count the samples of a batch; one that does not tell counts as one."""
    try:
        return batch_length(batch)
    except DataError:
        return 1


def refuse_no_step(feed: BatchFeed) -> None:
    """Raise if a routine that learns went by without a step."""
    if feed.num_steps == 0:
        raise HookError(
            "a routine of training went by and no batch was taken: no hook called next(ctx.train_loader), as "
            "_hook_on_batch_start_init does, in a loop over ctx.num_train_batch. To train on data of your own, give it "
            "to the trainer in parse_data()."
        )
