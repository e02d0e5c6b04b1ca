"""The static lists of names are those of the installed packages."""

from __future__ import annotations

import inspect

import torch
from accelerate.utils import LoggerType

from hezar_train.config import names


def test_optimizers_are_those_of_torch() -> None:
    base = torch.optim.Optimizer
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    assert set(names.OPTIMIZERS) == {name for name, cls in classes if issubclass(cls, base) and cls is not base}


def test_schedulers_are_those_of_torch() -> None:
    assert set(names.SCHEDULERS) == set(torch.optim.lr_scheduler.__all__) - {"LRScheduler"}


def test_losses_are_those_of_torch() -> None:
    assert set(names.LOSSES) == {name for name in dir(torch.nn) if name.endswith("Loss")}


def test_trackers_are_those_of_accelerate() -> None:
    assert set(names.TRACKERS) == {str(tracker.value) for tracker in LoggerType} - {"all"}


def test_lists_are_sorted_and_without_doubles() -> None:
    for listed in (names.OPTIMIZERS, names.SCHEDULERS, names.LOSSES, names.TRACKERS, names.DEVICES):
        assert list(listed) == sorted(set(listed))


def test_only_an_import_path_is_a_dotted_path() -> None:
    assert [names.is_dotted_path(name) for name in ("a.B", "a.b.C", "adam", "adam.", ".adam", "a b.C", "0.5")] == [
        *(True, True, False, False, False, False, False)
    ]
