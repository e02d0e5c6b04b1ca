"""A plan on other numbers of processes: with a global batch, the run of one process and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train import TrainerConfig
from hezar_train.plan import UNLIMITED, End, Plan, make_plan

SAME_ON_ALL = [
    "num_samples", "batch_size", "num_epochs", "drop_last", "window_samples", "updates_in_epoch", "total_updates",
    "log_updates", "save_updates", "eval_updates", "schedule_updates", "total_ticks", "counted_steps", "last_samples",
]  # fmt: skip

sizes = st.integers(1, 12)
steps = st.one_of(st.none(), st.integers(1, 60), st.sampled_from([0.05, 0.3, 0.5, 0.9]))


def config_of(**settings: Any) -> TrainerConfig:
    return TrainerConfig("run", **{"batch_size": 2, "global_batch_size": 8, "num_epochs": 3} | settings)


def walked(plan: Plan, end: End) -> list[tuple[int, int]]:
    """Walk a whole run; return (first, count) of each update, as an epoch's windows give them."""
    updates, samples, step = [], 0, 0
    for _ in range(plan.num_epochs):
        for span in plan.windows(0, end.step - step, end.samples - samples):
            updates.append((span.first, span.count))
            samples, step = samples + span.count, step + span.num_steps
        if end.is_reached(step, samples):
            break
    return updates


@settings(max_examples=200, deadline=None)
@given(
    batch_size=sizes, window=sizes, num_samples=st.integers(1, 60), max_steps=steps, period=steps,
    num_processes=st.integers(2, 5), drop_last=st.booleans(),
)  # fmt: skip
def test_all_but_the_steps_is_the_plan_of_one_process(
    batch_size: int, window: int, num_samples: int, max_steps: float | None, period: float | None,
    num_processes: int, drop_last: bool,
) -> None:  # fmt: skip
    if drop_last and num_samples < window:
        num_samples = window
    config = config_of(
        batch_size=batch_size, global_batch_size=window, max_steps=max_steps, save_steps=period,
        lr_scheduling_steps=period, drop_last=drop_last,
    )  # fmt: skip
    alone, plan = make_plan(config, num_samples), make_plan(config, num_samples, num_processes)
    assert [getattr(plan, name) for name in SAME_ON_ALL] == [getattr(alone, name) for name in SAME_ON_ALL]
    end = End() if max_steps is None else End(samples=plan.last_samples or 0)
    assert walked(plan, end) == walked(alone, end)
    by_steps = End() if max_steps is None else End(alone.total_steps)
    assert walked(alone, by_steps) == walked(alone, end)


@settings(max_examples=200, deadline=None)
@given(
    batch_size=sizes, window=sizes, num_samples=st.one_of(st.none(), st.integers(1, 40)), taken=st.integers(0, 90),
    start=st.integers(0, 40),
)  # fmt: skip
def test_samples_of_steps_are_counted_as_one_process_walks_them(
    batch_size: int, window: int, num_samples: int | None, taken: int, start: int
) -> None:
    config = config_of(batch_size=batch_size, global_batch_size=window, max_steps=100)
    plan = make_plan(config, num_samples)
    position = start if num_samples is None else start % num_samples
    counted, left = 0, taken
    at = position
    while left > 0:
        for span in plan.windows(at, left):
            counted, left = counted + span.count, left - span.num_steps
        at = 0
    assert plan.samples_of(position, taken) == counted


def test_the_total_of_steps_is_told_for_the_processes_there_are() -> None:
    config = config_of(batch_size=2, global_batch_size=8, num_epochs=2)
    assert [make_plan(config, 21, count).total_steps for count in (1, 2, 3, 4)] == [22, 12, 10, 6]
    assert [make_plan(config, 21, count).accumulation for count in (1, 2, 3, 4)] == [4, 2, 2, 1]
    assert [make_plan(config, 21, count).steps_in_epoch for count in (1, 2, 3, 4)] == [11, 6, 5, 3]


def test_a_stream_ends_by_samples() -> None:
    plan = make_plan(config_of(max_steps=10), None, 2)
    assert (plan.last_samples, plan.total_steps, plan.steps_in_epoch) == (20, 5, None)


def test_without_a_global_batch_every_process_counts_its_own_steps() -> None:
    config = TrainerConfig("run", batch_size=2, num_epochs=1, max_steps=5)
    plan = make_plan(config, 100, 3)
    assert (plan.window_samples, plan.total_steps, plan.last_samples) == (6, 5, None)


def test_an_older_plan_without_the_newer_fields_is_read() -> None:
    values = dataclasses.asdict(make_plan(config_of(), 21))
    del values["counted_steps"], values["last_samples"]
    assert Plan.from_dict(values).counted_steps == 33


@pytest.mark.parametrize(("end", "reached"), [(End(), False), (End(4), False), (End(3), True), (End(samples=6), True)])
def test_an_end_is_a_step_or_a_sample(end: End, reached: bool) -> None:
    assert end.is_reached(step=3, samples=6) is reached
    assert End().step == End().samples == UNLIMITED
