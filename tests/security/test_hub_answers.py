"""A server that lies: its answers choose no place on my disk, and cost me neither my disk nor my day."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from hezar_train.checkpoint import initial_weights
from hezar_train.checkpoint.manifest import FileRecord, Manifest
from hezar_train.config import TrainerConfig
from hezar_train.errors import CheckpointError, ConfigError, HezarTrainError, HubError
from hezar_train.hub import fetch_checkpoint, fetch_recipe, fetch_records, fetch_weights, limits
from hezar_train.hub.client import Repository, parse_address
from hezar_train.hub.push import push_files
from hezar_train.run_layout import step_of
from tests.hub.conftest import _point_client, _point_environment

COMMIT = "a" * 40
MODEL = "model.safetensors"


class Liar:
    """A Hub with one repository, whose answers a test bends."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {MODEL: b"weights"}
        self.etag, self.commit = "0" * 40, COMMIT
        self.sizes: dict[str, int] = {}
        self.silent_on = self.drips_on = self.endless_on = self.stalls_on = ""
        self.says: bytes | None = None
        self.packed = False
        self.cas = ""
        self.sent, self.seconds = 0, 0.0
        self.stopping = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def info(self) -> bytes:
        if self.says is not None:
            return self.says
        siblings = [{"rfilename": name, "size": self.sizes.get(name, len(text))} for name, text in self.files.items()]
        return json.dumps({"id": "me/x", "modelId": "me/x", "sha": self.commit, "siblings": siblings}).encode()


def _handler(liar: Liar) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if liar.silent_on and liar.silent_on in self.path:
                liar.stopping.wait(60)
                return
            if self.path.endswith("/create"):
                self.send(json.dumps({"url": f"{liar.url}/me/x"}).encode(), {"Content-Type": "application/json"}, True)
                return
            names = [one["path"] for one in json.loads(sent)["files"]] if "/preupload/" in self.path else None
            if names is None:
                self.send_error(403)
                return
            files = [{"path": name, "uploadMode": "lfs", "shouldIgnore": False} for name in names]
            self.send(json.dumps({"files": files}).encode(), {"Content-Type": "application/json"}, True)

        def answer(self, *, has_body: bool) -> None:  # noqa: PLR0911 - one for each lie
            if "/xet-" in self.path:
                told = {"X-Xet-Cas-Url": liar.cas, "X-Xet-Access-Token": "x", "X-Xet-Token-Expiration": "9999999999"}
                self.send(json.dumps({"casUrl": liar.cas, "accessToken": "x", "exp": 9999999999}).encode(), told, True)
                return
            if "/api/" in self.path:
                if liar.silent_on == "info":
                    liar.stopping.wait(60)
                    return
                if liar.endless_on == "info":
                    self.stream({"Content-Type": "application/json"}, pause=0.0)
                    return
                packed = {"Content-Encoding": "gzip"} if liar.packed else {}
                self.send(liar.info(), {"Content-Type": "application/json", **packed}, has_body)
                return
            name = self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0]
            if liar.silent_on == name:
                liar.stopping.wait(60)
                return
            headers = {"ETag": f'"{liar.etag}"', "X-Repo-Commit": liar.commit}
            if liar.cas:
                route = f"{liar.url}/api/models/me/x/xet-read-token/{liar.commit}"
                headers |= {"X-Xet-Hash": "1" * 64, "Link": f'<{route}>; rel="xet-auth"'}
            if has_body and name == liar.stalls_on:
                self.send(b"", {**headers, "Content-Length": str(liar.sizes[name])}, has_body)
                liar.stopping.wait(60)
                return
            if has_body and name in (liar.endless_on, liar.drips_on):
                self.stream(headers, pause=0.05 if name == liar.drips_on else 0.0)
                return
            liar.stopping.wait(liar.seconds if has_body else 0.0)
            self.send(liar.files[name], headers, has_body)

        def send(self, content: bytes, headers: dict[str, str], has_body: bool) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(content)

        def stream(self, headers: dict[str, str], pause: float) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                while not liar.stopping.wait(pause):
                    liar.sent += self.wfile.write(b"x" if pause else b"x" * (1 << 20))

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def liar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    liar = Liar()
    thread = threading.Thread(target=liar.server.serve_forever, daemon=True)
    thread.start()
    _point_environment(liar, tmp_path / "home", monkeypatch)  # type: ignore[arg-type]
    _point_client(liar, tmp_path / "home", monkeypatch)  # type: ignore[arg-type]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield liar
    liar.stopping.set()
    liar.server.shutdown()
    liar.server.server_close()


