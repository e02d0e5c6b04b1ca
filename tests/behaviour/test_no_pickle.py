"""No pickle is ever written or read: loading one can run anybody's code."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from workload import CrashAt, crash, differences, make_trainer

CLASSES = ("Unpickler", "_Unpickler", "Pickler", "_Pickler")
FUNCTIONS = ("load", "loads", "_load", "_loads", "dump", "dumps", "_dump", "_dumps")
MANY_PARAMETERS = 10_000


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a pickle was touched")


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every way to read or write a pickle raise."""
    for name in CLASSES:  # still classes, because torch makes subclasses of them when it is first used
        monkeypatch.setattr(pickle, name, type(name, (getattr(pickle, name),), {"__init__": refuse}))
    for name in FUNCTIONS:
        monkeypatch.setattr(pickle, name, refuse)
    for module in (torch, torch.serialization):
        monkeypatch.setattr(module, "load", refuse)
        monkeypatch.setattr(module, "save", refuse)


@pytest.mark.usefixtures("no_pickle")
def test_the_fixture_refuses_what_it_should() -> None:
    for read in (pickle.loads, pickle.Unpickler, torch.load):
        with pytest.raises(AssertionError, match="a pickle was touched"):
            read(b"")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("async_save", [True, False])
def test_save_and_resume_touch_no_pickle(tmp_path: Path, async_save: bool) -> None:
    make_trainer(tmp_path / "unbroken", ballast=MANY_PARAMETERS, async_save=async_save).train()
    hooks = [CrashAt(12, "on_batch_start")]
    crash(make_trainer(tmp_path / "broken", ballast=MANY_PARAMETERS, async_save=async_save, hooks=hooks))
    trainer = make_trainer(tmp_path / "broken", ballast=MANY_PARAMETERS, async_save=async_save)
    assert trainer.state.global_step == 11
    trainer.train()
    trainer.save(tmp_path / "export")
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []


@pytest.mark.usefixtures("no_pickle")
def test_the_first_weights_come_without_a_pickle(tmp_path: Path) -> None:
    make_trainer(tmp_path / "first").train()
    trainer = make_trainer(tmp_path / "second", init_weights_from=tmp_path / "first")
    assert trainer.model.state_dict().keys() == make_trainer(tmp_path / "third").model.state_dict().keys()


def test_no_file_of_a_run_is_a_pickle(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run")
    trainer.train()
    trainer.save(tmp_path / "export")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 30
    assert [path for path in files if _is_pickle(path)] == []


def test_the_last_test_knows_a_pickle_when_it_sees_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a": 1}, tmp_path / "b")
    assert _is_pickle(tmp_path / "a")
    assert _is_pickle(tmp_path / "b")


def _is_pickle(path: Path) -> bool:
    content = path.read_bytes()
    if content.startswith(b"PK"):  # torch wraps them in an archive
        return True
    try:
        return len(list(pickletools.genops(content))) > 1
    except ValueError:
        return False
