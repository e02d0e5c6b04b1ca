"""The context: names and their frames, what a step knows, and how long each name lives.

Variables of a batch, an epoch and a routine end with it, whatever way it ends, and never reach into another one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from hezar_train.data import Window
from hezar_train.errors import HookError
from hezar_train.loop import (
    HOOK_TRIGGER,
    LIFECYCLE,
    Alias,
    Context,
    CtxVar,
    HookSet,
    Lifecycle,
    Loop,
    Moment,
    Routine,
    Step,
    Verbs,
    lifecycle,
)
from hezar_train.loop.context import OF_THE_LOOP
from hezar_train.types import Mode

LIVES = ("batch", "epoch", "routine")


def test_a_name_is_read_as_an_attribute_an_item_or_with_get() -> None:
    ctx = Context()
    ctx.loss = 1.5
    ctx["norm"] = 2.5
    assert (ctx.loss, ctx["loss"], ctx.get("loss")) == (1.5, 1.5, 1.5)
    assert (ctx.norm, ctx["norm"], ctx.get("norm")) == (2.5, 2.5, 2.5)


def test_a_missing_name_raises_unless_a_default_stands_in() -> None:
    ctx = Context(model="m")
    with pytest.raises(AttributeError, match="the context has no 'batch' at this moment"):
        _ = ctx.batch
    with pytest.raises(AttributeError, match="the context has no 'batch' at this moment"):
        _ = ctx["batch"]
    assert ctx.get("batch") is None
    assert ctx.get("batch", 7) == 7


def test_in_tells_of_own_and_shared_names_only() -> None:
    ctx = Context(model="m")
    ctx.batch = 1
    assert "model" in ctx
    assert "batch" in ctx
    assert "loss" not in ctx


def test_a_frame_starts_with_its_mode_and_split_and_nothing_failed() -> None:
    ctx = Context()
    with ctx.frame(Mode.VAL, "val"):
        assert (ctx.mode, ctx.split, ctx.failed) == (Mode.VAL, "val", None)
    assert not any(name in ctx for name in ("mode", "split", "failed"))


def test_names_set_in_a_frame_vanish_with_it() -> None:
    ctx = Context()
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.batch = [1]
        assert ctx.batch == [1]
    assert "batch" not in ctx


def test_names_vanish_also_after_an_error() -> None:
    ctx = Context(model="m")
    with pytest.raises(ZeroDivisionError), ctx.frame(Mode.TRAIN, "train"):
        ctx.batch = 1 / 0
    assert "mode" not in ctx
    assert ctx.model == "m"


def test_an_inner_frame_hides_the_outer_one_and_gives_it_back() -> None:
    ctx = Context()
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.batch, ctx.loss = "train batch", 3.0
        with ctx.frame(Mode.VAL, "val"):
            assert "batch" not in ctx
            assert "loss" not in ctx
            ctx.batch = "val batch"
        assert (ctx.mode, ctx.split, ctx.batch, ctx.loss) == (Mode.TRAIN, "train", "train batch", 3.0)


def test_an_error_in_an_inner_frame_gives_the_outer_one_back() -> None:
    ctx = Context()
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.batch = 1
        with pytest.raises(ZeroDivisionError), ctx.frame(Mode.VAL, "val"), ctx.frame(Mode.TEST, "test"):
            ctx.batch, ctx.loss = 2, 1 / 0
        assert (ctx.mode, ctx.batch) == (Mode.TRAIN, 1)


def test_names_set_before_the_first_frame_come_back_after_it() -> None:
    ctx = Context()
    ctx.note = "mine"
    with ctx.frame(Mode.TRAIN, "train"):
        assert "note" not in ctx
    assert ctx.note == "mine"


def test_shared_names_are_read_in_every_frame() -> None:
    ctx = Context(model="m")
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.share({"progress": "bar"})
        with ctx.frame(Mode.VAL, "val"):
            assert (ctx.model, ctx["progress"], ctx.get("progress")) == ("m", "bar", "bar")
    assert ctx.progress == "bar"


def test_a_frame_may_hide_a_shared_name_for_as_long_as_it_lasts() -> None:
    ctx = Context(model="shared")
    with ctx.frame(Mode.TRAIN, "train"):
        ctx.model = "own"
        assert ctx.model == "own"
    assert ctx.model == "shared"


class TestStep:
    """What a step knows is declared once; its names are the context's, too."""

    def test_a_step_begins_knowing_nothing(self) -> None:
        step = Step()
        assert {name: getattr(step, name) for name in Step.__slots__} == dict.fromkeys(Step.__slots__)

    def test_every_name_of_a_step_is_declared_with_its_type(self) -> None:
        assert set(Step.__annotations__) == set(Step.__slots__)
        assert not hasattr(Step(), "__dict__")

    def test_a_name_that_is_not_declared_is_refused(self) -> None:
        with pytest.raises(AttributeError):
            Step().losss = 1.0  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            _ = Step().losss  # type: ignore[attr-defined]

    @pytest.mark.parametrize("name", Step.__slots__)
    def test_a_name_set_on_either_is_read_on_both(self, name: str) -> None:
        ctx = Context()
        ctx.put({name: "through the context"})
        assert getattr(ctx.step, name) == "through the context"
        setattr(ctx.step, name, "through the step")
        assert (getattr(ctx, name), ctx[name], ctx.get(name)) == ("through the step",) * 3
        assert name in ctx

    @pytest.mark.parametrize("name", Step.__slots__)
    def test_a_deleted_name_is_gone_from_both(self, name: str) -> None:
        ctx = Context()
        ctx.put({name: 1})
        assert ctx.take([name]) == {name: 1}
        assert getattr(ctx.step, name) is None
        assert name not in ctx
        assert ctx.get(name, "none") == "none"
        assert ctx.take([name]) == {}

    @pytest.mark.parametrize("name", sorted(OF_THE_LOOP))
    def test_what_the_loop_alone_knows_is_refused_by_name(self, name: str) -> None:
        ctx = Context()
        ctx.put({name: 1})
        for assign in (lambda: setattr(ctx, name, 2), lambda: ctx.merge_from_dict({name: CtxVar(2, "batch")})):
            with pytest.raises(
                HookError, match=rf"ctx\.{name} was assigned, which would change nothing: it is read only\. \w"
            ):
                assign()
        with pytest.raises(HookError, match=rf"ctx\.{name} was deleted, but the loop goes by it\. \w"):
            delattr(ctx, name)
        assert ctx[name] == 1
        assert name not in ctx.lifecycles["batch"]

    @pytest.mark.parametrize("name", ["mode", "split", "failed"])
    def test_what_a_routine_sets_is_refused_while_it_runs(self, name: str) -> None:
        ctx = Context()
        with ctx.frame(Mode.TRAIN, "train"), pytest.raises(HookError, match=rf"ctx\.{name} .* The routine sets it"):
            ctx[name] = "mine"
        ctx[name] = "mine"

    def test_names_that_are_closed_are_refused_until_the_routine_ends(self) -> None:
        ctx = Context()
        with ctx.frame(Mode.TRAIN, "train"):
            ctx.length = 3
            ctx.close(["length"], "Assign it earlier.")
            with pytest.raises(HookError, match=r"ctx\.length .* read only\. Assign it earlier\."):
                ctx.length = 4
            with ctx.frame(Mode.VAL, "val"):
                ctx.length = 5
            assert ctx.length == 3
        ctx.length = 6

    def test_what_is_false_or_nought_is_known_all_the_same(self) -> None:
        ctx = Context()
        ctx.step.applied, ctx.step.batch_in_window = False, 0
        assert (ctx.applied, ctx.batch_in_window) == (False, 0)
        assert "applied" in ctx
        assert ctx.take(["applied", "batch_in_window"]) == {"applied": False, "batch_in_window": 0}

    def test_a_loss_may_be_asked_for_before_it_is_known_but_only_in_a_window(self) -> None:
        ctx = Context()
        with pytest.raises(AttributeError, match="the context has no 'loss_value' at this moment"):
            _ = ctx.loss_value
        ctx.step.window = Window(0, 1, False, ["a"])
        assert ctx.loss_value is None

    def test_the_end_of_a_batch_lets_go_of_what_belongs_to_it_alone(self) -> None:
        ctx = Context()
        for number, name in enumerate(Step.__slots__):
            setattr(ctx.step, name, number)
        ctx.clear(Lifecycle.BATCH)
        gone = {name for name in Step.__slots__ if getattr(ctx.step, name) is None}
        assert gone == {"batch", "outputs", "loss", "loss_regular", "loss_task"}

    def test_a_name_of_a_step_may_be_given_another_life(self) -> None:
        ctx = Context()
        ctx.loss, ctx.grad_norm = CtxVar("kept", Lifecycle.EPOCH), CtxVar(1.0, Lifecycle.BATCH)
        assert (ctx.step.loss, ctx.step.grad_norm) == ("kept", 1.0)
        ctx.clear(Lifecycle.BATCH)
        assert (ctx.loss, "grad_norm" in ctx) == ("kept", False)
        ctx.clear(Lifecycle.EPOCH)
        assert "loss" not in ctx

    def test_the_step_itself_is_no_name_to_assign_or_to_take(self) -> None:
        ctx = Context()
        step = ctx.step
        words = r"ctx\.step is what the step under way knows; choose another name"
        with pytest.raises(AttributeError, match=words):
            ctx.step = 3  # type: ignore[assignment]
        with pytest.raises(AttributeError, match=words):
            del ctx.step
        assert ctx.take(["step"]) == {}
        assert ctx.step is step

    def test_a_routine_inside_another_has_a_step_of_its_own(self) -> None:
        ctx = Context()
        with ctx.frame(Mode.TRAIN, "train"):
            outer = ctx.step
            ctx.batch, ctx.grad_norm = "outer", 2.0
            with ctx.frame(Mode.VAL, "val"):
                assert ctx.step is not outer
                assert "batch" not in ctx
                ctx.batch = "inner"
            assert ctx.step is outer
            assert (ctx.batch, ctx.grad_norm) == ("outer", 2.0)


