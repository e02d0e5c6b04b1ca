"""The push that blocks: one commit with the expected files, whatever the server does on the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from hezar_train.errors import ConfigError, HubError
from hezar_train.hub import HubRecord, Pace, push_run
from tests.hub.runs import REPO, HandmadeRun, finished_run
from tests.hub.server import LoopbackHub

QUICK = Pace(first_seconds=0.02)
ROUTES = ["create", "info", "resolve", "validate_yaml", "preupload", "lfs_batch", "lfs_put", "lfs_verify", "commit"]


@pytest.fixture
def run(tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> HandmadeRun:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return finished_run(tmp_path / "run")


@pytest.fixture
def plain_lfs(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


def titles(hub: LoopbackHub, revision: str = "main") -> list[str]:
    return [commit.title for commit in hub.commits(REPO, revision)][:-1]  # the last is the server's own


def test_a_push_is_one_commit_and_comes_back_byte_by_byte(
    hub: LoopbackHub, run: HandmadeRun, tmp_path: Path, with_xet: bool
) -> None:
    done = push_run(run.root, REPO, commit_message="first", strategy="every_save")
    assert titles(hub) == ["first"]
    assert (done.oid, done.step, done.attempts) == (hub.commits(REPO)[0].id, 10, 1)
    assert str(done.url).endswith(str(done.oid))
    copy = Path(snapshot_download(REPO, local_dir=tmp_path / "copy"))
    for path in run.store.path(10).rglob("*"):
        if path.is_file():
            name = path.relative_to(run.store.path(10))
            assert (copy / "checkpoints" / "last" / name).read_bytes() == path.read_bytes()
    assert (copy / "model.safetensors").read_bytes() == (run.store.path(10) / "model.safetensors").read_bytes()
    assert not list((run.root / ".hub").iterdir())


def test_what_is_not_given_is_as_the_config_says(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    settings = {"hub_model_id": "tester/own", "hub_strategy": "best", "hub_revision": "dev"}
    run = finished_run(tmp_path / "run", hub_card={"license": "mit"}, **settings)
    done = push_run(run.root)
    assert (done.repo_id, done.revision, done.step, done.strategy) == ("tester/own", "dev", 5, "best")
    files = hub.files("tester/own", "dev")
    assert files["model.safetensors"] == (run.store.path(5) / "model.safetensors").read_bytes()
    assert b"license: mit" in files["README.md"]
    assert hub.files("tester/own") == {}


def test_a_second_push_sends_what_changed_and_deletes_only_its_own_files(hub: LoopbackHub, run: HandmadeRun) -> None:
    run.save(11, folders={"preprocessor": lambda folder: (folder / "old.txt").write_text("old")})
    push_run(run.root, REPO, strategy="every_save")
    from huggingface_hub import upload_file

    upload_file(path_or_fileobj=b"mine", path_in_repo="checkpoints/last/notes.md", repo_id=REPO)
    run.save(12)
    push_run(run.root, REPO, strategy="every_save")
    names = {name for name in hub.files(REPO) if name.startswith("checkpoints/")}
    assert "checkpoints/last/preprocessor/old.txt" not in names
    assert {"checkpoints/last/preprocessor/vocab.txt", "checkpoints/last/notes.md"} <= names
    assert "old.txt" in hub.files(REPO)  # at the root nothing says whose it is
    assert titles(hub)[0] == "Step 12"


def test_all_checkpoints_keeps_those_that_retention_deleted_here(hub: LoopbackHub, run: HandmadeRun) -> None:
    assert push_run(run.root, REPO, strategy="all_checkpoints").checkpoints == [5, 10]
    run.save(15)
    run.store.prune(keep=2)
    hub.requests.clear()
    assert push_run(run.root, REPO, strategy="all_checkpoints").checkpoints == [10, 15]
    folders = {name.split("/")[1] for name in hub.files(REPO) if name.startswith("checkpoints/")}
    assert folders == {"00000005", "00000010", "00000015"}


@pytest.mark.usefixtures("plain_lfs")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fault", [429, 500, 503, "cut", "lost"])
def test_a_fault_on_any_route_is_overcome(hub: LoopbackHub, run: HandmadeRun, route: str, fault: Any) -> None:
    if route == "resolve":  # only read where there is a card
        push_run(run.root, REPO)
        run.save(11)
    before = len(titles(hub)) if route == "resolve" else 0
    given: dict[str, Any] = {"kind": "cut", "when": "after"} if fault == "lost" else {"kind": fault}
    if fault in {429, 503}:
        given["retry_after"] = 0
    hub.faults.set(route, given.pop("kind"), times=2 if route in {"create", "commit"} else 1, **given)
    done = push_run(run.root, REPO, pace=QUICK)
    assert done.outcome == "done"
    assert any(request.fault for request in hub.requests)
    assert len(titles(hub)) == before + 1
    assert hub.commits(REPO)[0].id == done.oid
    newest = run.store.path(run.store.steps()[-1])
    assert hub.files(REPO)["model.safetensors"] == (newest / "model.safetensors").read_bytes()


@pytest.mark.parametrize("fault", [429, 500, 503, "cut"])
def test_a_fault_where_xet_gives_its_token_is_overcome(hub: LoopbackHub, run: HandmadeRun, fault: Any) -> None:
    hub.faults.set("xet_token", fault, times=1)
    assert push_run(run.root, REPO, pace=QUICK).outcome == "done"
    assert any(request.fault for request in hub.requests)
    assert hub.files(REPO)["model.safetensors"] == (run.store.path(10) / "model.safetensors").read_bytes()


def test_a_dead_server_is_a_hub_error_and_the_next_push_finishes(
    hub: LoopbackHub, run: HandmadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    hub.stop()
    with caplog.at_level(logging.WARNING), pytest.raises(HubError, match="could not be made: ConnectError"):
        push_run(run.root, REPO, pace=QUICK, max_attempts=3)
    assert caplog.text.count("Trying again in") == 2
    hub.start()
    assert push_run(run.root, REPO).attempts == 1
    entries = HubRecord(run.root / "hub.json").entries()
    assert [(one["outcome"], one["attempts"]) for one in entries] == [("failed", 3), ("done", 1)]
    assert HubRecord(run.root / "hub.json").is_uploaded(10)
    assert not list((run.root / ".hub").iterdir())


@pytest.mark.parametrize(("token", "words"), [(None, "401"), ("hf_thisTokenIsNotValidAtAll", "401")])
def test_without_a_valid_token_it_fails_at_once_and_says_what_to_do(
    hub: LoopbackHub, run: HandmadeRun, token: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=words) as caught:
        push_run(run.root, REPO, pace=QUICK)
    assert "hf auth login" in str(caught.value)
    assert HubRecord(run.root / "hub.json").entries()[0]["attempts"] == 1


def test_offline_mode_is_told(run: HandmadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="Unset HF_HUB_OFFLINE"):
        push_run(run.root, REPO, pace=QUICK)


def test_a_wrong_repository_name_is_refused_before_anything_is_staged(run: HandmadeRun) -> None:
    with pytest.raises(ConfigError, match="expected owner/name"):
        push_run(run.root, "digits")
    assert not (run.root / ".hub").exists()


@pytest.mark.parametrize("fault", [401, 403, 500, "cut"])
def test_no_token_is_in_any_file_or_message(
    hub: LoopbackHub, run: HandmadeRun, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run.note_environment(command=["train.py", f"--token={hub.token}"])
    hub.faults.set("commit", fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError) as caught:
        push_run(run.root, REPO, pace=QUICK, max_attempts=2)
    hub.faults.clear()
    push_run(run.root, REPO)
    texts = [str(caught.value), caplog.text, *(str(content) for content in hub.files(REPO).values())]
    texts += [path.read_bytes().decode("latin-1") for path in run.root.rglob("*") if path.is_file()]
    assert not any(hub.token in text for text in texts)
    assert "--token=***" in json.loads((run.root / "environment.json").read_text())["starts"][-1]["command"]
