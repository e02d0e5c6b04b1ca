"""Whatever trains inside `untouched`, the very same tensors come back with the same bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hezar_train.errors import DataError
from hezar_train.optim import Schedule
from hezar_train.state import TrainerState
from hezar_train.trainer.rollback import untouched


class Net(nn.Module):
    """Everything a module can hold: tied weights, statistics, buffers of all kinds, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("assigned", torch.zeros(2), persistent=False)
        self.register_buffer("expanded", torch.zeros(1, 3).expand(5, 3))
        self.register_buffer("absent", None)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.assigned = self.assigned + 1.0
        self.expanded[:1].add_(1.0)
        self.absent = torch.ones(1)
        self.calls += 1
        return self.norm(self.tied(self.first(x)))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Counting:
    """A stream that goes on where it was left."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Parts:
    """A model in the middle of its training, and what belongs to it."""

    def __init__(self, optimizer: str = "Adam", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), **{"lr": 0.1, **options})
        self.schedule = Schedule(StepLR(self.optimizer, 2), 1, self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.state = TrainerState()
        self.data = Counting()
        self.step()

    def step(self) -> None:
        loss = self.model(torch.randn(3, 4)).square().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.schedule.after_update(self.state.global_step, ends_epoch=False)
        next(iter(self.data))
        self.model.norm.train(not self.model.norm.training)
        random.random(), np.random.rand(), torch.rand(1)

    def kept(self) -> Any:
        return untouched(
            self.model, self.optimizer, self.schedule, self.scaler, self.state, self.data, torch.device("cpu")
        )

    def everything(self) -> dict[str, Any]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return copy.deepcopy({
            "tensors": {name: tensor.detach() for name, tensor in tensors.items()},
            "calls": self.model.calls, "modes": [module.training for module in self.model.modules()],
            "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(), "state": self.state.to_dict(), "place": self.data.place,
            "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
        })  # fmt: skip

    def objects(self) -> list[int]:
        """Return the identities of all tensors and containers."""
        owned = [*self.model.parameters(), *self.model.buffers(), *self.optimizer.param_groups]
        inner = [value for state in self.optimizer.state.values() for value in state.values()]
        return [id(one) for one in [*owned, *inner] if not isinstance(one, int | float)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))


@pytest.fixture(params=["Adam", "SGD", "Adam with a tensor for a rate"])
def parts(request: pytest.FixtureRequest) -> Parts:
    if request.param == "SGD":
        return Parts("SGD", momentum=0.9)
    return Parts(lr=torch.tensor(0.1)) if "tensor" in request.param else Parts()


@pytest.mark.parametrize("end", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_everything_comes_back_however_the_body_ends(parts: Parts, end: type[BaseException] | None) -> None:
    parts.model.absent = None
    before, objects = parts.everything(), parts.objects()

    def train() -> None:
        with parts.kept():
            for _ in range(3):
                parts.step()
            assert not any(same(before[key], now) for key, now in parts.everything().items())
            if end is not None:
                raise end

    with nullcontext() if end is None else pytest.raises(end):
        train()
    assert same(before, parts.everything())
    assert parts.objects() == objects
    assert parts.model.tied.weight is parts.model.first.weight
    assert parts.model.absent is None


def test_the_next_step_is_the_one_that_would_have_followed(parts: Parts) -> None:
    other = copy.deepcopy(parts)
    before = torch.get_rng_state()
    other.step()
    torch.set_rng_state(before)
    with parts.kept():
        parts.step()
    parts.step()
    for key in ("tensors", "optimizer", "schedule", "scaler", "state", "place", "torch"):
        assert same(parts.everything()[key], other.everything()[key]), key


def test_an_optimizer_without_state_has_none_afterwards() -> None:
    parts = Parts()
    parts.optimizer.state.clear()
    with parts.kept():
        parts.step()
        assert parts.optimizer.state
    assert not parts.optimizer.state


def test_gradients_are_set_aside_and_come_back() -> None:
    parts = Parts()
    parts.model(torch.randn(3, 4)).sum().backward()
    gradients = [parameter.grad for parameter in parts.model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    with parts.kept():
        assert all(parameter.grad is None for parameter in parts.model.parameters())
        parts.step()
    assert all(p.grad is before for p, before in zip(parts.model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if g is not None)


def test_a_scaler_that_was_left_between_unscaling_and_stepping_can_go_on() -> None:
    parts = Parts()
    with parts.kept():
        parts.scaler.scale(parts.model(torch.randn(3, 4)).sum()).backward()
        parts.scaler.unscale_(parts.optimizer)
    parts.scaler.scale(parts.model(torch.randn(3, 4)).sum()).backward()
    parts.scaler.unscale_(parts.optimizer)  # raises if it remembers the one before


def test_a_model_without_shapes_is_refused_because_it_cannot_go_back() -> None:
    parts = Parts()
    parts.model = nn.LazyLinear(2)  # type: ignore[assignment]
    with (
        pytest.raises(DataError, match="the parameters weight, bias have no shape before the first forward"),
        parts.kept(),
    ):
        pass


def test_data_that_can_be_read_only_once_is_refused() -> None:
    parts = Parts()
    parts.data = iter([1, 2])  # type: ignore[assignment]
    with pytest.raises(DataError, match="list_iterator that can be read only once"), parts.kept():
        pass
