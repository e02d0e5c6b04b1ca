"""Training that is pushed while it runs: a network that fails cannot hurt it, and what was pushed is the run."""

from __future__ import annotations

import cProfile
import hashlib
import json
import pstats
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError, HubError
from hezar_train.hub import push_run
from tests.hub.server import LoopbackHub

REPO = "tester/pushed"
LAST_STEP = 60
MIDDLE = 30
PUSH_ROUTES = ("create", "info", "preupload", "lfs_batch", "lfs_put", "lfs_verify", "commit")
FAULTS: dict[str, dict[str, Any]] = {
    "429": {"kind": 429, "times": 2},
    "500": {"kind": 500, "times": 2},
    "503": {"kind": 503, "times": 2},
    "cut": {"kind": "cut", "times": 2},
    "answer lost": {"kind": "cut", "times": 1, "when": "after"},
}
HUB_CODE = str(Path("hezar_train") / "hub")

_main_connects: list[str] = []


def _note_connects(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and threading.current_thread() is threading.main_thread():
        _main_connects.append(str(arguments[1:]))


sys.addaudithook(_note_connects)


@pytest.fixture(autouse=True)
def _token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, without_xet: None) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)


class At(Hook):
    """Do something once, after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self._step, self._act = step, act

    def after_step(self) -> None:
        if self.trainer.state.global_step == self._step:
            self._act()


def build(out: Path, hooks: list[Hook] | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 3))
    data = TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
    settings = {
        "batch_size": 8, "num_epochs": 5, "criterion": "CrossEntropyLoss", "save_steps": 10, "log_steps": 5,
        "trackers": [],
    }  # fmt: skip
    return Trainer(TrainerConfig(out, **settings | changes), model, data, hooks=hooks or [])


def pushing(out: Path, hooks: list[Hook] | None = None, **changes: Any) -> Trainer:
    given = {"push_to_hub": True, "hub_model_id": REPO, "hub_strategy": "every_save", "hub_wait_seconds": 60}
    return build(out, hooks, **given | changes)


def weights_of(out: Path, step: int = LAST_STEP) -> str:
    return hashlib.sha256((out / "checkpoints" / f"{step:08d}" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    build(out).train()
    return out


def pushes(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "hub.json").read_text())["pushes"]
    return found


def assert_told_truly(hub: LoopbackHub, out: Path) -> None:
    """Every push that is written down as done is a commit, and every commit but the server's own is written down."""
    told = pushes(out)
    done = {one["commit"] for one in told if one["outcome"] == "done"}
    made = {commit.id for commit in hub.commits(REPO)[:-1]}
    assert done <= made
    # a commit whose answer was lost, and which was not tried again because a newer push came
    assert len(made - done) <= sum(one["outcome"] == "superseded" and one["attempts"] > 0 for one in told)


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for path in out.glob("logs/*/metrics.json") for line in path.read_text().splitlines()]
    return {row["step"]: row["train.loss"] for row in rows if "train.loss" in row}


def test_a_run_goes_on_from_the_repository_alone(hub: LoopbackHub, tmp_path: Path, unbroken: Path) -> None:
    pushing(tmp_path / "first", hub_strategy="all_checkpoints").train()
    moved = tmp_path / "moved"
    build(moved, resume_from_checkpoint=f"hub://{REPO}#{MIDDLE}").train()
    assert weights_of(moved) == weights_of(unbroken)
    assert losses(moved) == losses(unbroken)


def test_a_run_pushes_to_the_branch_of_its_config(hub: LoopbackHub, tmp_path: Path) -> None:
    pushing(tmp_path / "run", num_epochs=1, hub_revision="dev", hub_card={"license": "mit"}).train()
    weights = (tmp_path / "run/checkpoints/00000012/model.safetensors").read_bytes()
    assert hub.files(REPO, "dev")["model.safetensors"] == weights
    assert b"license: mit" in hub.files(REPO, "dev")["README.md"]
    assert hub.files(REPO) == {}


