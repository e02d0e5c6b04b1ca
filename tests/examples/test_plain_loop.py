"""The loop by hand and the Trainer: the same parts, so the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hezar_train import Trainer
from hezar_train.loop import Context

Import = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gradient_accumulation_steps": 1, "max_grad_norm": None, "lr_scheduler": None, "optimizer": "sgd"},
        {"max_steps": 40, "lr_scheduler": "warmup_linear", "max_grad_norm": 0.1},
    ],
)
def test_a_loop_by_hand_ends_with_the_weights_of_the_trainer(
    overrides: dict[str, Any], example: Import, tmp_path: Path
) -> None:
    module = example("plain_loop")
    data, config = (
        module.labelled()[0],
        module.make_config(tmp_path, **{"num_epochs": 2, "save_enabled": False} | overrides),
    )
    by_hand, trainer, losses = module.make_model(), Trainer(config, module.make_model(), data), []

    def note(ctx: Context) -> None:
        losses.append(ctx.loss_value)

    trainer.register_hook_in_train(note, "on_update")
    trainer.train()
    assert module.train(by_hand, data, config) == losses
    for ours, theirs in zip(by_hand.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(losses) == trainer.state.update_step


def test_it_learns(example: Import, tmp_path: Path) -> None:
    module = example("plain_loop")
    data, held_out = module.labelled()
    model = module.make_model()
    module.train(model, data, module.make_config(tmp_path))
    assert module.accuracy(model, held_out) > 0.9


def test_what_is_not_finite_is_not_applied(example: Import, tmp_path: Path) -> None:
    module = example("plain_loop")
    data, model = module.labelled()[0], module.make_model()
    before = [parameter.clone() for parameter in model.parameters()]
    pixels, labels = (tensor[:20].clone() for tensor in data.tensors)
    pixels[3] = float("nan")
    with pytest.raises(ArithmeticError, match="not applied"):
        module.train(model, torch.utils.data.TensorDataset(pixels, labels), module.make_config(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
