"""The loopback Hub is a Hub to the unmodified client, and fails in the way that it was told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, ModelCard, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub.server import ROUTES, LoopbackHub

ROOT = Path(__file__).parents[2]
REPO = "owner/model"


@pytest.fixture
def api(hub: LoopbackHub) -> HfApi:
    """A client with a token, and an empty repository."""
    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo(REPO)
    return api


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small and large, text and binary, empty, and deep files."""
    folder = tmp_path / "folder"
    for path, content in {
        "README.md": "# سلام\n".encode(),
        "config.json": b"{}",
        "empty.txt": b"",
        "model.safetensors": os.urandom(200_000),
        "logs/events.out.tfevents.1": os.urandom(3_000),
        "deep/er/a name with spaces + signs.bin": b"\0" * 5_000,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def contents(folder: str | Path) -> dict[str, bytes]:
    """Return what is in a folder as `hub.files` returns it."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {path: content for path, content in found.items() if path not in {".gitattributes"}}


def routes(hub: LoopbackHub) -> list[str]:
    return [request.route for request in hub.requests]


def send(hub: LoopbackHub, path: str, body: bytes) -> None:
    """Send what the client would refuse to send."""
    headers = {"Authorization": f"Bearer {hub.token}"}
    urllib.request.urlopen(urllib.request.Request(hub.url + path, body, headers, method="POST"), timeout=5).close()


class TestTransfers:
    def test_a_pushed_folder_comes_back_byte_by_byte(
        self, hub: LoopbackHub, api: HfApi, folder: Path, with_xet: bool
    ) -> None:
        made = api.upload_folder(repo_id=REPO, folder_path=folder)
        assert hub.files(REPO) == contents(folder)
        assert contents(snapshot_download(REPO)) == contents(folder)
        assert hub.commits(REPO)[0].id == made.oid
        assert ("xet_token" in routes(hub), "lfs_put" in routes(hub)) == (with_xet, not with_xet)

    def test_a_large_file_goes_up_in_parts(self, hub: LoopbackHub, api: HfApi, folder: Path, without_xet: None) -> None:
        hub.part_bytes = 60_000
        api.upload_folder(repo_id=REPO, folder_path=folder, allow_patterns="model.safetensors")
        assert (routes(hub).count("lfs_put"), routes(hub).count("lfs_complete")) == (4, 1)
        assert contents(snapshot_download(REPO))["model.safetensors"] == (folder / "model.safetensors").read_bytes()

    def test_an_unchanged_folder_makes_no_commit(
        self, hub: LoopbackHub, api: HfApi, folder: Path, with_xet: bool
    ) -> None:
        made = [api.upload_folder(repo_id=REPO, folder_path=folder).oid for _ in range(2)]
        assert made[0] == made[1] == hub.commits(REPO)[0].id
        assert len(hub.commits(REPO)) == 2

    @pytest.mark.parametrize("pushed_with_xet", [True, False])
    def test_what_was_pushed_one_way_is_read_the_other_way(
        self, hub: LoopbackHub, api: HfApi, folder: Path, pushed_with_xet: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not pushed_with_xet)
        api.upload_folder(repo_id=REPO, folder_path=folder)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", pushed_with_xet)
        assert contents(snapshot_download(REPO)) == contents(folder)

    def test_files_of_several_pushes_are_read_together(self, hub: LoopbackHub, api: HfApi, folder: Path) -> None:
        for name in ("first.bin", "second.bin"):
            (folder / name).write_bytes(os.urandom(10_000))
            api.upload_folder(repo_id=REPO, folder_path=folder)
        assert contents(snapshot_download(REPO)) == contents(folder) == hub.files(REPO)

    def test_another_process_reads_and_writes_through_xet_meanwhile(
        self, hub: LoopbackHub, api: HfApi, folder: Path, tmp_path: Path
    ) -> None:
        api.upload_folder(repo_id=REPO, folder_path=folder)
        code = (
            "import huggingface_hub as hf\n"
            f"hf.snapshot_download({REPO!r}, local_dir='there')\n"
            "open('there/new.bin', 'wb').write(b'new' * 999)\n"
            f"hf.upload_file(repo_id={REPO!r}, path_or_fileobj='there/new.bin', path_in_repo='new.bin')\n"
        )
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "HF_TOKEN": hub.token}, check=True
        )
        assert hub.files(REPO) == {**contents(folder), "new.bin": b"new" * 999}
        assert (tmp_path / "there" / "model.safetensors").read_bytes() == hub.files(REPO)["model.safetensors"]

    def test_a_dataset_is_another_repository_than_the_model_of_its_name(
        self, hub: LoopbackHub, api: HfApi, folder: Path, with_xet: bool
    ) -> None:
        api.create_repo(REPO, repo_type="dataset")
        api.upload_folder(repo_id=REPO, folder_path=folder, repo_type="dataset")
        assert contents(snapshot_download(REPO, repo_type="dataset")) == contents(folder)
        assert hub.files(REPO) == {}

    def test_files_that_match_the_delete_patterns_go(self, hub: LoopbackHub, api: HfApi, folder: Path) -> None:
        api.upload_folder(repo_id=REPO, folder_path=folder)
        api.upload_folder(repo_id=REPO, folder_path=folder, ignore_patterns="logs/*", delete_patterns=["logs/*"])
        api.delete_folder("deep", REPO)
        assert set(hub.files(REPO)) == {"README.md", "config.json", "empty.txt", "model.safetensors"}

    def test_large_files_are_asked_for_without_the_token(
        self, hub: LoopbackHub, api: HfApi, folder: Path, without_xet: None
    ) -> None:
        api.create_repo("owner/secret", private=True)
        api.upload_folder(repo_id="owner/secret", folder_path=folder)
        snapshot_download("owner/secret", token=hub.token)
        assert {it.route for it in hub.requests if not it.has_token} <= {"lfs_put", "lfs_get", "validate_yaml"}
        assert {it.has_token for it in hub.requests if it.route == "lfs_get"} == {False}


class TestRepositories:
    def test_branches_and_tags_hold_what_they_held(self, hub: LoopbackHub, api: HfApi) -> None:
        def push(content: bytes, revision: str) -> None:
            api.upload_file(repo_id=REPO, path_or_fileobj=content, path_in_repo="step", revision=revision)

        push(b"1", "main")
        api.create_tag(REPO, tag="v1")
        api.create_branch(REPO, branch="try/out")
        push(b"2", "try/out")
        push(b"3", "main")
        steps = [Path(hf_hub_download(REPO, "step", revision=it)).read_bytes() for it in ("v1", "try/out", "main")]
        assert steps == [b"1", b"2", b"3"]
        refs = api.list_repo_refs(REPO)
        assert ([it.name for it in refs.branches], [it.name for it in refs.tags]) == (["main", "try/out"], ["v1"])
        assert refs.tags[0].target_commit == api.list_repo_commits(REPO)[1].commit_id

    def test_a_branch_or_tag_can_go_and_cannot_come_twice(self, api: HfApi) -> None:
        for create, delete, name in [
            (api.create_tag, api.delete_tag, "tag"),
            (api.create_branch, api.delete_branch, "branch"),
        ]:
            create(REPO, **{name: "x"})
            create(REPO, **{name: "x"}, exist_ok=True)
            with pytest.raises(HfHubHTTPError, match="already exists"):
                create(REPO, **{name: "x"})
            delete(REPO, **{name: "x"})
            with pytest.raises(RevisionNotFoundError):
                delete(REPO, **{name: "x"})

    def test_the_hub_describes_its_files(self, hub: LoopbackHub, api: HfApi, folder: Path, with_xet: bool) -> None:
        api.upload_folder(repo_id=REPO, folder_path=folder)
        sizes = {path: len(content) for path, content in contents(folder).items()}
        siblings = api.model_info(REPO, files_metadata=True).siblings
        assert {it.rfilename: it.size for it in siblings if it.rfilename != ".gitattributes"} == sizes
        assert {it.path for it in api.list_repo_tree(REPO)} == {
            ".gitattributes", "README.md", "config.json", "empty.txt", "model.safetensors", "logs", "deep",
        }  # fmt: skip
        assert [it.path for it in api.list_repo_tree(REPO, "deep/er")] == ["deep/er/a name with spaces + signs.bin"]
        described = {it.path: it for it in api.get_paths_info(REPO, ["deep", "model.safetensors", "missing"])}
        assert set(described) == {"deep", "model.safetensors"}
        assert (described["model.safetensors"].lfs is None, described["model.safetensors"].xet_hash is None) == (
            False, not with_xet,
        )  # fmt: skip

    def test_a_private_repository_needs_the_token(self, hub: LoopbackHub, api: HfApi) -> None:
        api.create_repo("owner/secret", private=True)
        assert api.model_info("owner/secret").private
        for token in (False, "hf_wrong"):
            with pytest.raises(HfHubHTTPError) as caught:
                HfApi(endpoint=hub.url, token=token).model_info("owner/secret")
            assert caught.value.response.status_code == 401
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download("owner/secret", ".gitattributes", token=False)

    def test_nothing_is_written_without_the_token(self, hub: LoopbackHub, api: HfApi) -> None:
        stranger = HfApi(endpoint=hub.url, token=False)
        for write in (
            lambda: stranger.create_repo("owner/other"),
            lambda: stranger.delete_repo(REPO),
            lambda: stranger.create_tag(REPO, tag="v1"),
            lambda: stranger.upload_file(repo_id=REPO, path_or_fileobj=b"x", path_in_repo="x"),
        ):
            with pytest.raises(HfHubHTTPError) as caught:
                write()
            assert caught.value.response.status_code == 401
        assert (len(hub.commits(REPO)), api.repo_exists("owner/other")) == (1, False)

    def test_what_is_missing_has_a_typed_error(self, hub: LoopbackHub, api: HfApi) -> None:
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("owner/other")
        with pytest.raises(RevisionNotFoundError):
            api.model_info(REPO, revision="other")
        with pytest.raises(RevisionNotFoundError):
            api.upload_file(repo_id=REPO, path_or_fileobj=b"x", path_in_repo="x", revision="other")
        with pytest.raises(RemoteEntryNotFoundError):
            hf_hub_download(REPO, "other")

    def test_a_repository_is_created_once_and_deleted_once(self, hub: LoopbackHub, api: HfApi) -> None:
        assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
        with pytest.raises(HfHubHTTPError, match="409"):
            api.create_repo(REPO)
        api.delete_repo(REPO)
        with pytest.raises(RepositoryNotFoundError):
            api.delete_repo(REPO)

    def test_a_commit_on_an_old_parent_is_refused(self, hub: LoopbackHub, api: HfApi) -> None:
        old = hub.commits(REPO)[0].id
        api.upload_file(repo_id=REPO, path_or_fileobj=b"1", path_in_repo="x", parent_commit=old)
        with pytest.raises(HfHubHTTPError) as caught:
            api.upload_file(repo_id=REPO, path_or_fileobj=b"2", path_in_repo="x", parent_commit=old)
        assert (caught.value.response.status_code, hub.files(REPO)) == (412, {"x": b"1"})

    @pytest.mark.parametrize(
        "change",
        [
            {"key": "file", "value": {"path": "../x", "content": ""}},
            {"key": "file", "value": {"path": "/x", "content": ""}},
            {"key": "lfsFile", "value": {"path": "x", "oid": "0" * 64, "size": 1}},
        ],
    )
    def test_a_commit_outside_the_repository_or_of_nothing_is_refused(
        self, hub: LoopbackHub, api: HfApi, change: dict
    ) -> None:
        lines = [{"key": "header", "value": {"summary": "trick"}}, change]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            send(hub, f"/api/models/{REPO}/commit/main", b"\n".join(json.dumps(it).encode() for it in lines))
        assert len(hub.commits(REPO)) == 1

    def test_commits_that_arrive_together_all_land(self, hub: LoopbackHub, api: HfApi) -> None:
        def push(number: int) -> None:
            api.upload_file(repo_id=REPO, path_or_fileobj=b"x", path_in_repo=str(number))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(push, range(16)))
        assert set(hub.files(REPO)) == {str(number) for number in range(16)}
        assert len(hub.commits(REPO)) == 17

    def test_a_card_is_pushed_and_read_back(self, hub: LoopbackHub, api: HfApi) -> None:
        ModelCard("---\nlanguage: fa\n---\n# A model\n").push_to_hub(REPO, token=hub.token)
        assert ModelCard.load(REPO).data.language == "fa"


class TestFaults:
    def test_the_client_survives_one_fault_on_each_way_up(
        self, hub: LoopbackHub, api: HfApi, folder: Path, without_xet: None
    ) -> None:
        faults = {"preupload": 429, "lfs_put": 500, "lfs_verify": "cut"}
        for route, kind in faults.items():
            hub.faults.set(route, kind, times=1, retry_after=0)
        api.upload_folder(repo_id=REPO, folder_path=folder, allow_patterns="model.safetensors")
        assert {it.route: it.fault for it in hub.requests if it.fault} == faults
        assert hub.files(REPO) == {"model.safetensors": (folder / "model.safetensors").read_bytes()}

    @pytest.mark.parametrize(("kind", "retry_after"), [(429, "1"), (500, None), (503, None)])
    def test_a_status_is_answered_as_often_as_asked_and_nothing_is_done(
        self, hub: LoopbackHub, api: HfApi, kind: int, retry_after: str | None
    ) -> None:
        hub.faults.set("create", kind, times=2)
        for _ in range(2):
            with pytest.raises(HfHubHTTPError) as caught:
                api.create_repo("owner/other")
            assert (caught.value.response.status_code, caught.value.response.headers.get("Retry-After")) == (
                kind, retry_after,
            )  # fmt: skip
            assert not api.repo_exists("owner/other")
        api.create_repo("owner/other")
        assert api.repo_exists("owner/other")

    @pytest.mark.parametrize(("when", "num_commits"), [("before", 1), ("after", 2), ("body", 2)])
    def test_a_commit_is_lost_or_only_its_answer_is(
        self, hub: LoopbackHub, api: HfApi, when: str, num_commits: int
    ) -> None:
        hub.faults.set("commit", "cut", times=1, when=when)
        with pytest.raises(httpx2.TransportError):
            api.upload_file(repo_id=REPO, path_or_fileobj=b"x", path_in_repo="x")
        assert len(hub.commits(REPO)) == num_commits
        api.upload_file(repo_id=REPO, path_or_fileobj=b"y", path_in_repo="x")
        assert hub.files(REPO) == {"x": b"y"}

    @pytest.mark.parametrize("path", ["README.md", "model.safetensors"])
    def test_a_download_that_is_cut_goes_on_where_it_was(
        self, hub: LoopbackHub, api: HfApi, folder: Path, path: str, without_xet: None
    ) -> None:
        api.upload_folder(repo_id=REPO, folder_path=folder)
        route = "lfs_get" if path == "model.safetensors" else "resolve"
        hub.faults.set(route, "cut", times=1, when="body", method="GET")
        assert Path(hf_hub_download(REPO, path)).read_bytes() == (folder / path).read_bytes()
        assert [it.fault for it in hub.requests if (it.route, it.method) == (route, "GET")] == ["cut", None]

    @pytest.mark.parametrize("path", ["README.md", "model.safetensors"])
    def test_a_wrong_hash_damages_what_is_served_and_not_what_is_kept(
        self, hub: LoopbackHub, api: HfApi, folder: Path, path: str, without_xet: None, tmp_path: Path
    ) -> None:
        api.upload_folder(repo_id=REPO, folder_path=folder)
        hub.faults.set("lfs_get" if path == "model.safetensors" else "resolve", "wrong_hash", times=1)
        served = [Path(hf_hub_download(REPO, path, cache_dir=tmp_path / it)).read_bytes() for it in ("a", "b")]
        assert served[0] != served[1] == (folder / path).read_bytes()
        assert len(served[0]) == len(served[1])

    def test_a_wrong_hash_on_the_way_up_is_noticed(
        self, hub: LoopbackHub, api: HfApi, folder: Path, without_xet: None
    ) -> None:
        hub.faults.set("lfs_put", "wrong_hash", times=1)
        with pytest.raises(RuntimeError, match=r"uploading 'model\.safetensors'"):
            api.upload_folder(repo_id=REPO, folder_path=folder, allow_patterns="model.safetensors")
        assert hub.files(REPO) == {}

    def test_a_slow_answer_is_late_and_right(self, hub: LoopbackHub, api: HfApi) -> None:
        hub.faults.set("info", "slow", seconds=0.3)
        start = time.monotonic()
        assert api.model_info(REPO).id == REPO
        assert time.monotonic() - start > 0.3

    def test_a_fault_on_every_route_can_be_cleared(self, hub: LoopbackHub, api: HfApi) -> None:
        hub.faults.set("*", 500)
        for call in (api.whoami, lambda: api.model_info(REPO), lambda: api.list_repo_refs(REPO)):
            with pytest.raises(HfHubHTTPError, match="500"):
                call()
        hub.faults.clear()
        assert api.whoami()["name"] == hub.user

    def test_a_fault_of_one_method_leaves_the_others_alone(self, hub: LoopbackHub, api: HfApi) -> None:
        hub.faults.set("tag", 503, method="DELETE")
        api.create_tag(REPO, tag="v1")
        with pytest.raises(HfHubHTTPError, match="503"):
            api.delete_tag(REPO, tag="v1")

    def test_without_a_xet_token_there_is_no_upload(self, hub: LoopbackHub, api: HfApi, folder: Path) -> None:
        hub.faults.set("xet_token", 403)
        with pytest.raises(ConnectionError, match="403"):
            api.upload_folder(repo_id=REPO, folder_path=folder)
        assert hub.files(REPO) == {}

    @pytest.mark.parametrize("wrong", [("comit", 500), ("commit", "cuts"), ("commit", "wrong_hash")])
    def test_a_fault_that_cannot_be_is_refused(self, hub: LoopbackHub, wrong: tuple[str, int | str]) -> None:
        with pytest.raises(ValueError, match="use"):
            hub.faults.set(*wrong)

    def test_every_route_has_a_name_that_faults_know(self) -> None:
        from tests.hub.server.routes import ROUTES as SERVED

        assert {route.name for route in SERVED} == set(ROUTES) - {"other"}


class TestLife:
    def test_a_dead_server_comes_back_with_everything(self, hub: LoopbackHub, api: HfApi) -> None:
        api.upload_file(repo_id=REPO, path_or_fileobj=b"x", path_in_repo="x")
        url = hub.url
        hub.stop()
        with pytest.raises(httpx2.ConnectError):
            api.model_info(REPO)
        hub.start()
        assert (hub.url, api.model_info(REPO).sha, hub.files(REPO)) == (url, hub.commits(REPO)[0].id, {"x": b"x"})

    def test_a_server_that_dies_cuts_what_it_is_doing(self, hub: LoopbackHub, api: HfApi) -> None:
        hub.faults.set("info", "slow", seconds=60)
        threading.Timer(0.2, hub.stop).start()
        start = time.monotonic()
        with pytest.raises(httpx2.TransportError):
            api.model_info(REPO)
        assert time.monotonic() - start < 5

    def test_another_server_on_the_same_folder_knows_the_repositories(
        self, hub: LoopbackHub, api: HfApi, folder: Path, tmp_path: Path, with_xet: bool
    ) -> None:
        api.upload_folder(repo_id=REPO, folder_path=folder)
        with LoopbackHub(tmp_path / "hub") as other:
            assert other.commits(REPO) == hub.commits(REPO)
            assert contents(snapshot_download(REPO, endpoint=other.url, local_dir=tmp_path / "there"))
            assert other.files(REPO) == contents(folder)

    def test_a_person_can_start_and_end_it(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "tests.hub.server", "--folder", str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(5)]
            variables = dict(line.removeprefix("export ").strip().split("=") for line in lines if "export" in line)
            api = HfApi(endpoint=variables["HF_ENDPOINT"], token=variables["HF_TOKEN"])
            assert api.whoami()["name"] == LoopbackHub.user
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


class TestTransformers:
    def test_a_pushed_model_is_loaded_by_its_name(
        self, hub: LoopbackHub, api: HfApi, tmp_path: Path, with_xet: bool
    ) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
        model = transformers.BertForSequenceClassification(config)
        model.save_pretrained(tmp_path / "model")
        api.upload_folder(repo_id=REPO, folder_path=tmp_path / "model")
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(REPO)
        for name, tensor in model.state_dict().items():
            assert tensor.equal(loaded.state_dict()[name]), name

    def test_transformers_itself_pushes(self, hub: LoopbackHub, api: HfApi) -> None:
        transformers = pytest.importorskip("transformers")
        transformers.BertConfig(hidden_size=8, num_attention_heads=1).push_to_hub("owner/config", token=hub.token)
        assert json.loads(hub.files("owner/config")["config.json"])["hidden_size"] == 8
