from __future__ import annotations

import copy
import json
import logging
import types
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import SWALR

from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.optim import Schedule, build_scheduler
from hezar_train.optim.curves import CURVES

RATE = 0.5
TICKS = 12


class Counting:
    """A lambda with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.helper = abs

    def __call__(self, tick: int) -> float:
        self.calls += 1
        return 1 / self.calls


class Wrapping(LRScheduler):
    """A scheduler of a user's own that holds others, functions, and a dict by number."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = StepLR(optimizer, step_size=2, gamma=0.5)
        self.functions = [abs, max]
        self.seen: dict[int, float] = {}
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen[self.last_epoch] = float("inf")
        if self.last_epoch:
            self.inner.step()
        return self.inner.get_last_lr()


class Opaque(LRScheduler):
    def __init__(self, optimizer: Optimizer) -> None:
        self.memory = {1, 2}
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return self.base_lrs


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "constant": ("constant", {}),
    "lambda": ("lambda", {"lr_lambda": lambda tick: 1 / (1 + tick)}),
    "counting lambda": ("lambda", {"lr_lambda": Counting()}),
    "step": ("step", {"step_size": 3}),
    "multi_step": ("multi_step", {"milestones": [2, 5, 5]}),
    "one_cycle": ("one_cycle", {}),
    "three phases": ("one_cycle", {"three_phase": True, "anneal_strategy": "linear"}),
    "linear": ("linear", {}),
    "exponential": ("exponential", {"gamma": 0.9}),
    "cyclic": ("cyclic", {"step_size_up": 2}),
    "cyclic exp_range": ("cyclic", {"step_size_up": 2, "mode": "exp_range", "gamma": 0.9}),
    "cyclic momentum": ("cyclic", {"step_size_up": 3, "cycle_momentum": True, "scale_fn": lambda x: 0.5**x}),
    "polynomial": ("polynomial", {}),
    "cosine_annealing": ("cosine_annealing", {}),
    "warm restarts": ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2}),
    "multiplicative": ("MultiplicativeLR", {"lr_lambda": lambda tick: 0.9}),
    "sequential": ("sequential", {"schedulers": [{"name": "linear"}, {"name": "cyclic"}], "milestones": [4]}),
    "chained": ("chainedscheduler", {"schedulers": [{"name": "linear"}, {"name": "cosine_annealing"}]}),
    "plateau": ("reduce_on_plateau", {"patience": 1}),
    "swa": ("torch.optim.swa_utils.SWALR", {"swa_lr": 0.1, "anneal_epochs": 3}),
    "own": (f"{__name__}.Wrapping", {}),
    "curves in sequence": (
        "sequential",
        {"schedulers": [{"name": "warmup_linear"}, {"name": "triangular2"}], "milestones": [5]},
    ),
    **{name: (name, {}) for name in CURVES},
    "warmup_step": ("warmup_step", {"step_size": 3, "warmup_iter": 2}),
    "warmup_multi_step": ("warmup_multi_step", {"milestones": [3, 7], "warmup_iter": 5}),
    "warmup_exponential": ("warmup_exponential", {"gamma": 0.7, "warmup_ratio": 0.5}),
    "warmup_noam": ("warmup_noam", {"warmup_iter": 4}),
    "inverse_sqrt": ("inverse_sqrt", {"timescale": 4}),
    "epoch_set": ("epoch_set", {"schedule": {0: 1.0, 2: 0.3, 7: 0.1}}),
    "acc": ("decay_when_acc", {"mode": "min", "acc_thresh": 0.01}),
    "triangles and acc": ("triangular_decay_when_acc", {"mode": "min", "acc_thresh": 0.01, "stepsize": 2}),
}
METRICS = [3.0, 2.0, 2.5, 2.5, 2.4, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9]


def make_schedule(case: str, period_updates: int | None = 1, cls: type[Optimizer] = Adam) -> Schedule:
    name, kwargs = CASES[case]
    optimizer: Any = cls([torch.nn.Parameter(torch.ones(2))], lr=RATE)  # type: ignore[call-arg]
    scheduler = build_scheduler(name, optimizer, total_ticks=TICKS, kwargs=copy.deepcopy(kwargs))
    return Schedule(scheduler, period_updates, optimizer)


def group_of(schedule: Schedule) -> dict[str, Any]:
    assert schedule.scheduler is not None
    return {key: value for key, value in schedule.scheduler.optimizer.param_groups[0].items() if key != "params"}


def tick(schedule: Schedule, update_step: int) -> None:
    assert schedule.scheduler is not None
    schedule.scheduler.optimizer.step()
    schedule.after_update(update_step, ends_epoch=False)
    schedule.after_evaluation(METRICS[(update_step - 1) % len(METRICS)])


def tick_only(schedule: Schedule, update_step: int) -> None:
    assert schedule.scheduler is not None
    schedule.scheduler.optimizer.step()
    schedule.after_update(update_step, ends_epoch=False)


