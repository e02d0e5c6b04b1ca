"""No text that is kept or shown holds a secret."""

from __future__ import annotations

import pytest

from hezar_train.hub import redact

TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT"


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