class TestTake:
    def test_names_are_taken_out_with_what_they_had(self) -> None:
        ctx = Context()
        ctx.batch, ctx.note = [1], "mine"
        assert ctx.take(["batch", "note", "loss"]) == {"batch": [1], "note": "mine"}
        assert "batch" not in ctx
        assert "note" not in ctx
        assert ctx.take(["batch", "note"]) == {}

    def test_what_was_taken_can_be_put_back(self) -> None:
        ctx = Context()
        ctx.batch, ctx.note = [1], "mine"
        ctx.merge_from_dict(ctx.take(["batch", "note"]))
        assert (ctx.batch, ctx.step.batch, ctx.note) == ([1], [1], "mine")

    def test_shared_names_stay(self) -> None:
        ctx = Context(model="m")
        assert ctx.take(["model"]) == {}
        assert ctx.model == "m"

    def test_only_the_innermost_frame_is_taken_from(self) -> None:
        ctx = Context()
        with ctx.frame(Mode.TRAIN, "train"):
            ctx.note = "outer"
            with ctx.frame(Mode.VAL, "val"):
                assert ctx.take(["note"]) == {}
            assert ctx.note == "outer"


def test_a_shared_name_cannot_be_deleted() -> None:
    ctx = Context(model="m")
    with pytest.raises(AttributeError, match="the context has no 'model' at this moment"):
        del ctx.model
    assert ctx.model == "m"


