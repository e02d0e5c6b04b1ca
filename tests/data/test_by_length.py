"""What lengths decide: the laws of orders, windows and cuts, for any lengths, budgets and numbers of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train import TrainerConfig
from hezar_train.data import ByLength, Lengths, LengthSettings, Window, default_collator
from hezar_train.data.by_length import cut_by_tokens, most_that_fit
from hezar_train.data.loader import MapSource
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan import UNLIMITED, Plan, keeping_ticks, make_plan
from tests.data.planned import order_of

LONGEST = 20

lengths = st.lists(st.integers(1, LONGEST), min_size=1, max_size=150)
budgets = st.one_of(st.none(), st.integers(LONGEST, 120))


def by_length(tokens: list[int], *, shuffle: bool = True, **asked: Any) -> ByLength:
    return ByLength(Lengths(tokens), LengthSettings(**asked), seed=7, shuffle=shuffle)


class Setting:
    """A source over samples that are their own numbers, and its plan, on one of several processes."""

    def __init__(self, tokens: list[int], config: TrainerConfig, rank: int = 0, num_processes: int = 1) -> None:
        self.decided = by_length(
            tokens, groups=config.group_by_length, window_tokens=config.global_batch_tokens,
            step_tokens=config.max_tokens_per_batch, packs=config.packing,
        )  # fmt: skip
        order = order_of(config.batch_size, seed=7, rank=rank, num_processes=num_processes, by_length=self.decided)
        self.source = MapSource(list(range(len(tokens))), list, order)
        self.plan: Plan = make_plan(config, len(tokens), num_processes, config.batch_size, self.decided)

    def windows(self, epoch: int = 1, position: int = 0, samples_left: int = UNLIMITED) -> list[Window]:
        return list(self.source.windows(self.plan, epoch, position, UNLIMITED, samples_left))


def own_samples(window: Window) -> list[int]:
    """Return the samples of this process, without those that only keep others company."""
    return [sample for batch, size in zip(window.batches, window.sizes, strict=True) if size for sample in batch]


configs = st.builds(
    lambda by_tokens, tokens, batch, step, groups, packs: TrainerConfig(
        "run", group_by_length=groups, max_tokens_per_batch=step, packing=packs,
        **({"global_batch_tokens": tokens} if by_tokens else {"batch_size": 3, "global_batch_size": batch}),
    ),
    st.booleans(), st.integers(LONGEST, 120), st.integers(1, 9), budgets, st.booleans(), st.booleans(),
).filter(lambda config: config.uses_lengths)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(tokens=lengths, config=configs, epoch=st.integers(1, 3))
def test_every_sample_comes_once_in_an_epoch(tokens: list[int], config: TrainerConfig, epoch: int) -> None:
    windows = Setting(tokens, config).windows(epoch)
    assert sorted(sample for window in windows for sample in own_samples(window)) == list(range(len(tokens)))
    firsts = [window.first for window in windows]
    assert firsts == [sum(one.count for one in windows[:number]) for number in range(len(windows))]
    assert [window.ends_epoch for window in windows] == [False] * (len(windows) - 1) + [True]


@settings(max_examples=50, deadline=None)
@given(tokens=lengths, config=configs, num_processes=st.integers(2, 4))
def test_updates_have_the_same_samples_on_one_to_four_processes(
    tokens: list[int], config: TrainerConfig, num_processes: int
) -> None:
    alone = Setting(tokens, config).windows()
    ranks = [Setting(tokens, config, rank, num_processes).windows() for rank in range(num_processes)]
    assert [[(one.first, one.count, len(one.batches)) for one in windows] for windows in ranks] == [
        [(one.first, one.count, len(one.batches)) for one in ranks[0]]
    ] * num_processes
    together = [sorted(s for one in windows for s in own_samples(one)) for windows in zip(*ranks, strict=True)]
    assert together == [sorted(own_samples(window)) for window in alone]


@settings(max_examples=50, deadline=None)
@given(tokens=lengths, config=configs, data=st.data())
def test_what_follows_an_update_does_not_depend_on_what_came_before(
    tokens: list[int], config: TrainerConfig, data: st.DataObject
) -> None:
    whole = Setting(tokens, config).windows(epoch=2)
    begun = data.draw(st.integers(0, len(whole)))
    place = whole[begun].first if begun < len(whole) else len(tokens)
    rest = Setting(tokens, config).windows(epoch=2, position=place)
    assert [(one.first, one.batches, one.sizes) for one in rest] == [
        (one.first, one.batches, one.sizes) for one in whole[begun:]
    ]


@settings(max_examples=60, deadline=None)
@given(tokens=lengths, config=configs, num_processes=st.integers(1, 4))
def test_no_update_and_no_step_has_more_tokens_than_its_budget(
    tokens: list[int], config: TrainerConfig, num_processes: int
) -> None:
    budget, bound = config.global_batch_tokens or UNLIMITED, config.max_tokens_per_batch or UNLIMITED
    for rank in range(num_processes):
        setting = Setting(tokens, config, rank, num_processes)
        order = setting.decided.order(1, setting.plan.window_samples).samples
        for window in setting.windows():
            assert sum(tokens[s] for s in order[window.first : window.first + window.count]) <= budget
            for batch in window.batches:
                width = sum(tokens[s] for s in batch) if config.packing else max(tokens[s] for s in batch) * len(batch)
                assert width <= bound


@settings(max_examples=50, deadline=None)
@given(
    tokens=lengths, config=configs, num_processes=st.integers(1, 3), num_epochs=st.integers(1, 3),
    max_steps=st.one_of(st.none(), st.integers(1, 40), st.sampled_from([0.1, 0.5, 0.9])),
)  # fmt: skip
def test_the_plan_counts_what_is_walked(
    tokens: list[int], config: TrainerConfig, num_processes: int, num_epochs: int, max_steps: float | None
) -> None:
    if not config.counts_tokens:
        return
    config.update(num_epochs=num_epochs, max_steps=max_steps)
    setting = Setting(tokens, config, num_processes=num_processes)
    plan, left = setting.plan, setting.plan.last_samples or UNLIMITED
    walked = []
    for epoch in range(1, num_epochs + 1):
        found = setting.windows(epoch, samples_left=left)
        left -= sum(one.count for one in found)
        walked += found
        if left == 0:
            break
    assert len(walked) == plan.total_updates == plan.counted_steps
    assert sum(len(one.batches) for one in walked) == plan.total_steps
    if isinstance(max_steps, int):
        assert plan.total_updates <= max_steps
    alone = Setting(tokens, config).plan
    assert (alone.total_updates, alone.last_samples) == (plan.total_updates, plan.last_samples)


@settings(max_examples=100, deadline=None)
@given(
    tokens=lengths, extra=st.integers(0, 60), num_processes=st.integers(1, 4), packs=st.booleans(),
    most=st.integers(1, 9),
)  # fmt: skip
def test_a_window_is_cut_into_as_few_steps_as_the_bound_allows(
    tokens: list[int], extra: int, num_processes: int, packs: bool, most: int
) -> None:
    tokens = tokens if packs else sorted(tokens, reverse=True)
    bound = max(tokens) + extra
    sizes = cut_by_tokens(tokens, bound, num_processes, most, packs=packs)
    assert sum(sizes) == len(tokens)
    assert len(sizes) % num_processes == 0
    assert sizes[: len([size for size in sizes if size])] == [size for size in sizes if size]  # empty ones come last
    assert max(sizes) <= most
    fewest, start, cells = 0, 0, []
    for size in (size for size in sizes if size):
        cell = tokens[start : start + size]
        cells.append(sum(cell) if packs else cell[0] * size)
        start += size
    assert max(cells) <= bound
    start = 0
    while start < len(tokens):  # one by one, as many as fit
        fewest, used = fewest + 1, 0
        taken = 0
        while start < len(tokens) and taken < most:
            used = used + tokens[start] if packs else tokens[start - taken] * (taken + 1)
            if used > bound:
                break
            start, taken = start + 1, taken + 1
    assert len(sizes) == -(-fewest // num_processes) * num_processes


def test_cells_are_as_equal_as_can_be() -> None:
    assert cut_by_tokens([5] * 10, 40, 1) == [5, 5]  # and not 8 and 2
    assert cut_by_tokens([9, 3, 3, 3], 20, 2) == [1, 3]
    assert cut_by_tokens([4, 4, 4, 4, 4, 4], 12, 2, packs=True) == [3, 3]
    assert cut_by_tokens([4, 4, 4], 4, 2) == [1, 1, 1, 0]
    with pytest.raises(ConfigError, match="a sample of 9 tokens does not fit into a step of 8"):
        cut_by_tokens([9], 8, 1)


def test_a_window_takes_as_many_samples_as_fit() -> None:
    assert most_that_fit(np.array([4, 4, 4, 9, 1, 1]), 9).tolist() == [2, 3, 4, 6]


def test_grouped_updates_have_similar_lengths_and_take_turns() -> None:
    tokens = np.random.default_rng(0).integers(1, 500, 6400)
    decided = by_length(tokens.tolist(), groups=True)
    order = decided.order(1, 32).samples
    by_update = tokens[order].reshape(-1, 32)
    assert np.mean(by_update.max(1) - by_update.min(1)) < 20  # a random update spans nearly all lengths
    longest = by_update.max(1)
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.2
    assert not np.array_equal(order, decided.order(2, 32).samples)


def test_the_rest_that_fills_no_update_is_no_group_of_its_own() -> None:
    tokens = list(range(1, 104))
    order = by_length(tokens, groups=True).order(1, 20)
    plain = by_length(tokens).order(1, 20)
    assert order.samples[100:].tolist() == plain.samples[100:].tolist()


def test_grouped_updates_of_tokens_are_nearly_full() -> None:
    tokens = np.random.default_rng(0).integers(1, 60, 4000)
    order = by_length(tokens.tolist(), groups=True, window_tokens=1000).order(1, 1)
    assert order.ends is not None
    sums = np.add.reduceat(tokens[order.samples], np.concatenate([[0], order.ends[:-1]]))
    assert sums.max() <= 1000
    assert sums.min() > 700


def test_without_a_shuffle_the_order_is_that_of_the_data() -> None:
    assert by_length([3, 2, 9, 4], shuffle=False, window_tokens=9).order(3, 1).samples.tolist() == [0, 1, 2, 3]


def test_a_resume_counts_the_ends_of_epochs_that_a_run_by_tokens_reaches_as_its_start_did() -> None:
    config = TrainerConfig("run", global_batch_tokens=16, num_epochs=9, max_steps=35, lr_scheduler="linear")
    plan = Setting([4] * 40, config).plan  # ten updates in an epoch
    assert (plan.total_updates, plan.schedule_updates, plan.total_ticks) == (35, None, 3)
    assert keeping_ticks(plan, config.to_dict(), plan, config.to_dict()) == plan


@pytest.mark.parametrize(
    ("field", "asked"), [("global_batch_tokens", "window_tokens"), ("max_tokens_per_batch", "step_tokens")]
)
def test_a_sample_that_can_never_fit_is_named(field: str, asked: str) -> None:
    with pytest.raises(DataError, match=rf"sample 1 of the training data has 9 tokens, and {field}=8 .* truncate them"):
        by_length([3, 9, 4], **{asked: 8})


def test_a_filler_fits_into_a_step() -> None:
    decided = by_length([3, 9, 9], step_tokens=10)
    assert decided.filler(np.array([0, 1, 2])).tolist() == [2]
    assert decided.filler(np.array([0])).tolist() == [0]


def test_samples_are_read_only_when_they_are_trained_on(tmp_path: Path) -> None:
    read: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return index

    config = TrainerConfig("run", global_batch_tokens=40, group_by_length=True)
    tokens = [5] * 100
    setting = Setting(tokens, config)
    order = order_of(1, seed=7, by_length=setting.decided)
    source = MapSource(Watched(range(100)), default_collator, order)
    rest = source.windows(setting.plan, 1, 96, UNLIMITED)
    assert [len(window.batches[0]) for window in rest] == [4]
    assert len(read) == 4
