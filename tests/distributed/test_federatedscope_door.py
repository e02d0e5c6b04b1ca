"""Rounds behind FederatedScope's door on two processes: the weights and metrics of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks, outcomes_on
from torch import nn

from hezar_train.compat.federatedscope import Context, GeneralTorchTrainer, get_optimizer

sys.path.append(str(Path(__file__).parents[1] / "compat"))
from fs_toy import cfg, loaders, weights


class OwnBackward(GeneralTorchTrainer):
    def _hook_on_batch_backward(self, ctx: Any) -> None:
        ctx.optimizer.zero_grad()
        ctx.loss_task.backward()
        ctx.optimizer.step()


def rounds(out: Path, kind: type[GeneralTorchTrainer], own_optimizer: bool = False) -> Any:
    torch.manual_seed(0)
    trainer = kind(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), loaders(), "cpu", cfg(out))

    def another(ctx: Context) -> None:
        ctx.optimizer = get_optimizer(ctx.model, "SGD", 0.1)

    if own_optimizer:
        trainer.register_hook_in_train(another, "on_fit_start")
    told = [trainer.train()[2] for _ in range(2)]
    return told[-1], trainer.evaluate("test"), weights(trainer).tolist()


@pytest.mark.parametrize("kind", [GeneralTorchTrainer, OwnBackward])
def test_a_round_is_that_of_one_process(tmp_path: Path, kind: type[GeneralTorchTrainer]) -> None:
    (one,) = on_ranks(1, rounds, tmp_path / "one", kind)
    first, second = on_ranks(2, rounds, tmp_path / "two", kind)
    assert first == second
    assert first[2] == pytest.approx(one[2], rel=1e-4, abs=1e-6)
    for found, wanted in zip(first[:2], one[:2], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("kind", [GeneralTorchTrainer, OwnBackward])
def test_an_optimizer_whose_gradients_would_not_be_joined_is_told_before_a_step(
    tmp_path: Path, kind: type[GeneralTorchTrainer]
) -> None:
    outcomes = outcomes_on(2, rounds, tmp_path, kind, True)
    assert "whose gradients are not joined over 2 processes" in str(outcomes[0].error)
