"""A model and other objects, saved under names and loaded again, without a trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.checkpoint import Checkpointer
from hezar_train.errors import CheckpointError


class Counter:
    """Any object with a state."""

    def __init__(self, total: int = 0) -> None:
        self.total = total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "place": torch.tensor([self.total])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"] + int(state["place"]) * 0


def make(folder: Path, run: Any, total: int = 0, **more: Any) -> Checkpointer:
    return Checkpointer(run.model, folder, optimizer=run.optimizer, counter=Counter(total), **more)


def test_everything_comes_back_as_it_was_saved(tmp_path: Path, new_run: Any) -> None:
    saved, fresh = new_run(seed=1), new_run(seed=2)
    saved.update(3)
    make(tmp_path, saved, total=5).save("model_0000003", iteration=3, note=("a", float("inf")))
    loading = make(tmp_path, fresh)
    assert loading.load("model_0000003", strict=True) == {"iteration": 3, "note": ("a", float("inf"))}
    assert fresh.bits() == saved.bits()
    assert loading.checkpointables["counter"].total == 5


def test_weights_alone_leave_the_rest_as_it_is(tmp_path: Path, new_run: Any, bits_of: Callable[[Any], object]) -> None:
    saved, fresh = new_run(seed=1), new_run(seed=2)
    saved.update(3)
    make(tmp_path, saved, total=5).save("model_final")
    loading = make(tmp_path, fresh)
    loading.load(tmp_path / "model_final", checkpointables=[])
    assert bits_of(fresh.model.state_dict()) == bits_of(saved.model.state_dict())
    assert not fresh.optimizer.state_dict()["state"]
    assert loading.checkpointables["counter"].total == 0


def test_the_last_one_is_tagged_but_not_the_best(tmp_path: Path, new_run: Any) -> None:
    checkpointer = make(tmp_path / "new", new_run())
    assert not checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() is None
    checkpointer.save("model_0000001")
    checkpointer.save("model_best")
    assert checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == tmp_path / "new" / "model_0000001"
    checkpointer.tag_last_checkpoint("model_best")
    assert checkpointer.get_checkpoint_file() == tmp_path / "new" / "model_best"


def test_a_name_may_be_saved_again(tmp_path: Path, new_run: Any) -> None:
    run, fresh = new_run(seed=1), new_run(seed=2)
    for _ in range(2):
        run.update()
        make(tmp_path, run).save("model_best")
    make(tmp_path, fresh).load("model_best", strict=True)
    assert fresh.bits() == run.bits()
    assert [path.name for path in tmp_path.iterdir()] == ["model_best"]


@pytest.mark.parametrize("kill_at", range(12))
def test_killed_anywhere_either_the_old_or_the_new_one_can_be_loaded(
    tmp_path: Path, new_run: Any, fork: Callable[[Callable[[], None]], Any], kill_at: int
) -> None:
    run = new_run()
    make(tmp_path, run, total=1).save("model")

    def die_while_saving() -> None:
        calls = iter(range(100))

        def or_die(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                if next(calls) == kill_at:
                    os._exit(9)
                return real(*given)

            return call

        os.fsync, os.rename = or_die(os.fsync), or_die(os.rename)
        make(tmp_path, run, total=2).save("model")

    assert fork(die_while_saving).wait() == 9
    loading = make(tmp_path, new_run())
    loading.resume_or_load(None)
    assert loading.checkpointables["counter"].total in {1, 2}
    loading.save("model")
    # a killed rename of the tag leaves a small file under a name that nobody reads
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".last_checkpoint."))
    assert left == ["last_checkpoint", "model"]


def test_what_does_not_fit_is_reported_name_by_name(
    tmp_path: Path, new_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, new_run(width=4)).save("model")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5), nn.Linear(5, 1))
    loading = Checkpointer(other, tmp_path)
    with caplog.at_level(logging.WARNING):
        loading.load("model")
    assert loading.report is not None
    assert {"0.weight", "0.bias"} <= set(loading.report.loaded)
    assert loading.report.missing == ["2.weight", "2.bias"]
    assert loading.report.mismatched == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert "2.weight, 2.bias" in caplog.text
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: 2\.weight, 2\.bias"):
        loading.load("model", strict=True)


def test_an_object_that_was_not_saved_is_left_or_refused(
    tmp_path: Path, new_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run()
    Checkpointer(run.model, tmp_path).save("model")
    loading = make(tmp_path, run, total=7)
    loading.load("model")
    assert "has no state of counter, optimizer" in caplog.text
    assert loading.checkpointables["counter"].total == 7
    with pytest.raises(CheckpointError, match="has no state of counter, optimizer"):
        loading.load("model", strict=True)
    with pytest.raises(CheckpointError, match="There are: counter, optimizer"):
        loading.load("model", checkpointables=["scheduler"])


class TestResumeOrLoad:
    def test_it_takes_the_last_one_whatever_the_path(self, tmp_path: Path, new_run: Any) -> None:
        run = new_run(seed=1)
        make(tmp_path, run, total=4).save("model", iteration=9)
        assert make(tmp_path, new_run(seed=2)).resume_or_load("nowhere", resume=True) == {"iteration": 9}

    @pytest.mark.parametrize("resume", [True, False])
    def test_without_one_or_without_resuming_it_takes_weights(self, tmp_path: Path, new_run: Any, resume: bool) -> None:
        run, fresh = new_run(seed=1), new_run(seed=2)
        make(tmp_path / "old", run, total=4).save("model", iteration=9)
        loading = make(tmp_path / "new", fresh)
        assert loading.resume_or_load(tmp_path / "old" / "model", resume) == {"iteration": 9}
        assert torch.equal(fresh.model[0].weight, run.model[0].weight)
        assert loading.checkpointables["counter"].total == 0

    def test_without_anything_it_leaves_the_model_as_it_is(self, tmp_path: Path, new_run: Any) -> None:
        run = new_run()
        before = run.bits()
        assert make(tmp_path, run).resume_or_load("") == {}
        assert run.bits() == before


def test_a_safetensors_file_gives_weights(tmp_path: Path, new_run: Any) -> None:
    run, fresh = new_run(seed=1), new_run(seed=2)
    make(tmp_path, run).save("model")
    Checkpointer(fresh.model).load(tmp_path / "model" / "model.safetensors")
    assert torch.equal(fresh.model[0].weight, run.model[0].weight)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path, new_run: Any) -> None:
    run = new_run()
    make(tmp_path, run).save("model")
    path = tmp_path / "model" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="is damaged"):
        make(tmp_path, run).load("model")


def test_a_process_that_does_not_save_writes_nothing(tmp_path: Path, new_run: Any) -> None:
    make(tmp_path / "new", new_run(), save_to_disk=False).save("model")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "last_checkpoint"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, new_run: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the name of a checkpoint"):
        make(tmp_path, new_run()).save(name)


def test_an_object_without_a_state_is_refused(new_run: Any) -> None:
    with pytest.raises(CheckpointError, match="counter= is a int"):
        Checkpointer(new_run().model, counter=5)
