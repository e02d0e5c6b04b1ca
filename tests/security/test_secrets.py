"""Secrets: refused where they would be written down, and never pushed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, HubError
from hezar_train.hub.client import refuse_secrets
from hezar_train.recipes import load_recipe

TOKEN = "hf_" + "aB3" * 11
RECIPE = "def build(data: str = '', **options): ...\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_kwargs": {"token": "anything"}},
        {"generation_kwargs": {"deep": [{"api_key": "anything"}]}},
        {"optimizer_kwargs": {"note": TOKEN}},
        {"hub_card": {"license_link": "https://me:hunter2@example.org/x"}},
        {"init_weights_from": f"https://example.org/{TOKEN}"},
    ],
)
def test_a_config_that_holds_a_secret_is_not_built_and_does_not_quote_it(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="environment variable") as caught:
        TrainerConfig("run", **fields)
    assert TOKEN not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "option", ["token=x", "password=x", f"data={TOKEN}", "data=https://a:b@c.org/d", "wandb_api_key=x"]
)
def test_a_secret_among_the_options_of_a_recipe_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "config.yaml").write_text("trainer: {output_dir: run}\n")
    with pytest.raises(ConfigError, match=r"recipe\..* holds .*environment variable"):
        load_recipe(tmp_path, [f"recipe.{option}"])


def test_the_value_of_a_variable_that_is_named_like_a_secret_is_refused_whatever_its_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse")
    with pytest.raises(ConfigError, match="the value of MY_SERVICE_PASSWORD"):
        TrainerConfig("run", optimizer_kwargs={"note": "it is correct horse."})


@pytest.mark.parametrize(
    "options",
    [
        {"pad_token": "[PAD]", "eos_token": "</s>", "text_column": "tokens", "max_tokens": 64, "token_dropout": 0.1},
        {"token": True, "data": "https://example.org/a:b", "model": "hf_transformers/bert", "token_type": "word"},
    ],
)
def test_what_only_sounds_like_a_secret_is_accepted(tmp_path: Path, options: dict[str, object]) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "config.yaml").write_text("trainer: {output_dir: run}\n")
    given = [f"recipe.{name}={value!r}".replace("True", "true") for name, value in options.items()]
    assert load_recipe(tmp_path, given).options == options


def test_a_push_with_a_secret_in_one_of_its_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "no-usual-form-at-all")
    (tmp_path / "log.jsonl").write_bytes(b" " * ((1 << 20) - 5) + b"no-usual-form-at-all")
    with pytest.raises(HubError, match=r"log\.jsonl is not pushed.* your token for the Hub"):
        refuse_secrets({"train/log.jsonl": tmp_path / "log.jsonl"})
    with pytest.raises(HubError, match=r"README\.md is not pushed"):
        refuse_secrets({"README.md": f"my token is {TOKEN}".encode()})
    refuse_secrets({"README.md": b"all is well"})
