"""Which checkpoint is the best, where that is written, and what it protects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train import Trainer, TrainerState
from hezar_train.errors import CheckpointError
from hezar_train.metrics import MetricsHandler

Build = Callable[..., Trainer]

NAN = float("nan")


class Scripted(MetricsHandler):
    """Give one value after another, whatever the model does."""

    valid_metrics = ("score", "error")

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self._values = iter(values)

    def objective(self, key: str) -> str:
        return "minimize" if key == "error" else "maximize"

    def compute(self) -> dict[str, float]:
        value = next(self._values)
        return {"score": value, "error": value}


@pytest.fixture
def scored(toy: Build, rows: Any) -> Build:
    """Build a run of so many epochs as there are values, judged by them."""

    def build(*values: float, **given: Any) -> Trainer:
        settings = {"metric_for_best_model": "score", "num_epochs": len(values)} | given
        return toy(eval_dataset=rows(3), metrics_handler=Scripted(list(values)), **settings)

    return build


def best_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "best.json").read_text())
    return found


class TestBest:
    @pytest.mark.parametrize(
        ("metric", "values", "step", "value"),
        [
            ("score", [0.1, 0.5, 0.3], 10, 0.5),
            ("error", [0.1, 0.5, 0.3], 5, 0.1),
            ("score", [0.5, 0.5, 0.5], 5, 0.5),  # a tie is no improvement
            ("error", [0.5, 0.5, 0.4], 15, 0.4),
            ("score", [NAN, 0.2, NAN], 10, 0.2),
            ("score", [float("inf"), 0.2, 0.1], 10, 0.2),
            ("score", [-0.5, -0.7, -0.6], 5, -0.5),  # the first value counts, below zero too
        ],
    )
    def test_the_best_value_and_its_checkpoint_are_written(
        self, scored: Build, tmp_path: Path, metric: str, values: list[float], step: int, value: float
    ) -> None:
        trainer = scored(*values, metric_for_best_model=metric)
        trainer.train()
        assert best_of(tmp_path / "run") == {"step": step, "metric": f"evaluation.{metric}", "value": value}
        assert (trainer.state.best_checkpoint, trainer.state.best_metric_value) == (step, value)

    def test_a_value_that_is_no_number_is_never_the_best(self, scored: Build, tmp_path: Path) -> None:
        trainer = scored(NAN, NAN)
        trainer.train()
        assert trainer.state.best_checkpoint is None
        assert not (tmp_path / "run/best.json").exists()

    def test_by_default_the_loss_of_the_evaluation_decides(self, toy: Build, rows: Any, tmp_path: Path) -> None:
        losses = iter([3.0, 1.0, 2.0])

        class Own(Trainer):
            def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
                return {"loss": next(losses)}

        toy(Own, eval_dataset=rows(3), num_epochs=3).train()
        assert best_of(tmp_path / "run") == {"step": 10, "metric": "evaluation.loss", "value": 1.0}

    def test_evaluations_inside_epochs_count_too(self, scored: Build, tmp_path: Path, saved_steps: Any) -> None:
        scored(0.1, 0.9, 0.3, num_epochs=1, eval_steps=2).train()
        assert best_of(tmp_path / "run")["step"] == 4
        assert saved_steps() == [2, 4, 5]

    def test_without_evaluation_the_training_loss_decides(self, toy: Build, tmp_path: Path) -> None:
        trainer = toy(num_epochs=3)
        trainer.train()
        assert best_of(tmp_path / "run") == {
            "step": 15,
            "metric": "train.loss",
            "value": trainer.state.loss_tracker_avg,
        }

    def test_the_training_loss_may_decide_although_there_are_evaluations(self, scored: Build, tmp_path: Path) -> None:
        scored(0.9, 0.1, metric_for_best_model="train.loss").train()
        assert best_of(tmp_path / "run")["metric"] == "train.loss"
        assert best_of(tmp_path / "run")["step"] == 10


class TestWhatItIsGoodFor:
    def test_the_best_checkpoint_outlives_the_limit(self, scored: Build, saved_steps: Any) -> None:
        scored(0.1, 0.9, 0.2, 0.3, 0.4, save_total_limit=2).train()
        assert saved_steps() == [10, 20, 25]

    def test_a_run_may_go_on_from_the_best(self, scored: Build, tmp_path: Path) -> None:
        first = scored(0.1, 0.9, 0.2)
        first.train()
        again = scored(0.3, num_epochs=3, resume_from_checkpoint="best")
        assert (again.state.global_step, again.state.epoch) == (10, 2)

    def test_a_path_is_a_place_also_if_it_is_called_best(
        self, scored: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scored(0.1, 0.9, 0.2).train()
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run/checkpoints/00000005").rename("best")
        again = scored(0.3, num_epochs=3, out="again", resume_from_checkpoint=Path("best"))
        assert again.state.global_step == 5

    def test_without_a_best_that_is_an_error(self, scored: Build) -> None:
        with pytest.raises(CheckpointError, match="no best result yet"):
            scored(0.3, resume_from_checkpoint="best")

    def test_a_resumed_run_remembers_the_best(self, scored: Build, tmp_path: Path) -> None:
        scored(0.1, 0.9).train()
        resumed = scored(0.5, 0.6, num_epochs=4, resume_from_checkpoint=True)
        resumed.train()
        assert best_of(tmp_path / "run")["step"] == 10
        assert resumed.state.best_metric_value == 0.9

    def test_resuming_from_an_older_checkpoint_forgets_what_came_later(self, scored: Build, tmp_path: Path) -> None:
        scored(0.1, 0.2, 0.9).train()
        older = scored(0.3, 0.4, num_epochs=3, resume_from_checkpoint=tmp_path / "run/checkpoints/00000005")
        assert (older.state.global_step, older.state.best_checkpoint) == (5, None)  # its evaluation is recorded apart
        older.train()
        assert best_of(tmp_path / "run") == {"step": 15, "metric": "evaluation.score", "value": 0.4}


class TestState:
    def test_the_counters_are_those_of_the_run(self, toy: Build, rows: Any) -> None:
        trainer = toy(num_epochs=3, eval_dataset=rows(3), max_steps=12, gradient_accumulation_steps=2)
        trainer.train()
        state = trainer.state
        assert (state.epoch, state.total_epochs, state.global_step, state.epoch_step) == (3, 3, 12, 2)
        assert (state.update_step, state.position, state.samples_seen) == (7, 8, 48)
        assert state.metric_for_best_checkpoint == "evaluation.loss"
        assert state.loss_tracker_avg == state.loss_tracker_sum / 48

    def test_it_is_in_the_checkpoint_and_reads_back_equal(self, toy: Build, tmp_path: Path) -> None:
        trainer = toy()
        trainer.train()
        saved = json.loads((tmp_path / "run/checkpoints/00000005/trainer_state.json").read_text())["state"]
        state = TrainerState.from_dict({**saved, "field_of_a_newer_version": 1})
        # the result at that step is judged after the save
        state.update(evaluation_pending=False, best_metric_value=trainer.state.best_metric_value, best_checkpoint=5)
        assert state == trainer.state

    def test_the_model_on_disk_is_the_model_in_memory(self, toy: Build, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        trainer = toy()
        trainer.train()
        saved = load_file(tmp_path / "run/checkpoints/00000005/model.safetensors")
        assert {name: value.tolist() for name, value in saved.items()} == {
            name: value.tolist() for name, value in trainer.model.state_dict().items()
        }
        assert torch.equal(saved["layer.weight"], trainer.model.layer.weight)  # type: ignore[union-attr, arg-type]
