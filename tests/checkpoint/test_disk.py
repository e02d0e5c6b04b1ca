from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from hezar_train.checkpoint import CheckpointStore
from hezar_train.checkpoint import manifest as disk
from hezar_train.config.files import is_disk_full


def test_the_record_is_that_of_the_bytes_written(tmp_path: Path) -> None:
    content = os.urandom(disk.CHUNK_BYTES + 5)
    record = disk.write_file_durably(tmp_path / "x", [content[:7], b"", memoryview(content)[7:]])
    assert (tmp_path / "x").read_bytes() == content
    assert record == disk.FileRecord(len(content), hashlib.sha256(content).hexdigest())
    assert disk.hash_file(tmp_path / "x") == record


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    disk.write_file_durably(tmp_path / "x", [b"old"])
    with pytest.raises(FileExistsError):
        disk.write_file_durably(tmp_path / "x", [b"new"])
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
