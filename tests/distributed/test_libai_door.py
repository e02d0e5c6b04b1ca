"""Behind LiBai's door, two processes are one: weights, rates and evaluations, also with a step of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from hezar_train.compat.libai import DefaultTrainer, EagerTrainer

sys.path.insert(1, str(Path(__file__).parents[1] / "compat"))
from libai_run import config_of, weights_of


class Own(EagerTrainer):
    """LiBai's own step, written out."""

    clips = True

    def run_step(self, get_batch: Any) -> None:  # type: ignore[override]
        loss_dict = self.model(**get_batch(next(self._data_loader_iter)))
        (sum(loss_dict.values()) / self.grad_acc_steps).backward()
        self.write_metrics(loss_dict, 0.0)
        if (self.iter + 1) % self.grad_acc_steps == 0:
            if self.clips:
                self.optimizer.clip_grad()  # type: ignore[attr-defined]
            self.optimizer.step()
            self.optimizer.zero_grad()


class Unclipped(Own):
    clips = False


def trained(folder: Path, step: type[EagerTrainer] | None, parts: int) -> Any:
    overrides = [
        "train.train_micro_batch_size=null",
        "train.global_batch_size=16",
        f"train.num_accumulation_steps={parts}",
    ]
    trainer: Any = DefaultTrainer(config_of(folder, *overrides, "train.train_iter=4", "train.evaluation.eval_period=2"))
    if step is not None:
        trainer._trainer = step(trainer.model, trainer.train_loader, trainer.optimizer, parts)
    trainer.train()
    found = trainer.storage.history("Acc@1").values()
    return weights_of(trainer), [rate for rate, _ in trainer.storage.history("lr").values()], [one for one, _ in found]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("step", [None, Own], ids=["default", "own"])
def test_two_processes_train_and_evaluate_as_one(step: Any, parts: int, tmp_path: Path) -> None:
    assert_as_alone(step, parts, tmp_path)


def test_a_step_of_ones_own_without_clipping_is_that_of_one_process(tmp_path: Path) -> None:
    assert_as_alone(Unclipped, 2, tmp_path)


def assert_as_alone(step: Any, parts: int, folder: Path) -> None:
    ((weights, rates, scores),) = on_ranks(1, trained, folder / "one", step, parts)
    for ours, our_rates, our_scores in on_ranks(2, trained, folder / "two", step, parts):
        for left, right in zip(ours, weights, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
        assert our_rates == pytest.approx(rates)
        assert our_scores == pytest.approx(scores)
