"""Every curve is its closed form, at the points that tell it from its mistaken twins."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torchs

from hezar_train.config import TrainerConfig
from hezar_train.config.names import CURVES as NAMES
from hezar_train.config.names import SCHEDULER_CLASSES
from hezar_train.errors import ConfigError
from hezar_train.optim import CurveLR, build_scheduler, watches_metric
from hezar_train.optim.curves import CURVES
from hezar_train.plan import exactness_changes, make_plan

RATE = 0.5
TICKS = 12
RANGE = {"lr_min": 0.1, "lr_max": 0.9}


def make_optimizer(*rates: float) -> Optimizer:
    return SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (RATE,)])


def rates(name: str, kwargs: dict[str, Any] | None = None, ticks: int = TICKS) -> list[float]:
    """Return the rate before the first tick and after each of `ticks`."""
    optimizer = make_optimizer()
    scheduler = build_scheduler(name, optimizer, total_ticks=TICKS, kwargs=kwargs)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(ticks):
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


# name, keywords, {tick: rate by hand}
POINTS: list[tuple[str, dict[str, Any], dict[int, float]]] = [
    ("triangular", RANGE | {"stepsize": 4}, {0: 0.1, 1: 0.3, 2: 0.5, 4: 0.9, 6: 0.5, 8: 0.1, 12: 0.9}),
    ("triangular", {}, {0: 0.05, 6: 0.5, 12: 0.05}),  # one cycle in the run, from a tenth of the rate
    ("triangular", RANGE | {"stepsize": 4, "start_iter": 3}, {0: 0.1, 3: 0.1, 5: 0.5, 7: 0.9, 11: 0.1}),
    ("inv_triangular", RANGE | {"stepsize": 4}, {0: 0.9, 2: 0.5, 4: 0.1, 8: 0.9, 12: 0.1}),
    ("inv_triangular", RANGE | {"stepsize": 4, "start_iter": 3}, {0: 0.9, 3: 0.9, 7: 0.1}),
    ("triangular_exp", RANGE | {"stepsize": 4, "k": 0.5}, {0: 0.1, 4: 0.9 * math.exp(-2), 8: 0.1 * math.exp(-4)}),
    ("triangular_exp", RANGE | {"stepsize": 4, "k": 0.5, "start_iter": 2}, {1: 0.1, 6: 0.9 * math.exp(-2)}),
    ("triangular_exp", RANGE | {"stepsize": 4}, {12: 0.9 * math.exp(-0.0012)}),
    ("triangular2", RANGE | {"stepsize": 2}, {2: 0.9, 4: 0.1, 6: 0.5, 10: 0.3}),
    ("triangular2_exp", RANGE | {"stepsize": 2, "k": 0.1}, {2: 0.9 * math.exp(-0.2), 6: 0.5 * math.exp(-0.6)}),
    ("warm_restarts", RANGE | {"stepsize": 3}, {0: 0.9, 2: 0.7, 3: 0.5, 4: 0.3, 6: 0.9, 9: 0.5, 12: 0.9}),
    ("warm_restarts", RANGE | {"stepsize": 3, "step_per_epoch": 2}, {0: 0.9, 6: 0.5, 12: 0.9}),
    ("linear_decay", RANGE | {"num_iters": 8}, {0: 0.9, 4: 0.5, 8: 0.1, 12: 0.1}),
    ("linear_decay", {}, {0: 0.5, 6: 0.275, 12: 0.05}),
    ("log_decay", RANGE | {"num_iter": 8}, {0: 0.9, 4: 0.3, 8: 0.1, 12: 0.1}),  # the middle is the geometric mean
    ("exponential_decay", {"lr_max": 0.9, "k": 0.1}, {0: 0.9, 10: 0.9 / math.e}),
    ("exponential_decay", {}, {12: 0.5 * math.exp(-0.012)}),
    ("exponential_decay", RANGE | {"k": 1.0}, {1: 0.9 / math.e, 12: 0.1}),
    ("step_decay", {"lr_max": 0.8, "lr_decay": 0.5, "lr_decay_every": 4}, {0: 0.8, 3: 0.8, 4: 0.4, 7: 0.4, 8: 0.2}),
    ("step_decay", RANGE | {"lr_decay": 0.1, "lr_decay_every": 2}, {1: 0.9, 2: 0.1, 4: 0.1}),
    ("epoch_set", {"schedule": {0: 0.3, 4: 0.2, 9: 0.1}, "lr_value": True}, {0: 0.3, 3: 0.3, 4: 0.2, 9: 0.1, 12: 0.1}),
    ("epoch_set", {"schedule": {"4": 0.5, "0": 1, "9": 0.1}}, {0: 0.5, 3: 0.5, 4: 0.25, 8: 0.25, 9: 0.025}),
    ("decay_when_epoch", {}, {0: 0.5, 7: 0.5, 8: 0.45}),
    ("decay_when_epoch", {"num_epochs": 2, "lr_decay": 0.5}, {1: 0.5, 2: 0.25, 4: 0.125, 6: 0.0625}),
    ("decay_to_epoch", {"non_decay_time": 2, "decay_length": 4, "final_lr": 0.1}, {2: 0.5, 4: 0.3, 6: 0.1, 12: 0.1}),
    ("decay_to_epoch", {"non_decay_time": 4, "initial_lr": 0.8}, {0: 0.8, 4: 0.8, 8: 0.4, 12: 0.0}),
    ("warmup_stable_decay", {"decay_iter": 4, "decay_method": "linear"}, {0: 0.5, 8: 0.5, 10: 0.25, 12: 0.0}),
    ("warmup_stable_decay", {"decay_ratio": 0.5, "alpha": 0.2}, {0: 0.5, 6: 0.5, 9: 0.3, 12: 0.1}),
    ("wsd", {"decay_iter": 4, "decay_method": "1-sqrt"}, {8: 0.5, 9: 0.25, 12: 0.0}),
    ("warmup_stable_decay", {}, {10: 0.5, 11: 0.25, 12: 0.0}),  # a tenth of the run, rounded up
    ("inverse_sqrt", {"timescale": 3}, {0: 0.5, 9: 0.25}),
    ("cosine_with_restarts", {"num_cycles": 3}, {0: 0.5, 2: 0.25, 4: 0.5, 6: 0.25, 8: 0.5, 12: 0.0}),
    ("cosine_with_restarts", {"eta_min": 0.1}, {0: 0.5, 6: 0.3, 12: 0.1}),
    ("warmup_linear", {"warmup_steps": 4}, {0: 0.0, 2: 0.25, 4: 0.5, 8: 0.25, 12: 0.0}),
    ("warmup_linear", {"warmup_ratio": 0.25, "total_steps": 8}, {1: 0.25, 2: 0.5, 5: 0.25, 8: 0.0, 12: 0.0}),
    ("warmup_noam", {"warmup_steps": 4}, {0: 0.0625, 1: 0.0625, 2: 0.125, 4: 0.25, 9: 0.5 / 3}),
]


@pytest.mark.parametrize(("name", "kwargs", "points"), POINTS)
def test_a_curve_goes_through_the_points_worked_out_by_hand(
    name: str, kwargs: dict[str, Any], points: dict[int, float]
) -> None:
    seen = rates(name, kwargs)
    assert [seen[tick] for tick in points] == pytest.approx(list(points.values()), rel=1e-12, abs=1e-15)


def half_cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


# name, keywords, the schedule without its warm-up
WARMED: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("warmup_cosine", {}, lambda t: RATE * (0.01 + 0.99 * half_cosine(t / TICKS))),
    ("warmup_cosine", {"alpha": 0.0, "max_iter": 24}, lambda t: RATE * half_cosine(t / 24)),
    ("warmup_cosine_annealing", {"eta_min": 0.1}, lambda t: 0.1 + 0.4 * half_cosine(t / TICKS)),
    ("warmup_step", {"step_size": 5}, lambda t: RATE * 0.1 ** (t // 5)),
    ("warmup_multi_step", {"milestones": [6, 9], "gamma": 0.5}, lambda t: RATE * 0.5 ** ((t >= 6) + (t >= 9))),
    ("warmup_multi_step", {"milestones": [0.5, 0.75]}, lambda t: RATE * 0.1 ** ((t >= 6) + (t >= 9))),
    ("warmup_exponential", {"gamma": 0.9}, lambda t: RATE * 0.9**t),
    ("warmup_polynomial", {"end_learning_rate": 0.1, "power": 2}, lambda t: 0.1 + 0.4 * (1 - t / TICKS) ** 2),
]


@pytest.mark.parametrize("method", ["linear", "constant"])
@pytest.mark.parametrize(("name", "kwargs", "after"), WARMED)
def test_a_warm_up_leads_into_its_schedule(
    name: str, kwargs: dict[str, Any], after: Callable[[int], float], method: str
) -> None:
    seen = rates(name, {"warmup_iter": 4, "warmup_factor": 0.2, "warmup_method": method, **kwargs})
    first = 0.2 * RATE
    assert seen[0] == pytest.approx(first)
    assert seen[2] == pytest.approx((first + after(4)) / 2 if method == "linear" else first)
    assert seen[4:] == pytest.approx([after(t) for t in range(4, TICKS + 1)], abs=1e-15)


@pytest.mark.parametrize(("name", "kwargs", "after"), WARMED)
def test_without_a_warm_up_it_is_the_plain_schedule_and_says_so(
    name: str, kwargs: dict[str, Any], after: Callable[[int], float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        seen = rates(name, {"warmup_iter": 0, **kwargs})
    assert seen == pytest.approx([after(t) for t in range(TICKS + 1)], abs=1e-15)
    assert "has no warm-up" in caplog.text


def test_a_warm_up_longer_than_the_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rates("warmup_cosine", {"warmup_iter": 20})
    assert "warms up for 20 ticks, but ends after 12" in caplog.text


def test_the_stock_warmup_of_libai_starts_at_a_thousandth() -> None:
    seen = rates("WarmupCosineLR", {"warmup_ratio": 0.25})
    assert seen[0] == pytest.approx(RATE / 1000)
    assert seen[3] == pytest.approx(RATE * (0.01 + 0.99 * half_cosine(0.25)))
    assert seen[12] == pytest.approx(RATE / 100)


def test_a_polynomial_that_cycles_is_laid_out_anew_past_its_end() -> None:
    seen = rates("warmup_polynomial", {"max_iter": 4, "cycle": True, "warmup_iter": 0})
    expected = [RATE * (1 - t / (4 * max(1, math.ceil(t / 4)))) for t in range(TICKS + 1)]
    assert seen == pytest.approx(expected)
    assert rates("warmup_polynomial", {"max_iter": 4, "warmup_iter": 0})[4:] == [0.0] * 9


TWINS: list[tuple[str, dict[str, Any], Callable[[Optimizer], Any]]] = [
    (
        "triangular",
        {"lr_min": 0.1, "stepsize": 4},
        lambda o: torchs.CyclicLR(o, 0.1, RATE, step_size_up=4, cycle_momentum=False),
    ),
    (
        "triangular2",
        {"lr_min": 0.1, "stepsize": 2},
        lambda o: torchs.CyclicLR(o, 0.1, RATE, 2, mode="triangular2", cycle_momentum=False),
    ),
    (
        "warm_restarts",
        {"lr_min": 0.1, "stepsize": 2},
        lambda o: torchs.CosineAnnealingWarmRestarts(o, 4, eta_min=0.1),
    ),
    ("linear_decay", {"num_iters": 6}, lambda o: torchs.LinearLR(o, 1.0, 0.1, 6)),
    ("exponential_decay", {"k": 0.1}, lambda o: torchs.ExponentialLR(o, math.exp(-0.1))),
    ("step_decay", {"lr_decay": 0.5, "lr_decay_every": 3}, lambda o: torchs.StepLR(o, 3, 0.5)),
    ("decay_when_epoch", {"num_epochs": 3}, lambda o: torchs.StepLR(o, 3, 0.9)),
    ("warmup_cosine_annealing", {"warmup_iter": 0}, lambda o: torchs.CosineAnnealingLR(o, TICKS)),
    ("warmup_polynomial", {"warmup_iter": 0, "power": 3.0}, lambda o: torchs.PolynomialLR(o, TICKS, 3.0)),
]


@pytest.mark.parametrize(("name", "kwargs", "twin"), TWINS)
def test_a_curve_equals_the_scheduler_of_torch_that_it_resembles(
    name: str, kwargs: dict[str, Any], twin: Callable[[Optimizer], Any]
) -> None:
    optimizer = make_optimizer()
    scheduler = twin(optimizer)
    expected = [optimizer.param_groups[0]["lr"]]
    for _ in range(TICKS):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates(name, kwargs) == pytest.approx(expected, abs=1e-12)


def test_the_tables_cover_every_curve() -> None:
    tested = {name for table in (POINTS, WARMED) for name, _, _ in table}
    assert CURVES.keys() - tested == {"decay_when_acc", "triangular_decay_when_acc"}


def test_the_config_knows_the_curves_and_their_classes() -> None:
    assert set(NAMES) == CURVES.keys()
    without_class = {"warmup_linear", "warmup_noam", "warmup_stable_decay", "inverse_sqrt", "cosine_with_restarts"}
    assert set(SCHEDULER_CLASSES.values()) == CURVES.keys() - without_class


@pytest.mark.parametrize(("spelled", "short"), SCHEDULER_CLASSES.items())
def test_a_class_name_of_another_system_means_the_same_curve(spelled: str, short: str) -> None:
    for name in (spelled, spelled.lower()):
        scheduler = build_scheduler(name, make_optimizer(), total_ticks=TICKS, kwargs=NEEDED.get(short))
        assert isinstance(scheduler, CurveLR)
        assert scheduler.curve.name == short


def test_each_group_follows_the_curve_from_its_own_rate() -> None:
    optimizer = make_optimizer(0.1, 0.4)
    scheduler = build_scheduler("linear_decay", optimizer, total_ticks=2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.055, 0.22])


def test_a_curve_that_counts_epochs_is_laid_out_over_the_epochs() -> None:
    scheduler: Any = build_scheduler("decay_to_epoch", make_optimizer(), total_ticks=900, total_epochs=9)
    assert scheduler.curve.settings["decay_length"] == 9


NEEDED: dict[str, dict[str, Any]] = {
    "epoch_set": {"schedule": {"0": 1}},
    "warmup_step": {"step_size": 1},
    "warmup_exponential": {"gamma": 0.5},
    "warmup_multi_step": {"milestones": [0.5]},
    "inverse_sqrt": {"timescale": 3},
}
WITH_A_WARM_UP = [name for name in CURVES if name.startswith("warmup_") and name != "warmup_stable_decay"]


@pytest.mark.parametrize("name", CURVES)
def test_a_run_of_another_length_is_told_where_the_curve_depends_on_it(name: str) -> None:
    kwargs = NEEDED.get(name, {}) | ({"warmup_ratio": 0.5} if name in WITH_A_WARM_UP else {})
    laid_out = []
    for epochs in (10, 20):
        scheduler: Any = build_scheduler(name, make_optimizer(), total_ticks=epochs, kwargs=kwargs, total_epochs=epochs)
        laid_out.append(scheduler.curve.settings)
    before, now = (TrainerConfig("run", lr_scheduler=name, lr_scheduler_kwargs=kwargs, num_epochs=n) for n in (10, 20))
    told = exactness_changes(before.to_dict(), now.to_dict(), make_plan(before, 4), make_plan(now, 4))
    assert bool(told) == (laid_out[0] != laid_out[1])


def test_a_curve_that_has_ended_stays_at_its_end() -> None:
    for name in ("linear_decay", "log_decay", "warmup_cosine", "warmup_cosine_annealing", "warmup_linear"):
        seen = rates(name, ticks=3 * TICKS)
        assert seen[TICKS:] == [seen[TICKS]] * (2 * TICKS + 1)


def test_the_names_that_follow_evaluations_are_known() -> None:
    names = {*CURVES, "reduce_on_plateau", "ReduceLROnPlateau", "step", "my_package.Schedule", "DecayWhenAcc"}
    assert {name for name in names if watches_metric(name)} == {
        *("reduce_on_plateau", "ReduceLROnPlateau", "decay_when_acc", "triangular_decay_when_acc", "DecayWhenAcc")
    }


BOUNDED = ["triangular", "inv_triangular", "triangular2", "warm_restarts", "linear_decay", "log_decay"]
SHRINKING = ["triangular_exp", "triangular2_exp"]


@pytest.mark.parametrize("name", BOUNDED + SHRINKING)
@given(
    tick=st.integers(0, 10**6),
    low=st.floats(1e-6, 1.0),
    span=st.floats(0, 10.0),
    length=st.integers(1, 10**5),
)
def test_a_curve_between_two_rates_never_leaves_them(
    name: str, tick: int, low: float, span: float, length: int
) -> None:
    kwargs = {"lr_min": low, "lr_max": low + span}
    length_name = "num_iters" if name.endswith("y") else "stepsize"
    scheduler: Any = build_scheduler(name, make_optimizer(), total_ticks=1, kwargs={**kwargs, length_name: length})
    value = scheduler.curve.value(tick, RATE)
    floor = low * math.exp(-1e-4 * tick) if name in SHRINKING else low
    assert floor * (1 - 1e-12) <= value <= (low + span) * (1 + 1e-12)


@pytest.mark.parametrize("name", WITH_A_WARM_UP)
@given(tick=st.integers(0, 10**5), warmup=st.integers(1, 1000), total=st.integers(1, 10**5))
def test_a_warm_up_never_rises_above_the_rate_or_falls_below_zero(
    name: str, tick: int, warmup: int, total: int
) -> None:
    kwargs: dict[str, Any] = {"warmup_iter": warmup}
    kwargs |= {"warmup_step": {"step_size": 9}, "warmup_exponential": {"gamma": 0.9}}.get(name, {})
    kwargs |= {"milestones": [3, 9]} if name == "warmup_multi_step" else {}
    scheduler: Any = build_scheduler(name, make_optimizer(), total_ticks=total, kwargs=kwargs)
    assert 0 <= scheduler.curve.value(tick, RATE) <= RATE * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("triangular", {"stepsise": 3}, r"'stepsise'\. It takes: lr_max, lr_min, start_iter, stepsize\. Did you mean"),
        (
            "inverse_sqrt",
            {},
            r"with the field warmup_steps, the ticks of the warm-up are its timescale\) needs timescale",
        ),
        ("wsd", {"warmup_ratio": 0.1}, r"\(a warm-up for any schedule is the field warmup_steps\) does not take"),
        ("wsd", {"decay_iter": 2, "decay_ratio": 0.1}, r"decay_iter and decay_ratio say the same"),
        ("wsd", {"decay_method": "square"}, r"decay_method='square'\. Expected one of 1-sqrt, cosine, linear"),
        ("triangular", {"stepsize": 0}, r"stepsize=0\. Expected a number above 0"),
        ("triangular", {"stepsize": "3"}, r"stepsize='3'\. Expected a number above 0"),
        ("triangular", {"lr_min": True}, r"lr_min=True\. Expected a number that is not negative"),
        ("triangular", {"lr_min": 0.1, "min": 0.2}, r"'min' is given twice, in two spellings"),
        ("triangular", {"lr_min": 0.6}, r"lr_min=0.6 is above lr_max=0.5 \(where it is left out"),
        ("warmup_cosine", {"warmup_iter": 3, "warmup_ratio": 0.1}, r"warmup_iter and warmup_ratio say the same"),
        ("warmup_cosine", {"warmup_ratio": 3}, r"warmup_ratio=3 is a share of the run"),
        ("warmup_cosine", {"warmup_method": "cubic"}, r"warmup_method='cubic'\. Expected one of constant, linear"),
        ("warmup_step", {}, r"\(FederatedScope's schedule of this name is 'warmup_linear' here\) needs step_size"),
        ("warmup_multi_step", {}, r"needs milestones"),
        ("warmup_multi_step", {"milestones": [5, 2]}, r"in rising order"),
        ("warmup_multi_step", {"milestones": [1.5]}, r"shares of the run between 0 and 1"),
        ("warmup_exponential", {}, r"needs gamma"),
        ("warmup_polynomial", {"cycle": "yes"}, r"cycle='yes'\. Expected True or False"),
        ("warmup_noam", {}, r"needs a warm-up"),
        ("epoch_set", {}, r"needs schedule"),
        ("epoch_set", {"schedule": [1, 2]}, r"Expected a mapping from epoch to value"),
        ("epoch_set", {"schedule": {1: 0.5}}, r"says nothing of epoch 0"),
        ("epoch_set", {"schedule": {0: 1, 1.5: 0.5}}, r"the epoch 1\.5 of the schedule\. Expected a whole number"),
        ("epoch_set", {"schedule": {0: "x"}}, r"schedule\[0\]='x'"),
        ("decay_when_acc", {"mode": "up"}, r"mode='up'\. Expected one of max, min"),
    ],
)
def test_what_cannot_work_is_told_when_it_is_built(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, make_optimizer(), total_ticks=TICKS, kwargs=kwargs)


def test_all_mistakes_of_a_curve_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler("triangular", make_optimizer(), total_ticks=9, kwargs={"stepsize": 0, "lr_max": "x"})
    assert len(caught.value.problems) == 2
