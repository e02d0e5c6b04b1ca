"""Addresses are read exactly, no text that is kept or shown holds a secret, and the package is cheap to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hezar_train.errors import ConfigError
from hezar_train.hub import HubAddress, is_hub_address, names_hub_weights, parse_address, parse_repo_id, redact

TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hub://me/model", HubAddress("me/model")),
        ("me/model", HubAddress("me/model")),
        ("hub://me/model@v1.0", HubAddress("me/model", "v1.0")),
        ("hub://me/model#120", HubAddress("me/model", None, 120)),
        ("hub://me/model@refs/pr/1#00000120", HubAddress("me/model", "refs/pr/1", 120)),
    ],
)
def test_an_address_is_read(text: str, expected: HubAddress) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hub://model", "0 slashes"),
        ("hub://a/b/c", "2 slashes"),
        ("hub://../etc", "'..' is no name"),
        ("hub:///model", "'' is no name"),
        ("hub://me/mo del", "'mo del' is no name"),
        ("hub://me/a--b", "'a--b' is no name"),
        ("hub://me/model@", "'' is no name of a branch"),
        ("hub://me/model@../x", "'../x' is no name of a branch"),
        ("hub://me/model#", "whole number, got ''"),
        ("hub://me/model#ten", "whole number, got 'ten'"),
        ("hub://me/model#-1", "whole number, got '-1'"),
    ],
)
def test_a_wrong_part_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="expected hub://owner/name") as caught:
        parse_address(text)
    assert words in str(caught.value)


def test_a_repository_id_has_no_revision() -> None:
    assert parse_repo_id("me/model") == "me/model"
    with pytest.raises(ConfigError, match="expected owner/name"):
        parse_repo_id("me/model@main")


def test_a_path_that_exists_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_hub_weights("runs/first")
    assert names_hub_weights("hub://runs/first")
    Path("runs/first").mkdir(parents=True)
    assert not names_hub_weights("runs/first")
    assert not names_hub_weights("/runs/first")
    assert not names_hub_weights(Path("other/first"))
    assert not is_hub_address("runs/first")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"token={TOKEN}!", "token=***!"),
        (f"Authorization: Bearer {TOKEN}", "Authorization: Bearer ***"),
        ("Authorization: Bearer secret.of.another.form", "Authorization: Bearer ***"),
        ("GET https://me:secret@host/x failed", "GET https://***@host/x failed"),
        ("PUT https://s3/key?X-Amz-Signature=abc&x=1 (500)", "PUT https://s3/key?... (500)"),
        ("hf_hub_download of hf_model failed", "hf_hub_download of hf_model failed"),
    ],
)
def test_secrets_are_hidden_and_nothing_else(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_the_token_of_the_environment_is_hidden_whatever_its_form(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "odd!token")
    assert redact("said odd!token aloud") == "said *** aloud"


def test_importing_the_package_imports_no_client() -> None:
    code = "import sys, hezar_train.hub; print(*{'huggingface_hub', 'httpx2'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
