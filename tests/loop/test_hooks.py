"""Hooks: which methods run at which moment, and the order in which a set runs them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from hezar_train.errors import HookError
from hezar_train.loop import HOOK_TRIGGER, Context, Hook, HookSet, Moment, moment_named, refuse_uncalled
from hezar_train.types import Mode


class Trainer:
    """Anything a hook can be attached to."""

    step = 3


def moments_of(hook: Hook) -> list[Moment]:
    return [moment for moment, _ in hook.calls()]


def test_a_hook_that_overrides_nothing_registers_nothing() -> None:
    assert moments_of(Hook()) == []


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        ("before_train", Moment.FIT_START),
        ("before_step", Moment.BATCH_START),
        ("after_step", Moment.BATCH_END),
        ("after_train", Moment.FIT_END),
    ],
)
def test_the_four_plain_methods_stand_for_their_moments(method: str, moment: Moment) -> None:
    seen: list[str] = []
    kind = type("Watcher", (Hook,), {method: lambda self: seen.append(method)})
    [(found, call)] = kind().calls()
    assert found == moment
    call(Context())
    assert seen == [method]


@pytest.mark.parametrize("moment", list(Moment))
def test_a_method_named_like_a_moment_gets_the_context(moment: Moment) -> None:
    seen: list[Context] = []
    kind = type("Watcher", (Hook,), {moment.value: lambda self, ctx: seen.append(ctx)})
    [(found, call)] = kind().calls()
    ctx = Context()
    call(ctx)
    assert found == moment
    assert seen == [ctx]


def test_methods_of_a_parent_class_count_as_written() -> None:
    class Parent(Hook):
        def after_step(self) -> None: ...

    class Child(Parent):
        def on_update(self, ctx: Context) -> None: ...

    assert moments_of(Child()) == [Moment.BATCH_END, Moment.UPDATE]


def test_a_hook_knows_its_trainer_without_keeping_it_alive() -> None:
    hook, trainer = Hook(), Trainer()
    hook.attach(trainer)  # type: ignore[arg-type]
    assert hook.trainer.step == 3  # type: ignore[attr-defined]
    del trainer
    gc.collect()
    with pytest.raises(ReferenceError):
        _ = hook.trainer.step  # type: ignore[attr-defined]


def test_a_hook_is_named_by_its_class_watches_training_and_has_no_state() -> None:
    class Watcher(Hook): ...

    assert Watcher().name == "Watcher"
    assert Watcher().modes == frozenset({Mode.TRAIN})
    assert Watcher().state_dict() == {}
    Watcher().load_state_dict({})


def test_a_property_of_a_hook_is_not_run_before_the_hook_has_its_trainer() -> None:
    class Rates(Hook):
        @property
        def step(self) -> int:
            return self.trainer.step  # type: ignore[attr-defined,no-any-return]

        @property
        def on_off(self) -> bool:
            return bool(self.step)

        def on_update(self, ctx: Context) -> None: ...

    hook, trainer = Rates(), Trainer()
    refuse_uncalled(hook)
    hook.attach(trainer)  # type: ignore[arg-type]
    assert hook.step == 3
    assert moments_of(hook) == [Moment.UPDATE]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_method_that_would_never_be_called_is_refused_whatever_its_kind(kind: Callable[..., object]) -> None:
    watcher = type("Watcher", (Hook,), {"on_step_end": kind(lambda *_: None)})
    with pytest.raises(HookError, match=r"on_step_end\(\) would never be called.*on_batch_end"):
        refuse_uncalled(watcher())


def test_a_plain_method_is_listed_under_its_own_name() -> None:
    class Watcher(Hook):
        def after_step(self) -> None: ...

    hooks = HookSet()
    for moment, call in Watcher().calls():
        hooks.register(call, moment)
    assert hooks.names(Moment.BATCH_END) == ["after_step"]


def hook(name: str) -> Callable[[Context], None]:
    """Return a hook that writes its name into the context's log."""

    def call(ctx: Context) -> None:
        ctx.log.append(name)

    call.__name__ = name
    return call


def hook_set(*names: str, last: str | None = None) -> HookSet:
    hooks = HookSet()
    for name in names:
        hooks.register(hook(name), Moment.BATCH_END)
    if last is not None:
        hooks.register(hook(last), Moment.BATCH_END, is_last=True)
    return hooks


