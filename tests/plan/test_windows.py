"""Windows cut an epoch, or the rest of one, without gaps or overlaps."""

from __future__ import annotations

from itertools import islice, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.config import TrainerConfig
from hezar_train.plan import Plan, WindowSpan, make_plan

SMALL = st.integers(1, 7)


def plan_of(num_samples: int | None, batch_size: int, accumulation: int, num_processes: int, **fields: object) -> Plan:
    config = TrainerConfig("run", batch_size=batch_size, gradient_accumulation_steps=accumulation, **fields)
    return make_plan(config, num_samples, num_processes)


def test_an_epoch_is_cut_into_windows_with_a_short_last_one() -> None:
    plan = plan_of(11, 2, 2, 1)
    assert list(plan.windows(0, plan.total_steps)) == [
        WindowSpan(0, 4, 2, False),
        WindowSpan(4, 4, 2, False),
        WindowSpan(8, 3, 2, True),
    ]


def test_windows_start_at_any_position() -> None:
    plan = plan_of(11, 2, 2, 1)
    assert list(plan.windows(5, 100)) == [WindowSpan(5, 4, 2, False), WindowSpan(9, 2, 1, True)]
    assert list(plan.windows(11, 100)) == []


def test_a_window_is_shortened_to_the_steps_that_are_left() -> None:
    plan = plan_of(12, 2, 2, 1)
    assert list(plan.windows(0, 3)) == [WindowSpan(0, 4, 2, False), WindowSpan(4, 2, 1, False)]
    assert list(plan.windows(0, 0)) == []


def test_the_last_steps_may_end_the_epoch_too() -> None:
    plan = plan_of(12, 2, 2, 1)
    assert [span.ends_epoch for span in plan.windows(0, 6)] == [False, False, True]


def test_drop_last_drops_the_short_window() -> None:
    plan = plan_of(11, 2, 2, 1, drop_last=True)
    assert list(plan.windows(0, 100)) == [WindowSpan(0, 4, 2, False), WindowSpan(4, 4, 2, True)]
    assert list(plan.windows(8, 100)) == []
    assert list(plan.windows(3, 100)) == [WindowSpan(3, 4, 2, False), WindowSpan(7, 4, 2, True)]


def test_a_stream_has_windows_as_long_as_there_are_steps() -> None:
    plan = plan_of(None, 2, 2, 1, max_steps=5)
    assert list(plan.windows(0, 5)) == [
        WindowSpan(0, 4, 2, False),
        WindowSpan(4, 4, 2, False),
        WindowSpan(8, 2, 1, False),
    ]


def test_a_trillion_samples_are_cut_lazily() -> None:
    plan = plan_of(10**12, 8, 1, 1)
    assert list(islice(plan.windows(9 * 10**11, plan.total_steps), 2)) == [
        WindowSpan(9 * 10**11, 8, 1, False),
        WindowSpan(9 * 10**11 + 8, 8, 1, False),
    ]


@settings(deadline=None)
@given(num_samples=st.integers(1, 200), batch_size=SMALL, accumulation=SMALL, num_processes=SMALL, data=st.data())
def test_windows_partition_the_rest_of_an_epoch(
    num_samples: int, batch_size: int, accumulation: int, num_processes: int, data: st.DataObject
) -> None:
    plan = plan_of(num_samples, batch_size, accumulation, num_processes)
    position = data.draw(st.integers(0, num_samples - 1))
    spans = list(plan.windows(position, 10**9))
    assert spans[0].first == position
    assert all(later.first == earlier.first + earlier.count for earlier, later in pairwise(spans))
    assert spans[-1].first + spans[-1].count == num_samples
    assert [span.ends_epoch for span in spans] == [False] * (len(spans) - 1) + [True]
    assert all(span.count == plan.window_samples for span in spans[:-1])


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 200),
    batch_size=SMALL,
    accumulation=SMALL,
    num_processes=SMALL,
    num_epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 300),
)
def test_the_totals_are_what_the_windows_add_up_to(
    num_samples: int, batch_size: int, accumulation: int, num_processes: int, num_epochs: int, max_steps: int | None
) -> None:
    plan = plan_of(num_samples, batch_size, accumulation, num_processes, num_epochs=num_epochs, max_steps=max_steps)
    whole_epoch = list(plan.windows(0, 10**9))
    assert sum(span.num_steps for span in whole_epoch) == plan.steps_in_epoch
    assert len(whole_epoch) == plan.updates_in_epoch
    steps, updates, epoch_ends = 0, 0, 0
    for _ in range(num_epochs):
        for span in plan.windows(0, plan.total_steps - steps):
            steps, updates, epoch_ends = steps + span.num_steps, updates + 1, epoch_ends + span.ends_epoch
    assert (steps, updates) == (plan.total_steps, plan.total_updates)
    assert plan.total_ticks == max(1, epoch_ends)


@settings(deadline=None)
@given(num_samples=st.integers(1, 200), batch_size=SMALL, accumulation=SMALL, steps_left=st.integers(0, 50))
def test_no_more_steps_are_taken_than_are_left(
    num_samples: int, batch_size: int, accumulation: int, steps_left: int
) -> None:
    plan = plan_of(num_samples, batch_size, accumulation, 1)
    assert plan.steps_in_epoch is not None
    taken = sum(span.num_steps for span in plan.windows(0, steps_left))
    assert taken == min(steps_left, plan.steps_in_epoch)


@settings(deadline=None)
@given(num_samples=st.integers(1, 200), batch_size=SMALL, accumulation=SMALL, num_processes=SMALL)
def test_drop_last_leaves_whole_windows_only(
    num_samples: int, batch_size: int, accumulation: int, num_processes: int
) -> None:
    window_samples = batch_size * accumulation * num_processes
    if num_samples < window_samples:
        return
    plan = plan_of(num_samples, batch_size, accumulation, num_processes, drop_last=True)
    spans = list(plan.windows(0, 10**9))
    assert {span.count for span in spans} == {window_samples}
    assert sum(span.num_steps for span in spans) == plan.steps_in_epoch
    assert [span.ends_epoch for span in spans] == [False] * (len(spans) - 1) + [True]
