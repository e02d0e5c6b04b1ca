from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CyclicLR

from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.optim import (
    MomentumSchedule,
    Schedule,
    build_momentum_schedule,
    build_scheduler,
    get_momentum,
    set_learning_rate,
    set_momentum,
)

TICKS = 12
CYCLE = {"min": 0.85, "max": 0.95, "stepsize": 4}


def make(cls: type[Optimizer] = SGD, num_groups: int = 1, **kwargs: Any) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2, 2))]} for _ in range(num_groups)]
    return cls(groups, lr=0.1, **kwargs)  # type: ignore[call-arg]


def make_schedule(optimizer: Optimizer, name: str = "inv_triangular", **kwargs: Any) -> MomentumSchedule:
    return build_momentum_schedule(name, optimizer, total_ticks=TICKS, kwargs=kwargs or CYCLE)


def step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("cls", "kwargs"), [(SGD, {"momentum": 0.5}), (AdamW, {"betas": (0.5, 0.99)}), (Muon, {})])
def test_the_momentum_is_read_from_either_place_and_set_in_every_group(
    cls: type[Optimizer], kwargs: dict[str, Any]
) -> None:
    optimizer = make(cls, num_groups=2, **kwargs)
    assert get_momentum(optimizer) == (0.5 if kwargs else 0.95)
    set_momentum(optimizer, 0.9)
    for group in optimizer.param_groups:
        assert group.get("momentum", group.get("betas")) in (0.9, (0.9, 0.99))


def test_an_optimizer_without_momentum_has_none_and_takes_none() -> None:
    assert get_momentum(make(Adagrad)) is None
    with pytest.raises(ConfigError, match=r"momentum=0.9, but Adagrad has no momentum"):
        set_momentum(make(Adagrad), 0.9)
    with pytest.raises(ConfigError, match=r"momentum_scheduler='triangular', but Adagrad has no momentum"):
        make_schedule(make(Adagrad), "triangular")


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_momentum_that_cannot_work_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        set_momentum(make(), value)


def test_rmsprop_that_trained_without_a_momentum_cannot_take_one_up() -> None:
    optimizer = make(RMSprop)
    step(optimizer)
    with pytest.raises(ConfigError, match="RMSprop has trained without a momentum"):
        set_momentum(optimizer, 0.9)


def test_the_rate_is_set_in_every_group_or_in_one() -> None:
    optimizer = make(num_groups=3)
    set_learning_rate(optimizer, 0.2)
    set_learning_rate(optimizer, 0.3, group=1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3, 0.2]
    with pytest.raises(ConfigError, match=r"no parameter group 3: the optimizer has 3"):
        set_learning_rate(optimizer, 0.3, group=3)


def test_a_rate_or_beta_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate, beta = torch.tensor(0.1), torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([parameter], lr=rate, betas=(beta, torch.tensor(0.9)), foreach=False, capturable=True)
    set_learning_rate(optimizer, 0.25)
    set_momentum(optimizer, 0.75)
    assert (rate.item(), beta.item()) == (0.25, 0.75)
    assert optimizer.param_groups[0]["betas"][0] is beta


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [(SGD, {"momentum": 0.9}), (SGD, {}), (AdamW, {}), (NAdam, {}), (RMSprop, {"momentum": 0.9}), (Muon, {})],
)
def test_with_inv_triangular_the_momentum_goes_down_and_up_with_every_update(
    cls: type[Optimizer], kwargs: dict[str, Any]
) -> None:
    optimizer = make(cls, num_groups=2, **kwargs)
    schedule = Schedule(None, 1, optimizer, momentum=make_schedule(optimizer))
    seen = [get_momentum(optimizer)]
    for update_step in range(1, 9):
        step(optimizer)
        schedule.after_update(update_step, ends_epoch=False)
        seen.append(get_momentum(optimizer))
    assert seen == pytest.approx([0.95, 0.925, 0.9, 0.875, 0.85, 0.875, 0.9, 0.925, 0.95])
    if "betas" in optimizer.param_groups[1]:
        assert optimizer.param_groups[1]["betas"] == (seen[-1], 0.999)


