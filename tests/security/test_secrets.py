"""Secrets: refused where they would be written down, and never pushed."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from hezar_train.cli.exit_codes import show_unexpected
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, HubError
from hezar_train.events import read_rows
from hezar_train.hub.client import refuse_secrets
from hezar_train.hub.push import HubRecord, PushOutcome, push_run
from hezar_train.hub.pushed_files import SavedRun, stage
from hezar_train.recipes import load_recipe
from hezar_train.trainer.environment import command_line
from tests.hub.conftest import hub as hub  # noqa: PLC0414 - the fixture
from tests.hub.runs import LOGS, REPO, finished_run
from tests.hub.server import LoopbackHub
from tests.security.hostile import make_trainer, newest

TOKEN = "hf_" + "aB3" * 11
RECIPE = "def build(data: str = '', **options): ...\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_kwargs": {"token": "anything"}},
        {"generation_kwargs": {"deep": [{"api_key": "anything"}]}},
        {"optimizer_kwargs": {"note": TOKEN}},
        {"optimizer_kwargs": {TOKEN: 5}},
        {"generation_kwargs": {"password": 83419276}},
        {"hub_card": {"license_link": "https://me:hunter2@example.org/x"}},
        {"init_weights_from": f"https://example.org/{TOKEN}"},
        {"generation_kwargs": {"apiKey": "anything"}},
        {"generation_kwargs": {"API-KEY": "anything"}},
        {"generation_kwargs": {"HF Token": "anything"}},
        {"generation_kwargs": {"dbPassword": "anything"}},
        {"generation_kwargs": {"Authorization": "Basic anything"}},
        {"generation_kwargs": {"bot_token": "110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw"}},
        {"hub_card": {"license_link": "https://0123456789abcdefABCDEF@example.org/x"}},
    ],
)
def test_a_config_that_holds_a_secret_is_not_built_and_does_not_quote_it(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="environment variable") as caught:
        TrainerConfig("run", **fields)
    assert TOKEN not in str(caught.value)
    assert "83419276" not in str(caught.value)
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
        {"sort_key": "length", "metric_key": "eval_accuracy_top1", "image_token": "<|image_placeholder|>"},
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


@pytest.mark.parametrize("place", ["evaluations/00000005.json", f"logs/{LOGS}/metrics.json", "environment.json"])
def test_a_run_with_a_secret_in_one_of_its_files_is_not_pushed(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse")
    run = finished_run(tmp_path / "run")
    with (run.root / place).open("a") as file:
        file.write('{"note": "it is correct horse"}\n')
    with pytest.raises(HubError, match=rf"{Path(place).name} is not pushed.* it holds MY_SERVICE_PASSWORD"):
        push_run(run.root, REPO)
    assert not hub.files(REPO)


@pytest.mark.parametrize(("secret", "is_one"), [("8letters", True), ("7letter", False)])
def test_a_secret_has_eight_characters_or_more(monkeypatch: pytest.MonkeyPatch, secret: str, is_one: bool) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    with pytest.raises(ConfigError, match="MY_SERVICE_PASSWORD") if is_one else nullcontext():
        TrainerConfig("run", optimizer_kwargs={"note": f"it is {secret}."})
    with pytest.raises(HubError, match="MY_SERVICE_PASSWORD") if is_one else nullcontext():
        refuse_secrets({"README.md": f"it is {secret}.".encode()})


@pytest.mark.parametrize(
    "written", [json.dumps, lambda text: json.dumps(text, ensure_ascii=False), quote, repr], ids=range(4)
)
def test_a_secret_is_found_however_a_file_writes_it(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], str]
) -> None:
    secret = "p\u00e4ss/'word'" if written is repr else 'p\u00e4ss\\w"ord/1'
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    with pytest.raises(HubError, match="MY_SERVICE_PASSWORD"):
        refuse_secrets({"train/state.json": written(secret).encode()})


@pytest.mark.parametrize(
    "variable",
    ["PGPASSWORD", "MYSQL_PWD", "SSHPASS", "GPG_PASSPHRASE", "SIGNING_PRIVATE_KEY", "AZURE_KEY", "GITHUB_PAT"],
)
def test_a_variable_is_known_as_a_secret_by_any_usual_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0f1e2d3c4b5a69788796a5b4c3d2e1f0")
    with pytest.raises(ConfigError, match=f"the value of {variable}"):
        TrainerConfig("run", optimizer_kwargs={"note": "0f1e2d3c4b5a69788796a5b4c3d2e1f0"})


@pytest.mark.parametrize(
    "written",
    [
        lambda secret: yaml.safe_dump({"note": f"{'word ' * 14}{secret}"}),
        lambda secret: yaml.safe_dump({"note": secret + "'"}),
        html.escape,
        lambda secret: secret.replace("_", "\\_").replace("*", "\\*"),
        lambda secret: f"{secret[:9]}\n    {secret[9:]}",
        lambda secret: base64.b64encode(f"x{secret}".encode()).decode(),
        lambda secret: base64.b64encode(f"{secret}yz".encode()).decode(),
    ],
    ids=range(7),
)
def test_a_secret_is_found_over_lines_escaped_and_in_base64(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], str]
) -> None:
    secret = "it's correct_horse & battery*staple"
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    with pytest.raises(HubError, match="MY_SERVICE_PASSWORD"):
        refuse_secrets({"train/notes.txt": written(secret).encode()})
    refuse_secrets({"train/notes.txt": b"It is correct that a horse needs no battery"})


@pytest.mark.parametrize("place", ["a name", "the metadata", "a tensor"])
def test_a_secret_in_a_file_of_weights_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    secret = "correct_horse & battery"
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    text = torch.tensor(list(b"\x01" * (2 << 20) + f"of {secret}.".encode()), dtype=torch.uint8)
    tensors = {secret if place == "a name" else "x": torch.zeros(5), "note": text[: None if place == "a tensor" else 3]}
    save_file(
        tensors, tmp_path / "model.safetensors", {"by": secret[:7] + "\n" + secret[7:]} if "meta" in place else {}
    )
    whole = (tmp_path / "model.safetensors").read_bytes()
    for source in (tmp_path / "model.safetensors", whole):
        with pytest.raises(HubError, match="MY_SERVICE_PASSWORD"):
            refuse_secrets({"model.safetensors": source})
    refuse_secrets({"model.safetensors": whole.replace(secret[7:].encode(), b" " * len(secret[7:]))})


@pytest.mark.parametrize("length", [0, 3, 8, 100])
def test_a_file_of_weights_that_is_none_is_searched_all_the_same(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse")
    refuse_secrets({"model.safetensors": b"\xff" * length})
    with pytest.raises(HubError, match="MY_SERVICE_PASSWORD"):
        refuse_secrets({"model.safetensors": b"\xff" * length + b"correct horse"})


@pytest.mark.parametrize("text", ["<U", "utf-16-le"])
@pytest.mark.parametrize("is_base64", [True, False])
def test_a_secret_is_found_in_wide_letters(monkeypatch: pytest.MonkeyPatch, text: str, is_base64: bool) -> None:
    secret = "horse&8b"  # fewer letters than are looked for without what stands between them
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    wide = np.array([f"a{secret}"]).tobytes() if text == "<U" else f"a{secret}".encode(text)
    with pytest.raises(HubError, match="MY_SERVICE_PASSWORD"):
        refuse_secrets({"train/trainer_state.json": base64.b64encode(wide) if is_base64 else wide})


def test_the_command_of_a_run_is_kept_without_the_secrets_that_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_PASSWORD", "correct horse")
    typed = [
        "/home/me/train.py", "--lr", "0.1", "--password", "hunter2", "--api-key=abc", "data.dbPassword=x y",
        "--verbose",
        "--token", "t0k", "sk-" + "a1" * 12, "https://me:pw@example.org/x", "--note", "correct horse", "--tokens", "64",
    ]  # fmt: skip
    assert command_line(typed) == (
        "python train.py --lr 0.1 --password *** --api-key=*** data.dbPassword=*** --verbose --token *** '***' "
        "'https://***@example.org/x' --note '***' --tokens 64"
    )


def test_no_host_is_kept_of_what_ray_starts_its_workers_with() -> None:
    worker = "/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py"
    assert command_line([worker, "--node-ip-address=192.0.2.7", "--redis-password=pw"]) == ""


def test_a_name_or_a_message_with_a_secret_is_not_pushed() -> None:
    with pytest.raises(HubError, match="the name of a file holds") as caught:
        refuse_secrets({f"train/{TOKEN}.json": b""})
    assert TOKEN not in str(caught.value)
    with pytest.raises(HubError, match="the message holds"):
        refuse_secrets({"README.md": b""}, f"pushed with {TOKEN}")


def test_a_record_of_pushes_is_kept_whatever_a_server_says(tmp_path: Path) -> None:
    record = HubRecord(tmp_path / "hub.json")
    for error in ('see http://example.org/?a="b', f"Bearer {TOKEN} \\", 'http://me:hunter2@example.org/"x'):
        record.append(PushOutcome(4, "asked", "me/x", None, "end", "failed", error=error))
    assert len(record.entries()) == 3
    assert TOKEN not in (text := (tmp_path / "hub.json").read_text())
    assert "hunter2" not in text


def test_the_host_s_name_is_in_no_name_that_is_pushed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logs,) = (run / "logs").iterdir()
    (events,) = logs.glob("events.*")
    start, host = logs.name[:19], socket.gethostname()
    assert host in events.name
    for name in ("secret-host.example.org", "another"):
        twin = run / "logs" / f"{start}_{name}"
        twin.mkdir()
        (twin / "metrics.json").write_bytes((logs / "metrics.json").read_bytes())
        (twin / f"events.out.tfevents.1700000000.{name}.77.0").write_bytes(events.read_bytes())
    names = stage(SavedRun(run), 12, "end").files
    assert not [name for name in names if "secret-host" in name or "another" in name or f"_{host}" in name]
    folders = {f"train/logs/{start}", f"train/logs/{start}-2", f"train/logs/{start}-3"}
    assert {name.rpartition("/")[0] for name in names if name.endswith("metrics.json")} == folders
    assert sum("/events.out.tfevents." in name for name in names) == 3


def test_a_run_goes_on_in_logs_that_were_fetched_without_the_host_s_name(run: Path) -> None:
    (logs,) = (run / "logs").iterdir()
    shutil.rmtree(newest(run))
    logs.rename(fetched := logs.with_name(logs.name[:19]))
    make_trainer(run, resume_from_checkpoint=True).train()
    assert list((run / "logs").iterdir()) == [fetched]
    assert [row.step for row in read_rows(fetched / "metrics.json")] == list(range(1, 13))


def test_the_traceback_that_is_kept_of_an_unexpected_error_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "correct horse battery")
    monkeypatch.setattr("sys.argv", ["hezar-train", "train", "sums", "recipe.api_key=Xy12Zw34Vu56Ts78"])
    error = RuntimeError("https://me:correct horse battery@store.example refused hf_" + "a1" * 17)
    show_unexpected(RuntimeError, error, None)
    kept = Path(re.findall(r"The traceback is in (\S+)\.", capsys.readouterr().err)[0])
    told = kept.read_text()
    kept.unlink()
    assert "RuntimeError" in told
    assert not [secret for secret in ("correct horse", "Xy12Zw34", "hf_a1") if secret in told]
