"""The keyed permutation: a bijection at every size, exact in reverse, and a good shuffle.

The quality tests use fixed seeds, so they always give the same answer. Their limits are what chance exceeds once in a
million: with a few dozen of them, a shuffle that is no worse than chance passes all.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from hezar_train.data import Permutation
from hezar_train.data.sampler import LARGEST_SIZE, LARGEST_SORTED_SIZE
from hezar_train.errors import DataError

MILLIONTH = 4.9  # standard deviations that a normal variable exceeds, on either side, once in a million
HUGE = 10**12
SMALL_SIZES = [2, 3, 5, 10, 100]
FEISTEL_SIZES = [LARGEST_SORTED_SIZE + 1, 5000, 8192, 100_003]


def order(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Permutation(size, seed, epoch).chunk(0, size)


def orders(size: int, num_seeds: int, num_epochs: int = 1) -> np.ndarray:
    return np.stack([order(size, seed, epoch) for seed in range(num_seeds) for epoch in range(num_epochs)])


def chi_square_limit(freedom: int) -> float:
    """The value that chi-square exceeds once in a million, by Wilson and Hilferty's approximation."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.7534 * math.sqrt(part)) ** 3


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.corrcoef(left, right)[0, 1])


def test_every_size_up_to_3000_is_a_permutation() -> None:
    for size in range(3001):
        assert np.array_equal(np.sort(order(size, seed=size)), np.arange(size)), size


@pytest.mark.parametrize("size", [4096, 4097, 65**2, 65**2 + 1, 5000, 2**16 - 1, 65_537, 100_003, 2**17, 1_000_000])
def test_larger_sizes_are_permutations(size: int) -> None:
    assert np.array_equal(np.bincount(order(size, seed=3), minlength=size), np.ones(size))


@pytest.mark.parametrize("size", [1, 2, 3, 100, 3000, *FEISTEL_SIZES])
def test_inverse_finds_the_position_of_every_index(size: int) -> None:
    permutation = Permutation(size, seed=5, epoch=2)
    assert np.array_equal(permutation.index_of(permutation.chunk(0, size)), np.arange(size))


@pytest.mark.parametrize("size", [HUGE, HUGE + 1, LARGEST_SIZE])
def test_inverse_maps_back_a_million_sampled_positions(size: int) -> None:
    permutation = Permutation(size, seed=11, epoch=4)
    positions = np.random.default_rng(0).integers(0, size, 1_000_000)
    indices = permutation.at(positions)
    assert indices.min() >= 0
    assert indices.max() < size
    assert np.array_equal(permutation.index_of(indices), positions)


def test_an_index_does_not_depend_on_what_else_is_asked() -> None:
    permutation = Permutation(100_003, seed=1, epoch=1)
    whole = permutation.chunk(0, 100_003)
    scattered = np.array([[99_999, 0], [50_000, 7]])
    assert np.array_equal(permutation.at(scattered), whole[scattered])
    assert np.array_equal(permutation.chunk(70_000, 70_010), whole[70_000:70_010])
    assert scattered.tolist() == [[99_999, 0], [50_000, 7]]


def test_order_never_changes_between_versions_and_platforms() -> None:
    # A saved run continues in this order: these numbers may never change.
    assert order(10, seed=42, epoch=1).tolist() == [4, 8, 5, 1, 2, 9, 6, 0, 3, 7]
    assert Permutation(5000, 42, 1).chunk(0, 6).tolist() == [3537, 230, 4057, 1492, 4356, 3875]
    far = Permutation(HUGE, 42, 1).chunk(9 * 10**11, 9 * 10**11 + 4)
    assert far.tolist() == [552126066011, 70055116347, 127585840312, 877799157838]


def test_seed_epoch_and_size_each_change_the_order() -> None:
    for size in (50, 5000):
        keys = [(0, 0), (0, 1), (1, 0), (-1, 0), (2**64, 0), (-(2**100), 0), (10, 1), (1, 10)]
        assert len({order(size, seed, epoch).tobytes() for seed, epoch in keys}) == len(keys)
    assert order(5001)[:20].tolist() != order(5000)[:20].tolist()