def test_what_was_pushed_is_downloaded_byte_by_byte(hub: LoopbackHub, tmp_path: Path) -> None:
    pushing(tmp_path / "run").train()
    found = Path(snapshot_download(REPO, local_dir=tmp_path / "copy"))
    names = [path for path in found.rglob("*") if path.is_file() and ".cache" not in path.parts]
    downloaded = {str(path.relative_to(found)): path.read_bytes() for path in names if path.name != ".gitattributes"}
    assert downloaded == hub.files(REPO)
    local = tmp_path / "run/checkpoints" / f"{LAST_STEP:08d}"
    for path in (one for one in local.rglob("*") if one.is_file()):
        assert downloaded[f"checkpoints/last/{path.relative_to(local)}"] == path.read_bytes()


def moments_of(hub: LoopbackHub, when: str, fault: dict[str, Any], route: str) -> Iterator[Hook]:
    """Set a fault now, or return the hook that sets it later."""
    if when == "start":
        hub.faults.set(route, **fault)
    else:
        yield At(MIDDLE if when == "middle" else LAST_STEP - 1, lambda: hub.faults.set(route, **fault))


def check_a_failing_hub(
    hub: LoopbackHub, tmp_path: Path, unbroken: Path, route: str, fault: dict[str, Any], when: str
) -> None:
    trainer = pushing(tmp_path / "run", list(moments_of(hub, when, fault, route)))
    _main_connects.clear()
    trainer.train()
    assert not _main_connects
    assert weights_of(tmp_path / "run") == weights_of(unbroken)
    assert trainer.hub_uploaded is True, pushes(tmp_path / "run")
    assert "model.safetensors" in hub.files(REPO)
    assert_told_truly(hub, tmp_path / "run")


