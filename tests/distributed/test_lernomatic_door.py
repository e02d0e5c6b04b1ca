"""Epochs as lernomatic's users write them, on two processes: the weights and histories of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks, outcomes_on

sys.path.append(str(Path(__file__).parents[1] / "compat"))
from test_lernomatic_keywords import Own, Trainer, net, pair, samples


def train_one(out: Path, kind: type[Trainer]) -> Any:
    trainer = kind(
        net(), train_dataset=samples(22), val_dataset=samples(8, 1), batch_size=4, num_epochs=2, learning_rate=0.05,
        drop_last=False, checkpoint_dir=str(out), global_batch_size=4,
    )  # fmt: skip
    trainer.train()
    return _told(trainer, trainer.get_loss_history().tolist() + trainer.get_acc_history().tolist())


def train_two(out: Path, num_samples: int = 24) -> Any:
    trainer = pair(out, global_batch_size=4, train_dataset=samples(num_samples), drop_last=False)
    trainer.train()
    return _told(trainer, trainer.critic_loss_history.tolist())


def _told(trainer: Any, values: list[float]) -> tuple[list[float], list[float]]:
    return values, [value for one in trainer.model.parameters() for value in one.detach().flatten().tolist()]


@pytest.mark.parametrize("kind", [Trainer, Own])
def test_an_epoch_of_ones_own_is_that_of_one_process(tmp_path: Path, kind: type[Trainer]) -> None:
    ((values, weights),) = on_ranks(1, train_one, tmp_path / "one", kind)
    told = on_ranks(2, train_one, tmp_path / "two", kind)
    assert told[0] == told[1]
    assert told[0][0] == pytest.approx(values, rel=1e-5)
    assert told[0][1] == pytest.approx(weights, rel=1e-4, abs=1e-6)


def test_processes_with_several_optimizers_stay_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_two, tmp_path)
    assert first == second


def test_unequal_shares_with_several_optimizers_are_told_before_a_step(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, train_two, tmp_path, 25)
    assert "which have unequal shares of this batch" in str(outcomes[0].error)
