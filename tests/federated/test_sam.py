"""On the quadratic a/2 * w^2 with the mean over samples, the gradient at w + eps is a * (w + eps): a closed form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.federated import ASAM, SAM, FedProx, wrap_sam_trainer
from hezar_train.loop import Context

RATE, RHO = 0.1, 0.5


class Bowl(nn.Module):
    """Return the loss a/2 * |w|^2 for each sample's a."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, -4.0]))
        self.forwards = 0

    def forward(self, a: torch.Tensor) -> dict[str, torch.Tensor]:
        self.forwards += 1
        return {"loss": (a / 2 * self.weight.square().sum()).mean()}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Trainer]:
    def make(hooks: list[Hook], **settings: Any) -> Trainer:
        fields = {"batch_size": 2, "learning_rate": RATE, "optimizer": "sgd", "dataloader_shuffle": False}
        data = [{"a": torch.tensor(value)} for value in (1.0, 2.0, 3.0, 4.0)]
        return Trainer(TrainerConfig(tmp_path / "run", **fields | settings), Bowl(), data, hooks=hooks)

    return make


def sam_step(weight: torch.Tensor, a: float, stretch: torch.Tensor) -> torch.Tensor:
    """Return the weights after one update, written down from the definition."""
    slope = a * weight
    climbed = weight + RHO * stretch.square() * slope / (stretch * slope).norm()
    return weight - RATE * a * climbed


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_the_steps_on_a_quadratic_are_the_closed_form(build: Callable[..., Trainer], is_adaptive: bool) -> None:
    eta = 0.01
    trainer = build([ASAM(RHO, eta) if is_adaptive else SAM(RHO)])
    expected = torch.tensor([3.0, -4.0])
    for a in (1.5, 3.5):
        expected = sam_step(expected, a, expected.abs() + eta if is_adaptive else torch.ones(2))
    trainer.train()
    assert torch.allclose(trainer.model.weight, expected, atol=1e-6)


def test_a_window_of_micro_batches_climbs_once(build: Callable[..., Trainer]) -> None:
    trainer = build([SAM(RHO)], batch_size=1, gradient_accumulation_steps=2)
    expected = torch.tensor([3.0, -4.0])
    for a in (1.5, 3.5):
        expected = sam_step(expected, a, torch.ones(2))
    trainer.train()
    assert torch.allclose(trainer.model.weight, expected, atol=1e-6)


def test_each_step_takes_two_forwards_and_logs_the_loss_of_the_first(build: Callable[..., Trainer]) -> None:
    trainer = build([SAM(RHO)], learning_rate=0.0)
    trainer.train()
    assert trainer.model.forwards == 4
    assert trainer.state.loss_tracker_avg == pytest.approx(2.5 / 2 * 25)


def test_the_weights_come_back_exactly_before_the_update(build: Callable[..., Trainer]) -> None:
    seen: list[list[float]] = []
    trainer = build([SAM(0.1)], max_steps=1)
    trainer.register_hook_in_train(lambda ctx: seen.append(ctx.model.weight.tolist()), "on_batch_backward")
    trainer.train()
    assert seen == [[3.0, -4.0]]


def test_the_weights_come_back_when_the_second_pass_fails(build: Callable[..., Trainer]) -> None:
    trainer = build([SAM(RHO)])
    calls: list[int] = []

    def fail_later(_: Context) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("second pass")

    trainer.register_hook_in_train(fail_later, "on_batch_forward")
    with pytest.raises(RuntimeError, match="second pass"):
        trainer.train()
    assert trainer.model.weight.tolist() == [3.0, -4.0]


@pytest.mark.parametrize("order", ["pull is climbed", "pull is added"])
def test_what_stands_before_it_is_climbed_and_what_stands_after_is_added_once(
    build: Callable[..., Trainer], order: str
) -> None:
    mu, w0 = 2.0, torch.tensor([3.0, -4.0])
    hooks = [FedProx(mu), SAM(RHO)] if order == "pull is climbed" else [SAM(RHO), FedProx(mu)]
    trainer = build(hooks)
    trainer.train()
    w1 = sam_step(w0, 1.5, torch.ones(2))  # the pull is zero where it begins, but not uphill of it
    pull = mu * RHO * w0 / w0.norm() if order == "pull is climbed" else torch.zeros(2)
    w1 = w1 - RATE * pull
    slope = 3.5 * w1 + (mu * (w1 - w0) if order == "pull is climbed" else 0)
    uphill = w1 + RHO * slope / slope.norm()
    pulled_at = uphill if order == "pull is climbed" else w1
    expected = w1 - RATE * (3.5 * uphill + mu * (pulled_at - w0))
    assert torch.allclose(trainer.model.weight, expected, atol=1e-5)


def test_the_value_of_a_pull_is_that_of_the_first_pass(build: Callable[..., Trainer]) -> None:
    seen: list[tuple[float, float]] = []
    start = torch.tensor([3.0, -4.0])

    def note(ctx: Context) -> None:
        seen.append((float(ctx.loss_regular), float((ctx.model.weight.detach() - start).square().sum())))

    trainer = build([FedProx(2.0), SAM(RHO)])
    trainer.register_hook_in_train(note, "on_batch_backward")
    trainer.train()
    assert [value for value, _ in seen] == pytest.approx([expected for _, expected in seen])
    assert seen[1][1] > 0


def test_the_wrapper_adds_the_adaptive_one_if_asked(build: Callable[..., Trainer]) -> None:
    assert "SAM" in wrap_sam_trainer(build([])).hooks_in_train.names("on_batch_backward")
    trainer = wrap_sam_trainer(build([]), rho=0.5, eta=0.01, adaptive=True)
    assert "ASAM" in trainer.hooks_in_train.names("on_batch_backward")
    with pytest.raises(ConfigError, match="rho=-1 must be a number of at least 0"):
        wrap_sam_trainer(build([]), rho=-1)