def trace(schedule: Schedule, first: int, last: int) -> list[dict[str, Any]]:
    """Tick through updates `first` to `last` and return the optimizer's group after each."""
    seen = []
    for update_step in range(first, last + 1):
        tick(schedule, update_step)
        seen.append(group_of(schedule))
    return seen


@pytest.mark.parametrize("case", CASES)
@given(cut=st.integers(0, TICKS + 2))
def test_a_schedule_resumed_at_any_tick_is_the_unbroken_one(case: str, cut: int) -> None:
    unbroken = trace(make_schedule(case), 1, TICKS + 3)
    first = make_schedule(case)
    trace(first, 1, cut)
    saved = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    resumed = make_schedule(case)
    resumed.load_state_dict(saved)
    assert resumed.rates() == first.rates()
    assert resumed.state_dict() == first.state_dict()
    assert trace(resumed, cut + 1, TICKS + 3) == unbroken[cut:]


@pytest.mark.parametrize("case", CASES)
def test_a_saved_state_holds_no_code_and_no_tensor(case: str) -> None:
    schedule = make_schedule(case)
    trace(schedule, 1, 5)
    stack: list[Any] = [schedule.state_dict()]
    while stack:
        value = stack.pop()
        assert value is None or type(value) in (bool, int, float, str, list, dict), value
        stack.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def test_the_state_that_was_loaded_is_not_changed() -> None:
    schedule = make_schedule("cyclic momentum")
    saved = schedule.state_dict()
    kept = copy.deepcopy(saved)
    schedule.load_state_dict(saved)
    trace(schedule, 1, 3)
    assert saved == kept


