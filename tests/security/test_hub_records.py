"""Logs and evaluations that come from the Hub: those that their manifest proves, and none that decides anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from hezar_train.hub import fetch_records, push_run
from tests.hub.conftest import hub as hub  # noqa: PLC0414 - the fixture
from tests.hub.runs import LOGS, PUSHED_LOGS, REPO, HandmadeRun, finished_run
from tests.hub.server import LoopbackHub

ADDRESS = f"hub://{REPO}"
FORGED = json.dumps({"step": 5, "epoch": 1, "metrics": {"accuracy": 1.0}}).encode()


@pytest.fixture
def pushed(tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> HandmadeRun:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    run = finished_run(tmp_path / "first")
    push_run(run.root, REPO, strategy="every_save")
    return run


def commit(*operations: CommitOperationAdd | CommitOperationDelete) -> None:
    HfApi().create_commit(REPO, list(operations), commit_message="planted")


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def at_home(name: str) -> str:
    """Return what a pushed file is called in the run: there, the host is named."""
    return name.replace(f"logs/{PUSHED_LOGS}/", f"logs/{LOGS}/")


def test_records_come_as_they_were_pushed(pushed: HandmadeRun, tmp_path: Path) -> None:
    fetch_records(ADDRESS, tmp_path / "new")
    found = names(tmp_path / "new")
    assert {f"logs/{PUSHED_LOGS}/metrics.json", "evaluations/00000005.json", "evaluations/00000010.json"} <= found
    kept = {name for name in found if "tfevents" not in name}  # whose names hold the host in another place
    assert all((tmp_path / "new" / name).read_bytes() == (pushed.root / at_home(name)).read_bytes() for name in kept)


@pytest.mark.parametrize("name", ["evaluations/00000005.json", f"logs/{PUSHED_LOGS}/metrics.json"])
def test_a_forged_record_is_left_out_and_told(
    pushed: HandmadeRun, tmp_path: Path, name: str, warnings_of: Callable[[], str]
) -> None:
    honest = (pushed.root / at_home(name)).read_bytes()
    commit(CommitOperationAdd(f"train/{name}", honest[:-9] + b"123456789"))
    fetch_records(ADDRESS, tmp_path / "new")
    assert name not in names(tmp_path / "new")
    assert "is not what its manifest.json says" in warnings_of()


def test_a_record_of_another_size_or_without_a_place_in_the_manifest_is_left_out(
    pushed: HandmadeRun, tmp_path: Path
) -> None:
    commit(
        CommitOperationAdd("train/evaluations/00000005.json", FORGED),
        CommitOperationAdd("train/evaluations/00000007.json", FORGED),
    )
    fetch_records(ADDRESS, tmp_path / "new")
    assert {name for name in names(tmp_path / "new") if name.startswith("eval")} == {"evaluations/00000010.json"}


def test_without_a_manifest_no_record_is_used(
    pushed: HandmadeRun, tmp_path: Path, warnings_of: Callable[[], str]
) -> None:
    commit(CommitOperationDelete("train/manifest.json"))
    assert fetch_records(ADDRESS, tmp_path / "new") == []
    assert "are not used" in warnings_of()


def test_an_evaluation_that_is_still_to_be_done_is_not_taken_from_a_record(pushed: HandmadeRun, tmp_path: Path) -> None:
    fetch_records(ADDRESS, tmp_path / "new", before_step=10)
    assert {name for name in names(tmp_path / "new") if name.startswith("eval")} == {"evaluations/00000005.json"}
