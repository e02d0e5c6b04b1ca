"""What a push uploads comes from the run's folder alone, and rests while the run goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hezar_train.checkpoint import Checkpoint, Contents, read_tensors
from hezar_train.checkpoint.shard_files import Box, Place, write_shards
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.hub import PushNames, PushTarget, push_run
from hezar_train.hub.pushed_files import SavedRun, SupersededError, remove_leftovers, stage
from tests.hub.runs import PUSHED_LOGS, HandmadeRun, finished_run

TRAIN_FILES = {
    "train/train_config.yaml", "train/trainer_state.json", "train/plan.json", "train/best.json", "train/manifest.json",
    "train/environment.json", "train/evaluations/00000005.json", "train/evaluations/00000010.json",
    f"train/logs/{PUSHED_LOGS}/metrics.json", f"train/logs/{PUSHED_LOGS}/training_logs.csv", "train/curves.png",
}  # fmt: skip
CHECKPOINT_FILES = {
    "model.safetensors", "optimizer.safetensors", "trainer_state.json", "train_config.yaml", "preprocessor/vocab.txt",
    "manifest.json",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> HandmadeRun:
    return finished_run(tmp_path / "run")


@pytest.fixture
def paths(run: HandmadeRun) -> SavedRun:
    return SavedRun(run.root)


def without_tensorboard(names: object) -> set[str]:
    return {name for name in names if "tfevents" not in name}  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["end", "best"])
def test_a_model_for_others_has_weights_and_preprocessor_at_the_root(paths: SavedRun, strategy: str) -> None:
    staged = stage(paths, 10, strategy)
    assert without_tensorboard(staged.files) == {"model.safetensors", "vocab.txt", *TRAIN_FILES}
    assert sum("tfevents" in name for name in staged.files) == 1
    assert staged.files["model.safetensors"].read_bytes() == (paths.store.path(10) / "model.safetensors").read_bytes()
    assert staged.nbytes == sum(path.stat().st_size for path in staged.files.values())


def test_every_save_adds_the_checkpoint_under_one_name(paths: SavedRun) -> None:
    added = without_tensorboard(stage(paths, 10, "every_save").files) - TRAIN_FILES - {"model.safetensors", "vocab.txt"}
    assert added == {f"checkpoints/last/{name}" for name in CHECKPOINT_FILES}


def test_all_checkpoints_adds_every_one_under_its_step(paths: SavedRun) -> None:
    added = {name for name in stage(paths, 10, "all_checkpoints").files if name.startswith("checkpoints/")}
    assert added == {f"checkpoints/{step}/{name}" for step in ("00000005", "00000010") for name in CHECKPOINT_FILES}


def test_flags_drop_their_files_and_names_rename_them(paths: SavedRun) -> None:
    names = PushNames("c.yaml", "w.safetensors", None, "o.safetensors", "extra", push_optimizer=True, push_logs=False)
    found = set(stage(paths, 10, "end", names).files)
    assert {"w.safetensors", "extra/c.yaml", "extra/o.safetensors", "extra/trainer_state.json"} <= found
    assert not any("logs" in name or name.endswith(".png") for name in found)
    bare = set(stage(paths, 10, "end", PushNames(push_model=False, push_logs=False)).files)
    assert "model.safetensors" not in bare
    assert "train/train_config.yaml" in bare


def test_files_of_another_library_are_added_as_they_are(paths: SavedRun, tmp_path: Path) -> None:
    (tmp_path / "extra" / "train").mkdir(parents=True)
    (tmp_path / "extra" / "model.pt").write_bytes(b"x")
    (tmp_path / "extra" / "train" / "dataset_config.yaml").write_text("a: 1\n")
    files = stage(paths, 10, "end", extra_folder=tmp_path / "extra").files
    assert files["model.pt"].read_bytes() == b"x"
    assert "train/dataset_config.yaml" in files


def test_what_is_staged_outlives_its_checkpoint_and_does_not_grow(run: HandmadeRun, paths: SavedRun) -> None:
    expected = (run.store.path(5) / "model.safetensors").read_bytes()
    staged = stage(paths, 5, "every_save")
    log = staged.files[f"train/logs/{PUSHED_LOGS}/metrics.json"]
    before = log.read_bytes()
    assert run.store.prune(keep=1) == [5]
    run.log(11)
    assert staged.files["checkpoints/last/model.safetensors"].read_bytes() == expected
    assert log.read_bytes() == before
    staged.discard()
    assert list(paths.layout.hub_staging.iterdir()) == []


def test_a_checkpoint_that_vanished_is_superseded(run: HandmadeRun, paths: SavedRun) -> None:
    run.store.prune(keep=1)
    with pytest.raises(SupersededError, match="step 5 is not there any more"):
        stage(paths, 5, "every_save")
    assert list(paths.layout.hub_staging.iterdir()) == []


def test_a_damaged_checkpoint_is_not_pushed(run: HandmadeRun, paths: SavedRun) -> None:
    weights = run.store.path(10) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        stage(paths, 10, "end")


def test_shards_become_one_file_that_others_read(run: HandmadeRun, paths: SavedRun) -> None:
    model = nn.Linear(4, 4)
    parts = Contents.gather(nn.Linear(1, 1), {}, {}, {"train_config.yaml": "{}\n"})
    shards = {
        f"{number:05d}-of-00002": {"weight": (model.weight[row : row + 2], Place((4, 4), Box((row, 0), (2, 4)), True))}
        for number, row in enumerate((0, 2))
    }

    def fill(draft: object) -> None:
        parts.write(draft)  # type: ignore[arg-type]
        for number, boxes in shards.items():
            write_shards(draft, number, {"model": boxes})  # type: ignore[arg-type]

    run.store.publish(20, fill)
    whole = read_tensors(stage(paths, 20, "end").files["model.safetensors"])
    assert torch.equal(whole["weight"], model.weight)


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(paths: SavedRun) -> None:
    alive = stage(paths, 10, "end").folder
    dead = alive.with_name(alive.name.replace(f"-{os.getpid()}-", "-999999999-"))
    alive.joinpath("x").mkdir()
    dead.mkdir()
    remove_leftovers(paths)
    assert list(paths.layout.hub_staging.iterdir()) == [alive]


def test_a_folder_that_is_no_run_and_a_run_without_checkpoints_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no train_config\.yaml"):
        push_run(tmp_path, "a/b")
    HandmadeRun(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        push_run(tmp_path / "run", "a/b")
    with pytest.raises(ConfigError, match="has no hub_model_id"):
        push_run(tmp_path / "run")


def test_a_run_whose_config_has_another_name_is_read_from_its_checkpoints(run: HandmadeRun) -> None:
    (run.root / "train_config.yaml").rename(run.root / "asked.yaml")
    staged = stage(SavedRun(run.root), 10, "end")
    expected = (run.store.path(10) / "train_config.yaml").read_bytes()
    assert staged.files["train/train_config.yaml"].read_bytes() == expected


def test_a_name_that_leads_outside_is_refused(paths: SavedRun) -> None:
    with pytest.raises(ConfigError, match="leads outside"):
        stage(paths, 10, "end", PushNames(model="../model.safetensors"))
    assert list(paths.layout.hub_staging.iterdir()) == []


def test_an_unknown_strategy_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'every_save'"):
        PushTarget("a/b", strategy="every_saves")


def test_a_staged_checkpoint_verifies(paths: SavedRun) -> None:
    staged = stage(paths, 10, "every_save", verified=True)
    assert Checkpoint(staged.files["checkpoints/last/manifest.json"].parent).step == 10
