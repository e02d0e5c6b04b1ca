"""A run's folder of checkpoints: what they hold, which one is taken, which ones go, and the copy that a save makes."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hezar_train.checkpoint import CheckpointStore, Contents, SnapshotBuffers, load_module_state, to_delete
from hezar_train.errors import CheckpointError

FILES = [
    "model.safetensors",
    "optimizer.safetensors",
    "trainer_state.json",
    "train_config.yaml",
    "preprocessor/vocab.txt",
    "manifest.json",
]


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def publish(store: CheckpointStore, run: Any) -> Path:
    return store.publish(run.step, run.parts().write)


@pytest.fixture
def two_saved(store: CheckpointStore, new_run: type) -> tuple[CheckpointStore, list[object]]:
    run, bits = new_run(), []
    for _ in range(2):
        run.update(2)
        publish(store, run)
        bits.append(run.bits())
    return store, bits


@pytest.mark.parametrize(
    "build",
    [
        torch.optim.Adam,
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
        torch.optim.Adafactor,
        torch.optim.Rprop,
    ],
)
def test_a_resumed_run_is_the_unbroken_run_to_the_last_bit(
    store: CheckpointStore, new_run: type, build: Callable[[Any], Any]
) -> None:
    run, resumed = new_run(), new_run(seed=1)
    run.optimizer, resumed.optimizer = build(run.model.parameters()), build(resumed.model.parameters())
    run.update(3)
    publish(store, run)
    run.update(3)
    checkpoint, rejected = store.newest()
    resumed.load(checkpoint)
    assert rejected == []
    assert resumed.step == 3
    resumed.update(3)
    assert resumed.bits() == run.bits()


def test_all_parts_come_back(store: CheckpointStore, new_run: type, bits_of: Callable[[Any], object]) -> None:
    run = new_run()
    run.update(5)
    checkpoint = store.open(publish(store, run))
    assert checkpoint.step == 5
    assert checkpoint.state() == {"global_step": 5, "loss": 5.1}
    expected = {"scheduler": {"last_epoch": 5, "best": float("inf")}, "cursor": torch.arange(5)}
    assert bits_of(checkpoint.extra()) == bits_of(expected)
    assert bits_of(checkpoint.optimizer()) == bits_of(run.optimizer.state_dict())
    assert checkpoint.text("train_config.yaml") == "seed: 0\n"
    assert checkpoint.text("preprocessor/vocab.txt") == "a\nb\n"
    with pytest.raises(CheckpointError, match=r"has no file 'absent\.txt'"):
        checkpoint.text("absent.txt")


def test_an_optimizer_tree_may_have_its_own_extra_part(store: CheckpointStore) -> None:
    texts = {"train_config.yaml": ""}
    parts = Contents.gather(nn.Linear(1, 1), {"extra": {"x": torch.zeros(1)}}, {}, texts, extra={"x": torch.ones(1)})
    checkpoint = store.open(store.publish(1, parts.write))
    assert checkpoint.optimizer()["extra"]["x"].item() == 0
    assert checkpoint.extra()["x"].item() == 1


def test_parts_that_cannot_be_saved_are_refused_before_anything_is_written(store: CheckpointStore) -> None:
    texts, model = {"train_config.yaml": ""}, nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"needs the text 'train_config\.yaml'"):
        Contents.gather(model, {}, {}, {})
    with pytest.raises(CheckpointError, match="put them into `extra`"):
        Contents.gather(model, {}, {"loss": torch.ones(1)}, texts)
    with pytest.raises(CheckpointError, match=r"extra\.cursor is a builtins\.range"):
        Contents.gather(model, {}, {}, texts, extra={"cursor": range(3)})
    with pytest.raises(CheckpointError, match=r"second part called 'trainer_state\.json'"):
        store.publish(1, Contents.gather(model, {}, {}, texts, folders={"trainer_state.json": Path.rmdir}).write)
    assert list(store.root.iterdir()) == []


def test_tied_weights_survive_the_disk(store: CheckpointStore) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    source, target = tied(), tied()
    texts = {"train_config.yaml": ""}
    store.publish(1, Contents.gather(source, {}, {}, texts).write)
    load_module_state(target, *store.open(store.path(1)).model())
    assert target[1].weight is target[0].weight
    assert torch.equal(target[1].weight, source[0].weight)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip_one_bit, truncate, Path.unlink])
def test_any_damage_to_the_newest_makes_the_one_before_the_choice(
    two_saved: tuple[CheckpointStore, list[object]], new_run: type, name: str, harm: Callable[[Path], None]
) -> None:
    store, bits = two_saved
    harm(store.path(4) / name)
    checkpoint, rejected = store.newest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert [one.path for one in rejected] == [store.path(4)]
    assert name in rejected[0].reason
    resumed = new_run(seed=1)
    resumed.load(checkpoint)
    assert resumed.bits() == bits[0]
    with pytest.raises(CheckpointError, match=r"00000004 is (damaged|not a checkpoint).*has 00000002, 00000004"):
        store.open(store.path(4))


def test_nothing_loadable_is_an_error_and_never_a_start_from_scratch(
    two_saved: tuple[CheckpointStore, list[object]],
) -> None:
    store, _ = two_saved
    flip_one_bit(store.path(2) / "model.safetensors")
    (store.path(4) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    assert "00000002: model.safetensors does not match" in str(caught.value)
    assert "00000004: manifest.json is missing" in str(caught.value)


def test_checkpoints_that_were_set_aside_are_remembered(two_saved: tuple[CheckpointStore, list[object]]) -> None:
    store, _ = two_saved
    (store.path(4) / "manifest.json").unlink()
    _, rejected = store.newest()
    assert [path.name for path in store.set_aside(rejected)] == [".damaged-00000004-1"]
    assert store.steps() == [2]
    shutil.rmtree(store.path(2))
    with pytest.raises(CheckpointError, match=r"\.damaged-00000004-1: was set aside"):
        store.newest()


def test_an_empty_or_absent_folder_has_no_checkpoint(store: CheckpointStore) -> None:
    assert store.newest() == (None, [])
    store.root.mkdir()
    (store.root / "notes").mkdir()
    (store.root / "7").write_text("a file, not a folder")
    assert (store.newest(), store.steps()) == ((None, []), [])


def test_names_are_read_as_numbers_under_any_padding(store: CheckpointStore, new_run: type) -> None:
    run = new_run()
    for name in ("9", "010", "000000000011"):
        run.update(int(name) - run.step)
        publish(store, run).rename(store.root / name)
    assert store.steps() == [9, 10, 11]
    assert [store.path(step).name for step in (9, 10, 11, 12)] == ["9", "010", "000000000011", "00000012"]
    newest, _ = store.newest()
    assert newest is not None
    assert newest.step == 11


def test_any_folder_name_can_be_opened_and_its_step_comes_from_within(
    two_saved: tuple[CheckpointStore, list[object]], tmp_path: Path
) -> None:
    store, _ = two_saved
    shutil.copytree(store.path(2), tmp_path / "my favourite")
    assert store.open(f"{tmp_path}/my favourite/").step == 2


def test_a_folder_that_is_named_after_another_step_is_passed_over(
    two_saved: tuple[CheckpointStore, list[object]],
) -> None:
    store, _ = two_saved
    shutil.copytree(store.path(2), store.root / "9")
    newest, rejected = store.newest()
    assert newest is not None
    assert newest.step == 4
    assert rejected[0].reason == "the folder is named after step 9 but holds step 2"


@pytest.mark.parametrize(("name", "reason"), [("absent", "does not exist"), ("empty", "is not a checkpoint")])
def test_a_path_without_a_checkpoint_is_a_clear_error(
    two_saved: tuple[CheckpointStore, list[object]], tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=reason):
        two_saved[0].open(tmp_path / name)


def test_a_good_checkpoint_is_never_rewritten_and_a_damaged_one_is_set_aside(
    two_saved: tuple[CheckpointStore, list[object]], new_run: type
) -> None:
    store, _ = two_saved
    other = new_run(seed=5)
    other.step = 4
    before = (store.path(4) / "model.safetensors").stat().st_mtime_ns
    publish(store, other)
    assert (store.path(4) / "model.safetensors").stat().st_mtime_ns == before
    flip_one_bit(store.path(4) / "model.safetensors")
    publish(store, other)
    assert store.open(store.path(4)).step == 4
    assert sorted(path.name for path in store.root.iterdir()) == [".damaged-00000004-1", "00000002", "00000004"]


def test_a_failed_save_leaves_nothing_behind(two_saved: tuple[CheckpointStore, list[object]], new_run: type) -> None:
    store, _ = two_saved

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("the tokenizer broke")

    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        store.publish(9, new_run().parts(folders={"preprocessor": fail}).write)
    assert sorted(path.name for path in store.root.iterdir()) == ["00000002", "00000004"]


def test_save_and_load_never_touch_pickle(
    store: CheckpointStore, new_run: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("pickle was used")

    for owner, name in [(pickle, "Unpickler"), (pickle, "load"), (pickle, "loads"), (pickle, "_Unpickler")]:
        monkeypatch.setattr(owner, name, refuse)
    for owner, name in [(pickle, "dump"), (pickle, "dumps"), (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(owner, name, refuse)
    run, resumed = new_run(), new_run(seed=1)
    run.update(2)
    publish(store, run)
    checkpoint, _ = store.newest()
    resumed.load(checkpoint)
    assert resumed.bits() == run.bits()


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(
    two_saved: tuple[CheckpointStore, list[object]],
) -> None:
    store, _ = two_saved
    for name in (".tmp-00000009-1-1", ".trash-00000001-1", ".damaged-00000003-1"):
        (store.root / name / "preprocessor").mkdir(parents=True)
    assert store.clean() == [".tmp-00000009-1-1", ".trash-00000001-1"]
    assert sorted(path.name for path in store.root.iterdir()) == [".damaged-00000003-1", "00000002", "00000004"]


def test_pruning_keeps_the_newest_and_the_protected(store: CheckpointStore, new_run: type) -> None:
    run = new_run()
    for _ in range(5):
        run.update()
        publish(store, run)
    assert store.prune(2, protect={1}) == [2, 3]
    assert sorted(path.name for path in store.root.iterdir()) == ["00000001", "00000004", "00000005"]
    assert store.prune(None) == []


def test_checkpoints_of_an_abandoned_future_can_be_dropped(two_saved: tuple[CheckpointStore, list[object]]) -> None:
    store, _ = two_saved
    assert [path.name for path in store.drop_after(2)] == [".dropped-00000004-1"]
    assert store.steps() == [2]


@given(st.sets(st.integers(0, 50)), st.none() | st.integers(-1, 8), st.sets(st.integers(0, 50)))
def test_retention_never_lets_the_newest_or_a_protected_one_go(
    steps: set[int], keep: int | None, protect: set[int]
) -> None:
    doomed = to_delete(steps, keep, protect)
    kept = steps - set(doomed)
    assert set(doomed) <= steps
    assert not set(doomed) & protect
    if steps:
        assert max(steps) in kept
    if keep is None:
        assert doomed == []
    else:
        assert set(sorted(steps)[-max(keep, 1) :]) <= kept
        assert len(kept - protect) <= max(keep, 1)


def test_a_copy_does_not_follow_later_updates() -> None:
    buffers, weight = SnapshotBuffers(), torch.ones(3, requires_grad=True)
    copy = buffers.copy({"w": weight})["w"]
    with torch.no_grad():
        weight.add_(1)
    assert copy.tolist() == [1, 1, 1]
    assert not copy.requires_grad


def test_reserved_buffers_are_used_again_and_again() -> None:
    buffers, tensors = SnapshotBuffers(), {"w": torch.randn(4, 3).t(), "step": torch.tensor(2.0)}
    buffers.reserve(tensors)
    assert buffers.nbytes == 4 * 3 * 4 + 4
    first = {name: copy.data_ptr() for name, copy in buffers.copy(tensors).items()}
    copies = buffers.copy(tensors)
    assert {name: copy.data_ptr() for name, copy in copies.items()} == first
    assert all(torch.equal(copies[name], tensors[name]) and copies[name].is_contiguous() for name in tensors)


def test_a_stand_in_of_the_same_form_reserves_the_buffer() -> None:
    buffers, parameter = SnapshotBuffers(), torch.randn(5)
    buffers.reserve({"exp_avg": parameter})
    reserved = buffers._buffers["exp_avg"].data_ptr()
    assert buffers.copy({"exp_avg": torch.zeros(5)})["exp_avg"].data_ptr() == reserved


def test_a_changed_form_gets_a_new_buffer_and_a_vanished_name_frees_its_own() -> None:
    buffers = SnapshotBuffers()
    buffers.copy({"a": torch.ones(2), "b": torch.ones(2)})
    copies = buffers.copy({"a": torch.ones(3, dtype=torch.float64)})
    assert (copies["a"].shape, copies["a"].dtype) == ((3,), torch.float64)
    assert buffers.nbytes == 24


def test_all_kinds_of_dtypes_and_empty_tensors_are_copied() -> None:
    tensors = {
        str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int8)
    }
    tensors["empty"] = torch.empty(0, 2)
    copies = SnapshotBuffers().copy(tensors)
    assert all(torch.equal(copies[name].float(), tensor.float()) for name, tensor in tensors.items())
    assert SnapshotBuffers().copy({}) == {}