def test_the_optimizer_uses_the_momentum_that_is_set() -> None:
    optimizer = make(momentum=0.9)
    parameter = optimizer.param_groups[0]["params"][0]
    step(optimizer)
    set_momentum(optimizer, 0.5)
    step(optimizer)
    assert torch.allclose(parameter.detach(), torch.full((2, 2), 1 - 0.1 * 1 - 0.1 * 1.5))


@pytest.mark.parametrize("kwargs", [{"mtm_min": 0.85, "mtm_max": 0.95}, {"lr_min": 0.85, "lr_max": 0.95}])
def test_the_range_may_be_spelled_as_in_other_systems(kwargs: dict[str, float]) -> None:
    optimizer = make(momentum=0.9)
    make_schedule(optimizer, "TriangularScheduler", stepsize=4, **kwargs)
    assert get_momentum(optimizer) == 0.85


def test_a_range_that_is_left_out_is_that_of_each_group() -> None:
    optimizer = make(num_groups=2, momentum=0.9)
    optimizer.param_groups[1]["momentum"] = 0.5
    schedule = make_schedule(optimizer, "linear_decay", num_iters=2)
    schedule.tick()
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.855, 0.475])
    schedule.tick()
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.81, 0.45])


def test_rate_and_momentum_each_count_what_is_theirs() -> None:
    optimizer = make(momentum=0.9)
    rate = build_scheduler("linear_decay", optimizer, total_ticks=4, kwargs={"lr_min": 0.02})
    momentum = make_schedule(optimizer, "epoch_set", schedule={0: 1, 1: 0.5})
    schedule = Schedule(rate, 2, optimizer, momentum=momentum)
    seen = []
    for update_step in range(1, 5):
        optimizer.step()
        schedule.after_update(update_step, ends_epoch=update_step == 3)
        seen.append((round(schedule.rates()[0], 9), get_momentum(optimizer)))
    assert seen == [(0.1, 0.9), (0.08, 0.9), (0.08, 0.45), (0.06, 0.45)]


def test_an_update_that_was_not_applied_only_ends_the_epoch() -> None:
    optimizer = make(momentum=0.9)
    rate = build_scheduler("linear_decay", optimizer, total_ticks=4)
    momentum = make_schedule(optimizer, "decay_when_epoch", num_epochs=1, decay=0.5)
    schedule = Schedule(rate, 1, optimizer, momentum=momentum)
    schedule.after_update(0, ends_epoch=True, applied=False)
    assert (schedule.rates(), get_momentum(optimizer)) == ([0.1], 0.45)


def test_a_schedule_can_be_ticked_by_hand() -> None:
    optimizer = make(momentum=0.9)
    rate = build_scheduler("decay_when_epoch", optimizer, total_ticks=4, kwargs={"num_epochs": 1, "lr_decay": 0.5})
    schedule = Schedule(rate, 100, optimizer, momentum=make_schedule(optimizer))
    optimizer.step()
    schedule.tick_rate()
    schedule.tick_momentum()
    assert (schedule.rates(), get_momentum(optimizer)) == ([0.05], pytest.approx(0.925))


@given(cut=st.integers(0, TICKS), name=st.sampled_from(["inv_triangular", "triangular2", "log_decay", "warm_restarts"]))
def test_a_momentum_resumed_at_any_tick_is_the_unbroken_one(cut: int, name: str) -> None:
    def run(schedule: Schedule, first: int) -> list[float | None]:
        seen = []
        for update_step in range(first, TICKS + 1):
            schedule.after_update(update_step, ends_epoch=False)
            seen.append(get_momentum(schedule.momentum.optimizer))  # type: ignore[union-attr]
        return seen

    def build() -> Schedule:
        optimizer = make(AdamW)
        return Schedule(None, 1, optimizer, momentum=make_schedule(optimizer, name, min=0.7, max=0.95))

    unbroken, first, resumed = run(build(), 1), build(), build()
    for update_step in range(1, cut + 1):
        first.after_update(update_step, ends_epoch=False)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.state_dict() == first.state_dict()
    assert run(resumed, cut + 1) == unbroken[cut:]


def test_a_momentum_falls_when_an_evaluation_does_and_remembers_it() -> None:
    def build() -> tuple[Optimizer, Schedule]:
        optimizer = make(momentum=0.8)
        return optimizer, Schedule(None, 1, optimizer, momentum=make_schedule(optimizer, "decay_when_acc", decay=0.5))

    optimizer, schedule = build()
    seen = []
    for value in (0.5, 0.49, 0.4, 0.6, 0.5):
        schedule.after_evaluation(value)
        schedule.after_update(1, ends_epoch=True)
        seen.append(get_momentum(optimizer))
    assert seen == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2])
    other, resumed = build()
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    resumed.after_evaluation(0.1)
    assert get_momentum(other) == pytest.approx(0.1)


