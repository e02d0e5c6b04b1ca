"""Before a run begins it is told where it would train at next to no rate; and the telling changes nothing."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hezar_train.config import TrainerConfig
from hezar_train.optim import Schedule, idle_part, idle_warning
from hezar_train.optim.forecast import shares_ahead
from hezar_train.plan import Plan, make_plan
from hezar_train.trainer.optimizer_setup import schedule_for, scheduler_for

RATE = 0.1


class Own(LRScheduler):
    """A scheduler of a user's own, which must not be asked in advance."""

    def get_lr(self) -> list[Any]:
        assert self.last_epoch == 0, "asked for a tick that is not its turn"
        return self.base_lrs


def make(samples: int | None = 50, **fields: Any) -> tuple[Schedule, Plan, TrainerConfig]:
    config = TrainerConfig("run", **{"num_epochs": 3, "learning_rate": RATE, **fields})
    plan = make_plan(config, samples)
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (RATE, RATE / 100)]
    optimizer = SGD(groups, lr=RATE, momentum=0.9)
    scheduler = scheduler_for(optimizer, config, plan, "minimize", None)
    return schedule_for(optimizer, scheduler, config, plan, "minimize"), plan, config


def idle(samples: int | None = 50, **fields: Any) -> tuple[int, int] | None:
    schedule, plan, _ = make(samples, **fields)
    found = idle_part(schedule, plan)
    return None if found is None else (found.first_update, found.updates)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        # a whole epoch at nothing: the ticks are epochs
        ({"lr_scheduler": "warmup_linear", "lr_scheduler_kwargs": {"warmup_iter": 2}}, (1, 50)),
        ({"lr_scheduler": "warmup_cosine", "lr_scheduler_kwargs": {"warmup_iter": 1}}, (1, 50)),
        ({"lr_scheduler": "warmup_exponential", "lr_scheduler_kwargs": {"gamma": 0.9, "warmup_ratio": 0.1}}, (1, 50)),
        ({"lr_scheduler": "warmup_noam", "lr_scheduler_kwargs": {"warmup_iter": 4000}}, (1, 150)),
        ({"lr_scheduler": "one_cycle"}, (101, 50)),  # its last tick is an epoch
        # the ticks are updates, and what was meant in epochs is over soon
        ({"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": 1}, (4, 147)),
        ({"lr_scheduler": "StepLR", "lr_scheduler_kwargs": {"step_size": 10}, "lr_scheduling_steps": 1}, (31, 120)),
        ({"lr_scheduler": "exponential", "lr_scheduler_kwargs": {"gamma": 0.9}, "lr_scheduling_steps": 1}, (45, 106)),
        ({"lr_scheduler": "warmup_cosine_annealing", "lr_scheduler_kwargs": {"max_iter": 3}, "lr_scheduling_steps": 1},
         (4, 147)),
        ({"lr_scheduler": "cosine_annealing", "lr_scheduler_kwargs": {"T_max": 3}, "lr_scheduling_steps": 50}, None),
        ({"lr_scheduler": "epoch_set", "lr_scheduler_kwargs": {"schedule": {0: 1.0, 1: 0.001}}}, (51, 100)),
        ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"power": 4}, "lr_scheduling_steps": 1}, (104, 47)),
        ({"lr_scheduler": "sequential", "lr_scheduling_steps": 1, "lr_scheduler_kwargs": {
            "schedulers": [{"name": "linear", "kwargs": {"start_factor": 1e-4, "end_factor": 1e-3}},
                           {"name": "constant"}], "milestones": [20]}}, (1, 20)),
    ],
)  # fmt: skip
def test_what_would_hardly_train_is_found(fields: dict[str, Any], found: tuple[int, int] | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert idle(**fields) == found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"warmup_steps": 30},
        {"lr_scheduler": "warmup_linear", "lr_scheduler_kwargs": {"warmup_ratio": 0.1}},
        *({"lr_scheduler": name, "warmup_steps": 0.1} for name in (
            "warmup_linear", "warmup_cosine", "warmup_polynomial", "inverse_sqrt", "warmup_stable_decay", "wsd",
            "cosine_with_restarts", "linear", "cosine_annealing", "polynomial", "triangular", "log_decay",
        )),
        *({"lr_scheduler": name, "lr_scheduling_steps": 1} for name in (
            "one_cycle", "linear", "cosine_annealing", "polynomial", "cyclic", "triangular", "constant",
        )),
        {"lr_scheduler": "reduce_on_plateau"},
        {"lr_scheduler": "decay_when_acc"},
        {"lr_scheduler": "decay_to_epoch"},
        {"lr_scheduler": "warmup_noam", "lr_scheduler_kwargs": {"warmup_ratio": 0.1}},
    ],
)  # fmt: skip
def test_schedules_as_they_should_be_are_not_warned_of(fields: dict[str, Any]) -> None:
    assert idle(**fields) is None
    assert idle(10, **fields) is None
    assert idle(20_000, **fields) is None  # of which two thousand are looked at


