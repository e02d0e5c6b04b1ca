"""When the learning rate changes: per epoch or update, after evaluations, and never on an update that was skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

from hezar_train import Hook, Trainer
from hezar_train.errors import NonFiniteError
from hezar_train.metrics import MetricsHandler

Build = Callable[..., Trainer]


class Rates(Hook):
    """Note the learning rate that each update used."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_update(self, ctx: Any) -> None:
        self.used.append(round(self.trainer.optimizer.param_groups[0]["lr"], 9))


def rates(trainer: Trainer) -> list[float]:
    """Train; return the learning rate of each update, and the last one."""
    watch = Rates()
    trainer.register_hooks([watch])
    trainer.train()
    return [*watch.used, round(trainer.optimizer.param_groups[0]["lr"], 9)]


class TestPace:
    STEP: ClassVar[dict[str, Any]] = {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.1}}

    def test_by_default_a_schedule_ticks_once_per_epoch(self, toy: Build) -> None:
        assert rates(toy(num_epochs=2, **self.STEP)) == [0.1] * 5 + [0.01] * 5 + [0.001]

    def test_with_one_step_it_ticks_after_every_update(self, toy: Build) -> None:
        found = rates(toy(lr_scheduling_steps=1, **self.STEP))
        assert found == pytest.approx([0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6])

    @pytest.mark.filterwarnings("ignore:lr_scheduling_steps=1 is not a multiple")
    def test_ticks_are_counted_at_updates_not_at_steps(self, toy: Build) -> None:
        found = rates(toy(lr_scheduling_steps=1, gradient_accumulation_steps=2, **self.STEP))
        assert found == [0.1, 0.01, 0.001, 0.0001]

    def test_a_period_of_steps_runs_on_over_epoch_ends(self, toy: Build) -> None:
        found = rates(toy(lr_scheduling_steps=4, num_epochs=2, **self.STEP))
        assert found == [0.1] * 4 + [0.01] * 4 + [0.001] * 3

    def test_a_share_of_the_run_is_a_period_too(self, toy: Build) -> None:
        found = rates(toy(lr_scheduling_steps=0.5, num_epochs=2, **self.STEP))
        assert found == [0.1] * 5 + [0.01] * 5 + [0.001]

    def test_a_resumed_schedule_goes_on_where_it_was(self, toy: Build) -> None:
        unbroken = rates(toy(out="unbroken", lr_scheduling_steps=3, num_epochs=2, **self.STEP))
        first = rates(toy(lr_scheduling_steps=3, num_epochs=1, **self.STEP))
        second = rates(toy(lr_scheduling_steps=3, num_epochs=2, resume_from_checkpoint=True, **self.STEP))
        assert first[:-1] + second == unbroken


class TestNames:
    KEYWORDS: ClassVar[dict[str, dict[str, Any]]] = {
        "lambda": {"lr_lambda": "math.cos"},
        "step": {"step_size": 1},
        "multi_step": {"milestones": [1]},
        "exponential": {"gamma": 0.5},
        "sequential": {
            "milestones": [2],
            "schedulers": [{"name": "constant"}, {"name": "exponential", "kwargs": {"gamma": 0.5}}],
        },
    }
    NAMES = (
        "constant", "lambda", "step", "reduce_on_plateau", "multi_step", "one_cycle", "linear", "exponential", "cyclic",
        "sequential", "polynomial", "cosine_annealing",
    )  # fmt: skip

    @pytest.mark.parametrize("name", NAMES)
    def test_each_name_trains_and_resumes(self, toy: Build, name: str) -> None:
        given = {"lr_scheduler": name, "lr_scheduler_kwargs": self.KEYWORDS.get(name), "lr_scheduling_steps": 1}
        unbroken = rates(toy(out="unbroken", num_epochs=2, max_steps=8, **given))
        broken = toy(num_epochs=2, max_steps=8, save_steps=3, **given)
        broken.register_hooks([Crash(at_step=4)])
        with pytest.raises(CrashError):
            broken.train()
        resumed = rates(toy(num_epochs=2, max_steps=8, save_steps=3, resume_from_checkpoint=True, **given))
        assert resumed == unbroken[3:]

    def test_the_old_spelling_of_cosine_annealing_is_taken(self, toy: Build) -> None:
        with pytest.warns(UserWarning, match="old spelling of 'cosine_annealing'"):
            trainer = toy(lr_scheduler="cosine_anealing")
        assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)

    @pytest.mark.parametrize(
        ("name", "attribute"),
        [
            ("one_cycle", "total_steps"),
            ("cosine_annealing", "T_max"),
            ("linear", "total_iters"),
            ("polynomial", "total_iters"),
        ],
    )
    @pytest.mark.parametrize(("steps", "ticks"), [(None, 3), (1, 9), (4, 4)])
    @pytest.mark.filterwarnings("ignore:lr_scheduling_steps=1 is not a multiple")
    def test_lengths_are_filled_in_in_ticks(
        self, toy: Build, name: str, attribute: str, steps: int | None, ticks: int
    ) -> None:
        trainer = toy(lr_scheduler=name, lr_scheduling_steps=steps, num_epochs=3, gradient_accumulation_steps=2)
        assert getattr(trainer.lr_scheduler, attribute) == ticks

    def test_a_polynomial_is_at_zero_when_the_run_ends(self, toy: Build) -> None:
        found = rates(toy(lr_scheduler="polynomial", lr_scheduling_steps=1))
        assert found == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.0])


