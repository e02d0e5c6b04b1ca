"""Rows of the lernomatic table: epochs that can be extended, schedules, histories and checkpoints by its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hezar_train import Hook, TrainerConfig
from hezar_train.compat.lernomatic import Trainer
from hezar_train.errors import ConfigError
from hezar_train.metrics import MetricsHandler

Build = Callable[..., Trainer]


@pytest.fixture
def toy(toy: Build) -> Build:
    """Build the toy with lernomatic's Trainer."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        return toy(cls, **given)

    return build


class TestConstruction:
    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ("loss_function", "criterion"),
            ("optim_function", "optimizer"),
            ("save_every", "save_steps"),
            ("print_every", "log_steps"),
            ("val_batch_size", "eval_batch_size"),
            ("test_batch_size", "eval_batch_size"),
            ("checkpoint_dir", "checkpoints_dir"),
            ("device_id", "device"),
            ("stop_when_acc", "stop_when"),
            ("early_stop", "early_stopping_patience"),
            ("mtm_scheduler", "momentum_scheduler"),
            ("num_workers", "num_dataloader_workers"),
            ("shuffle", "dataloader_shuffle"),
        ],
    )
    def test_its_keywords_are_answered_with_ours(self, theirs: str, ours: str) -> None:
        with pytest.raises(ConfigError, match=f"'{theirs}' is not a field. Here it is called '{ours}'"):
            TrainerConfig("run", **{theirs: 1})

    def test_the_log_is_there_after_the_first_epoch_and_grows(self, toy: Build, tmp_path: Path) -> None:
        lengths: list[int] = []

        class Look(Hook):
            def on_epoch_start(self, ctx: Any) -> None:
                paths = (tmp_path / "run/logs").glob("*/metrics.json")
                lengths.append(sum(len(path.read_text().splitlines()) for path in paths))

        toy(num_epochs=3, arguments={"hooks": [Look()]}).train()
        assert lengths == [0, 1, 2]


class Scripted(MetricsHandler):
    """Give one accuracy after another, whatever the model does."""

    valid_metrics = ("accuracy",)

    def __init__(self, *values: float) -> None:
        super().__init__()
        self._values = iter(values)

    def compute(self) -> dict[str, float]:
        return {"accuracy": next(self._values)}


class TestStopping:
    def epochs(self, toy: Build, rows: Any, *accuracies: float, **settings: Any) -> int:
        arguments = {"eval_dataset": rows(3), "metrics_handler": Scripted(*accuracies)}
        trainer = toy(num_epochs=len(accuracies), arguments=arguments, **settings)
        trainer.train()
        return trainer.state.epoch

    def test_a_run_stops_after_the_epoch_that_reaches_its_goal(self, toy: Build, rows: Any) -> None:
        assert self.epochs(toy, rows, 0.7, 0.8, 0.9, stop_when="accuracy >= 0.7") == 1
        assert self.epochs(toy, rows, 0.1, 0.2, 0.3, stop_when="accuracy >= 0.7") == 3

    def test_a_run_stops_when_its_accuracy_grows_too_little(self, toy: Build, rows: Any) -> None:
        settings = {"early_stopping_patience": 2, "early_stopping_threshold": 0.02, "early_stopping_mode": "window"}
        accuracies = (0.5, 0.6, 0.61, 0.61, 0.61)
        assert self.epochs(toy, rows, *accuracies, early_stopping_metric="accuracy", **settings) == 4


class TestSchedules:
    def test_a_momentum_schedule_is_followed_at_each_step(self, toy: Build) -> None:
        seen: list[float] = []
        trainer = toy(
            optimizer="sgd", momentum=0.9, lr_scheduling_steps=1, momentum_scheduler="InvTriangularScheduler",
            momentum_scheduler_kwargs={"mtm_min": 0.85, "mtm_max": 0.95, "stepsize": 2},
        )  # fmt: skip
        trainer.register_hook_in_train(
            lambda ctx: seen.append(ctx.optimizer.param_groups[0]["momentum"]), "on_batch_start"
        )
        trainer.train()
        assert seen == pytest.approx([0.95, 0.9, 0.85, 0.9, 0.95])

    def test_a_schedule_by_epoch_and_one_by_accuracy_each_see_their_own_progress(self, toy: Build, rows: Any) -> None:
        def rates(name: str, kwargs: dict[str, Any]) -> list[float]:
            seen: list[float] = []
            arguments = {"eval_dataset": rows(3), "metrics_handler": Scripted(0.5, 0.3, 0.6)}
            trainer = toy(
                num_epochs=3, lr_scheduler=name, lr_scheduler_kwargs=kwargs, metric_for_best_model="accuracy",
                optimizer="sgd", lr_scheduling_steps=1, arguments=arguments,
            )  # fmt: skip
            trainer.register_hook_in_train(
                lambda ctx: seen.append(ctx.optimizer.param_groups[0]["lr"]), "on_epoch_start"
            )
            trainer.train()
            return seen

        assert rates("EpochSetScheduler", {"schedule": {0: 1.0, 1: 0.5, 2: 0.1}}) == pytest.approx([0.1, 0.05, 0.005])
        assert rates("DecayWhenAcc", {"lr_decay": 0.5}) == pytest.approx([0.1, 0.1, 0.05])


def test_inference_comes_straight_from_a_run(toy: Build, rows: Any, tmp_path: Path) -> None:
    trainer = toy(task="text_classification")
    trainer.train()
    other = toy(out="other", task="text_classification", init_weights_from=tmp_path / "run")
    assert other.predict(rows(9)) == trainer.predict(rows(9))