@pytest.mark.parametrize("name", ["cosine_annealing", "triangular", "warmup_cosine"])
def test_a_rate_that_is_a_tensor_is_restored_in_place(name: str) -> None:
    def make() -> Schedule:
        optimizer = AdamW([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(RATE), fused=True)
        return Schedule(build_scheduler(name, optimizer, total_ticks=TICKS), 1)

    first, resumed = make(), make()
    trace(first, 1, 5)
    rate = group_of(resumed)["lr"]
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert group_of(resumed)["lr"] is rate
    trace(first, 6, 9)
    trace(resumed, 6, 9)
    assert resumed.rates() == first.rates()


@pytest.mark.parametrize(("period_updates", "expected"), [(1, 6), (2, 3), (4, 1), (7, 0), (None, 2)])
def test_a_schedule_ticks_every_period_or_at_the_end_of_an_epoch(period_updates: int | None, expected: int) -> None:
    schedule = make_schedule("exponential", period_updates)
    assert isinstance(schedule.scheduler, LRScheduler)
    schedule.scheduler.optimizer.step()
    for update_step in range(1, 7):
        schedule.after_update(update_step, ends_epoch=update_step % 3 == 0)
    assert schedule.scheduler.last_epoch == expected


def test_a_plateau_ticks_after_evaluations_only() -> None:
    schedule = make_schedule("plateau")
    assert schedule.is_plateau
    for update_step in range(1, 10):
        schedule.after_update(update_step, ends_epoch=True)
    assert schedule.rates() == [RATE]
    for _ in range(3):
        schedule.after_evaluation(1.0)
    assert schedule.rates() == pytest.approx([RATE / 10])


def test_an_evaluation_ticks_nothing_but_a_plateau() -> None:
    schedule = make_schedule("exponential")
    schedule.after_evaluation(1.0)
    assert schedule.rates() == [RATE]


def test_a_curve_that_counts_epochs_ticks_at_their_ends_whatever_the_period() -> None:
    schedule = make_schedule("epoch_set", period_updates=2)
    seen = []
    for update_step in range(1, 10):
        schedule.scheduler.optimizer.step()  # type: ignore[union-attr]
        schedule.after_update(update_step, ends_epoch=update_step % 3 == 0)
        seen.append(schedule.rates()[0])
    assert seen == pytest.approx([0.5] * 5 + [0.15] * 4)


def test_decay_when_acc_falls_with_each_evaluation_far_enough_below_the_best() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    scheduler = build_scheduler("DecayWhenAcc", optimizer, total_ticks=TICKS, kwargs={"lr_decay": 0.5})
    schedule = Schedule(scheduler, 1, optimizer)
    assert schedule.is_plateau
    seen = []
    for accuracy in (0.8, 0.77, 0.75, float("nan"), 0.9, 0.86, 0.85, 0.9):
        schedule.after_update(1, ends_epoch=True)
        schedule.after_evaluation(accuracy)
        seen.append(schedule.rates()[0])
    # 0.75 is below 0.95 * 0.8, and 0.85 below 0.95 * 0.9
    assert seen == [RATE, RATE, RATE / 2, RATE / 2, RATE / 2, RATE / 2, RATE / 4, RATE / 4]


def test_with_mode_min_it_is_a_rise_that_counts() -> None:
    schedule = make_schedule("acc")
    for loss in (2.0, 2.01, 2.03, 1.0):
        schedule.after_evaluation(loss)
    assert schedule.rates() == pytest.approx([RATE * 0.9])


def test_triangles_follow_the_ticks_and_shrink_with_each_fall() -> None:
    schedule = make_schedule("triangles and acc")
    assert not schedule.is_plateau
    seen = []
    for update_step, loss in enumerate([1.0, 1.0, 2.0, 1.0, 1.0, 1.0], start=1):
        tick_only(schedule, update_step)
        schedule.after_evaluation(loss)
        seen.append(schedule.rates()[0])
    assert seen == pytest.approx([0.275, 0.5, 0.275 * 0.9, 0.05 * 0.9, 0.275 * 0.9, 0.5 * 0.9])


def test_another_base_rate_moves_a_curve_but_not_one_between_given_rates() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    for kwargs, expected in (({}, 1.0), ({"lr_max": 0.4, "lr_min": 0.1}, 0.4)):
        optimizer.param_groups[0].update(lr=RATE, initial_lr=RATE)
        schedule = Schedule(build_scheduler("linear_decay", optimizer, total_ticks=4, kwargs=kwargs), 1, optimizer)
        schedule.scale_rates(2.0)
        assert schedule.rates() == [expected]


def test_without_a_scheduler_the_rates_stay_and_the_state_is_empty() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    schedule = Schedule(None, 1, optimizer)
    schedule.after_update(1, ends_epoch=True)
    schedule.after_evaluation(1.0)
    schedule.load_state_dict(schedule.state_dict())
    assert (schedule.rates(), schedule.is_plateau, Schedule(None).rates()) == ([RATE], False, [])


def test_one_cycle_holds_its_last_rate_past_the_end_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    schedule = make_schedule("three phases", cls=SGD)
    with caplog.at_level(logging.WARNING):
        trace(schedule, 1, TICKS)
        assert caplog.records == []
        trace(schedule, TICKS + 1, 3 * TICKS)
    assert schedule.rates() == pytest.approx([RATE / 25 / 1e4])
    assert [record.getMessage() for record in caplog.records] == [
        "The one-cycle schedule was made for 12 ticks and has ended; its last learning rate 2e-06 is kept."
    ]


def test_an_object_passed_in_ticks_and_holds_likewise() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    schedule = Schedule(OneCycleLR(optimizer, max_lr=1.0, total_steps=3, cycle_momentum=False), 2, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(schedule, 1, 20)
    assert schedule.rates() == pytest.approx([1 / 25 / 1e4])


def test_a_nested_object_passed_in_is_saved_whole() -> None:
    def make() -> Schedule:
        optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE)
        parts: list[LRScheduler] = [LambdaLR(optimizer, lambda t: t / 4), StepLR(optimizer, 2)]
        return Schedule(SequentialLR(optimizer, parts, [4]), 1, optimizer)

    first, resumed = make(), make()
    trace(first, 1, 6)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert trace(resumed, 7, 12) == trace(first, 7, 12)


def test_no_schedule_makes_torch_warn_of_the_order_of_steps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in CASES:
            schedule = make_schedule(case)
            trace(schedule, 1, 3)
            resumed = make_schedule(case)
            resumed.load_state_dict(schedule.state_dict())
            trace(resumed, 4, 6)


def test_a_state_that_cannot_be_saved_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"scheduler's state\['memory'\] is a set, which a checkpoint cannot hold"):
        Schedule(Opaque(SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE)), 1)


def test_a_scheduler_over_another_optimizer_is_refused() -> None:
    one, other = (SGD([torch.nn.Parameter(torch.ones(2))], lr=RATE) for _ in range(2))
    with pytest.raises(ConfigError, match="another optimizer than the one that trains"):
        Schedule(StepLR(one, 1), 1, other)


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler is a SimpleNamespace\. Expected an object of torch"):
        Schedule(types.SimpleNamespace(step=print), 1)  # type: ignore[arg-type]


def test_the_state_of_another_scheduler_is_refused() -> None:
    saved = make_schedule("step").state_dict()
    with pytest.raises(CheckpointError, match=r"scheduler is StepLR, this run's is LinearLR\. Set lr_scheduler back"):
        make_schedule("linear").load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"scheduler is StepLR, this run's is triangular"):
        make_schedule("triangular").load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"scheduler is StepLR, this run's is None"):
        Schedule(None).load_state_dict(saved)


def test_the_state_of_other_groups_is_refused() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
    schedule = Schedule(StepLR(SGD(groups, lr=RATE), 3), 1)
    with pytest.raises(CheckpointError, match=r"drives 1 parameter groups, this run's 2"):
        schedule.load_state_dict(make_schedule("step", cls=SGD).state_dict())


def test_the_cases_are_of_the_classes_they_stand_for() -> None:
    assert isinstance(make_schedule("plateau").scheduler, ReduceLROnPlateau)
    assert isinstance(make_schedule("swa").scheduler, SWALR)
