from __future__ import annotations

import pytest

from hezar_train.loop import Context
from hezar_train.types import Mode


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