def files_outside(folder: Path) -> set[str]:
    inside = folder / "home" / "hub" / "hezar_train"
    return {str(path) for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(inside)}


@pytest.mark.parametrize("etag", ["../../../../../evil", "/../../../../../../evil", "{tmp}/evil", "x/../../../../evil"])
@pytest.mark.parametrize("what", ["weights", "recipe", "config"])
def test_an_etag_chooses_no_place(liar: Liar, tmp_path: Path, etag: str, what: str) -> None:
    liar.etag = etag.format(tmp=tmp_path)
    liar.files |= {
        "train/train_config.yaml": b"output_dir: run\n",
        "train/recipe.json": json.dumps({"sha256": "0" * 64, "options": {}}).encode(),
        "train_config.yaml": b"output_dir: run\n",
    }
    call = {
        "weights": lambda: fetch_weights("me/x"),
        "recipe": lambda: fetch_recipe("me/x"),
        "config": lambda: TrainerConfig.load("me/x"),
    }[what]
    with suppress(HezarTrainError):
        call()
    assert files_outside(tmp_path) == set()


@pytest.mark.parametrize("verb", ["download", "push"])
def test_no_server_but_the_hub_s_own_sends_xet_to_a_folder(
    liar: Liar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.delenv("HEZAR_TRAIN_XET")
    liar.cas = f"local://{tmp_path / 'mine'}"
    if verb == "download":
        assert fetch_weights("me/x").read_bytes() == b"weights"
    else:
        with pytest.raises(HubError):  # this server takes nothing
            Repository("me/x").commit({"a.bin": b"\0" * 100_000}, [], "a file", None)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("endpoint", "is_used"),
    [
        ("https://huggingface.co", True), ("https://hub-ci.huggingface.co", True), ("http://huggingface.co", False),
        ("https://huggingface.co.evil.example", False), ("https://evilhuggingface.co", False),
        ("https://huggingface.co@evil.example", False), ("https://mirror.example", False),
    ],
)  # fmt: skip
def test_xet_is_for_the_hub_s_own_servers(endpoint: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.delenv("HEZAR_TRAIN_XET", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    Repository("me/x")
    assert constants.HF_HUB_DISABLE_XET is not is_used


def test_a_config_of_a_repository_names_no_code(liar: Liar) -> None:
    liar.files["train_config.yaml"] = b"output_dir: run\nlr_scheduler: pydoc.pipepager\n"
    with pytest.raises(ConfigError, match=r"me/x names code, 'pydoc\.pipepager'"):
        TrainerConfig.load("me/x")
    assert TrainerConfig.load("me/x", lr_scheduler="linear").lr_scheduler == "linear"
    assert TrainerConfig.load("me/x", lr_scheduler="mine.Own").lr_scheduler == "mine.Own"


def test_a_commit_whose_id_is_a_path_is_refused(liar: Liar, tmp_path: Path) -> None:
    liar.commit = "../../../evil"
    with pytest.raises(HubError, match="an id that is none"):
        fetch_weights("me/x")
    assert files_outside(tmp_path) == set()


def test_what_is_honest_comes_and_is_kept_by_its_commit(liar: Liar) -> None:
    assert fetch_weights("me/x").read_bytes() == b"weights"
    liar.files[MODEL] = b"another"
    assert fetch_weights("me/x").read_bytes() == b"weights"
    liar.commit = "b" * 40
    assert fetch_weights("me/x").read_bytes() == b"another"


def test_more_bytes_than_announced_are_not_taken(liar: Liar, tmp_path: Path) -> None:
    liar.endless_on = MODEL
    with pytest.raises(HubError, match=r"more than the 7 bytes|more than 7 bytes"):
        fetch_weights("me/x")
    liar.stopping.wait(0.5)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 128 << 20


@pytest.mark.parametrize("name", ["train/train_config.yaml", "train/recipe.json"])
def test_a_record_of_gigabytes_is_refused_before_its_first_byte(liar: Liar, name: str) -> None:
    liar.files |= {"train/train_config.yaml": b"", "train/recipe.json": b""}
    liar.sizes[name] = 5 << 30
    with pytest.raises(HezarTrainError, match="5,368,709,120 bytes, which no such file has"):
        fetch_recipe("me/x")


def test_a_config_of_gigabytes_is_refused_before_its_first_byte(liar: Liar) -> None:
    liar.files["train_config.yaml"], liar.sizes["train_config.yaml"] = b"output_dir: run\n", 5 << 30
    with pytest.raises(HezarTrainError, match=r"5,368,709,120 bytes; expected at most"):
        TrainerConfig.load("me/x")


def test_a_checkpoint_is_refused_by_the_sizes_that_are_told_of_it(liar: Liar, tmp_path: Path) -> None:
    manifest, weights = "checkpoints/last/manifest.json", f"checkpoints/last/{MODEL}"
    content = Manifest(4, {MODEL: FileRecord(1 << 60, "0" * 64)}).to_bytes()
    liar.files, liar.sizes = {manifest: content, weights: b""}, {manifest: 5 << 30, weights: 1 << 60}
    with pytest.raises(CheckpointError, match="5368709120 bytes, which no manifest has"):
        fetch_checkpoint("hub://me/x", tmp_path / "into")
    del liar.sizes[manifest]
    with pytest.raises(HubError, match=r"needs 1,152,921,504,606,846,976 bytes"):
        fetch_checkpoint("hub://me/x", tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_a_few_bytes_more_than_the_listing_says_are_not_kept(liar: Liar, tmp_path: Path) -> None:
    liar.sizes[MODEL] = 3
    with pytest.raises(HubError, match="with more than 3 bytes"):
        fetch_weights("me/x")
    assert not list(tmp_path.rglob(MODEL))


@pytest.mark.parametrize("where", ["info", MODEL])
def test_a_silent_server_is_told_of_after_seconds(liar: Liar, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(limits, "SILENT_SECONDS", 1.0)
    liar.silent_on = where
    begun = time.monotonic()
    with pytest.raises(HubError, match=r"silent for 1 seconds|within 1 seconds|[Tt]imeout|timed out"):
        fetch_weights("me/x")
    assert time.monotonic() - begun < 6


@pytest.mark.parametrize("where", ["create", "commit"])
def test_a_server_that_is_silent_when_something_is_pushed_is_told_of(
    liar: Liar, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(limits, "COMMIT_SECONDS", 1.0)
    if where == "create":
        liar.silent_on = where
    else:  # not by the server: the client's own retries would outlive this test
        monkeypatch.setattr("huggingface_hub.HfApi.create_commit", lambda *_, **__: liar.stopping.wait(60))
    begun = time.monotonic()
    with pytest.raises(HubError, match="did not come to an end within 1 seconds"):
        push_files({"a.txt": b"text"}, "me/x", commit_message="a file", max_attempts=1)
    assert time.monotonic() - begun < 6


def test_a_large_download_that_falls_silent_is_given_up_long_before_its_time(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SILENT_SECONDS", 1.0)
    liar.stalls_on, liar.sizes[MODEL] = MODEL, 10_000_000
    begun = time.monotonic()
    with pytest.raises(HubError, match="silent for 1 seconds"):
        fetch_weights("me/x")
    assert time.monotonic() - begun < 8


def test_nothing_is_taken_from_the_client_s_cache_whose_places_a_server_can_name(liar: Liar, tmp_path: Path) -> None:
    planted = tmp_path / "home" / "hub" / "models--me--x" / "snapshots" / COMMIT / MODEL
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"planted")
    assert fetch_weights("me/x").read_bytes() == b"weights"


def test_a_server_that_drips_does_not_keep_anybody(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 2.0)
    liar.sizes[MODEL] = 1000
    liar.drips_on = MODEL
    begun = time.monotonic()
    with pytest.raises(HubError, match="did not come to an end within 2 seconds"):
        fetch_weights("me/x")
    assert time.monotonic() - begun < 8


def about(**changes: Any) -> bytes:
    siblings = [{"rfilename": MODEL, "size": 7}]
    return json.dumps({"id": "me/x", "modelId": "me/x", "sha": COMMIT, "siblings": siblings} | changes).encode()


@pytest.mark.parametrize("kind", ["weights", "records"])
def test_many_files_have_a_limit_together(
    liar: Liar, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(limits, "FILE_SECONDS", 0.0)
    liar.seconds = 0.3
    fetch = _many_files(liar, kind, 40, tmp_path)
    began = time.monotonic()
    with pytest.raises(HubError, match=r"gave \d+ of 40 files within 2 seconds"):
        fetch()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["weights", "records"])
def test_files_without_number_are_refused_before_the_first(liar: Liar, tmp_path: Path, kind: str) -> None:
    fetch = _many_files(liar, kind, 20_001, tmp_path)
    with pytest.raises(HubError, match="would have 20,001 files downloaded"):
        fetch()


def _many_files(liar: Liar, kind: str, count: int, folder: Path) -> Callable[[], object]:
    """Put weights or records of so many files into the repository, and return what fetches them."""
    if kind == "weights":
        names = [f"model-{number}.safetensors" for number in range(count)]
        index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
        liar.files = {"model.safetensors.index.json": json.dumps(index).encode()} | dict.fromkeys(names, b"weights")
        return lambda: fetch_weights("me/x", folder)
    names = [f"logs/{number}/metrics.json" for number in range(count)]
    one = FileRecord(2, hashlib.sha256(b"{}").hexdigest())
    manifest = {"train/manifest.json": Manifest(1, dict.fromkeys(names, one)).to_bytes()}
    liar.files = manifest | {f"train/{name}": b"{}" for name in names}
    return lambda: fetch_records("me/x", folder)


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 5000, b"[1, 2]", b"null", b'"x"', b"\xff", b"",
        about(sha=5), about(sha=["a" * 40]), about(sha={}), about(sha="../" + "a" * 37),
        about(siblings="x"), about(siblings=5), about(siblings=[1]), about(siblings={"a": 1}),
        about(siblings=[{"size": 7}]), about(siblings=[{"rfilename": ["a"]}]), about(siblings=[{"rfilename": 5}]),
        *(about(siblings=[{"rfilename": MODEL, "size": size}])
          for size in ("7", -7, 7.0, True, float("inf"), float("nan"), [7], 1 << 70)),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_of_the_hub(liar: Liar, answer: bytes) -> None:
    liar.says = answer
    with pytest.raises(HubError):
        fetch_weights("hub://me/x")


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_answer_without_end_costs_little_memory(
    liar: Liar, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    monkeypatch.setattr(limits, "ANSWER_BYTES", 4 << 20)
    if is_packed:
        liar.says, liar.packed = gzip.compress(b" " * (64 << 20)), True
    else:
        liar.endless_on = "info"
    with pytest.raises(HubError, match="answers with more than the 4,194,304 bytes"):
        fetch_weights("hub://me/x")
    assert liar.sent < 64 << 20


@pytest.mark.parametrize("folder", ["9" * 5000, "9" * 30])
def test_a_step_that_no_run_has_is_none(liar: Liar, tmp_path: Path, folder: str) -> None:
    liar.files = {f"checkpoints/{folder}/manifest.json": b"{}"}
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        fetch_checkpoint("hub://me/x", tmp_path / "into")
    assert step_of(folder) is None


def test_a_step_of_thousands_of_digits_in_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="the step after '#'"):
        parse_address("hub://me/x#" + "9" * 5000)


@pytest.mark.parametrize(
    "index",
    [
        b"[" * 5000,
        b"{}",
        b"5",
        b'{"weight_map": 5}',
        b'{"weight_map": {"a": ["x"]}}',
        b'{"weight_map": {"a": 5}}',
        b"\xff",
    ],
)
def test_an_index_of_nonsense_is_refused(liar: Liar, tmp_path: Path, index: bytes) -> None:
    liar.files = {f"{MODEL}.index.json": index}
    with pytest.raises(CheckpointError):
        fetch_weights("hub://me/x")
    (tmp_path / f"{MODEL}.index.json").write_bytes(index)
    with pytest.raises(CheckpointError):
        initial_weights(torch.nn.Linear(1, 1), tmp_path / f"{MODEL}.index.json")


def test_an_index_of_gigabytes_is_refused_before_its_first_byte(liar: Liar) -> None:
    liar.files, liar.sizes = {f"{MODEL}.index.json": b"{}"}, {f"{MODEL}.index.json": 1 << 33}
    with pytest.raises(HubError, match=r"8,589,934,592 bytes; expected at most"):
        fetch_weights("hub://me/x")


def test_weights_that_do_not_fit_on_the_disk_are_refused_before_their_first_byte(liar: Liar) -> None:
    liar.sizes = {MODEL: 1 << 60}
    with pytest.raises(HubError, match=r"needs 1,152,921,504,606,846,976 bytes"):
        fetch_weights("hub://me/x")
