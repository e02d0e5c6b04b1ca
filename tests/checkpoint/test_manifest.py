"""What makes a folder a checkpoint: its manifest, every damage told, and files that are durable before their names."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from hezar_train.checkpoint import CheckpointStore, verify
from hezar_train.checkpoint.manifest import (
    CHUNK_BYTES,
    REQUIRED_FILES,
    FileRecord,
    Manifest,
    hash_file,
    read_manifest,
    write_file_durably,
)
from hezar_train.config.files import is_disk_full
from hezar_train.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in REQUIRED_FILES:
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, {name: hash_file(tmp_path / name) for name in REQUIRED_FILES})
    return tmp_path


def write_manifest(folder: Path, files: dict[str, FileRecord]) -> None:
    (folder / "manifest.json").write_bytes(Manifest(7, files).to_bytes())


def test_a_whole_checkpoint_verifies_and_unlisted_files_are_ignored(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    assert verify(folder) == read_manifest(folder)
    assert verify(folder).step == 7
    content = json.loads((folder / "manifest.json").read_text())
    assert list(content) == ["format", "step", "files", "sha256"]
    assert content["files"]["train_config.yaml"]["size"] == len("train_config.yaml")


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_required_part_that_is_not_listed_is_damage(folder: Path, name: str) -> None:
    records = read_manifest(folder).files
    write_manifest(folder, {other: record for other, record in records.items() if other != name})
    with pytest.raises(CheckpointError, match=f"{name} is not listed in manifest.json"):
        verify(folder)


def test_each_kind_of_damage_is_told_exactly(folder: Path) -> None:
    (folder / "model.safetensors").write_text("model.safetensorz")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its SHA-256"):
        verify(folder)
    (folder / "trainer_state.json").write_text("short")
    with pytest.raises(CheckpointError, match=r"trainer_state\.json has 5 bytes instead of 18"):
        verify(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        verify(folder)


def test_a_manifest_that_was_changed_is_damage(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(CheckpointError, match="does not match its own SHA-256"):
        verify(folder)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="does not match its own SHA-256"):
        verify(folder)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        verify(folder)


def test_a_manifest_cannot_point_outside_its_folder(folder: Path) -> None:
    write_manifest(folder, {**read_manifest(folder).files, "../secret": FileRecord(0, "")})
    with pytest.raises(CheckpointError, match=r"lists '\.\./secret', which is refused: it is outside"):
        verify(folder)


def test_another_format_is_refused_by_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hezar_train.checkpoint.manifest.FORMAT", 2)
    with pytest.raises(CheckpointError, match="has format 1; this version of hezar_train reads 2"):
        verify(folder)


def test_the_record_is_that_of_the_bytes_written(tmp_path: Path) -> None:
    content = os.urandom(CHUNK_BYTES + 5)
    record = write_file_durably(tmp_path / "x", [content[:7], b"", memoryview(content)[7:]])
    assert (tmp_path / "x").read_bytes() == content
    assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest())
    assert hash_file(tmp_path / "x") == record


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write_file_durably(tmp_path / "x", [b"old"])
    with pytest.raises(FileExistsError):
        write_file_durably(tmp_path / "x", [b"new"])
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.EFBIG, "limit"), True),
        (OSError(errno.EIO, "broken"), False),
        (RuntimeError("No space left on device (os error 28)"), True),
        (RuntimeError("something (os error 5)"), False),
        (ValueError("28"), False),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error: BaseException, answer: bool) -> None:
    assert is_disk_full(error) is answer
    wrapped = RuntimeError("the preprocessor could not be saved")
    wrapped.__cause__ = error
    assert is_disk_full(wrapped) is answer


def test_everything_is_on_disk_before_the_name_and_the_name_before_the_return(
    store: CheckpointStore, new_run: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recording_rename(source: Path, target: Path) -> None:
        calls.append(("rename", Path(target).name))
        rename(source, target)

    store.root.mkdir()
    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    parts = new_run().parts()
    store.publish(3, parts.write, lambda: calls.append(("before", "commit")))
    draft = calls[-4][1]
    assert draft.startswith(".tmp-00000003-")
    assert calls == [
        ("fsync", "model.safetensors"),
        ("fsync", "optimizer.safetensors"),
        ("fsync", "trainer_state.json"),
        ("fsync", "train_config.yaml"),
        ("fsync", "vocab.txt"),
        ("fsync", "preprocessor"),
        ("fsync", "manifest.json"),
        ("fsync", draft),
        ("before", "commit"),
        ("rename", "00000003"),
        ("fsync", "checkpoints"),
    ]
