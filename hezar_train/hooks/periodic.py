"""Hooks that do something every so many steps, under the names that LiBai's users know.

They watch, measure and ask; none of them changes the run. So two of LiBai's are not here in full: the best checkpoint
is kept by `metric_for_best_model`, because only the default behaviour can protect it from retention; and the schedule
is stepped by the default hook `schedule`, so `LRScheduler` only records the rate.

Periods count steps, as `state.global_step` does: a period of 5 means after the steps 5, 10, 15. What a hook must
remember is in its state, so a run that was killed and resumed writes and evaluates what the unbroken run does.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import torch

from hezar_train.checkpoint.optimizer_state import load_state
from hezar_train.errors import DataError, HookError
from hezar_train.events import (
    CSVWriter,
    EventWriter,
    Histogram,
    Image,
    JSONLinesWriter,
    Row,
    TensorBoardWriter,
    flatten_results_dict,
    keep_until,
)
from hezar_train.events.storage import RESERVED_NAMES
from hezar_train.loop import Context, Hook, HookCall, Moment
from hezar_train.runtime import logger

if TYPE_CHECKING:
    from hezar_train.trainer import Trainer

__all__ = [
    "CallbackHook",
    "Checkpointed",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "checked_period",
    "numbers_in",
]

HookBase = Hook

Callback = Callable[[Any], object]


class CallbackHook(Hook):
    """Call functions of the trainer: `CallbackHook(after_step=lambda trainer: ...)`."""

    def __init__(
        self,
        *,
        before_train: Callback | None = None,
        after_train: Callback | None = None,
        before_step: Callback | None = None,
        after_step: Callback | None = None,
    ) -> None:
        given = {
            Moment.FIT_START: before_train,
            Moment.FIT_END: after_train,
            Moment.BATCH_START: before_step,
            Moment.BATCH_END: after_step,
        }
        self._functions = {moment: function for moment, function in given.items() if function is not None}
        for function in self._functions.values():
            if not callable(function):
                raise HookError(f"CallbackHook: {function!r} is not a function; expected one that takes the trainer")

    def calls(self) -> Iterator[tuple[Moment, HookCall]]:
        for moment, function in self._functions.items():
            yield moment, functools.partial(self._call, function)

    def _call(self, function: Callback, _: Context) -> None:
        function(self.trainer)


class IterationTimer(Hook):
    """Put the seconds of each step as `time`, and say at the end how fast the steps were.

    A step's time is that of its forward, backward and update on the host's clock; other hooks before and after them do
    not count. The first steps after a start are slower and not put: `warmup_iter=3` begins with the third.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_steps = checked_period("IterationTimer", "warmup_iter", warmup_iter, least=0)

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        for mode in self.modes:  # first at their moments: other hooks' time must not count
            hooks = trainer.hooks[mode]
            hooks.register(self._start, Moment.BATCH_FORWARD, name=f"{self.name}.start", position=0)
            hooks.register(self._stop, Moment.BATCH_END, name=f"{self.name}.stop", position=0)

    def before_train(self) -> None:
        self._num_steps, self._num_timed, self._timed_seconds = 0, 0, 0.0
        self._train_began = perf_counter()

    def before_step(self) -> None:
        self._step_began, self._is_forward = perf_counter(), False

    def _start(self, _: Context) -> None:
        if not self._is_forward:  # an overridden run_step may run several forwards, or none
            self._step_began, self._is_forward = perf_counter(), True

    def _stop(self, _: Context) -> None:
        self._seconds = perf_counter() - self._step_began

    def after_step(self) -> None:
        self._num_steps += 1
        if self._num_steps < self._warmup_steps:
            self._train_began = perf_counter()
            return
        self._num_timed += 1
        self._timed_seconds += self._seconds
        self.trainer.storage.put_scalar("time", self._seconds)

    def after_train(self) -> None:
        if not self._num_timed:
            return
        outside = perf_counter() - self._train_began - self._timed_seconds
        logger.info(
            "%d steps of %.4f seconds on average; %.2f seconds went elsewhere (data, hooks, saves, evaluations)",
            self._num_timed, self._timed_seconds / self._num_timed, max(outside, 0.0),
        )  # fmt: skip


class LRScheduler(Hook):
    """Put the learning rate that each step trains with as `lr`: that of the group with the most parameters.

    The schedule itself comes from `TrainerConfig.lr_scheduler`, or is passed to the Trainer.
    """

    def before_train(self) -> None:
        sizes = [len(group["params"]) for group in self.trainer.optimizer.param_groups]
        self._group = sizes.index(max(sizes))

    def before_step(self) -> None:
        self._rate = self.trainer.optimizer.param_groups[self._group]["lr"]
        if isinstance(self._rate, torch.Tensor):
            self._rate = self._rate.clone()  # the schedule writes into it

    def after_step(self) -> None:
        self.trainer.storage.put_scalar("lr", self._rate, smoothing_hint=False)


class PeriodicCheckpointer(Hook):
    """Ask for a checkpoint every `period` steps; `save_total_limit` says how many are kept.

    The end of each epoch and of the run is saved in any case. Inside a window of micro-batches the save waits for its
    end.
    """

    def __init__(self, period: int) -> None:
        self._period = checked_period("PeriodicCheckpointer", "period", period, least=1)

    def after_step(self) -> None:
        if self.trainer.state.global_step % self._period == 0:
            self.trainer.request_save()


