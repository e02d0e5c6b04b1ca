from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hezar_train.data import Window
from hezar_train.loop import Context, HookSet, Moment, Routine
from hezar_train.types import Mode


def recording() -> tuple[Context, HookSet]:
    """Return a context, and hooks that note every moment in it."""
    ctx, hooks = Context(log=[]), HookSet()
    for moment in Moment:
        hooks.register(lambda ctx, moment=moment: ctx.log.append(moment.value), moment, name="note")
    return ctx, hooks


def routine(ctx: Context, hooks: HookSet, run_step: Callable[[], object] | None = None) -> Routine:
    return Routine(ctx, hooks, Mode.TRAIN, "train", run_step)


def windows(*batches: list[Any]) -> list[Window]:
    return [Window(0, len(part), False, part) for part in batches]


def failing(error: BaseException) -> Callable[[Context], None]:
    def fail(_: Context) -> None:
        raise error

    return fail


def test_events_come_in_the_order_of_the_walk() -> None:
    ctx, hooks = recording()
    walk = routine(ctx, hooks)
    with walk.running():
        for _ in range(2):
            with walk.epoch():
                walk.walk(windows(["a", "b"]))
    step = ["on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end"]
    epoch = ["on_epoch_start", *step, *step, "on_epoch_end"]
    assert ctx.log == ["on_fit_start", *epoch, *epoch, "on_fit_end"]


def test_the_given_step_runs_between_batch_start_and_batch_end() -> None:
    ctx, hooks = recording()
    walk = routine(ctx, hooks, lambda: ctx.log.append(f"step {ctx.batch}"))
    walk.walk(windows(["a"], ["b"]))
    around = ["on_batch_start", "step {}", "on_batch_end"]
    assert ctx.log == [word.format(batch) for batch in "ab" for word in around]


def test_each_step_sees_its_window_its_batch_and_whether_it_closes_the_window() -> None:
    ctx = Context()
    seen: list[tuple[Window, Any, int, bool]] = []
    one, two = windows(["a", "b", "c"], ["d"])
    walk = routine(ctx, HookSet(), lambda: seen.append((ctx.window, ctx.batch, ctx.batch_in_window, ctx.closes_window)))
    walk.walk([one, two])
    assert seen == [(one, "a", 0, False), (one, "b", 1, False), (one, "c", 2, True), (two, "d", 0, True)]


def test_a_hook_may_change_the_batch_that_the_step_sees() -> None:
    ctx, hooks, seen = Context(), HookSet(), []
    hooks.register(lambda ctx: setattr(ctx, "batch", ctx.batch * 10), Moment.BATCH_START)
    routine(ctx, hooks, lambda: seen.append(ctx.batch)).walk(windows([1, 2]))
    assert seen == [10, 20]


def test_windows_are_asked_for_one_at_a_time() -> None:
    ctx, hooks = recording()

    def lazy() -> Any:
        for name in "ab":
            ctx.log.append(f"window {name}")
            yield Window(0, 1, False, [name])

    routine(ctx, hooks, lambda: None).walk(lazy())
    around = ["on_batch_start", "on_batch_end"]
    assert ctx.log == ["window a", *around, "window b", *around]


def test_no_windows_and_no_hooks_are_no_trouble() -> None:
    ctx = Context()
    walk = routine(ctx, HookSet())
    with walk.running(), walk.epoch():
        walk.walk([])
    for moment in Moment:
        walk.fire(moment)


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
    walk = routine(ctx, hooks)
    with pytest.raises(ValueError, match="broken"), walk.running(), walk.epoch():
        raise ValueError("broken")
    assert ctx.log == ["on_fit_start", "on_epoch_start", "on_fit_end"]


def test_a_failing_step_ends_the_walk_before_batch_end() -> None:
    ctx, hooks = recording()
    walk = routine(ctx, hooks, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        walk.walk(windows(["a", "b"]))
    assert ctx.log == ["on_batch_start"]


def test_routines_nest_and_the_outer_one_goes_on_as_before() -> None:
    ctx, hooks, looked = Context(), HookSet(), []
    inner = Routine(ctx, HookSet(), Mode.VAL, "val", lambda: looked.append((ctx.mode, ctx.batch)))

    def evaluate(ctx: Context) -> None:
        with inner.running():
            inner.walk(windows(["x", "y"]))
        looked.append((ctx.mode, ctx.batch))

    hooks.register(evaluate, Moment.BATCH_END)
    outer = routine(ctx, hooks, lambda: None)
    with outer.running():
        outer.walk(windows(["a"]))
    assert looked == [("val", "x"), ("val", "y"), ("train", "a")]


def test_what_runs_is_frozen_when_the_routine_is_made() -> None:
    ctx, hooks = Context(log=[]), HookSet()
    walk = routine(ctx, hooks)
    hooks.register(lambda ctx: ctx.log.append("late"), Moment.BATCH_END, name="late")
    walk.walk(windows(["a"]))
    assert ctx.log == []
    routine(ctx, hooks).walk(windows(["a"]))
    assert ctx.log == ["late"]
