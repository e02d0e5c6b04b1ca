"""A plan's numbers, case by case."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import Plan, is_due, make_plan


def plan_of(num_samples: int | None, num_processes: int = 1, **fields: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # periods inside a window
        config = TrainerConfig("run", **fields)
    return make_plan(config, num_samples, num_processes)


@pytest.mark.parametrize(
    ("num_samples", "num_processes", "fields", "expected"),
    [
        (10, 1, {}, {"steps_in_epoch": 10, "updates_in_epoch": 10, "total_steps": 10, "total_updates": 10}),
        (10, 1, {"batch_size": 4}, {"steps_in_epoch": 3, "updates_in_epoch": 3, "window_samples": 4}),
        (10, 2, {"batch_size": 4}, {"steps_in_epoch": 2, "updates_in_epoch": 2, "window_samples": 8}),
        (10, 4, {"batch_size": 4}, {"steps_in_epoch": 1, "updates_in_epoch": 1, "window_samples": 16}),
        # 3 windows of 3 steps and one of 2
        (11, 1, {"gradient_accumulation_steps": 3}, {"steps_in_epoch": 11, "updates_in_epoch": 4, "total_updates": 4}),
        (11, 1, {"gradient_accumulation_steps": 3, "drop_last": True}, {"steps_in_epoch": 9, "updates_in_epoch": 3}),
        (12, 1, {"gradient_accumulation_steps": 3, "drop_last": True}, {"steps_in_epoch": 12, "updates_in_epoch": 4}),
        (5, 1, {"num_epochs": 2, "max_steps": 7}, {"total_steps": 7, "total_updates": 7}),
        (5, 1, {"num_epochs": 2, "max_steps": 700}, {"total_steps": 10, "total_updates": 10}),
        (5, 1, {"num_epochs": 3, "max_steps": 0.5}, {"total_steps": 8}),
        (10, 1, {"max_steps": 0.7}, {"total_steps": 7}),
        (10, 1, {"max_steps": 1e-9}, {"total_steps": 1}),
        # 5 steps in windows of 2, 2 and 1; then 7 steps are 3 + 1 updates, 8 are 3 + 2
        (5, 1, {"num_epochs": 2, "max_steps": 7, "gradient_accumulation_steps": 2}, {"total_updates": 4}),
        (5, 1, {"num_epochs": 2, "max_steps": 8, "gradient_accumulation_steps": 2}, {"total_updates": 5}),
        (5, 1, {"num_epochs": 2, "gradient_accumulation_steps": 2}, {"total_updates": 6, "updates_in_epoch": 3}),
        # a window's worth on four processes in one step, and a short last window that still takes two
        (100, 4, {"batch_size": 8, "gradient_accumulation_steps": 2}, {"steps_in_epoch": 4, "updates_in_epoch": 2}),
        (10**12, 3, {"batch_size": 7}, {"steps_in_epoch": 47619047620}),
    ],
)
def test_steps_and_updates(
    num_samples: int, num_processes: int, fields: dict[str, Any], expected: dict[str, int]
) -> None:
    values = plan_of(num_samples, num_processes, **fields).to_dict()
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("period", "fields", "updates"),
    [
        (None, {}, None),
        (0, {}, None),
        (3, {}, 3),
        (3, {"gradient_accumulation_steps": 2}, 2),
        (4, {"gradient_accumulation_steps": 2}, 2),
        (1, {"gradient_accumulation_steps": 8}, 1),
        (0.3, {}, 3),
        (0.01, {}, 1),
        (0.31, {}, 4),
        (0.5, {"max_steps": 5}, 3),
        (0.5, {"gradient_accumulation_steps": 2}, 3),
        (500, {}, 500),
    ],
)
@pytest.mark.parametrize("name", ["save", "log", "eval"])
def test_a_period_in_steps_becomes_one_in_updates(
    name: str, period: int | float | None, fields: dict[str, Any], updates: int | None
) -> None:
    plan = plan_of(5, num_epochs=2, **{f"{name}_steps": period}, **fields)
    assert plan.to_dict()[f"{name}_updates"] == updates


def test_saves_every_three_of_two_times_five_fall_on_three_six_and_nine() -> None:
    plan = plan_of(5, num_epochs=2, save_steps=3)
    due = [update for update in range(plan.total_updates + 1) if is_due(plan.save_updates, update)]
    assert due == [3, 6, 9]


def test_nothing_is_due_without_a_period_or_before_the_first_update() -> None:
    assert not is_due(None, 5)
    assert not is_due(1, 0)
    assert is_due(1, 1)


def test_what_is_switched_off_has_no_period() -> None:
    plan = plan_of(5, save_enabled=False, save_steps=2, do_evaluate=False, eval_steps=2)
    assert (plan.save_updates, plan.eval_updates) == (None, None)


@pytest.mark.parametrize(
    ("fields", "schedule_updates", "total_ticks"),
    [
        ({}, None, 3),
        ({"max_steps": 14}, None, 2),
        ({"max_steps": 4}, None, 1),
        ({"lr_scheduling_steps": 1}, 1, 15),
        ({"lr_scheduling_steps": 4}, 4, 3),
        ({"lr_scheduling_steps": 100}, 100, 1),
        ({"lr_scheduling_steps": 0.1}, 2, 7),
        ({"lr_scheduling_steps": 1, "gradient_accumulation_steps": 2}, 1, 9),
    ],
)
def test_ticks_of_the_schedule(fields: dict[str, Any], schedule_updates: int | None, total_ticks: int) -> None:
    plan = plan_of(5, num_epochs=3, **fields)
    assert (plan.schedule_updates, plan.total_ticks) == (schedule_updates, total_ticks)


def test_a_stream_runs_for_max_steps() -> None:
    plan = plan_of(None, max_steps=10, gradient_accumulation_steps=4, num_epochs=3, log_steps=0.5)
    assert (plan.num_samples, plan.steps_in_epoch, plan.updates_in_epoch) == (None, None, None)
    assert (plan.total_steps, plan.total_updates, plan.log_updates, plan.total_ticks) == (10, 3, 2, 3)


@pytest.mark.parametrize("max_steps", [None, 0.5])
def test_a_stream_without_whole_max_steps_is_refused_with_what_to_add(max_steps: float | None) -> None:
    with pytest.raises(ConfigError, match=f"max_steps={max_steps}.*for example max_steps=1000"):
        plan_of(None, max_steps=max_steps)


def test_empty_data_is_refused() -> None:
    with pytest.raises(DataError, match="training data is empty"):
        plan_of(0)


def test_drop_last_that_drops_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 samples do not fill one update of 8"):
        plan_of(7, 2, batch_size=2, gradient_accumulation_steps=2, drop_last=True)


def test_a_loaders_batch_size_overrides_the_configs() -> None:
    config = TrainerConfig("run", batch_size=3)
    plan = make_plan(config, 10, batch_size=5)
    assert (plan.batch_size, plan.steps_in_epoch, config.batch_size) == (5, 2, 3)


def test_the_config_is_left_as_it_was() -> None:
    config = TrainerConfig("run", save_steps=0.5, max_steps=0.5)
    before = config.to_dict()
    assert make_plan(config, 10) == make_plan(config, 10)
    assert config.to_dict() == before


def test_a_plan_survives_its_file_and_ignores_what_it_does_not_know(tmp_path: Path) -> None:
    plan = plan_of(None, max_steps=7)
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert Plan.from_dict({**plan.to_dict(), "later": 1}) == plan
    with pytest.raises(ConfigError, match="lacks num_samples, total_steps"):
        Plan.from_dict({k: v for k, v in plan.to_dict().items() if k not in ("num_samples", "total_steps")})
