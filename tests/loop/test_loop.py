"""The loop: which moments come in which order, what each step sees, and how a walk ends, well or badly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.config import TrainerConfig
from hezar_train.data import Order, Window, open_source
from hezar_train.errors import DataError, HookError, NonFiniteError
from hezar_train.loop import Context, Fit, HookSet, Loop, Moment, Routine, Verbs
from hezar_train.plan import End, make_plan
from hezar_train.state import TrainerState
from hezar_train.types import Mode

EVALUATION_STEP = ["on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end"]
OPEN_STEP = EVALUATION_STEP
CLOSING_STEP = [
    "on_batch_start", "on_batch_forward", "on_batch_backward", "on_gradients", "on_update", "on_batch_end",
]  # fmt: skip


def recording() -> tuple[Context, HookSet]:
    """Return a context, and hooks that note every moment in it."""
    ctx, hooks = Context(log=[]), HookSet()
    for moment in Moment:
        hooks.register(lambda ctx, moment=moment: ctx.log.append(moment.value), moment, name="note")
    return ctx, hooks


def routine(ctx: Context, hooks: HookSet) -> Routine:
    return Routine(ctx, hooks, Mode.TRAIN, "train")


def no_verb(*_: Any) -> Any:
    raise AssertionError("the loop called a method that this test does not have")


def loop_of(ctx: Context, hooks: HookSet | None = None, **own: Any) -> Loop:
    """Return a loop with the verbs given, and what to do when a fit fails."""
    forget = own.pop("start_over", lambda: None)
    verbs = Verbs(**{field.name: own.get(field.name, no_verb) for field in dataclasses.fields(Verbs)})
    return Loop(ctx, nn.Identity(), HookSet() if hooks is None else hooks, verbs, as_it_is, forget)


def as_it_is(window: Window) -> Window:
    return window


def walk(ctx: Context, hooks: HookSet, windows: Iterable[Window]) -> None:
    """Walk over windows of which nothing is learned."""
    loop_of(ctx).infer(routine(ctx, hooks), windows)


def windows(*batches: list[Any]) -> list[Window]:
    return [Window(0, len(part), False, part) for part in batches]


def failing(error: BaseException) -> Callable[[Context], None]:
    def fail(_: Context) -> None:
        raise error

    return fail


def test_events_come_in_the_order_of_the_walk() -> None:
    ctx, hooks = recording()
    outer = routine(ctx, hooks)
    with outer.running():
        for _ in range(2):
            with outer.epoch():
                loop_of(ctx).infer(outer, windows(["a", "b"]))
    epoch = ["on_epoch_start", *EVALUATION_STEP, *EVALUATION_STEP, "on_epoch_end"]
    assert ctx.log == ["on_fit_start", *epoch, *epoch, "on_fit_end"]


def test_each_step_sees_its_window_its_batch_and_whether_it_closes_the_window() -> None:
    ctx, hooks = Context(), HookSet()
    seen: list[tuple[Window, Any, int, bool, int]] = []

    def look(ctx: Context) -> None:
        seen.append((ctx.window, ctx.batch, ctx.batch_in_window, ctx.closes_window, ctx.cur_batch_i))

    hooks.register(look, Moment.BATCH_FORWARD)
    one, two = windows(["a", "b", "c"], ["d"])
    walk(ctx, hooks, [one, two])
    assert seen == [(one, "a", 0, False, 0), (one, "b", 1, False, 1), (one, "c", 2, True, 2), (two, "d", 0, True, 3)]


def test_a_hook_may_change_the_batch_that_the_step_sees() -> None:
    ctx, hooks, seen = Context(), HookSet(), []
    hooks.register(lambda ctx: setattr(ctx, "batch", ctx.batch * 10), Moment.BATCH_START)
    hooks.register(lambda ctx: seen.append(ctx.batch), Moment.BATCH_FORWARD)
    walk(ctx, hooks, windows([1, 2]))
    assert seen == [10, 20]


def test_windows_are_asked_for_one_at_a_time() -> None:
    ctx, hooks = recording()

    def lazy() -> Any:
        for name in "ab":
            ctx.log.append(f"window {name}")
            yield Window(0, 1, False, [name])

    walk(ctx, hooks, lazy())
    assert ctx.log == ["window a", *EVALUATION_STEP, "window b", *EVALUATION_STEP]


def test_no_windows_and_no_hooks_are_no_trouble() -> None:
    ctx = Context()
    empty = routine(ctx, HookSet())
    with empty.running(), empty.epoch():
        loop_of(ctx).infer(empty, [])
    for moment in Moment:
        empty.fire(moment)


def test_the_frame_lasts_from_fit_start_to_fit_end() -> None:
    ctx, hooks = Context(), HookSet()
    seen: list[tuple[str, str]] = []
    for moment in (Moment.FIT_START, Moment.FIT_END):
        hooks.register(lambda ctx: seen.append((ctx.mode, ctx.split)), moment, name="look")
    with Routine(ctx, hooks, Mode.VAL, "val").running():
        ctx.batch = 1
    assert seen == [("val", "val")] * 2
    assert "batch" not in ctx
    assert "mode" not in ctx


def test_fit_end_runs_after_a_failure_and_sees_it() -> None:
    ctx, hooks = Context(), HookSet()
    seen: list[BaseException | None] = []
    hooks.register(lambda ctx: seen.append(ctx.failed), Moment.FIT_END, name="look")
    error = ValueError("broken")
    with pytest.raises(ValueError, match="broken") as caught, routine(ctx, hooks).running():
        raise error
    assert caught.value is error
    assert seen == [error]


def test_fit_end_sees_no_failure_where_there_is_none() -> None:
    ctx, hooks = Context(), HookSet()
    seen: list[BaseException | None] = []
    hooks.register(lambda ctx: seen.append(ctx.failed), Moment.FIT_END, name="look")
    with routine(ctx, hooks).running():
        pass
    assert seen == [None]


@pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt()])
def test_an_exit_is_a_failure_too(error: BaseException) -> None:
    ctx, hooks = Context(), HookSet()
    seen: list[BaseException | None] = []
    hooks.register(lambda ctx: seen.append(ctx.failed), Moment.FIT_END, name="look")
    with pytest.raises(type(error)), routine(ctx, hooks).running():
        raise error
    assert seen == [error]


def test_an_error_at_fit_start_still_reaches_fit_end() -> None:
    ctx, hooks = recording()
    hooks.register(failing(ValueError("no start")), Moment.FIT_START, name="fail")
    with pytest.raises(ValueError, match="no start"), routine(ctx, hooks).running():
        ctx.log.append("body")
    assert ctx.log == ["on_fit_start", "on_fit_end"]


def test_an_error_at_fit_end_does_not_hide_what_went_wrong_first() -> None:
    ctx, hooks = Context(), HookSet()
    second = RuntimeError("second")
    hooks.register(failing(second), Moment.FIT_END, name="fail")
    with pytest.raises(ValueError, match="first") as caught, routine(ctx, hooks).running():
        raise ValueError("first")
    assert caught.value.__context__ is second  # still told in the traceback
    assert "mode" not in ctx


def test_an_error_at_fit_end_alone_is_raised() -> None:
    ctx, hooks = Context(), HookSet()
    hooks.register(failing(RuntimeError("only")), Moment.FIT_END, name="fail")
    with pytest.raises(RuntimeError, match="only"), routine(ctx, hooks).running():
        pass
    assert "mode" not in ctx


def test_epoch_end_does_not_run_after_a_failure() -> None:
    ctx, hooks = recording()
    broken = routine(ctx, hooks)
    with pytest.raises(ValueError, match="broken"), broken.running(), broken.epoch():
        raise ValueError("broken")
    assert ctx.log == ["on_fit_start", "on_epoch_start", "on_fit_end"]


def test_a_failing_step_ends_the_walk_before_batch_end() -> None:
    ctx, hooks = recording()
    hooks.register(failing(ZeroDivisionError()), Moment.BATCH_FORWARD, name="fail", before="note")
    with pytest.raises(ZeroDivisionError):
        walk(ctx, hooks, windows(["a", "b"]))
    assert ctx.log == ["on_batch_start"]
    assert "batch" not in ctx


def test_routines_nest_and_the_outer_one_goes_on_as_before() -> None:
    ctx, hooks, inner_hooks, looked = Context(), HookSet(), HookSet(), []
    inner_hooks.register(lambda ctx: looked.append((ctx.mode, ctx.batch)), Moment.BATCH_FORWARD)
    inner, loop = Routine(ctx, inner_hooks, Mode.VAL, "val"), loop_of(ctx)

    def evaluate(ctx: Context) -> None:
        with inner.running():
            loop.infer(inner, windows(["x", "y"]))
        looked.append((ctx.mode, ctx.batch))

    hooks.register(evaluate, Moment.BATCH_END)
    outer = routine(ctx, hooks)
    with outer.running():
        loop.infer(outer, windows(["a"]))
    assert looked == [("val", "x"), ("val", "y"), ("train", "a")]


def test_what_runs_is_frozen_when_the_routine_is_made() -> None:
    ctx, hooks = Context(log=[]), HookSet()
    frozen, loop = routine(ctx, hooks), loop_of(ctx)
    hooks.register(lambda ctx: ctx.log.append("late"), Moment.BATCH_END, name="late")
    loop.infer(frozen, windows(["a"]))
    assert ctx.log == []
    loop.infer(routine(ctx, hooks), windows(["a"]))
    assert ctx.log == ["late"]


class Learning:
    """A fit over two numbers an epoch, with a step of the test's own; hooks note every moment."""

    def __init__(self, run_step: Callable[[], Any] | None = None, num_epochs: int = 1, accumulation: int = 1) -> None:
        self.ctx, self.hooks = recording()
        self.failures = 0
        self.hooks.register(lambda ctx: setattr(ctx, "outputs", {}), Moment.BATCH_FORWARD, name="forward")
        self.loop = loop_of(
            self.ctx, self.hooks, run_step=run_step or self.step, inner_training_loop=self.epoch,
            start_over=self.forget,
        )  # fmt: skip
        source = open_source([10, 20], list, Order(batch_size=1, seed=0, shuffle=False))
        config = TrainerConfig(
            "run", batch_size=1, num_epochs=num_epochs, gradient_accumulation_steps=accumulation, drop_last=False
        )
        self.plan = make_plan(config, 2)
        self.state = TrainerState()
        self.make_fit = lambda: Fit(
            self.loop.training_routine(), source, self.plan, self.state, End(), num_epochs, as_it_is
        )

    def epoch(self, epoch: int) -> dict[str, float]:
        self.ctx.log.append(f"epoch {epoch}")
        return self.loop.run_epoch(epoch)

    def step(self) -> torch.Tensor:
        self.loop.run_model(self.ctx.batch)
        self.loop.run_update()
        return torch.tensor(0.5)

    def forget(self) -> None:
        self.failures += 1

    def run(self) -> list[str]:
        self.loop.fit(self.make_fit())
        return list(self.ctx.log)


