"""Which rate is read from planted curves, the picture, and the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hezar_train.errors import ConfigError, DataError, MissingDependencyError
from hezar_train.trainer.lr_finder import LRFinderResult

NUM_RATES = 81
RATES = [float(rate) for rate in np.logspace(-7, 1, NUM_RATES)]  # ten to a decade
LEAST = 50  # the update with the rate 1e-2


def curve(smoothed: Any, **given: Any) -> LRFinderResult:
    values = [float(value) for value in smoothed]
    return LRFinderResult(RATES[: len(values)], values, values, **given)


def valley(left: float = 0.1, right: float = 0.1) -> list[float]:
    """Fall evenly down to the planted minimum, then rise."""
    return [2.0 + (left * (LEAST - n) if n < LEAST else right * (n - LEAST)) for n in range(NUM_RATES)]


def like_a_sweep() -> list[float]:
    """Stay flat, fall along a sigmoid whose steepest point is at update 40, reach a minimum at 50, explode."""
    steps = np.arange(NUM_RATES)
    fall = 2.3 - 2.0 / (1 + np.exp(-(steps - 40) / 2.5))
    rise = fall[LEAST] + 0.02 * np.exp(0.5 * (steps - LEAST))
    return [float(value) for value in (*fall[: LEAST + 1], *rise[LEAST + 1 :])]


@pytest.mark.parametrize("method", ["min_loss", "laplace", "sobel"])
@pytest.mark.parametrize("slopes", [(0.1, 0.1), (0.05, 0.2), (0.2, 0.05)])
def test_the_minimum_of_a_planted_valley_is_found(method: str, slopes: tuple[float, float]) -> None:
    found = curve(valley(*slopes), lr_select_method=method)
    assert found.suggestion == RATES[LEAST]
    low, high = found.get_lr_range()
    assert high == RATES[LEAST] == pytest.approx(1e-2)
    assert low == pytest.approx(1e-4)  # twice the exponent


@pytest.mark.parametrize("best", [0, 33, NUM_RATES - 1])
def test_the_best_accuracy_is_found_wherever_it_is(best: int) -> None:
    accuracies = [0.5 - abs(best - n) / 1000 for n in range(NUM_RATES)]
    assert curve(valley(), accuracies=accuracies, lr_select_method="max_acc").suggestion == RATES[best]


def test_the_steepest_point_of_the_fall_is_found_although_noise_and_the_explosion_are_steeper() -> None:
    smoothed = like_a_sweep()
    smoothed[0] += 5.0  # the first losses are hardly smoothed
    smoothed[-1] = 1.0  # while it explodes, a loss may also crash
    assert curve(smoothed).suggestion == RATES[40]


@pytest.mark.parametrize("seed", range(5))
def test_the_steepest_point_is_found_in_noise_and_does_not_move_with_the_lag_of_the_smoothed_loss(seed: int) -> None:
    losses = np.asarray(like_a_sweep()) + np.random.default_rng(seed).normal(0, 0.1, NUM_RATES)
    lagging = [float(losses[: end + 1].mean()) for end in range(NUM_RATES)]
    found = LRFinderResult(RATES, [float(loss) for loss in losses], lagging)
    assert found.suggestion is not None
    assert RATES[36] <= found.suggestion <= RATES[44]  # the lagging curve is least near update 58


@pytest.mark.parametrize("method", ["min_loss", "sobel"])
def test_the_minimum_before_an_explosion_is_found(method: str) -> None:
    assert curve(like_a_sweep()).get_lr_range(method)[1] == RATES[LEAST]


def test_the_bend_is_looked_for_low_in_the_valley_and_not_in_the_explosion() -> None:
    assert RATES[LEAST - 8] <= curve(like_a_sweep()).get_lr_range("laplace")[1] <= RATES[LEAST + 8]


def test_the_widest_range_ends_at_the_last_rate_tried() -> None:
    low, high = curve(valley()[: LEAST + 1], lr_select_method="max_range").get_lr_range()
    assert (low, high) == (pytest.approx(1e-4), RATES[LEAST])


def test_the_ends_of_the_range_follow_their_factors_and_stay_within_what_was_swept() -> None:
    wide = curve(valley(), lr_select_method="min_loss", lr_min_factor=9.0)
    assert wide.get_lr_range() == (RATES[0], RATES[LEAST])
    scaled = curve(valley(), lr_select_method="min_loss", lr_max_scale=1.5, lr_min_factor=1.5)
    assert scaled.get_lr_range() == (pytest.approx(10**-4.5), pytest.approx(10**-3))
    assert curve(valley()).get_lr_range("max_range") == (1.0, 10.0)  # above 1 a power would not be lower


@pytest.mark.parametrize("method", ["steepest", "laplace", "sobel"])
@pytest.mark.parametrize("smoothed", [[1.0] * 30, list(range(30)), [1.0]], ids=["flat", "rising", "one rate"])
def test_a_loss_that_does_not_fall_suggests_nothing_and_says_so(method: str, smoothed: list[float]) -> None:
    found = curve(smoothed, lr_select_method=method, stopped_by="divergence")
    assert found.suggestion is None
    assert "no rate" in str(found)
    with pytest.raises(DataError, match=f"'{method}' selects no rate: the loss did not fall.*stopped by: divergence"):
        found.get_lr_range()


def test_a_method_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"lr_select_method='max_ac' is not known.*Did you mean 'max_acc'"):
        curve(valley(), lr_select_method="max_ac")
    with pytest.raises(ConfigError, match="'min_range' is not known"):
        curve(valley()).get_lr_range("min_range")


def test_accuracies_that_were_not_measured_cannot_be_selected_by() -> None:
    with pytest.raises(DataError, match=r"needs accuracies: call find_lr\(acc_test=True\)"):
        curve(valley()).get_lr_range("max_acc")


def test_curves_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="2 rates, 1 losses, 2 smoothed losses and 0 accuracies were given"):
        LRFinderResult([0.1, 0.2], [1.0], [1.0, 1.0])


def test_a_file_reads_back_exactly_what_was_written(tmp_path: Path) -> None:
    found = curve(like_a_sweep(), accuracies=[1 / 3] * NUM_RATES, lr_select_method="sobel", stopped_by="divergence")
    path = found.save(tmp_path / "rates.json")
    assert LRFinderResult.load(path) == found
    assert json.loads(path.read_text())["stopped_by"] == "divergence"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"rates": []}')
    with pytest.raises(DataError, match=r"x.json is no result of find_lr\(\): it lacks accuracies, losses"):
        LRFinderResult.load(tmp_path / "x.json")


def test_a_plot_is_written_as_a_png(tmp_path: Path) -> None:
    path = curve(like_a_sweep(), accuracies=[0.5] * NUM_RATES).plot(tmp_path / "plots" / "rates.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert curve([1.0, 1.0]).plot(tmp_path / "flat.png").exists()


def test_given_axes_are_drawn_on_with_the_rates_on_a_logarithmic_scale() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    assert curve(like_a_sweep()).plot(axes, title="mine") is axes
    assert (axes.get_xscale(), axes.get_title()) == ("log", "mine")
    assert list(axes.lines[1].get_xdata()) == RATES  # the rates themselves, not their exponents
    assert list(axes.lines[1].get_ydata()) == like_a_sweep()


def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"needs the package 'matplotlib'.*hezar-train\[plot\]"):
        curve(valley()).plot(tmp_path / "rates.png")
