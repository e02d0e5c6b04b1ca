"""What comes from the Hub is proven before it is believed; a repository that tries tricks is refused in a sentence."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from safetensors.torch import save_file

from hezar_train.checkpoint import Checkpoint, CheckpointStore
from hezar_train.errors import CheckpointError, ConfigError, HezarTrainError, HubError
from hezar_train.hub import (
    fetch_checkpoint,
    fetch_file,
    fetch_recipe,
    fetch_records,
    fetch_weights,
    push_files,
    push_run,
)
from hezar_train.hub.fetch import named_code
from tests.hub.runs import LOGS, PUSHED_LOGS, REPO, HandmadeRun, finished_run
from tests.hub.server import LoopbackHub

ADDRESS = f"hub://{REPO}"
LAST = "checkpoints/last"


@pytest.fixture
def run(tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> HandmadeRun:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return finished_run(tmp_path / "run")


@pytest.fixture
def pushed(hub: LoopbackHub, run: HandmadeRun) -> HandmadeRun:
    push_run(run.root, REPO, strategy="every_save")
    return run


def upload(files: dict[str, bytes]) -> None:
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    HfApi().create_commit(REPO, operations, commit_message="planted")


def manifest_with(hub: LoopbackHub, change: Any) -> bytes:
    """Return the pushed manifest, changed, with a hash that fits."""
    content = json.loads(hub.files(REPO)[f"{LAST}/manifest.json"])
    del content["sha256"]
    change(content)
    body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**content, "sha256": hashlib.sha256(body).hexdigest()}).encode()


def record_of(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetched_checkpoint_is_the_pushed_one_byte_by_byte(
    hub: LoopbackHub, run: HandmadeRun, tmp_path: Path
) -> None:
    push_run(run.root, REPO, strategy="every_save")
    found = fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert found == tmp_path / "new" / "00000010"
    assert everything(found) == everything(run.store.path(10))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["00000010"]
    opened, rejected = CheckpointStore(tmp_path / "new").newest()
    assert (opened.step, rejected) == (10, [])  # type: ignore[union-attr]


def test_steps_and_revisions_are_found(hub: LoopbackHub, run: HandmadeRun, tmp_path: Path) -> None:
    first = push_run(run.root, REPO, strategy="all_checkpoints")
    run.save(15)
    push_run(run.root, REPO, strategy="every_save")
    assert fetch_checkpoint(ADDRESS, tmp_path / "a").name == "00000015"
    assert fetch_checkpoint(f"{ADDRESS}#5", tmp_path / "a").name == "00000005"
    assert fetch_checkpoint(f"{ADDRESS}#15", tmp_path / "b").name == "00000015"
    assert fetch_checkpoint(f"{ADDRESS}@{first.oid}", tmp_path / "b").name == "00000010"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .* It has the steps 5, 10, 15"):
        fetch_checkpoint(f"{ADDRESS}#7", tmp_path / "b")


def test_what_is_on_disk_is_not_downloaded_again(hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path) -> None:
    found = fetch_checkpoint(ADDRESS, tmp_path / "new")
    hub.requests.clear()
    assert fetch_checkpoint(ADDRESS, tmp_path / "new") == found
    assert not any("safetensors" in request.path for request in hub.requests)
    (found / "model.safetensors").write_bytes(b"damaged")
    assert everything(fetch_checkpoint(ADDRESS, tmp_path / "new")) == everything(pushed.store.path(10))
    assert [path.name for path in (tmp_path / "new").glob(".damaged-*")] == [".damaged-00000010-1"]


def test_another_run_s_checkpoint_is_not_overwritten(pushed: HandmadeRun, tmp_path: Path) -> None:
    other = HandmadeRun(tmp_path / "other", width=5)
    other.save(10)
    with pytest.raises(CheckpointError, match="another checkpoint of the same step"):
        fetch_checkpoint(ADDRESS, other.root / "checkpoints")
    assert Checkpoint(other.store.path(10)).step == 10


def test_a_repository_without_checkpoints_says_what_to_do(run: HandmadeRun, tmp_path: Path) -> None:
    push_run(run.root, REPO, strategy="end")
    with pytest.raises(CheckpointError, match="hub_strategy='every_save'"):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    with pytest.raises(HubError, match="nobody/nothing could not be read"):
        fetch_checkpoint("hub://nobody/nothing", tmp_path / "new")


EVIL_NAMES = [
    "../evil.json", "preprocessor/../../evil.json", "/tmp/evil.json", "a\\..\\evil.json", "C:evil.json", "./evil.json",
    "a//evil.json", ".hidden/evil.json", "evil.json\n", "evil.json ", "manifest.json", "MODEL.safetensors",
]  # fmt: skip
CODE_NAMES = ["evil.pkl", "evil.pt", "preprocessor/evil.py", "evil.BIN", "pytorch_model.bin", "evil.ckpt", "evil.so"]


@pytest.mark.parametrize("name", [*EVIL_NAMES, *CODE_NAMES])
def test_a_manifest_that_names_anything_but_plain_data_is_refused(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path, name: str
) -> None:
    evil = pickle.dumps("evil")
    upload({f"{LAST}/manifest.json": manifest_with(hub, lambda one: one["files"].update({name: record_of(evil)}))})
    before = everything(tmp_path / "run")
    hub.requests.clear()
    with pytest.raises(CheckpointError) as caught:
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert any(words in str(caught.value) for words in ("which is refused", "lists one file twice, or itself"))
    assert list((tmp_path / "new").iterdir()) == []
    assert everything(tmp_path / "run") == before
    assert not (tmp_path / "evil.json").exists()
    fetched = {request.path for request in hub.requests if request.route == "resolve"}
    assert all(path.endswith("manifest.json") for path in fetched)


def test_a_planted_pickle_with_a_true_hash_is_refused_and_never_loaded(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    evil = pickle.dumps(Evil())
    changed = manifest_with(hub, lambda one: one["files"].update({"extra.pkl": record_of(evil)}))
    upload({f"{LAST}/extra.pkl": evil, f"{LAST}/manifest.json": changed})
    with pytest.raises(CheckpointError, match="may be a pickle or code"):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def test_files_that_no_manifest_lists_are_left_where_they_are(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path
) -> None:
    upload({f"{LAST}/stray.pkl": b"x", f"{LAST}/code.py": b"raise SystemExit", "modeling.py": b"raise SystemExit"})
    assert everything(fetch_checkpoint(ADDRESS, tmp_path / "new")) == everything(pushed.store.path(10))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.update(step="10"),
        lambda one: one.update(step=-1),
        lambda one: one.update(files=[]),
        lambda one: one["files"].update({"x.json": {"size": 1}}),
        lambda one: one["files"].update({"x.json": {"size": "1", "sha256": "a" * 64}}),
        lambda one: one["files"].update({"x.json": {"size": 1, "sha256": "../x"}}),
        lambda one: one["files"].update({"model.safetensors": {"size": 1, "sha256": "a" * 64}}),
        lambda one: one["files"].pop("model.safetensors"),
        lambda one: one.update(format=99),
    ],
)
def test_a_manifest_of_another_form_is_refused(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path, change: Any
) -> None:
    upload({f"{LAST}/manifest.json": manifest_with(hub, change)})
    with pytest.raises(CheckpointError, match=ADDRESS):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[]", b"not json", b'{"step": 1}', b"[" * 100_000])
def test_a_manifest_that_is_none_is_refused(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path, content: bytes
) -> None:
    upload({f"{LAST}/manifest.json": content})
    with pytest.raises(CheckpointError, match=ADDRESS):
        fetch_checkpoint(ADDRESS, tmp_path / "new")


def test_changed_content_is_refused(hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path) -> None:
    content = bytearray(hub.files(REPO)[f"{LAST}/optimizer.safetensors"])
    content[-1] ^= 1
    upload({f"{LAST}/optimizer.safetensors": bytes(content)})
    with pytest.raises(CheckpointError, match=r"is not what its manifest says: optimizer\.safetensors does not match"):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_link_in_the_way_is_not_followed(hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "00000010").symlink_to(tmp_path / "outside", target_is_directory=True)
    assert fetch_checkpoint(ADDRESS, tmp_path / "new").name == "00000010"
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize(
    "state",
    [
        {"files": {"../precious.txt": 0}},
        {"files": {"/etc/passwd": 0}},
        {"files": {"logs\\..\\x": 0}},
        {"files": ["logs/x"]},
        {"logs_dir": "../../logs"},
        {"logs_dir": 3},
    ],
)
def test_a_state_that_names_files_outside_the_run_is_refused(
    hub: LoopbackHub, run: HandmadeRun, tmp_path: Path, state: dict[str, Any]
) -> None:
    run.save(20, state=state)
    push_run(run.root, REPO, strategy="every_save")
    with pytest.raises(CheckpointError, match="it is outside the run"):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "evil.module.Optimizer"},
        {"lr_scheduler": "evil.module.schedule"},
        {"criterion": "os.system"},
        {"lr_scheduler": "lambda", "lr_scheduler_kwargs": {"lr_lambda": "evil.module.rate"}},
    ],
)
def test_a_config_that_names_foreign_code_is_refused_unless_one_s_own_names_it(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run = finished_run(tmp_path / "run", **settings)
    push_run(run.root, REPO, strategy="every_save")
    with pytest.raises(ConfigError, match=r"names code, .* That is refused"):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    found = fetch_checkpoint(ADDRESS, tmp_path / "new", own_config=run.config.to_dict())
    assert found.name == "00000010"


def test_classes_of_torch_and_of_this_package_are_not_foreign() -> None:
    known = {"optimizer": "torch.optim.AdamW", "lr_scheduler": "torch.optim.lr_scheduler.StepLR"}
    others = {"criterion": "CrossEntropyLoss", "output_dir": "runs.v1", "metric_for_best_model": "evaluation.f1"}
    assert named_code({**known, **others, "seed": 1, "metrics": ["f1", {"name": "accuracy"}]}) == set()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"optimizer_kwargs": {"a": ["x.y", 1]}, "metrics": [{"name": "m.n"}]}, {"x.y", "m.n"}),
        ({"optimizer": "torch.hub.load"}, {"torch.hub.load"}),
        ({"criterion": "torch.nn.parallel.distributed.os.system"}, {"torch.nn.parallel.distributed.os.system"}),
        ({"metrics": ["evaluate:evil/metric"]}, {"evaluate:evil/metric"}),
        ({"generation_kwargs": {"custom_generate": "evil/repo"}}, {"custom_generate='evil/repo'"}),
        ({"generation_kwargs": {"trust_remote_code": True}}, {"trust_remote_code=True"}),
    ],
)
def test_every_way_to_foreign_code_is_seen(config: dict[str, Any], found: set[str]) -> None:
    assert named_code(config) == found


def test_records_are_fetched_where_they_are_missing(hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path) -> None:
    new = tmp_path / "new"
    (new / "evaluations").mkdir(parents=True)
    (new / "evaluations" / "00000005.json").write_text("mine")
    upload({"train/logs/evil.py": b"x"})
    fetch_records(ADDRESS, new)
    assert (new / "evaluations" / "00000005.json").read_text() == "mine"
    logs = (new / "logs" / PUSHED_LOGS / "metrics.json").read_bytes()
    assert logs == (pushed.root / "logs" / LOGS / "metrics.json").read_bytes()
    assert not (new / "logs" / "evil.py").exists()
    assert not list(new.glob(".tmp-*"))


def test_weights_are_the_safetensors_at_the_root(pushed: HandmadeRun) -> None:
    found = fetch_weights(REPO)
    assert found.read_bytes() == (pushed.store.path(10) / "model.safetensors").read_bytes()
    assert fetch_weights(f"{REPO}@main") == found


def test_weights_in_several_files_come_with_their_index(hub: LoopbackHub, run: HandmadeRun, tmp_path: Path) -> None:
    HfApi().create_repo(REPO)
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    part = (tmp_path / "one.safetensors").read_bytes()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"model.safetensors.index.json": json.dumps(index).encode()}
    upload(files | dict.fromkeys(index["weight_map"].values(), part))
    found = fetch_weights(REPO)
    assert found.name == "model.safetensors.index.json"
    assert (found.parent / "model-00002-of-00002.safetensors").read_bytes() == part


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "x.bin", "sub/x.safetensors", 3])
def test_an_index_that_names_anything_else_is_refused(hub: LoopbackHub, run: HandmadeRun, name: Any) -> None:
    HfApi().create_repo(REPO)
    upload({"model.safetensors.index.json": json.dumps({"weight_map": {"a": name}}).encode(), "x.bin": b"x"})
    with pytest.raises(HezarTrainError, match="expected safetensors files at the root"):
        fetch_weights(REPO)


def test_a_pickle_at_the_root_is_refused_with_a_way_out(hub: LoopbackHub, run: HandmadeRun) -> None:
    HfApi().create_repo(REPO)
    upload({"pytorch_model.bin": b"x"})
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin, which looks like a pickle"):
        fetch_weights(REPO)
    with pytest.raises(CheckpointError, match="may be a pickle"):
        fetch_file(REPO, "pytorch_model.bin")


def test_a_repository_of_hezars_gives_its_weights_beside_its_config(hub: LoopbackHub, run: HandmadeRun) -> None:
    HfApi().create_repo(REPO)
    upload({"model.pt": b"x"})
    with pytest.raises(CheckpointError, match=r"only model.pt, which looks like a pickle"):
        fetch_weights(REPO)
    upload({"model_config.yaml": b"name: bert_text_classification\n"})
    found = fetch_weights(REPO)
    assert found.name == "model.pt"
    assert (found.parent / "model_config.yaml").is_file()


def recipe_files(config: str = "seed: 3\n", **record: Any) -> dict[str, Path | bytes]:
    content = {"path": "/x", "config": "config.yaml", "sha256": "ab" * 32, "options": {"width": 2}, **record}
    return {"train/train_config.yaml": config.encode(), "train/recipe.json": json.dumps(content).encode()}


def test_a_recipe_is_fetched_without_what_belongs_to_its_owner_s_machine(run: HandmadeRun) -> None:
    config = "output_dir: /etc\nlogs_dir: ../..\nseed: 3\npush_to_hub: true\nhub_model_id: a/b\ntrackers: [wandb]\n"
    commit = push_files(recipe_files(config), REPO, commit_message="x")
    found = fetch_recipe(REPO)
    assert (found.fields, found.sha256, found.options) == ({"seed": 3}, "ab" * 32, {"width": 2})
    assert found.commit == commit.oid


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (recipe_files("optimizer: evil.module.Optimizer\n"), "That is refused"),
        (recipe_files("init_weights_from: /home/them/w\n"), "which only its owner has"),
        (recipe_files(sha256="../x"), "not of the form"),
        (recipe_files(options="rm"), "not of the form"),
        (recipe_files("!!python/object/apply:os.system [ls]"), "could not determine a constructor"),
        ({"train/train_config.yaml": b"seed: 3\n"}, "has no train/recipe.json"),
    ],
)
def test_a_recipe_that_cannot_be_trusted_is_refused(
    run: HandmadeRun, files: dict[str, Path | bytes], words: str
) -> None:
    push_files(files, REPO, commit_message="x")
    with pytest.raises(ConfigError, match=words):
        fetch_recipe(REPO)


def test_a_config_is_fetched_as_a_file(pushed: HandmadeRun) -> None:
    found = fetch_file(REPO, "train/train_config.yaml")
    assert found.read_bytes() == (pushed.root / "train_config.yaml").read_bytes()


@pytest.mark.parametrize(("route", "fault"), [("info", 500), ("info", "cut"), ("resolve", 401), ("lfs_get", 404)])
def test_a_server_that_fails_is_a_hub_error_and_leaves_nothing_behind(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path, route: str, fault: Any
) -> None:
    hub.faults.set(route, fault)
    with pytest.raises(HubError, match=REPO):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert not list((tmp_path / "new").glob("*"))
    hub.faults.clear()
    assert everything(fetch_checkpoint(ADDRESS, tmp_path / "new")) == everything(pushed.store.path(10))


@pytest.mark.parametrize("fault", [500, "cut", "wrong_hash"])
def test_a_download_that_breaks_once_never_becomes_a_wrong_checkpoint(
    hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path, fault: Any
) -> None:
    hub.faults.set("lfs_get", fault, times=1)
    try:
        found = fetch_checkpoint(ADDRESS, tmp_path / "new")
    except HezarTrainError:
        assert not list((tmp_path / "new").iterdir())
        found = fetch_checkpoint(ADDRESS, tmp_path / "new")
    assert everything(found) == everything(pushed.store.path(10))


def test_a_dead_server_is_a_hub_error(hub: LoopbackHub, pushed: HandmadeRun, tmp_path: Path) -> None:
    hub.stop()
    with pytest.raises(HubError, match="could not be read: ConnectError"):
        fetch_checkpoint(ADDRESS, tmp_path / "new")