def test_numpy_integers_are_as_good_as_python_ones() -> None:
    same = Permutation(np.int64(5000), np.int32(7), np.uint8(1))  # type: ignore[arg-type]
    assert np.array_equal(same.chunk(0, 5000), order(5000, seed=7, epoch=1))


@pytest.mark.parametrize("size", [10, 5000, HUGE])
def test_positions_outside_are_refused_with_the_range(size: int) -> None:
    permutation = Permutation(size, seed=0, epoch=0)
    for outside in (-1, size):
        with pytest.raises(DataError, match=rf"expected 0 to {size - 1}"):
            permutation.at(np.array([0, outside]))
        with pytest.raises(DataError, match=rf"index .*{outside}"):
            permutation.index_of(np.array([outside]))


@pytest.mark.parametrize("size", [-1, LARGEST_SIZE + 1])
def test_sizes_that_cannot_be_shuffled_are_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"size={size}"):
        Permutation(size, seed=0, epoch=0)


@pytest.mark.parametrize("size", SMALL_SIZES)
def test_each_sample_is_equally_likely_at_each_position(size: int) -> None:
    drawn = orders(size, num_seeds=400, num_epochs=10)
    counts = np.stack([np.bincount(drawn[:, position], minlength=size) for position in range(size)])
    expected = len(drawn) / size
    # Rows and columns of a permutation sum to one, which leaves (size - 1)^2 degrees of freedom and this factor.
    statistic = (size - 1) / size * ((counts - expected) ** 2 / expected).sum()
    assert statistic < chi_square_limit((size - 1) ** 2)


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_each_order_of_a_few_samples_is_equally_likely(size: int) -> None:
    drawn = Counter(map(tuple, orders(size, num_seeds=400, num_epochs=30).tolist()))
    counts = np.array([drawn[one] for one in itertools.permutations(range(size))])
    expected = drawn.total() / math.factorial(size)
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(math.factorial(size) - 1)


@pytest.mark.parametrize("size", FEISTEL_SIZES[:3])
def test_each_region_is_equally_likely_in_each_region_of_many_samples(size: int) -> None:
    num_regions, num_orders = 16, 100
    region = np.arange(size) * num_regions // size
    lengths = np.bincount(region)
    drawn = orders(size, num_seeds=20, num_epochs=5)
    counts = sum(np.bincount(region * num_regions + region[row], minlength=num_regions**2) for row in drawn)
    share = np.outer(lengths, lengths).ravel()
    deviation = counts - num_orders * share / size
    # The regions' counts are hypergeometric: (num_regions - 1)^2 degrees of freedom, with size - 1 for size.
    assert (deviation**2 / (num_orders * share / (size - 1))).sum() < chi_square_limit((num_regions - 1) ** 2)


