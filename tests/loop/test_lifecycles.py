"""Variables of a batch, an epoch and a routine end with it, whatever way it ends, and never reach into another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hezar_train.data import Window
from hezar_train.loop import LIFECYCLE, Context, CtxVar, HookSet, Lifecycle, Moment, Routine, lifecycle
from hezar_train.types import Mode

LIVES = ("batch", "epoch", "routine")


def windows(*batches: str) -> list[Window]:
    return [Window(0, 1, False, [batch]) for batch in batches]


def run(ctx: Context, hooks: HookSet, num_epochs: int = 2, step: Callable[[], object] | None = None) -> None:
    """Walk over epochs of two batches."""
    routine = Routine(ctx, hooks, Mode.TRAIN, "train", step or (lambda: None))
    with routine.running():
        for _ in range(num_epochs):
            with routine.epoch():
                routine.walk(windows("a", "b"))


def fail(_: Context) -> None:
    raise ZeroDivisionError("in a hook")


@pytest.mark.parametrize("life", [*LIVES, *Lifecycle, None])
def test_a_variable_is_stored_bare(life: str | None) -> None:
    ctx = Context()
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.a = CtxVar(0.0, life)
        ctx["b"] = CtxVar([1], life)
        assert type(ctx.a) is float
        assert ctx.b == [1]


def test_an_unknown_life_is_refused() -> None:
    with pytest.raises(ValueError, match="'step' is not a valid Lifecycle"):
        Context().a = CtxVar(1, "step")


@pytest.mark.parametrize(
    ("life", "starts"),
    [
        # what the starts of four batches in two epochs find, where the first one sets it
        ("batch", [False, False, False, False]),
        ("epoch", [False, True, False, False]),
        ("routine", [False, True, True, True]),
        (None, [False, True, True, True]),
    ],
)
def test_a_variable_of_the_first_batch_lives_as_long_as_it_says(life: str | None, starts: list[bool]) -> None:
    ctx, hooks, seen = Context(), HookSet(), []

    def look(ctx: Context) -> None:
        seen.append("mark" in ctx)
        if len(seen) == 1:
            ctx.mark = CtxVar("here", life)

    hooks.register(look, Moment.BATCH_START)
    run(ctx, hooks)
    assert seen == starts
    assert "mark" not in ctx


@pytest.mark.parametrize("life", LIVES)
def test_it_is_still_there_at_the_end_of_its_own_scope(life: str) -> None:
    ctx, hooks, seen = Context(), HookSet(), []
    end = {"batch": Moment.BATCH_END, "epoch": Moment.EPOCH_END, "routine": Moment.FIT_END}[life]

    def mark(ctx: Context) -> None:
        ctx.mark = CtxVar("here", life)

    hooks.register(mark, Moment.BATCH_START)
    hooks.register(lambda ctx: seen.append(ctx.mark), end)
    run(ctx, hooks, num_epochs=1)
    assert set(seen) == {"here"}


@pytest.mark.parametrize("moment", [moment for moment in Moment if moment not in {Moment.UPDATE, Moment.FIT_END}])
def test_after_a_failure_anywhere_nothing_is_left(moment: Moment) -> None:
    ctx, hooks = Context(model="m"), HookSet()

    def mark(ctx: Context) -> None:
        for life in LIVES:
            ctx[life] = CtxVar("here", life)

    for each in Moment:
        hooks.register(mark, each)
    hooks.register(fail, moment)
    routine = Routine(ctx, hooks, Mode.TRAIN, "train")
    with pytest.raises(ZeroDivisionError), routine.running(), routine.epoch():
        routine.walk(windows("a"))
    assert not any(life in ctx for life in LIVES)
    assert (ctx.mode_stack, ctx.split_stack, ctx.model) == ([], [], "m")


def test_hooks_of_the_end_see_what_failed() -> None:
    ctx, hooks, seen = Context(), HookSet(), []
    hooks.register(fail, Moment.BATCH_START)
    hooks.register(lambda ctx: seen.append(type(ctx.failed)), Moment.FIT_END)
    with pytest.raises(ZeroDivisionError):
        run(ctx, hooks)
    assert seen == [ZeroDivisionError]


def test_a_routine_inside_another_leaves_the_outer_ones_variables_alone() -> None:
    ctx, inner, outer = Context(), HookSet(), HookSet()
    stacks: list[tuple[list[Mode], list[str]]] = []

    def count_up(ctx: Context) -> None:
        ctx.count = CtxVar(ctx.get("count", 0) + 1, Lifecycle.ROUTINE)
        ctx.flag = CtxVar(ctx.mode, Lifecycle.BATCH)

    def nested(ctx: Context) -> None:
        with Routine(ctx, inner, Mode.VAL, "val").running():
            stacks.append((ctx.mode_stack, ctx.split_stack))
            Routine(ctx, inner, Mode.VAL, "val", lambda: None).walk(windows("x"))
            assert ctx.count == 1

    for hooks in (inner, outer):
        hooks.register(count_up, Moment.BATCH_START)
    outer.register(nested, Moment.BATCH_END)
    outer.register(lambda ctx: stacks.append((ctx.flag, ctx.count)), Moment.BATCH_END)
    run(ctx, outer, num_epochs=1)
    within = ([Mode.TRAIN, Mode.VAL], ["train", "val"])
    assert stacks == [within, (Mode.TRAIN, 1), within, (Mode.TRAIN, 2)]
    assert ctx.mode_stack == []


def test_a_failure_in_an_inner_routine_gives_mode_and_split_back() -> None:
    ctx, inner = Context(), HookSet()
    inner.register(fail, Moment.FIT_START)
    with ctx.frame(Mode.TRAIN, "train"):
        with pytest.raises(ZeroDivisionError):
            run(ctx, inner)
        assert (ctx.mode_stack, ctx.split_stack) == ([Mode.TRAIN], ["train"])


class Owner:
    """Something with a context and methods that limit lives."""

    def __init__(self) -> None:
        self.ctx = Context()

    @lifecycle(LIFECYCLE.EPOCH)
    def look(self, answer: Any, *, failing: bool = False) -> Any:
        """Look at something."""
        self.ctx.a = CtxVar(1, "epoch")
        self.ctx.b = CtxVar(2, "routine")
        if failing:
            fail(self.ctx)
        return answer


def test_a_decorated_method_clears_its_life_on_return_and_on_failure() -> None:
    owner = Owner()
    assert owner.look("yes") == "yes"
    assert ("a" in owner.ctx, "b" in owner.ctx) == (False, True)
    with pytest.raises(ZeroDivisionError):
        owner.look("no", failing=True)
    assert "a" not in owner.ctx
    assert (Owner.look.__name__, Owner.look.__doc__) == ("look", "Look at something.")


def test_the_names_by_life_can_be_listed() -> None:
    ctx = Context()
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.a, ctx.b = CtxVar(1, "epoch"), CtxVar(2, "batch")
        assert ctx.lifecycles["epoch"] == {"a"}
        assert "b" in ctx.lifecycles["batch"]


def test_names_are_deleted_and_merged_as_attributes_or_items() -> None:
    ctx = Context(model="m")
    ctx.merge_from_dict({"a": 1, "b": CtxVar(2, "batch")})
    assert (ctx.a, ctx["b"]) == (1, 2)
    del ctx.a
    assert "a" not in ctx
    with pytest.raises(AttributeError):
        _ = ctx.a
    ctx.clear("batch")
    assert ctx.get("b") is None
