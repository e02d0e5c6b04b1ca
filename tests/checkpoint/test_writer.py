from __future__ import annotations

import logging
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hezar_train.checkpoint import CheckpointStore, CheckpointWriter
from hezar_train.errors import CheckpointError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", mount], check=True)


def write_too_much(folder: Path) -> None:
    (folder / "huge").write_bytes(bytes(16 << 20))


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_holds_the_moment_of_its_save(store: CheckpointStore, new_run: type, background: bool) -> None:
    run, resumed, state = new_run(), new_run(seed=1), {"global_step": 2}
    writer = CheckpointWriter(store, background)
    run.update(2)
    at_save = run.bits()
    gate = threading.Event()
    gate.set()
    if background:
        gate.clear()
    writer.save(2, run.parts(state=state, folders={"wait": lambda folder: gate.wait(10) and None}))
    run.update(2)
    state["global_step"] = 99
    gate.set()
    writer.close()
    checkpoint, _ = store.newest()
    resumed.load(checkpoint)
    assert (resumed.step, writer.last_step) == (2, 2)
    assert resumed.bits() == at_save
    assert resumed.bits() != run.bits()


def test_background_saves_use_the_reserved_memory_and_inline_saves_none(store: CheckpointStore, new_run: type) -> None:
    run = new_run()
    run.update()
    parts = run.parts()
    tensor_bytes = parts.nbytes - sum(map(len, parts.files.values()))
    writer = CheckpointWriter(store)
    assert writer.reserve(parts) == tensor_bytes
    writer.save(1, run.parts())
    writer.wait()
    assert writer._buffers.nbytes == tensor_bytes
    assert CheckpointWriter(store, background=False).reserve(parts) == 0


def test_a_save_waits_for_the_one_under_way_and_says_so(
    store: CheckpointStore, new_run: type, caplog: pytest.LogCaptureFixture
) -> None:
    run, gate = new_run(), threading.Event()
    writer = CheckpointWriter(store)
    writer.save(1, run.parts(before_commit=lambda: gate.wait(10) and None))
    assert store.steps() == []
    threading.Timer(0.2, gate.set).start()
    writer.save(2, run.parts())
    assert "The save of step 2 waited 0." in caplog.text
    assert "for the save of step 1" in caplog.text
    caplog.clear()
    writer.wait()
    writer.save(3, run.parts())
    writer.close()
    assert (store.steps(), caplog.text) == ([1, 2, 3], "")


@pytest.mark.parametrize("meet", [lambda writer, parts: writer.save(2, parts), lambda writer, _: writer.wait()])
def test_an_error_in_the_background_surfaces_at_the_next_call_once(
    store: CheckpointStore, new_run: type, meet: Callable[[Any, Any], None]
) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("the tokenizer broke")

    writer = CheckpointWriter(store)
    writer.save(1, new_run().parts(folders={"preprocessor": fail}))
    with pytest.raises(RuntimeError, match="the tokenizer broke") as caught:
        meet(writer, new_run().parts())
    assert caught.value.__notes__ == ["This happened while the checkpoint of step 1 was being written."]
    writer.save(3, new_run().parts())
    writer.close()
    assert names(store) == ["00000003"]


def test_an_error_in_line_is_raised_at_once(store: CheckpointStore, new_run: type) -> None:
    def fail() -> None:
        raise OSError(5, "the log's disk broke")

    with pytest.raises(OSError, match="the log's disk broke"):
        CheckpointWriter(store, background=False).save(1, new_run().parts(before_commit=fail))
    assert names(store) == []


def test_retention_follows_each_save_and_never_takes_the_best(store: CheckpointStore, new_run: type) -> None:
    writer = CheckpointWriter(store, keep=2)
    for step in range(1, 6):
        writer.save(step, new_run().parts(), protect={2})
    writer.close()
    assert store.steps() == [2, 4, 5]


def test_retention_never_takes_the_last_good_one(store: CheckpointStore, new_run: type) -> None:
    writer = CheckpointWriter(store, background=False, keep=1)
    for step in (10, 20):
        writer.save(step, new_run().parts())
    (store.path(20) / "manifest.json").unlink()
    writer.save(15, new_run().parts())
    newest, _ = store.newest()
    assert newest is not None
    assert newest.step == 15


def test_a_checkpoint_that_does_not_read_back_is_an_error_and_nothing_is_deleted(
    store: CheckpointStore, new_run: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(store, background=False, keep=1)
    writer.save(1, new_run().parts())
    publish = store.publish

    def publish_on_a_failing_disk(*arguments: Any) -> Path:
        path = publish(*arguments)
        (path / "model.safetensors").write_bytes(b"rust")
        return path

    monkeypatch.setattr(store, "publish", publish_on_a_failing_disk)
    with pytest.raises(CheckpointError, match=r"00000002 is damaged: model\.safetensors has 4 bytes"):
        writer.save(2, new_run().parts())
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_up_stops_the_save_and_not_the_training(
    small_disk: Path, new_run: type, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    store, run = CheckpointStore(small_disk / "checkpoints"), new_run()
    writer = CheckpointWriter(store, background)
    writer.save(1, run.parts())
    writer.save(2, run.parts(folders={"preprocessor": write_too_much}))
    writer.wait()
    assert writer.failed_saves == 1
    assert "DISK FULL: the checkpoint of step 2 was NOT written" in caplog.text
    assert names(store) == ["00000001"]
    newest, _ = store.newest()
    assert newest is not None
    writer.save(3, run.parts())
    writer.close()
    assert names(store) == ["00000001", "00000003"]


def test_a_full_disk_is_seen_before_anything_is_written_and_the_next_save_succeeds(
    small_disk: Path, new_run: type, caplog: pytest.LogCaptureFixture
) -> None:
    store, run, started = CheckpointStore(small_disk / "checkpoints"), new_run(), []
    writer = CheckpointWriter(store)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes((7 << 20) + (1 << 19)))
    writer.save(1, run.parts(folders={"preprocessor": started.append}))
    writer.wait()
    assert (writer.failed_saves, started, names(store)) == (1, [], [])
    assert "are needed and" in caplog.text
    ballast.unlink()
    writer.save(2, run.parts())
    writer.close()
    assert (writer.failed_saves, store.steps()) == (1, [2])


def test_a_file_size_limit_counts_as_a_full_disk(store: CheckpointStore, new_run: type, fork: Any) -> None:
    def job() -> None:
        logging.disable()
        run, writer = new_run(width=20_000), CheckpointWriter(store)
        writer.save(1, run.parts())
        writer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
        writer.save(2, run.parts())
        run.update()
        writer.wait()
        assert (writer.failed_saves, names(store)) == (1, ["00000001"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.save(3, run.parts())
        writer.close()

    assert fork(job).wait() == 0
    assert store.steps() == [1, 3]
    newest, _ = store.newest()
    assert newest is not None
    assert newest.step == 3
