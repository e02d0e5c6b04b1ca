"""Logs and evaluations that come from the Hub: those that their manifest proves, and none that decides anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from hezar_train import Hook
from hezar_train.errors import CheckpointError
from hezar_train.hub import fetch_records, push_run
from tests.hub.conftest import hub as hub  # noqa: PLC0414 - the fixture
from tests.hub.runs import LOGS, PUSHED_LOGS, REPO, HandmadeRun, finished_run
from tests.hub.server import LoopbackHub
from tests.security.hostile import add_tensor, edit_state, make_trainer, newest

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


def test_a_download_s_folder_has_a_name_that_nobody_can_guess(
    pushed: HandmadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[set[str]] = []
    rename = os.rename

    def noted(source: Path, target: Path) -> None:
        drafts[-1] |= {part for part in Path(source).parts if part.startswith(".tmp-")}
        rename(source, target)

    monkeypatch.setattr(os, "rename", noted)
    for name in ("one", "two"):
        drafts.append(set())
        fetch_records(ADDRESS, tmp_path / name)
    assert [len(names) for names in drafts] == [1, 1]
    assert drafts[0] != drafts[1]


@pytest.fixture
def pushed_run(run: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained run, of which a test changes something and pushes it with every hash in order."""
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return run


class BestReader(Hook):
    """Read what a run says of its best result when it begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: list[dict[str, Any]] = []

    def before_train(self) -> None:
        self.found.append(json.loads(self._path.read_text()))


def test_a_resume_from_the_hub_takes_neither_a_due_evaluation_nor_a_best_result_from_records(
    pushed_run: Path, tmp_path: Path
) -> None:
    (pushed_run / "evaluations").mkdir()
    for step in (8, 12):
        (pushed_run / "evaluations" / f"{step:08d}.json").write_bytes(FORGED)
    (pushed_run / "best.json").write_text(json.dumps({"step": 12, "metric": "evaluation.accuracy", "value": 1.0}))
    push_run(pushed_run, REPO, strategy="every_save")
    trainer = make_trainer(tmp_path / "new", resume_from_checkpoint=ADDRESS, num_epochs=3, accept_changes=True)
    assert {path.name for path in (tmp_path / "new" / "evaluations").iterdir()} == {"00000008.json"}
    reader, best_of_checkpoint = BestReader(tmp_path / "new" / "best.json"), trainer.state.best_metric_value
    trainer.register_hooks([reader])
    trainer.train()
    assert trainer.state.global_step == 18
    assert [(one["metric"], one["value"]) for one in reader.found] == [("train.loss", best_of_checkpoint)]


def test_a_checkpoint_of_pointers_on_the_hub_is_refused_and_does_not_stay(pushed_run: Path, tmp_path: Path) -> None:
    add_tensor(newest(pushed_run), "evil", torch.zeros(8, dtype=torch.uint8))
    hostile = {"$array": {"tensor": "evil", "dtype": "|O", "shape": [1]}}
    edit_state(newest(pushed_run), lambda sections: sections["extra"].update(measured=hostile))
    push_run(pushed_run, REPO, strategy="every_save")
    with pytest.raises(CheckpointError, match=r"dtype '\|O'"):
        make_trainer(tmp_path / "new", resume_from_checkpoint=ADDRESS)
    assert list((tmp_path / "new" / "checkpoints").iterdir()) == []