class CrashError(Exception):
    """Raised in the middle of a run."""


class Crash(Hook):
    def __init__(self, at_step: int) -> None:
        self._at_step = at_step

    def after_step(self) -> None:
        if self.trainer.state.global_step == self._at_step:
            raise CrashError


class TestObjects:
    def test_a_scheduler_that_is_passed_in_ticks_like_a_named_one(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        given = {"model": model, "optimizer": optimizer, "num_epochs": 2}
        scheduler = ExponentialLR(optimizer, gamma=0.5)
        assert rates(toy(lr_scheduler=scheduler, **given)) == [0.8] * 5 + [0.4] * 5 + [0.2]

    def test_also_with_a_period(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        scheduler = LambdaLR(optimizer, lambda tick: 0.5**tick)
        trainer = toy(model=model, optimizer=optimizer, lr_scheduler=scheduler, lr_scheduling_steps=2)
        assert rates(trainer) == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]


class Scripted(MetricsHandler):
    """Give one value after another, whatever the model does."""

    valid_metrics = ("score",)

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self._values = iter(values)

    def compute(self) -> dict[str, float]:
        return {"score": next(self._values)}


class TestPlateau:
    PLATEAU: ClassVar[dict[str, Any]] = {
        "lr_scheduler": "reduce_on_plateau",
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.0},
        "metric_for_best_model": "score",
        "num_epochs": 4,
    }

    def test_it_ticks_after_evaluations_with_the_metric_for_the_best_model(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(3), metrics_handler=Scripted([0.5, 0.6, 0.6, 0.7]), **self.PLATEAU)
        # the score is the larger the better: only the third evaluation is no improvement
        assert rates(trainer) == [0.1] * 15 + [0.05] * 6

    def test_inside_epochs_too(self, toy: Build, rows: Any) -> None:
        handler = Scripted([0.5, 0.4, 0.3, 0.2])
        given = self.PLATEAU | {"num_epochs": 1}
        trainer = toy(eval_dataset=rows(3), metrics_handler=handler, eval_steps=2, **given)
        assert rates(trainer) == [0.1] * 4 + [0.05, 0.025]

    def test_without_evaluation_it_follows_the_training_loss_at_epoch_ends(self, toy: Build) -> None:
        given = self.PLATEAU | {"metric_for_best_model": "loss", "learning_rate": 0.0, "num_epochs": 3}
        trainer = toy(**given)
        trainer.train()
        assert trainer.lr_scheduler.last_epoch == 3  # type: ignore[union-attr]

    def test_an_object_that_is_passed_in_is_treated_alike(self, toy: Build, rows: Any, classifier: Any) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0, threshold=0.0)
        trainer = toy(
            model=model, optimizer=optimizer, lr_scheduler=plateau, eval_dataset=rows(3), num_epochs=3,
            metrics_handler=Scripted([0.5, 0.4, 0.6]), metric_for_best_model="score",
        )  # fmt: skip
        assert rates(trainer) == [0.1] * 10 + [0.05] * 6

    def test_a_value_that_is_no_number_does_not_tick_it(self, toy: Build, rows: Any) -> None:
        handler = Scripted([0.5, float("nan"), 0.6, 0.7])
        assert rates(toy(eval_dataset=rows(3), metrics_handler=handler, **self.PLATEAU)) == [0.1] * 21