def test_a_fit_walks_epochs_and_batches_and_updates_at_each_windows_end() -> None:
    learning = Learning(num_epochs=2, accumulation=2)
    epochs = [[f"epoch {number}", *OPEN_STEP, *CLOSING_STEP] for number in (1, 2)]
    assert learning.run() == [
        "on_fit_start",
        "on_epoch_start", *epochs[0], "on_epoch_end",
        "on_epoch_start", *epochs[1], "on_epoch_end",
        "on_fit_end",
    ]  # fmt: skip


def test_the_given_step_runs_between_batch_start_and_batch_end() -> None:
    def step() -> torch.Tensor:
        learning.ctx.log.append(f"step {learning.ctx.batch}")
        return torch.tensor(0.5)

    learning = Learning(step)
    around = ["on_batch_start", "step {}", "on_batch_end"]
    steps = [word.format(batch) for batch in ([10], [20]) for word in around]
    assert learning.run() == [
        "on_fit_start", "on_epoch_start", "epoch 1", *steps, "on_epoch_end", "on_fit_end",
    ]  # fmt: skip


def test_a_step_of_ones_own_has_its_loss_read_and_counts_as_applied() -> None:
    seen: list[tuple[float, bool]] = []
    learning = Learning(lambda: torch.tensor(0.5))
    learning.hooks.register(lambda ctx: seen.append((ctx.loss_value, ctx.applied)), Moment.BATCH_END)
    learning.run()
    assert seen == [(0.0, True)] * 2  # a window that nobody has weighed weighs nothing


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ({"logits": 1}, DataError, r"the overridden run_step\(\) returned a mapping of logits; expected the step's"),
        (torch.tensor(float("inf")), NonFiniteError, "loss nan in the update at step 1"),
    ],
)
def test_a_step_without_a_usable_loss_ends_the_fit(returned: Any, error: type[Exception], words: str) -> None:
    learning = Learning(lambda: returned)
    with pytest.raises(error, match=words):
        learning.run()
    assert learning.ctx.log[-2:] == ["on_batch_start", "on_fit_end"]
    assert learning.failures == 1


