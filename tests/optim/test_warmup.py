"""The laws of a warm-up: update u of w has u/w of the schedule's first rate, and then the schedule goes its own way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hezar_train.errors import CheckpointError
from hezar_train.optim import Schedule, build_momentum_schedule, build_scheduler, get_momentum

RATE = 0.5
EPOCH = 5  # updates
CASES: dict[str, dict[str, Any]] = {
    "constant": {},
    "step": {"step_size": 2, "gamma": 0.5},
    "linear": {},
    "exponential": {"gamma": 0.9},
    "cosine_annealing": {},
    "one_cycle": {},
    "cyclic": {"step_size_up": 2},
    "polynomial": {"power": 2.0},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "sequential": {"schedulers": [{"name": "linear"}, {"name": "cosine_annealing"}], "milestones": [3]},
    "chainedscheduler": {"schedulers": [{"name": "linear"}, {"name": "cosine_annealing"}]},
    "lambda": {"lr_lambda": lambda tick: 0.9**tick},
    "triangular": {},
    "linear_decay": {},
    "warmup_linear": {},
    "warmup_cosine": {},
    "warmup_multi_step": {"milestones": [0.5]},
    "warmup_stable_decay": {"decay_ratio": 0.4},
    "inverse_sqrt": {"timescale": 4},
    "cosine_with_restarts": {"num_cycles": 2},
}
names = st.sampled_from(list(CASES))
warmups = st.integers(1, 9)
totals = st.integers(10, 30)
periods = st.sampled_from([1, 2, 3, None])


def make_optimizer(cls: Callable[..., Optimizer] = SGD) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (RATE, RATE / 4)]
    return cls(groups, lr=RATE)


def make_schedule(name: str | None, total: int, warmup: int, period: int | None = 1) -> Schedule:
    optimizer = make_optimizer()
    rest = total - warmup
    ticks = max(1, rest // period if period else total // EPOCH - warmup // EPOCH)
    scheduler = None
    if name is not None:
        scheduler = build_scheduler(name, optimizer, total_ticks=ticks, kwargs=dict(CASES[name]), is_warmed=warmup > 0)
    return Schedule(scheduler, period, optimizer, warmup_updates=warmup)


def rates_of(schedule: Schedule, first: int, last: int) -> list[list[float]]:
    """Return the rates that updates have, from the first to the last, counted from 1."""
    seen = []
    for update in range(first, last + 1):
        seen.append(schedule.rates())
        schedule._optimizer.step()  # type: ignore[union-attr]
        schedule.after_update(update, ends_epoch=update % EPOCH == 0)
    return seen


@given(name=names, warmup=warmups, total=totals, period=periods)
@settings(max_examples=200)
def test_update_u_of_w_has_u_of_w_of_the_first_rate(name: str, warmup: int, total: int, period: int | None) -> None:
    plain, warmed = make_schedule(name, total, 0, period), make_schedule(name, total, warmup, period)
    begin = build_first(name, total, warmup, period)
    seen = rates_of(warmed, 1, warmup)
    assert seen[0] == [rate * (1 / warmup) for rate in begin]
    assert seen[-1] == begin  # the whole rate, at update w
    assert seen == [[rate * (update / warmup) for rate in begin] for update in range(1, warmup + 1)]
    assert plain.warmup_updates == 0


def build_first(name: str, total: int, warmup: int, period: int | None) -> list[float]:
    """Return the first rates of a schedule over the rest of a run."""
    ticks = max(1, (total - warmup) // period if period else total // EPOCH - warmup // EPOCH)
    optimizer = make_optimizer()
    build_scheduler(name, optimizer, total_ticks=ticks, kwargs=dict(CASES[name]), is_warmed=True)
    return [group["lr"] for group in optimizer.param_groups]


@given(name=names, warmup=warmups, total=totals, period=st.sampled_from([1, 2, 3]))
@settings(max_examples=200)
def test_after_it_the_schedule_spans_the_rest(name: str, warmup: int, total: int, period: int) -> None:
    warmed = rates_of(make_schedule(name, total, warmup, period), 1, total)
    alone = rates_of(make_schedule(name, total - warmup, 0, period), 1, total - warmup)
    assert warmed[warmup:] == alone


@given(warmup=warmups, total=totals)
def test_epochs_that_end_in_the_warm_up_do_not_tick(warmup: int, total: int) -> None:
    schedule = make_schedule("step", total, warmup, None)
    rates_of(schedule, 1, total)
    assert schedule.scheduler is not None
    assert schedule.scheduler.last_epoch == total // EPOCH - warmup // EPOCH


@given(warmup=warmups, total=totals)
def test_without_a_schedule_the_rate_stays_where_the_warm_up_led(warmup: int, total: int) -> None:
    seen = rates_of(make_schedule(None, total, warmup), 1, total)
    assert seen[0] == [RATE * (1 / warmup), RATE / 4 * (1 / warmup)]
    assert seen[warmup - 1 :] == [[RATE, RATE / 4]] * (total - warmup + 1)


@given(name=st.none() | names, warmup=warmups, total=totals, period=periods, data=st.data())
@settings(max_examples=200)
def test_resumed_at_any_update_it_is_the_unbroken_one(
    name: str | None, warmup: int, total: int, period: int | None, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, total))
    unbroken = rates_of(make_schedule(name, total, warmup, period), 1, total)
    first, second = (make_schedule(name, total, warmup, period) for _ in range(2))
    before = rates_of(first, 1, cut)
    state = json.loads(json.dumps([first._optimizer.state_dict()["param_groups"], first.state_dict()]))  # type: ignore[union-attr]
    groups, schedule_state = state
    second._optimizer.load_state_dict({"state": {}, "param_groups": groups})  # type: ignore[union-attr]
    second.load_state_dict(schedule_state)
    assert before + rates_of(second, cut + 1, total) == unbroken


def test_a_skipped_update_is_not_counted() -> None:
    schedule = make_schedule(None, 10, 4)
    schedule.after_update(1, ends_epoch=False)
    before = schedule.rates()
    schedule.after_update(1, ends_epoch=True, applied=False)
    assert schedule.rates() == before == [RATE / 2, RATE / 8]


def test_a_plateau_waits_and_sees_no_evaluation_of_the_warm_up() -> None:
    optimizer = make_optimizer()
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    schedule = Schedule(plateau, None, optimizer, warmup_updates=2)
    schedule.after_update(1, ends_epoch=False)
    schedule.after_evaluation(1.0)
    schedule.after_evaluation(9.0)
    assert plateau.last_epoch == 0
    schedule.after_update(2, ends_epoch=False)
    assert schedule.rates() == [RATE, RATE / 4]
    schedule.after_evaluation(1.0)
    schedule.after_evaluation(9.0)
    assert schedule.rates() == [RATE / 2, RATE / 8]


def test_a_schedule_that_counts_epochs_goes_on_counting() -> None:
    optimizer = make_optimizer()
    schedule = {"schedule": {0: 1.0, 1: 0.5}}
    scheduler = build_scheduler("epoch_set", optimizer, total_ticks=9, kwargs=schedule)
    seen = rates_of(Schedule(scheduler, 1, optimizer, warmup_updates=10), 1, 12)
    assert [rate for rate, _ in seen[4:6]] == [RATE * 0.5, 0.5 * RATE * (6 / 10)]
    assert [rate for rate, _ in seen[9:]] == [RATE / 2] * 3


def test_the_momentum_has_no_warm_up_and_does_not_wait() -> None:
    optimizer = make_optimizer(Adam)
    momentum = build_momentum_schedule("linear_decay", optimizer, total_ticks=4, kwargs={"min": 0.5, "max": 0.9})
    schedule = Schedule(None, 1, optimizer, momentum=momentum, warmup_updates=3)
    seen = []
    for update in range(1, 5):
        seen.append(get_momentum(optimizer))
        schedule.after_update(update, ends_epoch=False)
    assert seen == pytest.approx([0.9, 0.8, 0.7, 0.6])


def test_rates_that_are_scaled_in_it_are_led_to() -> None:
    schedule = make_schedule("warmup_linear", 10, 4)
    rates_of(schedule, 1, 1)
    schedule.scale_rates(2.0)
    assert schedule.rates() == [RATE, RATE / 4]  # two quarters of twice the rate
    rates_of(schedule, 2, 4)
    assert schedule.rates() == [2 * RATE, RATE / 2]


def test_an_object_waits_at_its_first_tick_and_then_has_its_own_length() -> None:
    optimizer = make_optimizer()
    schedule = Schedule(StepLR(optimizer, 2, 0.1), 1, optimizer, warmup_updates=2)
    assert [rate for rate, _ in rates_of(schedule, 1, 6)] == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.05, 0.05])


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(RATE)
    optimizer = Adam([torch.nn.Parameter(torch.ones(1))], lr=rate, capturable=False, foreach=False)
    schedule = Schedule(None, 1, optimizer, warmup_updates=2)
    group = optimizer.param_groups[0]
    assert float(group["lr"]) == RATE / 2
    schedule.after_update(1, ends_epoch=False)
    assert float(group["lr"]) == RATE
    assert isinstance(group["lr"], torch.Tensor)


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        [],
        {"updates": 0, "done": 0, "rates": [0.1, 0.1]},
        {"updates": 4, "done": 5, "rates": [0.1, 0.1]},
        {"updates": 4, "done": -1, "rates": [0.1, 0.1]},
        {"updates": 1 << 60, "done": 1, "rates": [0.1, 0.1]},
        {"updates": 4, "done": 1, "rates": [0.1]},
        {"updates": 4, "done": 1, "rates": ["0.1", 0.1]},
        {"updates": "4", "done": 1, "rates": [0.1, 0.1]},
        {"updates": 4, "done": 1, "rates": [0.1, 0.1], "num_updates": 3},
    ],
)
def test_a_state_that_no_warm_up_has_saved_is_refused(saved: Any) -> None:
    schedule = make_schedule(None, 10, 4)
    with pytest.raises(CheckpointError, match="warm-up"):
        schedule.load_state_dict({"class": None, "warmup": saved})


def test_a_warm_up_is_not_taken_up_by_a_run_without_one() -> None:
    state = make_schedule(None, 10, 4).state_dict()
    with pytest.raises(CheckpointError, match="The checkpoint has a warm-up, this run has none"):
        make_schedule(None, 10, 0).load_state_dict(state)
