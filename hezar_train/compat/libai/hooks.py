"""LiBai's hooks, under its names and with its arguments: `from hezar_train.compat.libai import hooks`.

A trainer behind this door calls the four methods of its hooks itself (`trainer.before_step()` and so on), in the order
in which they were registered; moments (`on_update(ctx)`) are the loop's. Periods count iterations: a period of 20 acts
after the iterations 19, 39, ... What a hook must remember is in its state, so a run that was killed and resumed does
what the unbroken one does.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler

from hezar_train.compat.libai import distributed as dist
from hezar_train.compat.libai.checkpoint import Checkpointer
from hezar_train.errors import HookError
from hezar_train.events import EventWriter
from hezar_train.hooks.periodic import PeriodicWriter as RowWriter
from hezar_train.hooks.periodic import checked_period, numbers_in
from hezar_train.loop import Context, Hook, HookCall, Moment
from hezar_train.optim.schedule import from_plain, to_plain
from hezar_train.runtime import logger

__all__ = [
    "BestCheckpointer",
    "CallbackHook",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
]

Callback = Callable[[Any], object]


class HookBase(Hook):
    """Something that watches a run; the trainer calls `before_train`, `before_step`, `after_step`, `after_train`."""

    trainer: Any

    def calls(self) -> Iterator[tuple[Moment, HookCall]]:
        """Yield the moments alone: the four methods are called by the trainer, which may override how."""
        for moment in Moment:
            if hasattr(self, moment.value):
                yield moment, getattr(self, moment.value)


class CallbackHook(HookBase):
    """Call functions of the trainer: `CallbackHook(after_step=lambda trainer: ...)`."""

    def __init__(
        self,
        *,
        before_train: Callback | None = None,
        after_train: Callback | None = None,
        before_step: Callback | None = None,
        after_step: Callback | None = None,
    ) -> None:
        self._functions = {
            "before_train": before_train, "after_train": after_train, "before_step": before_step,
            "after_step": after_step,
        }  # fmt: skip
        for name, function in self._functions.items():
            if function is not None and not callable(function):
                raise HookError(
                    f"CallbackHook: {name}={function!r} is no function; expected one that takes the trainer"
                )

    def before_train(self) -> None:
        self._call("before_train")

    def before_step(self) -> None:
        self._call("before_step")

    def after_step(self) -> None:
        self._call("after_step")

    def after_train(self) -> None:
        self._call("after_train")

    def _call(self, name: str) -> None:
        function = self._functions[name]
        if function is not None:
            function(self.trainer)


class IterationTimer(HookBase):
    """Put the seconds of each iteration as `time`, and say at the end how fast they were.

    The first iterations after a start are slower and not put: `warmup_iter=3` begins with the third. It stands first
    among the hooks, so that the time of others does not count.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        self._num_warmup = checked_period("IterationTimer", "warmup_iter", warmup_iter, least=0)

    def before_train(self) -> None:
        self._num_timed, self._seconds, self._began = 0, 0.0, perf_counter()

    def before_step(self) -> None:
        self._step_began = perf_counter()

    def after_step(self) -> None:
        seconds = perf_counter() - self._step_began
        if self.trainer.iter - self.trainer.start_iter + 1 < self._num_warmup:
            self._began = perf_counter()
            return
        self._num_timed += 1
        self._seconds += seconds
        self.trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        if self._num_timed:
            elsewhere = max(0.0, perf_counter() - self._began - self._seconds)
            logger.info(
                "%d iterations of %.4f seconds on average; %.2f seconds went elsewhere (data, hooks)",
                self._num_timed, self._seconds / self._num_timed, elsewhere,
            )  # fmt: skip


