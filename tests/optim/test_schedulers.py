from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hezar_train.errors import ConfigError
from hezar_train.optim import build_scheduler, scheduler_names
from hezar_train.optim.curves import CURVES
from hezar_train.types import LRSchedulerType

RATE = 0.5
TICKS = 12


def slowly(tick: int) -> float:
    return 1 / (1 + tick)


def warmup(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda tick: min(1.0, tick / num_warmup_steps) if tick < num_training_steps else 0.0)


def no_scheduler(optimizer: Optimizer) -> str:
    return "nothing"


def make_optimizer(cls: Callable[..., Optimizer] = SGD, **kwargs: Any) -> Optimizer:
    return cls([torch.nn.Parameter(torch.ones(2))], lr=RATE, **kwargs)


def rates(name: str, kwargs: dict[str, Any] | None = None, ticks: int = TICKS) -> list[float]:
    """Return the rate before the first tick and after each of `ticks`, as a run of TICKS meets them."""
    optimizer = make_optimizer()
    scheduler = build_scheduler(name, optimizer, total_ticks=TICKS, kwargs=kwargs)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(ticks):
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def one_cycle(tick: int) -> float:
    top, bottom, floor = RATE, RATE / 25, RATE / 25 / 1e4
    peak, last = 0.3 * TICKS - 1, TICKS - 1
    start, end, share = (bottom, top, tick / peak) if tick <= peak else (top, floor, (tick - peak) / (last - peak))
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def triangle(tick: int) -> float:
    return RATE / 10 + (RATE - RATE / 10) * (1 - abs(tick / (TICKS // 2) - 1))


CLOSED_FORMS: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("constant", {}, lambda t: RATE),
    ("constant", {"factor": 0.5, "total_iters": 3}, lambda t: RATE * (0.5 if t < 3 else 1)),
    ("lambda", {"lr_lambda": slowly}, lambda t: RATE / (1 + t)),
    ("lambda", {"lr_lambda": f"{__name__}.slowly"}, lambda t: RATE / (1 + t)),
    ("lambda", {"lr_lambda": [slowly]}, lambda t: RATE / (1 + t)),
    ("step", {"step_size": 3}, lambda t: RATE * 0.1 ** (t // 3)),
    ("multi_step", {"milestones": [2, 5], "gamma": 0.5}, lambda t: RATE * 0.5 ** ((t >= 2) + (t >= 5))),
    ("one_cycle", {}, one_cycle),
    ("linear", {}, lambda t: RATE * (1 / 3 + 2 / 3 * t / TICKS)),
    ("linear", {"start_factor": 1.0, "end_factor": 0.0}, lambda t: RATE * (1 - t / TICKS)),
    ("linear", {"total_iters": 4}, lambda t: RATE * (1 / 3 + 2 / 3 * min(t, 4) / 4)),
    ("exponential", {"gamma": 0.9}, lambda t: RATE * 0.9**t),
    ("cyclic", {}, triangle),
    ("polynomial", {}, lambda t: RATE * (1 - t / TICKS)),
    ("polynomial", {"power": 2.0}, lambda t: RATE * (1 - t / TICKS) ** 2),
    ("cosine_annealing", {}, lambda t: RATE * (1 + math.cos(math.pi * t / TICKS)) / 2),
    ("cosine_anealing", {"T_max": 6}, lambda t: RATE * (1 + math.cos(math.pi * t / 6)) / 2),
    (
        "sequential",
        {"schedulers": [{"name": "linear"}, {"name": "cosine_annealing"}], "milestones": [4]},
        lambda t: RATE * (1 / 3 + t / 6) if t < 4 else RATE * (1 + math.cos(math.pi * (t - 4) / 8)) / 2,
    ),
    (
        "sequential",
        {"schedulers": [{"name": "cyclic"}, {"name": "exponential", "kwargs": {"gamma": 0.5}}], "milestones": [10]},
        lambda t: RATE / 10 + (RATE - RATE / 10) * (1 - abs(t / 5 - 1)) if t < 10 else RATE * 0.5 ** (t - 10),
    ),
    (
        "sequential",
        {
            "schedulers": [{"name": "warmup_linear", "kwargs": {"warmup_iter": 2}}, {"name": "LinearDecayScheduler"}],
            "milestones": [4],
        },
        lambda t: RATE * (t / 2 if t < 2 else (4 - t) / 2) if t < 4 else RATE * (1 - 0.9 * (t - 4) / 8),
    ),
    ("StepLR", {"step_size": 5}, lambda t: RATE * 0.1 ** (t // 5)),
    ("linearlr", {}, lambda t: RATE * (1 / 3 + 2 / 3 * t / TICKS)),
    ("ConstantLR", {}, lambda t: RATE * (1 / 3 if t < 5 else 1)),
    ("MultiplicativeLR", {"lr_lambda": lambda t: 0.9}, lambda t: RATE * 0.9**t),
    ("CosineAnnealingWarmRestarts", {"T_0": 5}, lambda t: RATE * (1 + math.cos(math.pi * (t % 5) / 5)) / 2),
    (
        "ChainedScheduler",
        {"schedulers": [{"name": "linear"}, {"name": "exponential", "kwargs": {"gamma": 0.9}}]},
        lambda t: RATE * (1 / 3 + 2 / 3 * t / TICKS) * 0.9**t,
    ),
    ("torch.optim.lr_scheduler.PolynomialLR", {}, lambda t: RATE * (1 - t / TICKS)),
    (f"{__name__}.warmup", {"num_warmup_steps": 4}, lambda t: RATE * min(1, t / 4) if t < TICKS else 0.0),
]


@pytest.mark.parametrize(("name", "kwargs", "closed_form"), CLOSED_FORMS)
def test_each_name_follows_its_closed_form(
    name: str, kwargs: dict[str, Any], closed_form: Callable[[int], float]
) -> None:
    last = TICKS - 1 if name == "one_cycle" else TICKS
    assert rates(name, kwargs, last) == pytest.approx([closed_form(t) for t in range(last + 1)], rel=1e-9, abs=1e-12)


def test_the_closed_forms_cover_every_name_but_the_plateau() -> None:
    covered = {name for name, _, _ in CLOSED_FORMS} | CURVES.keys()  # the curves have a table of their own
    assert {str(name) for name in LRSchedulerType} - covered == {"reduce_on_plateau"}


def test_the_list_of_names_has_hezars_and_torchs() -> None:
    torch_names = {name.lower() for name in torch.optim.lr_scheduler.__all__} - {"lrscheduler"}
    assert set(scheduler_names()) == {str(name) for name in LRSchedulerType} | torch_names


def test_one_cycle_takes_as_many_ticks_as_the_run_has() -> None:
    assert len(rates("one_cycle")) == TICKS + 1


@pytest.mark.parametrize("name", ["one_cycle", "linear", "polynomial", "cosine_annealing", "cyclic"])
@pytest.mark.parametrize("total_ticks", [0, 1, 2])
def test_a_run_of_hardly_any_tick_can_be_scheduled(name: str, total_ticks: int) -> None:
    optimizer = make_optimizer()
    scheduler = build_scheduler(name, optimizer, total_ticks=total_ticks)
    optimizer.step()
    scheduler.step()
    assert 0 <= optimizer.param_groups[0]["lr"] <= RATE * (1 + 1e-9)


def test_each_group_keeps_its_own_rate() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.4)]
    optimizer = SGD(groups)
    scheduler = build_scheduler("one_cycle", optimizer, total_ticks=10, kwargs={"pct_start": 0.3})
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.4])


def test_cyclic_cycles_a_momentum_only_where_one_is_at_work() -> None:
    moving, plain, adam = make_optimizer(momentum=0.7), make_optimizer(), make_optimizer(Adam)
    for optimizer in (moving, plain, adam):
        build_scheduler("cyclic", optimizer, total_ticks=TICKS)
    assert moving.param_groups[0]["momentum"] == 0.9
    assert plain.param_groups[0]["momentum"] == 0
    assert adam.param_groups[0]["betas"] == (0.9, 0.999)


def test_one_cycle_cycles_adams_first_beta_and_leaves_adagrad_alone() -> None:
    adam = make_optimizer(Adam)
    build_scheduler("one_cycle", adam, total_ticks=TICKS)
    assert adam.param_groups[0]["betas"] == (0.95, 0.999)
    build_scheduler("one_cycle", make_optimizer(Adagrad), total_ticks=TICKS)


def test_one_cycle_takes_epochs_and_steps_per_epoch_instead_of_a_total() -> None:
    kwargs = {"epochs": 2, "steps_per_epoch": 3}
    scheduler: Any = build_scheduler("one_cycle", make_optimizer(), total_ticks=TICKS, kwargs=kwargs)
    assert scheduler.total_steps == 6


def test_cyclic_takes_the_base_rate_from_the_given_maximum() -> None:
    optimizer = make_optimizer()
    build_scheduler("cyclic", optimizer, total_ticks=TICKS, kwargs={"max_lr": 2.0})
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_a_builtin_function_can_be_the_lambda_and_be_saved() -> None:
    scheduler = build_scheduler("lambda", make_optimizer(), total_ticks=TICKS, kwargs={"lr_lambda": "math.cos"})
    assert scheduler.state_dict()["lr_lambdas"] == [{}]


def test_no_name_makes_torch_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, kwargs, _ in CLOSED_FORMS:
            rates(name, kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("cosin_annealing", {}, r"is not known\. Known: chainedscheduler.*Did you mean 'cosine_annealing'\?"),
        ("step", {}, r"lr_scheduler='step' needs step_size"),
        ("multi_step", {"gamma": 0.5}, r"lr_scheduler='multi_step' needs milestones"),
        ("exponential", {}, r"needs gamma"),
        ("lambda", {}, r"needs lr_lambda"),
        ("sequential", {}, r"needs milestones, schedulers"),
        (
            "step",
            {"step_size": 1, "gama": 0.1},
            r"does not take 'gama'\. It takes: gamma, step_size\. Did you mean 'gamma'",
        ),
        ("step", {"step_size": 1, "last_epoch": 3}, r"does not take 'last_epoch'"),
        ("lambda", {"lr_lambda": "slowly"}, r"lr_lambda='slowly' is not a function"),
        ("lambda", {"lr_lambda": "no_such_package.decay"}, r"lr_lambda='no_such_package.decay'.*cannot be imported"),
        ("reduce_on_plateau", {"factor": 2.0}, r"cannot be built: Factor should be < 1.0"),
        ("no_such_package.Decay", {}, r"cannot be imported"),
        (f"{__name__}.no_scheduler", {}, r"built a str\. Expected a schedule's name"),
        (f"{__name__}.RATE", {}, r"is a float, which cannot be called"),
        ("sequential", {"schedulers": [{"name": "linear"}], "milestones": [1]}, r"1 schedulers and 1 milestones"),
        ("sequential", {"schedulers": [], "milestones": []}, r"is empty"),
        ("sequential", {"schedulers": ["linear"], "milestones": []}, r"Expected \{'name': \.\.\., 'kwargs'"),
        ("sequential", {"schedulers": "linear", "milestones": []}, r"Expected a list"),
        ("sequential", {"schedulers": [{"name": "linear"}], "milestones": [5, 5]}, r"rising order"),
        ("sequential", {"schedulers": [{"name": "one_cycle"}], "milestones": []}, r"'one_cycle' cannot be a part"),
        ("sequential", {"schedulers": [{"name": "reduce_on_plateau"}], "milestones": []}, r"cannot be a part"),
        ("sequential", {"schedulers": [{"name": "step"}], "milestones": []}, r"lr_scheduler='step' needs step_size"),
        ("sequential", {"schedulers": [{"name": "decay_when_acc"}], "milestones": []}, r"cannot be a part"),
        ("sequential", {"schedulers": [{"name": "DecayWhenEpoch"}], "milestones": []}, r"cannot be a part"),
        ("ChainedScheduler", {"schedulers": [{"name": "triangular"}]}, r"triangular cannot be a part of it"),
    ],
)
def test_what_cannot_work_is_told_when_it_is_built(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, make_optimizer(), total_ticks=TICKS, kwargs=kwargs)
