"""A loopback Hub for each test, and a client that knows of no other place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.server import LoopbackHub

UNSET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub that runs, a client and child processes that find it, an empty cache, and no token."""
    with LoopbackHub(tmp_path / "hub") as running:
        _point_environment(running, tmp_path / "home", monkeypatch)
        _point_client(running, tmp_path / "home", monkeypatch)
        yield running


@pytest.fixture(params=[True, False], ids=["xet", "lfs"])
def with_xet(request: pytest.FixtureRequest, hub: LoopbackHub) -> bool:
    """Run the test twice: large files through Xet, and through LFS."""
    if not request.param:
        request.getfixturevalue("without_xet")
    return request.param


@pytest.fixture
def without_xet(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send large files through LFS, also from child processes."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def _point_environment(hub: LoopbackHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_XET_CACHE": home / "xet",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1,localhost",
        "HEZAR_TRAIN_XET": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


def _point_client(hub: LoopbackHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the client read its settings from the environment when it was imported
    for name, value in {
        "ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
        "HF_XET_CACHE": str(home / "xet"), "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"), "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": False,
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    if "transformers.utils.hub" in sys.modules:
        monkeypatch.setattr(sys.modules["transformers.utils.hub"], "_hf_api", None)