class LRScheduler(HookBase):
    """Put the learning rate of each iteration as `lr`, then tick the schedule: once, whoever else could.

    Without arguments it is the trainer's schedule, which a `DefaultTrainer` leaves to this hook; a `Trainer` ticks its
    own after each update, and the rate is only put.
    """

    def __init__(self, optimizer: Optimizer | None = None, scheduler: TorchLRScheduler | None = None) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler

    def before_train(self) -> None:
        self._group = _telling_group(self._rates_of().param_groups)
        if self._is_own and self._loop_ticks and self.trainer.lr_scheduler is not None:
            raise HookError(
                "LRScheduler was given a scheduler, and the trainer ticks one of its own over the same rates. Leave "
                "one of them out: pass lr_scheduler= to the Trainer, or nothing to the hook."
            )

    def before_step(self) -> None:
        self._rate = float(self._rates_of().param_groups[self._group]["lr"])

    def after_step(self) -> None:
        self.trainer.storage.put_scalar("lr", self._rate, smoothing_hint=False)
        if self._is_own:
            self._scheduler.step()  # type: ignore[union-attr]
        elif not self._loop_ticks:
            self._tick()

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": to_plain(self._scheduler.state_dict(), "state")} if self._is_own else {}  # type: ignore[union-attr]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scheduler is not None and "scheduler" in state:
            self._scheduler.load_state_dict(from_plain(state["scheduler"], self._scheduler.state_dict()))

    @property
    def _is_own(self) -> bool:
        """Whether the scheduler is another one than the trainer's, so that nobody else ticks it and saves its state."""
        return self._scheduler is not None and self._scheduler is not getattr(self.trainer, "lr_scheduler", None)

    @property
    def _loop_ticks(self) -> bool:
        hooks = getattr(self.trainer, "hooks_in_train", None)
        return hooks is not None and "schedule" in hooks.names(Moment.BATCH_END)

    def _rates_of(self) -> Optimizer:
        return self._optimizer or self.trainer.optimizer

    def _tick(self) -> None:
        with warnings.catch_warnings():
            # torch expects an update before each tick; an iteration is a micro-batch, and may come before the first
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._step_schedule()

    def _step_schedule(self) -> None:
        schedule = getattr(self.trainer, "schedule", None)
        scheduler = getattr(self.trainer, "lr_scheduler", None)
        if schedule is not None:
            schedule.tick_rate()
        elif scheduler is not None:
            scheduler.step()


def _telling_group(groups: list[dict[str, Any]]) -> int:
    """Return the group whose rate is put: the largest; where each has one parameter, one of the commonest rate."""
    sizes = [len(group["params"]) for group in groups]
    if max(sizes) > 1:
        return sizes.index(max(sizes))
    rates = [float(group["lr"]) for group in groups]
    return rates.index(Counter(rates).most_common()[0][0])