def test_one_position_of_many_samples_meets_every_part_of_them_equally_often() -> None:
    size, num_parts, num_keys = 5000, 50, 4000
    asked = np.array([0, 1, 70, 71, size // 2, size - 1])
    met = np.stack([Permutation(size, key, epoch=key % 7).at(asked) for key in range(num_keys)])
    for column in (met * num_parts // size).T:
        counts = np.bincount(column, minlength=num_parts)
        expected = num_keys / num_parts
        assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(num_parts - 1)


@pytest.mark.parametrize("distance", [1, 65, 66])
def test_difference_of_two_places_says_nothing_on_the_smallest_grid(distance: int) -> None:
    # The test that a network of four rounds fails: two cells of one column of the 65 x 65 grid.
    side = 65
    drawn = orders(side**2, num_seeds=150)
    rows, columns = np.divmod(drawn, side)
    row_steps, column_steps = ((part - np.roll(part, distance, axis=1)) % side for part in (rows, columns))
    counts = np.bincount((row_steps * side + column_steps).ravel(), minlength=side**2)
    assert counts[0] == 0
    expected = drawn.size / (side**2 - 1)
    assert ((counts[1:] - expected) ** 2 / expected).sum() < chi_square_limit(side**2 - 2)


@pytest.mark.parametrize("size", [100, 1000, *FEISTEL_SIZES])
def test_neighbours_are_uncorrelated(size: int) -> None:
    drawn = orders(size, num_seeds=30)
    mean = np.mean([correlation(row[:-1], row[1:]) for row in drawn])
    assert abs(mean + 1 / (size - 1)) < MILLIONTH / math.sqrt(size * len(drawn))


@pytest.mark.parametrize("size", [100, 1000, *FEISTEL_SIZES])
@pytest.mark.parametrize("neighbour", ["next epoch", "next seed"])
def test_neighbouring_epochs_and_seeds_are_uncorrelated(size: int, neighbour: str) -> None:
    drawn = orders(size, num_seeds=1, num_epochs=31) if neighbour == "next epoch" else orders(size, num_seeds=31)
    found = [correlation(left, right) for left, right in itertools.pairwise(drawn)]
    assert max(map(abs, found)) < (MILLIONTH + 1) / math.sqrt(size)
    assert abs(np.mean(found)) < MILLIONTH / math.sqrt(size * len(found))


@pytest.mark.parametrize(("size", "num_orders"), [(10, 3000), (100, 3000), (4096, 200), (5000, 200)])
def test_fixed_points_are_as_many_as_chance_has(size: int, num_orders: int) -> None:
    num_fixed = (orders(size, num_seeds=num_orders) == np.arange(size)).sum(axis=1)
    # Poisson with mean one: mean and variance are one, the variance's own variance is three.
    assert abs(num_fixed.mean() - 1) < MILLIONTH / math.sqrt(num_orders)
    assert abs(num_fixed.var() - 1) < MILLIONTH * math.sqrt(3 / num_orders)


@pytest.mark.parametrize("size", [128, 4096, 8192, 100_000])
@pytest.mark.parametrize("bit", [0, 1, 2, 3, 4])
def test_low_bits_of_an_index_do_not_follow_those_of_its_position(size: int, bit: int) -> None:
    drawn = orders(size, num_seeds=20)
    set_at, set_in = np.arange(size) >> bit & 1, drawn >> bit & 1
    num_both = (set_at & set_in).sum()
    num_set = set_at.sum()
    variance = (num_set * (size - num_set)) ** 2 / (size**2 * (size - 1))
    assert abs(num_both - len(drawn) * num_set**2 / size) < MILLIONTH * math.sqrt(len(drawn) * variance)


@pytest.mark.parametrize("size", [1000, *FEISTEL_SIZES])
def test_neighbours_are_as_far_apart_as_in_a_random_order(size: int) -> None:
    distances = np.abs(np.diff(orders(size, num_seeds=30), axis=1))
    # One distance has the mean (size + 1) / 3 and a variance below size^2 / 18; shared ends add less than that again.
    assert abs(distances.mean() - (size + 1) / 3) < MILLIONTH * size / 3 / math.sqrt(distances.size)
    near = (distances < size / 10).mean()
    assert abs(near - 0.19) < MILLIONTH * math.sqrt(2 * 0.19 * 0.81 / distances.size) + 2 / size


@pytest.mark.parametrize("size", [1000, 5000, 8192])
def test_orders_fall_into_as_many_cycles_as_random_ones(size: int) -> None:
    num_orders = 60
    mean = np.mean([_num_cycles(row) for row in orders(size, num_seeds=num_orders)])
    harmonic = sum(1 / number for number in range(1, size + 1))
    assert abs(mean - harmonic) < MILLIONTH * math.sqrt(harmonic / num_orders)


def _num_cycles(row: np.ndarray) -> int:
    unseen, count = set(range(len(row))), 0
    successors = row.tolist()
    while unseen:
        place = unseen.pop()
        while (place := successors[place]) in unseen:
            unseen.remove(place)
        count += 1
    return count
