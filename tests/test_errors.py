"""An error comes out of another process as it went in: loaders, pools and Ray send their workers' as pickles."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import hezar_train
from hezar_train.errors import (
    ConfigError,
    DataError,
    HezarTrainError,
    MissingDependencyError,
    NonFiniteError,
    TrainingInterrupted,
)
from hezar_train.hub.client import HubUnreachableError

GIVEN: dict[type, tuple[Any, ...]] = {
    ConfigError: (["batch_size=0 must be positive", "seed='a' must be a number"],),
    DataError: ("a batch without labels", (3, 8)),
    HubUnreachableError: ("too many requests", 2.5),
    MissingDependencyError: ("jiwer", "metrics", "the word error rate"),
    NonFiniteError: ("the loss is nan", 12, [4, 7]),
    TrainingInterrupted: (143, "SIGTERM ended the run"),
}
"""What makes those whose constructor takes more than a message."""


def exceptions() -> list[type[BaseException]]:
    """Return every class of an exception that the package has."""
    for module in pkgutil.walk_packages(hezar_train.__path__, "hezar_train."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, left = set(), [BaseException]
    while left:
        left += (below := left.pop().__subclasses__())
        found |= {one for one in below if one.__module__.startswith("hezar_train.")}
    return sorted(found, key=lambda one: (one.__module__, one.__name__))


def same(error: BaseException) -> tuple[Any, ...]:
    """Return all that an error says."""
    special = {name: getattr(error, name, None) for name in ("code", "msg")}
    return type(error), str(error), error.args, vars(error), special


def test_every_exception_of_the_package_survives_a_pickle_with_all_it_says() -> None:
    found = exceptions()
    assert len(found) > 15
    for kind in found:
        error = kind(*GIVEN.get(kind, ("what was given, and what to do",)))
        error.add_note("seen on worker 1")
        for sent in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert same(sent) == same(error)


def test_every_constructor_with_more_than_a_message_is_tried() -> None:
    own = {kind for kind in exceptions() if "__init__" in vars(kind)}
    assert own == set(GIVEN)


class OfAUserError(HezarTrainError):
    """One of a user's own, below ours, with a constructor that keeps nothing of what it is given."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(f"{folder} has {size} files")


def test_a_users_own_error_below_ours_survives_a_pickle() -> None:
    error = OfAUserError(Path("data"), 3)
    assert same(pickle.loads(pickle.dumps(error))) == same(error)


def test_what_was_told_of_a_config_is_still_one_list_of_problems() -> None:
    sent = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert sent.problems == ["one", "two"]
    assert str(sent).startswith("2 problems:")


def test_an_interrupted_run_leaves_with_its_code_on_the_other_side() -> None:
    sent = pickle.loads(pickle.dumps(TrainingInterrupted(130, "Ctrl-C")))
    with pytest.raises(SystemExit) as left:
        raise sent
    assert left.value.code == 130