def test_half_a_cosine_has_more_than_five_percent_below_a_hundredth_at_its_end() -> None:
    schedule, plan, _ = make(500, lr_scheduler="cosine_annealing", lr_scheduling_steps=1)
    below = [update for update, share in shares_ahead(schedule, plan).items() if share < 0.01]
    assert 0.06 < len(below) / plan.total_updates < 0.07
    assert idle_part(schedule, plan) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lr_scheduler": "one_cycle", "lr_scheduling_steps": 1},
        {"lr_scheduler": "cyclic", "lr_scheduling_steps": 1, "warmup_steps": 3},
        {"lr_scheduler": "cosine_annealing", "lr_scheduling_steps": 1},
        {"lr_scheduler": "CosineAnnealingWarmRestarts", "lr_scheduler_kwargs": {"T_0": 7}, "lr_scheduling_steps": 1},
        {"lr_scheduler": "multi_step", "lr_scheduler_kwargs": {"milestones": [2, 2, 5]}, "warmup_steps": 4},
        {"lr_scheduler": "sequential", "lr_scheduling_steps": 1, "warmup_steps": 4,
         "lr_scheduler_kwargs": {"schedulers": [{"name": "linear"}, {"name": "constant"}], "milestones": [20]}},
        {"lr_scheduler": "chainedscheduler", "lr_scheduling_steps": 1,
         "lr_scheduler_kwargs": {"schedulers": [{"name": "linear"}, {"name": "cosine_annealing"}]}},
        {"lr_scheduler": "warmup_cosine", "warmup_steps": 4},
        {"lr_scheduler": "reduce_on_plateau", "warmup_steps": 4},
    ],
)  # fmt: skip
def test_what_is_foreseen_is_what_comes_and_looking_changes_nothing(fields: dict[str, Any]) -> None:
    schedule, plan, _ = make(20, **fields)
    assert schedule._optimizer is not None
    before = json.dumps([schedule.state_dict(), schedule._optimizer.state_dict()])
    foreseen = shares_ahead(schedule, plan)
    assert json.dumps([schedule.state_dict(), schedule._optimizer.state_dict()]) == before
    used = []
    for update in range(1, plan.total_updates + 1):
        used.append(schedule.rates()[0])
        schedule._optimizer.step()
        schedule.after_update(update, ends_epoch=update % 20 == 0)
    highest = max(used)
    assert list(foreseen) == list(range(plan.total_updates))
    assert [share * highest for share in foreseen.values()] == pytest.approx(used, abs=1e-9)


def test_of_ones_own_code_and_of_streams_nothing_is_told() -> None:
    schedule, plan, _ = make()
    optimizer = schedule._optimizer
    assert optimizer is not None
    for scheduler in (Own(optimizer), LambdaLR(optimizer, lambda tick: 0.0)):
        assert shares_ahead(Schedule(scheduler, 1, optimizer), plan) == {}
    stream, plan, _ = make(None, max_steps=40, lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1})
    assert shares_ahead(stream, plan) == {}


def test_the_warning_says_what_why_and_what_to_do() -> None:
    for fields, words in (
        ({"lr_scheduler": "warmup_linear", "lr_scheduler_kwargs": {"warmup_iter": 2}},
         ("50 of 150 updates (33%), the first of them number 1,", "ticks once an epoch, 3 times in the run",
          "Set lr_scheduling_steps=1", "count in updates what lr_scheduler_kwargs={'warmup_iter': 2}",
          "A warm-up for any schedule is the field warmup_steps.")),
        ({"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": 1},
         ("lr_scheduler='step' ticks every update, 150 times in the run", "Give its lengths in lr_scheduler_kwargs")),
    ):  # fmt: skip
        schedule, plan, config = make(**fields)  # type: ignore[arg-type]
        found = idle_part(schedule, plan)
        assert found is not None
        told = idle_warning(found, schedule, config, plan)
        assert all(word in told for word in words), told