def test_a_checkpoint_from_before_momentum_schedules_still_loads() -> None:
    optimizer = make(momentum=0.9)
    schedule = Schedule(build_scheduler("triangular", optimizer, total_ticks=4), 1, optimizer)
    old = schedule.state_dict()
    assert "momentum" not in old
    schedule.load_state_dict(old)
    Schedule(None, 1, optimizer).load_state_dict({"class": None})


def test_a_checkpoint_of_another_momentum_schedule_is_refused() -> None:
    optimizer = make(momentum=0.9)
    one = Schedule(None, 1, optimizer, momentum=make_schedule(optimizer))
    other = Schedule(None, 1, optimizer, momentum=make_schedule(optimizer, "triangular"))
    with pytest.raises(CheckpointError, match=r"momentum schedule is inv_triangular over 1 .* this run's triangular"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(CheckpointError, match="checkpoint has no momentum schedule, this run has one"):
        one.load_state_dict({"class": None})
    with pytest.raises(CheckpointError, match="checkpoint has a momentum schedule, this run has none"):
        Schedule(None, 1, optimizer).load_state_dict(one.state_dict())


@pytest.mark.parametrize("name", ["one_cycle", "cyclic"])
def test_two_masters_of_one_momentum_are_refused(name: str) -> None:
    optimizer = make(momentum=0.9)
    scheduler = build_scheduler(name, optimizer, total_ticks=TICKS)
    momentum = make_schedule(optimizer)
    with pytest.raises(ConfigError, match=r"cycles the momentum itself.*cycle_momentum=False"):
        Schedule(scheduler, 1, optimizer, momentum=momentum)
    Schedule(
        build_scheduler(name, optimizer, total_ticks=TICKS, kwargs={"cycle_momentum": False}),
        *(1, optimizer),
        momentum=momentum,
    )


def test_a_master_of_the_momentum_is_found_inside_a_sequence() -> None:
    optimizer = make(momentum=0.9)
    kwargs = {"schedulers": [{"name": "constant"}, {"name": "cyclic"}], "milestones": [4]}
    scheduler: Any = build_scheduler("sequential", optimizer, total_ticks=TICKS, kwargs=kwargs)
    assert isinstance(scheduler._schedulers[1], CyclicLR)
    with pytest.raises(ConfigError, match="SequentialLR cycles the momentum itself"):
        Schedule(scheduler, 1, optimizer, momentum=make_schedule(optimizer))


def test_a_momentum_schedule_over_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="another optimizer than the one that trains"):
        Schedule(None, 1, make(momentum=0.9), momentum=make_schedule(make(momentum=0.9)))


@pytest.mark.parametrize(
    ("name", "cls", "kwargs", "message"),
    [
        (
            "cosine_annealing",
            AdamW,
            {},
            r"momentum_scheduler='cosine_annealing' is not known\. Known: cosine_with_restarts",
        ),
        ("triangular", SGD, {}, r"but the optimizer's momentum is 0\. Set the field 'momentum', or 'max'"),
        ("triangular", SGD, {"max": 1.5}, r"goes from .* to 1\.5\. Expected numbers from 0 to below 1"),
        ("epoch_set", AdamW, {"schedule": {0: 0.9, 3: 1.1}, "set_value": True}, r"goes from 0\.9 to 1\.1"),
        ("triangular", AdamW, {"lr_mx": 0.9}, r"does not take 'lr_mx'\. It takes: max, min, start_iter, stepsize"),
        ("triangular", AdamW, {"min": 0.95}, r"min=0\.95 is above max=0\.9"),
        ("triangular", RMSprop, {"min": 0, "max": 0.9}, r"begins at 0, but RMSprop cannot take up a momentum later"),
    ],
)
def test_a_momentum_schedule_that_cannot_work_is_told_when_it_is_built(
    name: str, cls: type[Optimizer], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_momentum_schedule(name, make(cls), total_ticks=TICKS, kwargs=kwargs)
