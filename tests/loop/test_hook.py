from __future__ import annotations

import gc

import pytest

from hezar_train.loop import Context, Hook, HookSet, Moment
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


def test_a_plain_method_is_listed_under_its_own_name() -> None:
    class Watcher(Hook):
        def after_step(self) -> None: ...

    hooks = HookSet()
    for moment, call in Watcher().calls():
        hooks.register(call, moment)
    assert hooks.names(Moment.BATCH_END) == ["after_step"]
