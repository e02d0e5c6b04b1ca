"""A compiled model: the same losses up to rounding, the same hooks, the same names in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Trainer
from hezar_train.checkpoint import read_tensors
from hezar_train.errors import ConfigError
from hezar_train.types import Mode

Build = Callable[..., Trainer]


def run(toy: Build, rows: Any, *, compiled: bool) -> tuple[Trainer, list[str], list[float]]:
    """Train the toy; return the trainer, the moments that a hook saw, and the losses."""
    moments: list[str] = []
    trainer = toy(compile=compiled, out=f"run{compiled}", eval_dataset=rows(6), num_epochs=2)
    for moment in trainer.hooks[Mode.TRAIN]:
        trainer.hooks[Mode.TRAIN].register(lambda _, moment=moment: moments.append(moment), moment, name="note")
    trainer.train()
    return trainer, moments, [value for value, _ in trainer.storage.history("train.step_loss").values()]


@pytest.mark.slow
def test_compiled_and_eager_runs_agree(toy: Build, rows: Any, tmp_path: Path) -> None:
    eager, eager_moments, eager_losses = run(toy, rows, compiled=False)
    compiled, moments, losses = run(toy, rows, compiled=True)
    assert compiled.model._compiled_call_impl is not None
    assert eager.model._compiled_call_impl is None
    assert losses == pytest.approx(eager_losses, abs=1e-5)
    assert moments == eager_moments
    for name, tensor in eager.model.state_dict().items():
        assert torch.allclose(compiled.model.state_dict()[name], tensor, atol=1e-5)
    files = [read_tensors(tmp_path / f"run{flag}/checkpoints/00000010/model.safetensors") for flag in (False, True)]
    assert files[0].keys() == files[1].keys()


@pytest.mark.slow
def test_a_compiled_run_is_resumed_by_an_eager_one(toy: Build) -> None:
    toy(compile=True, num_epochs=1).train()
    trainer = toy(num_epochs=2, resume_from_checkpoint=True)
    trainer.train()
    assert trainer.state.global_step == 10


class TestGradientCheckpointing:
    def test_the_models_own_switch_is_used(self, toy: Build, classifier: type[nn.Module]) -> None:
        class Thrifty(classifier):  # type: ignore[valid-type, misc]
            thrifty = False

            def gradient_checkpointing_enable(self) -> None:
                self.thrifty = True

        assert toy(model=Thrifty(), gradient_checkpointing=True).model.thrifty
        assert not toy(model=Thrifty()).model.thrifty

    def test_a_model_without_one_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match=r"Classifier has no gradient_checkpointing_enable\(\)"):
            toy(gradient_checkpointing=True)