def test_a_deleted_name_shows_the_shared_one_again() -> None:
    ctx = Context(model="shared")
    ctx.model = "own"
    del ctx.model
    assert ctx.model == "shared"


def test_an_alias_is_worked_out_when_it_is_read() -> None:
    ctx = Context(double=Alias(lambda ctx: ctx.batch * 2))
    ctx.batch = 2
    assert ctx.double == 4
    ctx.batch = 3
    assert (ctx.double, "double" in ctx) == (6, True)


def windows(*batches: str) -> list[Window]:
    return [Window(0, 1, False, [batch]) for batch in batches]


def loop_of(ctx: Context) -> Loop:
    """Return a loop that only walks: it calls none of a trainer's methods."""
    verbs = Verbs(*[None] * len(dataclasses.fields(Verbs)))  # type: ignore[arg-type]
    return Loop(ctx, nn.Identity(), HookSet(), verbs, lambda window: window, lambda: None)


def run(ctx: Context, hooks: HookSet, num_epochs: int = 2) -> None:
    """Walk over epochs of two batches."""
    routine = Routine(ctx, hooks, Mode.TRAIN, "train")
    with routine.running():
        for _ in range(num_epochs):
            with routine.epoch():
                loop_of(ctx).infer(routine, windows("a", "b"))


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


@pytest.mark.parametrize("moment", [Moment(name) for name in HOOK_TRIGGER if name != "on_fit_end"])
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
        loop_of(ctx).infer(routine, windows("a"))
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
        routine = Routine(ctx, inner, Mode.VAL, "val")
        with routine.running():
            stacks.append((ctx.mode_stack, ctx.split_stack))
            loop_of(ctx).infer(routine, windows("x"))
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
