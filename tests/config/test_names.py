"""The static lists of names are those of the installed packages; other systems' names are spellings of ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from accelerate.utils import LoggerType

from hezar_train.config import TrainerConfig, names
from hezar_train.errors import ConfigError
from hezar_train.trainer.loss_refusals import refuse_needy_criterion
from hezar_train.trainer.model_runner import build_criterion


def test_optimizers_are_those_of_torch() -> None:
    base = torch.optim.Optimizer
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    assert set(names.OPTIMIZERS) == {name for name, cls in classes if issubclass(cls, base) and cls is not base}


def test_schedulers_are_those_of_torch() -> None:
    assert set(names.SCHEDULERS) == set(torch.optim.lr_scheduler.__all__) - {"LRScheduler"}


def test_losses_are_those_of_torch() -> None:
    every = {name for name in dir(torch.nn) if name.endswith("Loss")}
    assert {*names.LOSSES, *names.NEEDY_LOSSES} == every
    assert {name for name in every if _is_usable(name)} == set(names.LOSSES)


def _is_usable(name: str) -> bool:
    try:
        refuse_needy_criterion(name, build_criterion(name))
    except ConfigError:
        return False
    return True


def test_trackers_are_those_of_accelerate() -> None:
    assert set(names.TRACKERS) == {str(tracker.value) for tracker in LoggerType} - {"all"}


def test_lists_are_sorted_and_without_doubles() -> None:
    for listed in (names.OPTIMIZERS, names.SCHEDULERS, names.LOSSES, names.NEEDY_LOSSES, names.TRACKERS, names.DEVICES):
        assert list(listed) == sorted(set(listed))


def test_only_an_import_path_is_a_dotted_path() -> None:
    assert [names.is_dotted_path(name) for name in ("a.B", "a.b.C", "adam", "adam.", ".adam", "a b.C", "0.5")] == [
        *(True, True, False, False, False, False, False)
    ]


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("TriangularScheduler", "triangular"),
        ("warmupcosinelr", "warmup_cosine"),
        ("WarmupStepLR", "warmup_step"),
        ("StepLR", "StepLR"),
        ("Warmup_Noam", "warmup_noam"),
        ("WarmRestartScheduler", "warm_restarts"),
        ("CosineAnnealingWarmRestarts", "CosineAnnealingWarmRestarts"),
    ],
)
def test_class_names_of_other_systems_are_spellings_of_ours(given: str, short: str) -> None:
    assert names.scheduler_name(given) == short
    assert TrainerConfig("run", lr_scheduler=given).scheduler_name == short


def test_no_class_of_another_system_hides_one_of_torch() -> None:
    assert not {name.lower() for name in names.SCHEDULER_CLASSES} & {name.lower() for name in names.SCHEDULERS}
    assert set(names.CURVES) < set(names.SHORT_SCHEDULERS)


def test_a_momentum_follows_curves_only() -> None:
    assert TrainerConfig("run", momentum_scheduler="InvTriangularScheduler").momentum_scheduler
    for wrong in ("StepLR", "my_package.Schedule", "triangulr", 3):
        with pytest.raises(ConfigError, match="momentum_scheduler"):
            TrainerConfig("run", momentum_scheduler=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"momentum": 1.0}, "momentum=1.0 must be below 1"),
        ({"momentum": -0.5}, "momentum=-0.5 must not be negative"),
        ({"momentum": "x"}, "momentum: expected a number, got str 'x'"),
        (
            {"momentum": 0.9, "optimizer_kwargs": {"betas": [0.9, 0.99]}},
            "optimizer_kwargs['betas'] contradicts momentum=0.9: give one of the two",
        ),
        ({"weight_decay_norm": -1.0}, "weight_decay_norm=-1.0 must not be negative"),
        ({"weight_decay_bias": "x"}, "weight_decay_bias: expected a number, got str 'x'"),
    ],
)
def test_a_wrong_momentum_or_decay_is_told(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig("run", **fields)
    assert caught.value.problems == [problem]