@pytest.mark.parametrize(
    ("route", "fault", "when"),
    [
        ("create", "500", "start"),
        ("commit", "503", "middle"),
        ("lfs_put", "cut", "end"),
        ("commit", "answer lost", "end"),
    ],
)
def test_a_hub_that_fails_for_a_while_changes_nothing(
    hub: LoopbackHub, tmp_path: Path, unbroken: Path, route: str, fault: str, when: str
) -> None:
    check_a_failing_hub(hub, tmp_path, unbroken, route, FAULTS[fault], when)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["start", "middle", "end"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", PUSH_ROUTES)
def test_any_fault_on_any_route_at_any_time_changes_nothing(
    hub: LoopbackHub, tmp_path: Path, unbroken: Path, route: str, fault: str, when: str
) -> None:
    check_a_failing_hub(hub, tmp_path, unbroken, route, FAULTS[fault], when)


@pytest.mark.parametrize("when", ["start", "middle", "end"])
def test_a_dead_hub_costs_nothing_but_the_upload_which_can_be_finished_later(
    hub: LoopbackHub, tmp_path: Path, unbroken: Path, when: str
) -> None:
    hooks: list[Hook] = []
    if when == "start":
        hub.stop()
    else:
        hooks = [At(MIDDLE if when == "middle" else LAST_STEP - 1, hub.stop)]
    trainer = pushing(tmp_path / "run", hooks, hub_wait_seconds=1)
    _main_connects.clear()
    trainer.train()
    assert not _main_connects
    assert trainer.hub_uploaded is False
    assert weights_of(tmp_path / "run") == weights_of(unbroken)
    assert pushes(tmp_path / "run")[-1]["outcome"] != "done"
    with pytest.raises(HubError):
        push_run(tmp_path / "run", max_attempts=1)
    hub.start()
    outcome = push_run(tmp_path / "run")
    assert outcome.oid == hub.commits(REPO)[0].id
    assert_told_truly(hub, tmp_path / "run")


def test_a_dead_hub_that_comes_back_gets_everything_by_the_end(
    hub: LoopbackHub, tmp_path: Path, unbroken: Path
) -> None:
    hub.stop()
    trainer = pushing(tmp_path / "run", [At(LAST_STEP - 1, hub.start)])
    trainer.train()
    assert trainer.hub_uploaded is True
    assert weights_of(tmp_path / "run") == weights_of(unbroken)
    assert_told_truly(hub, tmp_path / "run")


class Slowly(Hook):
    """Make a step as long as those of real models are."""

    def before_step(self) -> None:
        time.sleep(0.05)


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.usefixtures("unbroken")  # what is looked up once for a process has been
def test_the_training_thread_spends_next_to_nothing_on_the_hub(hub: LoopbackHub, tmp_path: Path, is_dead: bool) -> None:
    if is_dead:
        hub.stop()
    # Up to three runs: other work on the machine only ever adds time.
    shares = (
        _share_of_hub_code(pushing(tmp_path / str(number), [Slowly()], hub_wait_seconds=1 if is_dead else 60))
        for number in range(3)
    )
    assert any(share < 0.01 for share in shares)


def _share_of_hub_code(trainer: Trainer) -> float:
    """Train, and return the share of the training thread's time inside the Hub's code, but for waiting at the end."""
    profiler = cProfile.Profile(time.perf_counter)  # of this thread
    profiler.runcall(trainer.train)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    waits = sum(row[3] for (path, _, name), row in stats.items() if HUB_CODE in path and name == "close")
    entered = 0.0
    for (path, _, name), (_, _, _, _, callers) in stats.items():
        if HUB_CODE in path and name != "close":
            entered += sum(row[3] for (caller, _, _), row in callers.items() if HUB_CODE not in caller)
    total = max(row[3] for (_, _, name), row in stats.items() if name == "train") - waits
    print(f"{entered * 1e3:.1f} ms of {total * 1e3:.0f} ms in the Hub's code")
    return float(entered / total)


def test_the_blocking_verb_returns_the_commit_or_raises(hub: LoopbackHub, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run")
    trainer.train()
    commit = trainer.push_to_hub(REPO, commit_message="by hand")
    assert hub.commits(REPO)[0].title == "by hand"
    assert commit.oid == hub.commits(REPO)[0].id
    hub.stop()
    with pytest.raises(HubError):
        trainer.push_to_hub(REPO)


def test_initial_weights_come_from_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    first = build(tmp_path / "first")
    first.train()
    first.push_to_hub(REPO)
    torch.manual_seed(1)
    second = build(tmp_path / "second", init_weights_from=REPO)
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, first.model.state_dict()[name])
    assert second.state.global_step == 0


def test_a_config_goes_to_the_hub_and_comes_back_equal(hub: LoopbackHub, tmp_path: Path) -> None:
    config = TrainerConfig(tmp_path, batch_size=4, learning_rate=3e-4, hub_card={"license": "mit"})
    config.push_config_to_hub(REPO)
    assert TrainerConfig.load(REPO).to_dict() == config.to_dict()


def test_pushing_what_is_never_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_enabled=False"):
        TrainerConfig(tmp_path, push_to_hub=True, hub_model_id=REPO, save_enabled=False)


def test_a_pushed_transformers_model_is_loaded_by_transformers(hub: LoopbackHub, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **settings))
    rows = [{"input_ids": torch.randint(50, (6,)), "labels": torch.tensor(number % 2)} for number in range(16)]
    config = TrainerConfig(
        tmp_path / "run", task="text_classification", batch_size=4, push_to_hub=True, hub_model_id=REPO, trackers=[]
    )
    trainer = Trainer(config, model, rows)
    trainer.train()
    assert trainer.hub_uploaded is True
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(REPO)
    batch = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(batch).logits, trainer.model.eval()(batch).logits)


def test_hezars_own_format_is_added_only_on_request_and_hezar_loads_it(hub: LoopbackHub, tmp_path: Path) -> None:
    models = pytest.importorskip("hezar.models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = models.BertTextClassificationConfig(num_labels=3, vocab_size=50, **sizes)
    model = models.BertTextClassification(config)
    rows = [{"token_ids": torch.randint(50, (6,)), "labels": torch.tensor(number % 3)} for number in range(8)]
    settings = TrainerConfig(tmp_path / "run", task="text_classification", batch_size=4, trackers=[])
    trainer = Trainer(settings, model, rows)
    trainer.train()
    trainer.push_to_hub(REPO)
    assert not [name for name in hub.files(REPO) if name.endswith((".pt", ".bin", ".pth"))]
    trainer.push_to_hub(REPO, hezar_format=True)
    assert [name for name in hub.files(REPO) if name.endswith(".pt")] == ["model.pt"]
    loaded = models.Model.load(str(snapshot_download(REPO, local_dir=tmp_path / "copy")))
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
