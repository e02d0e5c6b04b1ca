"""LoRA on four kinds of models: what a checkpoint holds, a run that is killed, and what others load."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from ranks import Group
from safetensors.torch import load_file
from tiny import KINDS, LAST_STEP, Kill, adapted, base, checkpoint, logits, tensor_bytes, trainer

from hezar_train import Trainer
from hezar_train.errors import CheckpointError

SPARE_BYTES = 64 << 10


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A trainer at the end of its run, and the run's folder."""
    out = tmp_path_factory.mktemp(kind)
    made = trainer(kind, out)
    made.train()
    return made, out


def test_tensor_files_are_those_of_the_adapters_and_their_optimizer_state(trained: tuple[Trainer, Path]) -> None:
    made, out = trained
    parameters = [one for one in made.model.parameters() if one.requires_grad]
    adapters = sum(one.nbytes for one in parameters)
    averages = sum(v.nbytes for one in parameters for v in made.optimizer.state[one].values())
    limit = 1.05 * (adapters + averages) + SPARE_BYTES
    assert sum(one.nbytes for one in made.model.parameters()) > limit  # so that a whole model could not pass
    assert tensor_bytes(checkpoint(out)) <= limit


def test_a_run_that_is_killed_ends_like_the_unbroken_run(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    with Group(1, lambda: trainer(kind, tmp_path, hooks=[Kill(5)]).train()) as group:
        (killed,) = group.wait()
    assert killed.exit_code == -signal.SIGKILL, killed.error
    again = trainer(kind, tmp_path, resume_from_checkpoint=True)
    assert 0 < again.state.global_step < LAST_STEP
    again.train()
    for name in ("model.safetensors", "optimizer.safetensors", "base_model.json"):
        assert (checkpoint(tmp_path) / name).read_bytes() == (checkpoint(trained[1]) / name).read_bytes()


def test_peft_loads_the_export_onto_the_base_and_it_says_the_same(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trained[0].save(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "config.json").exists()
    loaded = PeftModel.from_pretrained(base(kind), tmp_path)
    assert torch.equal(logits(kind, loaded), logits(kind, trained[0].model))
    assert not torch.equal(logits(kind, loaded), logits(kind, base(kind)))


def test_the_merged_model_needs_no_peft_and_says_the_same(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    before = logits(kind, trained[0].model)
    trained[0].save(tmp_path, merge=True)
    assert not (tmp_path / "adapter_config.json").exists()
    merged = type(base(kind)).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(kind, merged), before, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(kind, base(kind)), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(kind, trained[0].model), before)  # a copy was merged


def test_another_base_is_refused_with_what_was_expected(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = adapted(kind)
    with torch.no_grad():
        frozen = next(one for one in other.parameters() if not one.requires_grad)
        frozen.view(-1)[3] += 1e-3
    words = rf"holds what was trained, and not the frozen base model .*{type(base(kind)).__name__}.*\d of \d+ frozen"
    with pytest.raises(CheckpointError, match=words):
        trainer(kind, trained[1], other, resume_from_checkpoint=True)
    copied = shutil.copytree(checkpoint(trained[1], 4), tmp_path / "checkpoints" / f"{4:08d}")
    with caplog.at_level(logging.WARNING):
        accepted = trainer(kind, tmp_path, other, resume_from_checkpoint=str(copied), accept_changes=True)
    assert "The model here has another base" in caplog.text
    accepted.train()
    with pytest.raises(CheckpointError, match="frozen tensors differ"):  # from here on the other one is the base
        trainer(kind, tmp_path, resume_from_checkpoint=True)


def test_the_config_of_the_adapters_is_the_same_in_every_process(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    file = checkpoint(trained[1]) / "model_config" / "adapter_config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    assert config["peft_type"] == "LORA"
    assert config["inference_mode"] is True
    assert config["target_modules"] == sorted(KINDS[kind].lora["target_modules"])


def test_adapters_of_a_run_begin_another_run(kind: str, trained: tuple[Trainer, Path], tmp_path: Path) -> None:
    exported = trained[0].save(tmp_path / "exported")
    for number, source in enumerate(
        [trained[1], checkpoint(trained[1]), exported, exported / "adapter_model.safetensors"]
    ):
        begun = trainer(kind, tmp_path / str(number), init_weights_from=source)
        assert torch.equal(logits(kind, begun.model), logits(kind, trained[0].model))


def test_the_adapters_file_has_the_names_that_peft_itself_gives(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trained[0].save(tmp_path / "ours")
    trained[0].model.save_pretrained(tmp_path / "pefts")  # type: ignore[operator]
    ours, pefts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "pefts"))
    assert pefts.keys() <= ours.keys()
    assert all(torch.equal(ours[name], pefts[name]) for name in pefts)