class Overflow(Hook):
    """Make the gradient infinite in some steps, as half precision does now and then."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.weights: list[list[float]] = []

    def on_batch_backward(self, ctx: Any) -> None:
        self.weights.append(self.trainer.model.layer.bias.tolist())  # type: ignore[union-attr, operator]
        if self.trainer.state.global_step + 1 in self._steps:
            self.trainer.model.layer.weight.grad[0, 0] = float("inf")  # type: ignore[union-attr, index]


@pytest.fixture
def scaled(toy: Build, with_scaler: Any) -> Build:
    """Build trainers with a real gradient scaler."""

    def build(*overflows: int, init_scale: float = 1024.0, **given: Any) -> Trainer:
        return toy(accelerator=with_scaler(init_scale), hooks=[Overflow(*overflows)], **given)

    return build


class TestSkippedUpdates:
    def test_a_scaled_run_is_the_plain_run(self, scaled: Build, toy: Build) -> None:
        given = {"num_epochs": 2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "optimizer": "sgd"}
        one, other = scaled(**given), toy(out="plain", **given)
        one.train()
        other.train()
        # powers of two scale exactly
        assert one.model.layer.weight.tolist() == other.model.layer.weight.tolist()  # type: ignore[union-attr, operator]
        assert one.state.loss_tracker_avg == other.state.loss_tracker_avg

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
    def test_a_skipped_update_changes_nothing_but_the_scale(self, scaled: Build, optimizer: str) -> None:
        trainer = scaled(3, optimizer=optimizer, lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5},
                         lr_scheduling_steps=1)  # fmt: skip
        found = rates(trainer)
        assert found == [0.1, 0.05, 0.025, 0.025, 0.0125, 0.00625]
        assert (trainer.state.global_step, trainer.state.update_step) == (5, 4)
        (watch,) = (hook for hook in trainer.parts.checkpointing.hooks if isinstance(hook, Overflow))
        assert watch.weights[3] == watch.weights[2]
        assert len({tuple(weights) for weights in watch.weights}) == 4
        assert trainer.accelerator.scaler.get_scale() == 512.0

    def test_it_is_neither_logged_nor_saved(self, scaled: Build, logged: Any, saved_steps: Any) -> None:
        scaled(3, log_steps=1, save_steps=1).train()
        assert [row["step"] for row in logged()] == [1, 2, 4, 5]
        assert saved_steps() == [1, 2, 4, 5]

    def test_a_skipped_update_at_the_end_still_ends_the_epoch(self, scaled: Build, rows: Any, saved_steps: Any) -> None:
        trainer = scaled(5, 10, num_epochs=2, eval_dataset=rows(3))
        trainer.train()
        assert (trainer.state.global_step, trainer.state.update_step, trainer.state.epoch) == (10, 8, 2)
        assert saved_steps() == [5, 10]

    def test_a_loss_that_is_no_number_in_a_skipped_update_spoils_no_mean(self, scaled: Build) -> None:
        class OnceNaN(Trainer):
            def compute_loss(self, *given: Any, **others: Any) -> torch.Tensor:
                loss = super().compute_loss(*given, **others)
                return loss * float("nan") if self.state.global_step == 2 else loss

        trainer = scaled(cls=OnceNaN)
        trainer.reset_hook_in_train("on_update", "guard")  # which would raise
        trainer.train()
        assert (trainer.state.global_step, trainer.state.update_step) == (5, 4)
        assert trainer.state.loss_tracker_count == 16
        assert math.isfinite(trainer.state.loss_tracker_avg)

    def test_the_scale_is_saved_and_restored(self, scaled: Build) -> None:
        first = scaled(3, num_epochs=1)
        first.train()
        state = first.accelerator.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"]) == (512.0, 2)
        second = scaled(num_epochs=2, init_scale=2.0, resume_from_checkpoint=True)
        assert second.accelerator.scaler.state_dict() == state

    def test_a_resumed_run_skips_and_grows_as_the_unbroken_one(self, scaled: Build) -> None:
        unbroken = scaled(3, 7, out="unbroken", num_epochs=2)
        unbroken.train()
        scaled(3, 7, num_epochs=1).train()
        resumed = scaled(3, 7, num_epochs=2, init_scale=2.0, resume_from_checkpoint=True)
        resumed.train()
        assert resumed.model.layer.weight.tolist() == unbroken.model.layer.weight.tolist()  # type: ignore[union-attr, operator]
        assert resumed.accelerator.scaler.state_dict() == unbroken.accelerator.scaler.state_dict()
        assert resumed.state.update_step == 8

    def test_the_ledger_still_names_every_sample_once(self, scaled: Build, tmp_path: Path) -> None:
        from hezar_train.events import Ledger

        scaled(3).train()
        lines = list(Ledger.read(tmp_path / "run/ledger.jsonl"))
        assert [(line.first, line.count) for line in lines] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4)]

    def test_a_skipped_update_is_not_counted_without_the_guard_either(self, scaled: Build) -> None:
        trainer = scaled(2)
        trainer.reset_hook_in_train("on_update", "guard")
        trainer.train()
        assert (trainer.state.global_step, trainer.state.update_step) == (5, 4)

    def test_an_update_without_the_guard_that_spoils_the_weights_says_who_applied_it(self, toy: Build) -> None:
        trainer = toy(learning_rate=1e38)
        trainer.reset_hook_in_train("on_update", "guard")
        with pytest.raises(NonFiniteError, match="it was applied, because the hook `guard` was taken out"):
            trainer.train()

    def test_without_a_scaler_an_infinite_gradient_stops_the_run(self, toy: Build) -> None:
        trainer = toy(hooks=[Overflow(3)])
        with pytest.raises(NonFiniteError, match=r"gradient norm inf .* at step 3 \(epoch 1\); it was not applied"):
            trainer.train()
        assert trainer.state.update_step == 2

    def test_an_infinite_loss_stops_the_run_also_with_a_scaler(self, scaled: Build, rows: Any) -> None:
        data = rows()
        data[7] = {**data[7], "x": torch.full((4,), float("nan"))}
        with pytest.raises(NonFiniteError, match="loss nan") as raised:
            scaled(train_dataset=data).train()
        assert 7 in raised.value.samples
        assert len(raised.value.samples) == 4
