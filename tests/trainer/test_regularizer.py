"""What is added to the loss: trained on, not logged, and the same however the batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hezar_train import Trainer
from hezar_train.errors import ConfigError
from hezar_train.loop import Context
from hezar_train.trainer import model_runner
from hezar_train.trainer.model_runner import register_regularizer
from hezar_train.types import Mode

Build = Callable[..., Trainer]


def squares(ctx: Context) -> torch.Tensor:
    """Return half the sum of squares of the parameters."""
    return 0.5 * sum(p.square().sum() for p in ctx.model.parameters())  # type: ignore[return-value]


def one(_: Context) -> float:
    return 1.0


register_regularizer("squares", squares)
register_regularizer("one", one)


def test_it_is_added_to_what_is_trained_on_and_not_to_what_is_logged(toy: Build) -> None:
    seen: list[float] = []
    trainer = toy(regularizer="one", regularizer_mu=0.5)
    trainer.hooks[Mode.TRAIN].register(
        lambda ctx: seen.append(float((ctx.loss_task - ctx.loss_batch).detach())), "on_batch_backward"
    )
    trainer.train()
    assert seen == pytest.approx([0.5] * 5)
    plain = toy(out="plain")
    plain.train()
    assert trainer.storage.history("train.step_loss").values() == plain.storage.history("train.step_loss").values()
    assert trainer.parts.train_step.loss_regular_total == pytest.approx(0.5 * 20)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_half_the_squares_are_weight_decay_however_the_batch_is_cut(toy: Build, accumulation: int) -> None:
    cut = {"batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    trainer = toy(regularizer="squares", regularizer_mu=0.1, optimizer="sgd", learning_rate=0.1, **cut)
    decayed = toy(out="decayed", weight_decay=0.1, optimizer="sgd", learning_rate=0.1, **cut)
    trainer.train()
    decayed.train()
    for name, tensor in decayed.model.state_dict().items():
        assert torch.allclose(trainer.model.state_dict()[name], tensor, atol=1e-6)


def test_it_stands_among_the_hooks_only_if_there_is_one(toy: Build) -> None:
    assert toy().hooks[Mode.TRAIN].names("on_batch_forward") == ["forward"]
    assert toy(regularizer="one").hooks[Mode.TRAIN].names("on_batch_forward") == ["forward", "regularize"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"regularizer": "one"}, 1),
        ({"regularizer": "one", "regularizer_mu": 0.1}, 0),
        ({}, 0),
    ],
)
def test_one_that_adds_nothing_is_told_once(
    toy: Build, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], told: int
) -> None:
    toy(**fields).train()
    words = "regularizer='one' adds nothing to the loss: its factor, regularizer_mu, is 0. Set it"
    assert caplog.text.count(words) == told


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("squraes", r"not registered.*Did you mean 'squares'"), ("no.such.thing", "cannot be imported")],
)
def test_an_unknown_one_is_refused(toy: Build, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        toy(regularizer=name)


def test_where_none_is_registered_it_is_said(toy: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "_REGISTERED", {})
    with pytest.raises(ConfigError, match=r"Registered: none\. Register a function .*'one', f\).*Set regularizer_mu"):
        toy(regularizer="one")


def test_a_dotted_path_is_imported(toy: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    import math

    monkeypatch.setattr(math, "nothing_more", one, raising=False)
    trainer: Any = toy(regularizer="math.nothing_more", regularizer_mu=1.0)
    assert trainer.regularizer is one
