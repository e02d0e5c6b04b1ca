"""The Poisson bootstrap: weights that are a function of seed and sample, and intervals that cover the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import ConfigError
from hezar_train.metrics import Metric, interval, poisson_weights
from hezar_train.metrics.classification import F1, Accuracy, share_counts


@given(st.integers(-5, 2**70), st.lists(st.integers(0, 2**40), min_size=1, max_size=40), st.integers(0, 9), st.data())
@settings(deadline=None)
def test_a_weight_depends_on_seed_row_and_sample_alone(
    seed: int, ids: list[int], num_rows: int, data: st.DataObject
) -> None:
    whole = poisson_weights(seed, torch.tensor(ids), num_rows)
    place = data.draw(st.integers(0, len(ids) - 1))
    alone = poisson_weights(seed, torch.tensor(ids[place : place + 1]), num_rows + 3)
    assert whole.shape == (1 + num_rows, len(ids))
    assert whole[0].eq(1).all()
    assert torch.equal(whole[:, place], alone[: 1 + num_rows, 0])


def test_weights_are_poisson_distributed_with_mean_one() -> None:
    weights = poisson_weights(3, torch.arange(20_000), 50)[1:].long()
    counts = torch.bincount(weights.flatten(), minlength=7)
    shares = scipy.stats.poisson.pmf(np.arange(6), 1.0)
    expected = np.append(shares, 1 - shares.sum()) * weights.numel()
    observed = np.append(counts[:6], counts[6:].sum())
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3
    assert scipy.stats.poisson.sf(7, 1.0) * weights.numel() > 5
    assert int(weights.max()) > 6


def test_rows_samples_and_seeds_are_uncorrelated() -> None:
    weights = poisson_weights(0, torch.arange(50_000), 9)[1:].double()
    across_rows = torch.corrcoef(weights) - torch.eye(9)
    lagged = torch.corrcoef(torch.stack([weights[0, :-1], weights[0, 1:]]))[0, 1]
    other_seed = torch.corrcoef(torch.stack([weights[0], poisson_weights(1, torch.arange(50_000), 1)[1].double()]))[
        0, 1
    ]
    five_deviations = 5 / math.sqrt(50_000)
    assert across_rows.abs().max() < five_deviations
    assert abs(lagged) < five_deviations
    assert abs(other_seed) < five_deviations


def test_the_weights_are_these_for_ever() -> None:
    assert poisson_weights(42, torch.tensor([0, 1, 2, 10**12]), 5).tolist() == [
        [1, 1, 1, 1],
        [4, 2, 0, 0],
        [2, 2, 2, 1],
        [1, 0, 0, 0],
        [1, 2, 1, 1],
        [1, 2, 1, 2],
    ]


def test_an_interval_is_between_the_quantiles_of_the_rows() -> None:
    values = list(np.linspace(0.0, 1.0, 101))
    assert interval(values) == pytest.approx((0.025, 0.975))
    assert interval(values, level=0.5) == pytest.approx((0.25, 0.75))


def test_undefined_rows_are_left_out_and_nothing_gives_nothing() -> None:
    assert interval([math.nan, 0.4, 0.4]) == pytest.approx((0.4, 0.4))
    for values in ([], [math.nan], [math.nan, math.nan]):
        assert all(math.isnan(end) for end in interval(values))


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, -0.1])
def test_a_level_is_a_share(level: float) -> None:
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        interval([0.5, 0.4, 0.6], level=level)


class Simulation(NamedTuple):
    """Sets of samples from a known population: classes by their shares, right with a chance, else any other class."""

    num_samples: int
    shares: list[float]
    chance: float

    def draw(self, num_samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.multinomial(torch.tensor(self.shares), num_samples, replacement=True, generator=generator)
        is_right = torch.rand(num_samples, generator=generator) < self.chance
        num_classes = len(self.shares)
        others = (targets + torch.randint(1, num_classes, (num_samples,), generator=generator)) % num_classes
        return torch.where(is_right, targets, others), targets

    def metrics(self) -> list[Metric]:
        num_classes = len(self.shares)
        kinds: list[Callable[[], Metric]] = [Accuracy, lambda: F1(num_classes=num_classes)]
        if num_classes == 2:
            kinds.append(lambda: F1("binary", num_classes=num_classes))
        metrics = [kind() for kind in kinds]
        share_counts(metrics)
        return metrics

    def rows(self, seed: int, num_rows: int, generator: torch.Generator) -> Iterator[list[float]]:
        samples, metrics = self.draw(self.num_samples, generator), self.metrics()
        weights = poisson_weights(seed, torch.arange(self.num_samples), num_rows)
        for metric in metrics:
            metric.update(*samples, weights)
        for metric in metrics:
            yield [next(iter(row.values())) for row in metric.compute_rows()[1:]]

    def truths(self, generator: torch.Generator) -> list[float]:
        samples, metrics = self.draw(2_000_000, generator), self.metrics()
        for metric in metrics:
            metric.update(*samples)
        return [next(iter(metric.compute().values())) for metric in metrics]

    def coverages(self, num_sets: int, num_rows: int) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        truths = self.truths(generator)
        num_covered = [0] * len(truths)
        for seed in range(num_sets):
            for number, rows in enumerate(self.rows(seed, num_rows, generator)):
                low, high = interval(rows)
                num_covered[number] += low <= truths[number] <= high
        return [covered / num_sets for covered in num_covered]


SIMULATIONS = [
    Simulation(200, [0.6, 0.4], 0.8),
    Simulation(300, [0.8, 0.2], 0.8),
    Simulation(300, [0.5, 0.3, 0.2], 0.75),
    Simulation(500, [0.5, 0.3, 0.2], 0.9),
]


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    for coverage in SIMULATIONS[0].coverages(num_sets=150, num_rows=200):
        assert 0.90 <= coverage <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("simulation", SIMULATIONS)
def test_intervals_cover_the_truth_in_95_percent_of_a_thousand_sets(simulation: Simulation) -> None:
    for coverage in simulation.coverages(num_sets=1_000, num_rows=500):
        assert 0.93 <= coverage <= 0.97
