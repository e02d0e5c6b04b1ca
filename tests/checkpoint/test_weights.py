from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from hezar_train.checkpoint import CheckpointStore, initial_weights
from hezar_train.errors import CheckpointError


def network(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, width))


def test_weights_are_matched_by_name_and_shape_and_the_rest_is_reported(tmp_path: Path) -> None:
    source, target = network(5), network()
    stored = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith("1.")}
    safetensors.torch.save_file({**stored, "other": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    report = initial_weights(target, tmp_path)
    assert report.loaded == ["0.weight", "0.bias"]
    assert report.missing == ["1.weight", "1.bias"]
    assert report.mismatched == ["2.weight", "2.bias"]
    assert report.unexpected == ["other"]
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].weight, before["1.weight"])
    assert torch.equal(target[2].weight, before["2.weight"])


def test_a_file_a_checkpoint_a_store_and_a_run_are_all_sources(tmp_path: Path, new_run: type) -> None:
    run, store = new_run(), CheckpointStore(tmp_path / "checkpoints")
    run.update(2)
    path = store.publish(2, run.parts().write)
    for source in (path / "model.safetensors", path, store.root, str(tmp_path)):
        target = new_run(seed=3).model
        report = initial_weights(torch.compile(target), source)
        assert torch.equal(target[0].weight, run.model[0].weight)
        assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])


def test_a_run_gives_its_newest_checkpoint_that_verifies(
    tmp_path: Path, new_run: type, caplog: pytest.LogCaptureFixture
) -> None:
    run, store = new_run(), CheckpointStore(tmp_path / "checkpoints")
    store.publish(1, run.parts().write)
    first = run.model[0].weight.detach().clone()
    run.update()
    (store.publish(2, run.parts().write) / "train_config.yaml").unlink()
    target = new_run(seed=3).model
    initial_weights(target, tmp_path)
    assert torch.equal(target[0].weight, first)
    assert "train_config.yaml is missing" in caplog.text


def test_a_damaged_checkpoint_is_no_source(tmp_path: Path, new_run: type) -> None:
    path = CheckpointStore(tmp_path).publish(1, new_run().parts().write)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        initial_weights(new_run().model, path)


def test_a_tied_tensor_is_loaded_by_either_of_its_names(tmp_path: Path) -> None:
    target = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    target[1].weight = target[0].weight
    safetensors.torch.save_file({"1.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    report = initial_weights(target, tmp_path)
    assert (report.loaded, report.missing) == (["0.weight", "1.weight"], [])
    assert target[0].weight.sum() == 8


def test_a_source_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"layers.0.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none of its 1 tensors.*layers\.0\.weight; the model has 0\.weight"):
        initial_weights(network(), tmp_path)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "last.ckpt", "weights.pth"])
def test_pickles_are_not_read(tmp_path: Path, name: str) -> None:
    torch.save(network().state_dict(), tmp_path / name)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match="pickles are not read"):
            initial_weights(network(), source)


def test_a_missing_path_and_an_empty_folder_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        initial_weights(network(), tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"without model\.safetensors"):
        initial_weights(network(), tmp_path)