def run(hooks: HookSet) -> list[str]:
    ctx = Context(log=[])
    for call in hooks.calls(Moment.BATCH_END):
        call(ctx)
    return list(ctx.log)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, ["a", "b", "new", "due"]),
        ({"before": "a"}, ["new", "a", "b", "due"]),
        ({"before": "b"}, ["a", "new", "b", "due"]),
        ({"before": "due"}, ["a", "b", "new", "due"]),
        ({"after": "a"}, ["a", "new", "b", "due"]),
        ({"after": "b"}, ["a", "b", "new", "due"]),
        ({"is_last": True}, ["a", "b", "due", "new"]),
    ],
)
def test_a_new_hook_takes_the_place_it_asks_for(where: dict[str, str], expected: list[str]) -> None:
    hooks = hook_set("a", "b", last="due")
    hooks.register(hook("new"), Moment.BATCH_END, **where)
    assert hooks.names(Moment.BATCH_END) == expected
    assert run(hooks) == expected


def test_whatever_is_registered_later_runs_before_what_does_what_is_due() -> None:
    hooks = hook_set(last="due")
    for name in ("a", "b"):
        hooks.register(hook(name), "on_batch_end")
    hooks.register(hook("first"), "on_batch_end", before="a")
    assert hooks.names("on_batch_end") == ["first", "a", "b", "due"]


def test_nothing_is_put_after_what_does_what_is_due() -> None:
    hooks = hook_set("a", last="due")
    with pytest.raises(HookError, match=r"nothing runs after 'due'.*use before='due'"):
        hooks.register(hook("new"), Moment.BATCH_END, after="due")
    assert hooks.names(Moment.BATCH_END) == ["a", "due"]


def test_before_and_after_together_are_refused() -> None:
    with pytest.raises(HookError, match="before='a' and after='b' were given; give one of them"):
        hook_set("a", "b").register(hook("new"), Moment.BATCH_END, before="a", after="b")


def test_replacing_keeps_the_name_and_the_place() -> None:
    hooks = hook_set("a", "b", last="due")
    hooks.replace(hook("other"), Moment.BATCH_END, "a")
    assert hooks.names(Moment.BATCH_END) == ["a", "b", "due"]
    assert run(hooks) == ["other", "b", "due"]


def test_what_is_assigned_in_the_list_of_a_moment_keeps_the_name_and_the_place() -> None:
    hooks = hook_set("a", "b", last="due")
    hooks[Moment.BATCH_END][0] = hook("other")
    assert hooks.names(Moment.BATCH_END) == ["a", "b", "due"]
    assert run(hooks) == ["other", "b", "due"]
    hooks[Moment.BATCH_END][2] = hook("mine")
    hooks.register(hook("c"), Moment.BATCH_END)
    assert run(hooks) == ["other", "b", "c", "mine"]


@pytest.mark.parametrize(
    ("put", "named"),
    [
        (lambda hooks: hooks.register(3, Moment.BATCH_END, name="mine"), "hook 'mine'"),
        (lambda hooks: hooks.replace(3, Moment.BATCH_END, "a"), "hook 'a'"),
        (lambda hooks: hooks[Moment.BATCH_END].append(3), "a hook"),
        (lambda hooks: hooks[Moment.BATCH_END].__setitem__(0, 3), "hook 'a'"),
    ],
)
def test_what_cannot_be_called_is_no_hook(put: Callable[[HookSet], None], named: str) -> None:
    hooks = hook_set("a")
    with pytest.raises(HookError, match=f"{named} is a int; expected a function of the context"):
        put(hooks)
    assert hooks.names(Moment.BATCH_END) == ["a"]


def test_a_replacement_of_the_last_hook_stays_last() -> None:
    hooks = hook_set("a", last="due")
    hooks.replace(hook("mine"), Moment.BATCH_END, "due")
    hooks.register(hook("b"), Moment.BATCH_END)
    assert run(hooks) == ["a", "b", "mine"]