def test_the_fit_under_way_is_known_until_it_ends_however_it_ends() -> None:
    seen: list[Any] = []
    learning = Learning()
    assert learning.loop.current is None
    learning.hooks.register(lambda ctx: seen.append(learning.loop.current), Moment.EPOCH_START)
    fit = learning.make_fit()
    learning.loop.fit(fit)
    assert seen == [fit]
    assert learning.loop.current is None
    learning.hooks.register(failing(ZeroDivisionError()), Moment.UPDATE)
    learning.state.update(epoch_finished=False)
    with pytest.raises(ZeroDivisionError):
        learning.loop.fit(learning.make_fit())
    assert learning.loop.current is None


def test_a_failure_inside_a_fit_is_told_once_and_a_good_end_is_none() -> None:
    learning = Learning()
    learning.run()
    assert learning.failures == 0
    learning.hooks.register(failing(KeyboardInterrupt()), Moment.BATCH_FORWARD)
    learning.state.update(epoch_finished=False)
    with pytest.raises(KeyboardInterrupt):
        learning.run()
    assert learning.failures == 1


def test_a_step_whose_forward_was_taken_out_is_refused() -> None:
    learning = Learning()
    learning.hooks.remove(Moment.BATCH_FORWARD, "forward")
    with pytest.raises(HookError, match="no hook ran the model at on_batch_forward"):
        learning.run()