class EvalHook(Hook):
    """Call a function every `eval_period` steps and at the end of the run; put the numbers that it returns.

    The function takes nothing and returns a mapping of numbers, nested or not: {"dev": {"f1": 0.5}} is put as "dev/f1".
    At the end it is called once, before the last checkpoint, and not at all if the run failed. A period of 0 means only
    at the end.
    """

    def __init__(self, eval_period: int, eval_function: Callable[[], Mapping[str, Any] | None]) -> None:
        self._period = checked_period("EvalHook", "eval_period", eval_period, least=0)
        if not callable(eval_function):
            raise HookError(f"EvalHook: eval_function is {eval_function!r}; expected a function without arguments")
        self._function = eval_function
        self._evaluated_step = -1

    def after_step(self) -> None:
        if self._period and self.trainer.state.global_step % self._period == 0 and not self.trainer.reached_end:
            self._evaluate()

    def on_epoch_end(self, _: Context) -> None:
        """Evaluate the last step here: what is put now is still logged and saved with it."""
        if self.trainer.reached_end:
            self._evaluate()

    def on_fit_end(self, ctx: Context) -> None:
        """Evaluate a run that the evaluation of its last step has ended."""
        if ctx.failed is None:
            self._evaluate()

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated_step": self._evaluated_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluated_step = state["evaluated_step"]

    def _evaluate(self) -> None:
        step = self.trainer.state.global_step
        if step == self._evaluated_step:
            return
        results = self._function()
        for name, value in numbers_in({} if results is None else results).items():
            self.trainer.storage.put_scalar(name, value, smoothing_hint=False)
        self._evaluated_step = step


class Checkpointed(Hook):
    """Keep an object of the user's in every checkpoint: what its `state_dict()` returns, plain values and tensors."""

    def __init__(self, name: str, kept: Any) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(kept, method, None)):
                raise HookError(f"{name!r} is a {type(kept).__name__} without {method}(); a checkpoint needs both")
        self._name, self.kept = f"checkpointed.{name}", kept

    @property
    def name(self) -> str:
        return self._name

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.kept.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_state(self.kept, state, f"the hook {self.name}")


def checked_period(hook: str, name: str, given: Any, least: int) -> int:
    """Return a number of steps that a hook was given; refuse what is none, or less than `least`."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= least:
        return given
    raise HookError(f"{hook}: {name}={given!r}; expected a whole number of steps, {least} or more")


def numbers_in(results: Any) -> dict[str, float]:
    """Return nested results as one mapping of floats."""
    if not isinstance(results, Mapping):
        raise DataError(f"eval_function returned a {type(results).__name__}; expected a mapping of numbers, or None")
    numbers = {}
    for name, value in flatten_results_dict(results).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(f"eval_function returned {value!r} under {name!r}; expected a number") from None
    return numbers


# LiBai's `PeriodicWriter`: rows of its own for writers of the user's, every so many steps.
#
# It owns those rows, what of them a checkpoint carries, and how the writers' files go on after a kill; the rows of the
# default log are the storage's.


class PeriodicWriter(Hook, EventWriter):
    """Give writers a row every `period` steps, at the last step, and when the run's files are closed.

    A row holds the last value of each name that was put since the row before; `time`, `step` and `epoch`, which a row
    has of its own, as `train.time` and so on. A writer whose `write()` takes nothing is called at the same times and
    reads `get_event_storage()` itself. At a resume, a JSON lines file is cut back to the checkpoint, and
    TensorBoard is told to forget what follows it; other writers get the rows past it twice. The hook stands among the
    storage's own writers only to be closed with them, after every `after_train`: nothing that is put there is lost.
    """

    def __init__(self, writers: Iterable[EventWriter], period: int = 20) -> None:
        self.period = checked_period("PeriodicWriter", "period", period, least=1)
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
        if self.is_due():
            self._write_row()

    def is_due(self) -> bool:
        """Tell whether a row is due after this step."""
        return self.trainer.state.global_step % self.period == 0 or self.trainer.reached_end

    def place(self) -> tuple[int, int]:
        """Return the step and the epoch of a row that is written now."""
        return self.trainer.state.global_step, self.trainer.state.epoch

    def values_now(self) -> dict[str, float]:
        """Return what a row that is written now holds."""
        return self._unwritten()

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
        values = self.values_now()
        if not values:
            return
        step, epoch = self.place()
        storage = self.trainer.storage
        named = {f"train.{name}" if name in RESERVED_NAMES else name: value for name, value in values.items()}
        for writer in self._writers:
            if _reads_storage(writer):
                writer.write()  # type: ignore[call-arg]
            else:
                writer.write([Row(step, epoch, time(), named)])
            writer.flush()
        self._carried = {}
        self._num_written = {name: storage.history(name).total for name in storage.latest()}

    def _go_back(self, sizes: Mapping[str, int]) -> None:
        """Open again the files that were closed, or hold more than they should."""
        next_step = self.place()[0] + 1
        self._writers = [_opened_again(writer, sizes, next_step) for writer in self._writers]


def _checked_writer(writer: Any) -> EventWriter:
    if isinstance(writer, EventWriter):
        return writer
    raise HookError(f"PeriodicWriter: {writer!r} is not an EventWriter. Subclass it and override write(rows).")


def _reads_storage(writer: EventWriter) -> bool:
    """Tell whether a writer's `write()` takes no rows."""
    return not inspect.signature(writer.write).parameters


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