def test_removing_takes_one_hook_out() -> None:
    hooks = hook_set("a", "b", last="due")
    hooks.remove("on_batch_end", "b")
    assert hooks.names(Moment.BATCH_END) == ["a", "due"]
    hooks.remove(Moment.BATCH_END, "due")
    hooks.register(hook("c"), Moment.BATCH_END)
    assert run(hooks) == ["a", "c"]


def test_a_hook_is_at_its_own_moment_only() -> None:
    hooks = hook_set("a")
    assert {moment: hooks.names(moment) for moment in Moment if hooks.names(moment)} == {Moment.BATCH_END: ["a"]}
    assert hooks.calls(Moment.UPDATE) == ()


def test_calls_are_frozen_when_they_are_asked_for() -> None:
    hooks = hook_set("a")
    frozen = hooks.calls(Moment.BATCH_END)
    hooks.register(hook("b"), Moment.BATCH_END)
    assert len(frozen) == 1
    assert len(hooks.calls(Moment.BATCH_END)) == 2


def test_a_hook_is_named_by_its_argument_its_function_or_its_class() -> None:
    class Watcher:
        def __call__(self, ctx: Context) -> None: ...

    hooks = HookSet()
    hooks.register(hook("function"), Moment.UPDATE)
    hooks.register(hook("function"), Moment.UPDATE, name="given")
    hooks.register(Watcher(), Moment.UPDATE)
    assert hooks.names(Moment.UPDATE) == ["function", "given", "Watcher"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda hooks, name: hooks.register(hook("new"), Moment.BATCH_END, before=name),
        lambda hooks, name: hooks.register(hook("new"), Moment.BATCH_END, after=name),
        lambda hooks, name: hooks.replace(hook("new"), Moment.BATCH_END, name),
        lambda hooks, name: hooks.remove(Moment.BATCH_END, name),
    ],
)
def test_an_unknown_hook_name_is_refused_with_the_nearest_one(ask: Callable[[HookSet, str], None]) -> None:
    hooks = hook_set("count", "schedule")
    with pytest.raises(HookError) as caught:
        ask(hooks, "shedule")
    assert str(caught.value) == (
        "no hook 'shedule' at on_batch_end. Did you mean 'schedule'? There are: count, schedule."
    )
    assert hooks.names(Moment.BATCH_END) == ["count", "schedule"]


def test_an_unknown_hook_name_where_there_is_none_says_so() -> None:
    with pytest.raises(HookError, match=r"no hook 'x' at on_update\. There are: none\."):
        HookSet().remove(Moment.UPDATE, "x")


@pytest.mark.parametrize(
    "ask",
    [
        lambda hooks: hooks.register(hook("new"), "on_batch_ende"),
        lambda hooks: hooks.replace(hook("new"), "on_batch_ende", "a"),
        lambda hooks: hooks.remove("on_batch_ende", "a"),
        lambda hooks: hooks.names("on_batch_ende"),
    ],
)
def test_an_unknown_moment_is_refused_with_the_nearest_one(ask: Callable[[HookSet], None]) -> None:
    with pytest.raises(
        HookError, match=r"'on_batch_ende' is not a moment\. Did you mean 'on_batch_end'\? There are: on"
    ):
        ask(hook_set("a"))


def test_moments_are_found_by_name_and_by_member() -> None:
    assert [moment_named(str(moment)) for moment in Moment] == list(Moment)
    assert moment_named(Moment.UPDATE) is Moment.UPDATE


def test_moments_stand_in_the_order_of_the_walk() -> None:
    assert [moment.value for moment in Moment] == [
        "on_fit_start", "on_epoch_start", "on_batch_start", "on_batch_forward", "on_batch_backward", "on_gradients",
        "on_update", "on_batch_end", "on_epoch_end", "on_fit_end",
    ]  # fmt: skip


def test_a_set_in_print_lists_every_moment_with_its_hooks() -> None:
    lines = str(hook_set("a", "b")).splitlines()
    assert len(lines) == len(Moment)
    assert lines[0] == "on_fit_start: -"
    assert "on_batch_end: a, b" in lines


def test_every_routine_has_all_moments_but_those_of_an_update() -> None:
    assert [str(moment) for moment in Moment if str(moment) not in HOOK_TRIGGER] == ["on_gradients", "on_update"]
    assert Moment.contains("on_gradients")
    assert not Moment.contains("on_gradient")