def test_a_step_alone_outside_of_a_fit_is_a_whole_window() -> None:
    learning = Learning()
    learning.loop.run_model("a")
    learning.loop.run_update()
    assert learning.ctx.log == ["on_batch_forward", "on_batch_backward", "on_gradients", "on_update"]
    assert learning.ctx.window.batches == ["a"]


def test_an_update_waits_for_the_windows_end() -> None:
    ctx, hooks = recording()
    loop = loop_of(ctx, hooks)
    ctx.step.closes_window = False
    loop.run_update()
    assert ctx.log == []
    ctx.step.closes_window = True
    loop.run_update()
    assert ctx.log == ["on_gradients", "on_update"]


def test_a_hook_at_fit_start_may_shorten_the_fit() -> None:
    learning = Learning(num_epochs=3)
    learning.hooks.register(lambda ctx: setattr(ctx, "num_train_epoch", 1), Moment.FIT_START)
    assert learning.run().count("on_epoch_start") == 1


def test_a_body_that_leaves_its_batches_early_is_refused() -> None:
    def first_only(epoch: int) -> dict[str, float]:
        with learning.loop.epoch_batches(epoch) as batches:
            assert len(batches) == 2
            next(iter(batches))
        return {}

    learning = Learning()
    learning.loop = loop_of(learning.ctx, learning.hooks, inner_training_loop=first_only)
    with pytest.raises(DataError, match=r"left its loop before the epoch's end"):
        learning.run()
