"""Items of unknown number, grouped into windows and cut for the processes.

An item is a sample, or a batch that is ready already. This module counts and cuts items; who reads them, and from
where, is the sources' affair.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from hezar_train.data.cuts import rank_ranges
from hezar_train.data.windows import Order, Window, share_or_company
from hezar_train.plan import Plan

__all__ = ["Group", "Item", "Left", "Pace", "cut", "in_groups"]

Item: TypeAlias = tuple[Any, int]
"""What was read, and how many samples it holds."""


class Pace(NamedTuple):
    """How many items make a step and a whole window."""

    per_step: int
    per_window: int
    samples_per_item: int
    """Samples in an item, as the plan counts them."""

    @classmethod
    def of(cls, plan: Plan, *, by_sample: bool) -> Pace:
        """Return the pace of single samples, or that of ready batches."""
        if by_sample:
            return cls(plan.step_samples, plan.window_samples, 1)
        return cls(plan.num_processes, plan.num_processes * plan.accumulation, plan.batch_size)


class Left(NamedTuple):
    """What may still be read: steps, and samples of all processes."""

    steps: int
    samples: int


class Group(NamedTuple):
    """The items of one window."""

    items: list[Item]
    state_after: Any
    """The data's own state once they were read."""

    ends_epoch: bool


def in_groups(
    items: Iterator[Item], pace: Pace, left: Left, state: Callable[[], Any], *, drop_last: bool
) -> Iterator[Group]:
    """Group items into windows; one window is read ahead, because only that tells where the epoch ends."""

    def take(count: int) -> list[Item]:
        taken = [item for _, item in zip(range(count), items, strict=False)]
        return [] if drop_last and len(taken) < count else taken

    held: tuple[list[Item], Any] | None = None
    steps_left, items_left = left.steps, -(-left.samples // pace.samples_per_item)
    while taken := take(min(pace.per_window, steps_left * pace.per_step, items_left)):
        if held is not None:
            yield Group(*held, ends_epoch=False)
        held = taken, state()
        steps_left -= -(-len(taken) // pace.per_step)
        items_left -= len(taken)
    if held is not None:
        is_data_over = steps_left > 0 and items_left > 0
        yield Group(*held, ends_epoch=is_data_over or not take(pace.per_window if drop_last else 1))


def cut(group: Group, pace: Pace, order: Order, position: int) -> tuple[Window, list[list[Any]]]:
    """Cut a window's items for this process: a window without batches, and the items of each micro-batch."""
    num_steps = -(-len(group.items) // pace.per_step)
    ranges = rank_ranges(0, len(group.items), num_steps, order.rank, order.num_processes)
    items, sizes = [item for item, _ in group.items], [size for _, size in group.items]
    starts = list(itertools.accumulate(sizes, initial=position))
    window = Window(position, sum(sizes), group.ends_epoch, [], cursor=group.state_after)
    window.sizes = [sum(sizes[first : first + count]) for first, count in ranges]
    window.firsts = [starts[first] for first, _ in ranges]
    return window, [share_or_company(items, first, count) for first, count in ranges]
