"""Whatever becomes of the newest checkpoint or of the disk, the run goes on from a whole checkpoint and says so."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workload import CrashAt, checkpoint_steps, crash, differences, make_trainer, rows_of

from hezar_train import Hook
from hezar_train.checkpoint import CheckpointStore
from hezar_train.errors import CheckpointError

FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "trainer_state.json",
    "train_config.yaml",
    "preprocessor/words.txt",
    "preprocessor/settings.json",
    "manifest.json",
)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: tuple[Callable[[Path], Any], ...] = (truncate, empty, flip_a_bit, Path.unlink)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run, and one that crashed with checkpoints 3, 6, 8, 11 and 14."""
    folder: Path = tmp_path_factory.mktemp("runs")
    make_trainer(folder / "unbroken").train()
    crash(make_trainer(folder / "broken", hooks=[CrashAt(15, "on_batch_start")]))
    assert checkpoint_steps(folder / "broken") == [3, 6, 8, 11, 14]
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=["truncated", "emptied", "bit flipped", "deleted"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_the_result_is_the_same(
    tmp_path: Path, runs: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], Any]
) -> None:
    run = Path(shutil.copytree(runs / "broken", tmp_path / "run"))
    newest = run / "checkpoints" / "00000014"
    damage(newest / name)
    with caplog.at_level(logging.INFO, "hezar_train"):
        trainer = make_trainer(run)
    assert trainer.state.global_step == 11
    passed_over = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(passed_over) == 1
    assert f"checkpoint {newest} is damaged and was passed over: {name} " in passed_over[0]
    trainer.train()
    assert differences(runs / "unbroken", run) == []
    assert CheckpointStore(run / "checkpoints").open(newest).step == 14  # written anew


def test_two_damaged_checkpoints_are_passed_over(tmp_path: Path, runs: Path) -> None:
    run = Path(shutil.copytree(runs / "broken", tmp_path / "run"))
    truncate(run / "checkpoints" / "00000014" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "00000011" / "preprocessor")
    trainer = make_trainer(run)
    assert trainer.state.global_step == 8
    trainer.train()
    assert differences(runs / "unbroken", run) == []


def test_where_no_checkpoint_can_be_loaded_nothing_starts_from_scratch(tmp_path: Path, runs: Path) -> None:
    run = Path(shutil.copytree(runs / "broken", tmp_path / "run"))
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded") as refused:
        make_trainer(run)
    assert [f"{step:08d}: manifest.json is missing" in str(refused.value) for step in (3, 6, 8, 11, 14)] == [True] * 5


def test_a_damaged_checkpoint_that_was_asked_for_by_path_is_refused(tmp_path: Path, runs: Path) -> None:
    run = Path(shutil.copytree(runs / "broken", tmp_path / "run"))
    flip_a_bit(run / "checkpoints" / "00000008" / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"00000008 is damaged: optimizer\.safetensors does not match"):
        make_trainer(run, resume_from_checkpoint=run / "checkpoints" / "00000008")


class Scarce(Hook):
    """Take the room away after step 4 and give it back after step 12."""

    def __init__(self, take: Callable[[], None], give_back: Callable[[], None]) -> None:
        self._take, self._give_back = take, give_back

    def after_step(self) -> None:
        if self.trainer.state.global_step == 4:
            while checkpoint_steps(Path(self.trainer.config.output_dir)) != [3]:
                time.sleep(0.001)  # the save in the background has room
            self._take()
        if self.trainer.state.global_step == 12:
            self._give_back()


@pytest.fixture
def file_limit() -> Iterator[Scarce]:
    """Allow no file beyond a size; a model with ballast has larger ones."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield Scarce(
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1])),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Scarce]]:
    """A disk of its own that can be filled to the last byte."""
    disk, filler = tmp_path / "disk", tmp_path / "disk" / "filler"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")

    def fill() -> None:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)

    yield disk, Scarce(fill, filler.unlink)
    subprocess.run(["umount", str(disk)], check=True)


def test_a_save_that_finds_no_room_does_not_stop_the_run(
    tmp_path: Path, file_limit: Scarce, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path / "unbroken", ballast=100_000).train()
    make_trainer(tmp_path / "full", ballast=100_000, async_save=False, hooks=[file_limit]).train()
    assert checkpoint_steps(tmp_path / "full") == [3, 14, 16]
    assert [f"DISK FULL: the checkpoint of step {step} was NOT written" in caplog.text for step in (6, 8, 11)] == [
        True
    ] * 3
    assert differences(tmp_path / "unbroken", tmp_path / "full") == []


@pytest.mark.parametrize("async_save", [True, False])
def test_a_crash_on_a_full_disk_leaves_the_earlier_checkpoint(
    tmp_path: Path, file_limit: Scarce, async_save: bool
) -> None:
    changes = {"ballast": 100_000, "async_save": async_save}
    make_trainer(tmp_path / "unbroken", **changes).train()
    crash(make_trainer(tmp_path / "full", hooks=[file_limit, CrashAt(12, "on_batch_start")], **changes))
    kept = checkpoint_steps(tmp_path / "full")
    # a save in the background may come to its writing only when the failed run has given the room back
    assert kept == [3] or (async_save and kept == [3, 11])
    file_limit._give_back()
    trainer = make_trainer(tmp_path / "full", **changes)
    assert trainer.state.global_step == kept[-1]
    trainer.train()
    assert differences(tmp_path / "unbroken", tmp_path / "full") == []


def test_a_disk_without_a_single_byte_left_delays_the_logs_and_loses_none(
    tmp_path: Path, small_disk: tuple[Path, Scarce], caplog: pytest.LogCaptureFixture
) -> None:
    disk, scarce = small_disk
    make_trainer(tmp_path / "unbroken").train()
    make_trainer(disk / "full", async_save=False, hooks=[scarce]).train()
    assert checkpoint_steps(disk / "full") == [3, 14, 16]
    assert "evaluations/00000008.json was not written: the disk is full" in caplog.text
    assert rows_of(disk / "full") == rows_of(tmp_path / "unbroken")
    assert set(differences(tmp_path / "unbroken", disk / "full")) == {"evaluations"}  # one record could not be written