class PeriodicCheckpointer(HookBase):
    """Save every `period` iterations and at the end: `PeriodicCheckpointer(checkpointer, period)`.

    With the trainer's own checkpointer, or none (`PeriodicCheckpointer(period)`), the run's checkpoints are meant, from
    which it resumes; how many are kept is the config's. Another one gets folders `model_0000099` and `model_final`, of
    which the newest `max_to_keep` stay beside the last.
    """

    def __init__(
        self,
        checkpointer: Checkpointer | int | None,
        period: int | None = None,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if period is None:  # PeriodicCheckpointer(100)
            checkpointer, period = None, checkpointer
        self._period = checked_period("PeriodicCheckpointer", "period", period, least=1)
        self._checkpointer: Any = checkpointer
        self._max_iter, self._prefix, self._saved = max_iter, file_prefix, list[str]()
        self._max_to_keep = max_to_keep

    def before_train(self) -> None:
        limit = self.trainer.config.save_total_limit if self._is_of_the_run else self._max_to_keep
        if self._max_to_keep is not None and self._max_to_keep != limit:
            raise HookError(
                f"PeriodicCheckpointer: max_to_keep={self._max_to_keep}, but the run keeps {limit}. Set "
                "train.checkpointer.max_to_keep (here: save_total_limit) instead."
            )

    def after_step(self) -> None:
        number = self.trainer.iter
        is_due = (number + 1) % self._period == 0
        if self._is_of_the_run:
            if is_due:
                self.trainer.request_save()
            return
        if is_due:
            self._save(f"{self._prefix}_{number:07d}", number)
        if number + 1 >= (self._max_iter or self.trainer.max_iter):
            self._checkpointer.save(f"{self._prefix}_final", iter=number)

    def state_dict(self) -> dict[str, Any]:
        return {"saved": list(self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = re.compile(rf"{re.escape(self._prefix)}_[0-9]{{7,19}}")  # what is named here is deleted later
        self._saved = [name for name in state["saved"] if isinstance(name, str) and own.fullmatch(name)]

    @property
    def _is_of_the_run(self) -> bool:
        own = getattr(self.trainer, "checkpointer", None)
        return self._checkpointer is None or (self._checkpointer is own and hasattr(self.trainer, "request_save"))

    def _save(self, name: str, number: int) -> None:
        self._checkpointer.save(name, iter=number)
        self._saved.append(name)
        while self._max_to_keep is not None and len(self._saved) > self._max_to_keep:
            self._checkpointer.delete(self._saved.pop(0))


class EvalHook(HookBase):
    """Call a function every `eval_period` iterations and at the end of the run; put the numbers that it returns.

    The function takes nothing and returns a mapping of numbers, nested or not: {"dev": {"f1": 0.5}} is put as "dev/f1".
    At the end it is called once, before the last checkpoint, and not at all if the run failed. A period of 0 means only
    at the end.
    """

    def __init__(self, eval_period: int, eval_function: Callable[[], Mapping[str, Any] | None]) -> None:
        self._period = checked_period("EvalHook", "eval_period", eval_period, least=0)
        if not callable(eval_function):
            raise HookError(f"EvalHook: eval_function is {eval_function!r}; expected a function without arguments")
        self._function, self._num_done = eval_function, -1

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if self._period and done % self._period == 0 and done != self.trainer.max_iter:
            self._evaluate(done)

    def on_epoch_end(self, _: Context) -> None:
        """Evaluate at the end of the run here: what is put now is still logged and saved with it."""
        if self.trainer.reached_end:
            self._evaluate(self.trainer.iter)

    def after_train(self) -> None:
        if self.trainer.iter >= self.trainer.max_iter:
            self._evaluate(self.trainer.iter)

    def state_dict(self) -> dict[str, Any]:
        return {"num_done": self._num_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_done = state["num_done"]

    def _evaluate(self, done: int) -> None:
        if done == self._num_done:
            return
        results = self._function()
        for name, value in numbers_in({} if results is None else results).items():
            self.trainer.storage.put_scalar(name, value, smoothing_hint=False)
        self._num_done = done
        dist.synchronize()


class BestCheckpointer(HookBase):
    """Save what an evaluation found to be the best so far as `model_best`; it stands after the `EvalHook`."""

    def __init__(
        self,
        eval_period: int,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str = "max",
        file_prefix: str = "model_best",
    ) -> None:
        self._period = checked_period("BestCheckpointer", "eval_period", eval_period, least=0)
        if mode not in {"max", "min"}:
            raise HookError(f"BestCheckpointer: mode={mode!r} is not known. Choose from: max, min.")
        self._checkpointer, self._metric, self._mode, self._name = checkpointer, val_metric, mode, file_prefix
        self.best_metric: float | None = None
        self.best_iter: int | None = None
        self._num_done = -1

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if self._period and done % self._period == 0 and done != self.trainer.max_iter:
            self._compare(done)

    def on_epoch_end(self, _: Context) -> None:
        if self.trainer.reached_end:
            self._compare(self.trainer.iter)

    def after_train(self) -> None:
        if self.trainer.iter >= self.trainer.max_iter:
            self._compare(self.trainer.iter)

    def state_dict(self) -> dict[str, Any]:
        return {"best_metric": self.best_metric, "best_iter": self.best_iter, "num_done": self._num_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_metric, self.best_iter, self._num_done = state["best_metric"], state["best_iter"], state["num_done"]

    def _compare(self, done: int) -> None:
        if done == self._num_done:
            return
        self._num_done = done
        found = self.trainer.storage.latest().get(self._metric)
        # an evaluator may give its results to the main process alone
        value, number = dist.broadcast_py_object((math.nan, -1) if found is None else found)
        if number < 0:
            logger.warning("BestCheckpointer: nothing was put as %r, so no best model is saved", self._metric)
            return
        if math.isfinite(value) and (self.best_metric is None or self._is_better(value, self.best_metric)):
            self.best_metric, self.best_iter = float(value), int(number)
            self._checkpointer.save(self._name)

    def _is_better(self, value: float, best: float) -> bool:
        return value > best if self._mode == "max" else value < best


class PeriodicWriter(RowWriter, HookBase):
    """Let writers write every `period` iterations and at the end; each has `write()` or `write(rows)`.

    A row holds the last value of what was put since the row before (LiBai's has medians, which a resumed run would not
    know), and its `iteration`.
    """

    def __init__(self, writers: Iterable[EventWriter], period: int = 20) -> None:
        super().__init__(writers, period)

    def is_due(self) -> bool:
        done = self.trainer.iter + 1
        return bool(done % self.period == 0 or done >= self.trainer.max_iter)

    def place(self) -> tuple[int, int]:
        state = getattr(self.trainer, "state", None)
        done = self.trainer.storage.step + 1
        return (done, 1) if state is None else (state.global_step, state.epoch)

    def values_now(self) -> dict[str, float]:
        found = super().values_now()
        now = min(self.trainer.storage.step, self.trainer.max_iter - 1)
        return found | {"iteration": now} if found else {}
