"""Training in rounds: a call does its part, the next goes on, and a kill inside one changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import ConfigError
from hezar_train.loop import Context

Build = Callable[..., Trainer]
Rows = Callable[..., list[dict[str, Any]]]


class Crash(Hook):
    """Fail at a moment of the step that follows so many finished ones."""

    def __init__(self, step: int, moment: str = "on_batch_start") -> None:
        self._step = step
        setattr(self, moment, self._fail)

    def _fail(self, ctx: Context) -> None:
        if ctx.state.global_step == self._step:
            raise RuntimeError("killed")


def everything(trainer: Trainer) -> list[Any]:
    """Return weights, optimizer state and counters, to compare bit by bit."""
    weights = [value.tolist() for value in trainer.model.state_dict().values()]
    moments = [[float(torch.as_tensor(value).double().sum()) for value in one.values()]
               for one in trainer.optimizer.state_dict()["state"].values()]  # fmt: skip
    state = trainer.state.to_dict()
    return [weights, moments, {name: state[name] for name in state if name not in ("files", "logs_dir", "hooks")}]


class TestLength:
    @pytest.mark.parametrize(
        ("settings", "samples"),
        [
            ({"local_update_steps": 3}, [12, 12, 12]),
            ({"local_update_steps": 7}, [28, 28, 28]),
            ({"local_update_steps": 1, "batch_or_epoch": "epoch"}, [20, 20, 20]),
            ({"local_update_steps": 2, "batch_or_epoch": "epoch", "batch_size": 8}, [40, 40, 40]),
            ({"local_update_steps": 2, "batch_size": 8}, [16, 12, 12]),  # the last batch of an epoch is short
            ({"local_update_steps": 3, "gradient_accumulation_steps": 2}, [12, 12, 12]),
        ],
    )
    def test_each_call_does_its_part(self, toy: Build, settings: dict[str, Any], samples: list[int]) -> None:
        trainer = toy(**settings)
        assert [trainer.train().num_samples for _ in samples] == samples
        assert trainer.state.samples_seen == sum(samples)

    def test_calls_together_go_through_epochs_as_one_long_run_would(self, toy: Build, rows: Rows) -> None:
        numbered = [{**row, "id": number} for number, row in enumerate(rows())]
        orders: dict[str, list[int]] = {"rounds": [], "run": []}
        for name, settings in (("rounds", {"local_update_steps": 3}), ("run", {"num_epochs": 3})):
            trainer = toy(out=name, train_dataset=numbered, **settings)
            trainer.register_hook_in_train(
                lambda ctx, name=name: orders[name].extend(ctx.batch["id"].tolist()), "on_batch_end"
            )
            for _ in range(5 if name == "rounds" else 1):
                trainer.train()
        assert orders["rounds"] == orders["run"]

    def test_rounds_of_batches_train_as_one_long_run_does(self, toy: Build) -> None:
        rounds, run = toy(out="rounds", local_update_steps=5, optimizer="adam"), toy(out="run", num_epochs=3)
        for _ in range(3):
            rounds.train()
        run.train()
        assert everything(rounds)[:2] == everything(run)[:2]

    def test_an_empty_round_is_refused_in_the_config(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="local_update_steps=0 must be at least 1"):
            toy(local_update_steps=0)
        with pytest.raises(ValueError, match=r"batch_or_epoch='round'.*batch, epoch"):
            toy(local_update_steps=1, batch_or_epoch="round")

    def test_each_round_is_saved_logged_and_evaluated_at_its_end(
        self, toy: Build, rows: Rows, saved_steps: Any, logged: Any
    ) -> None:
        trainer = toy(local_update_steps=3, eval_dataset=rows(6))
        metrics = [trainer.train().metrics for _ in range(3)]
        assert all("evaluation.loss" in one for one in metrics)
        assert {3, 6, 9} <= set(saved_steps())
        steps = [row["step"] for row in logged() if "evaluation.loss" in row]
        assert steps == sorted(set(steps))
        assert {3, 6, 9} <= set(steps)

    def test_the_history_has_one_entry_for_each_evaluation(self, toy: Build, rows: Rows) -> None:
        trainer = toy(local_update_steps=5, eval_dataset=rows(6))
        losses = [trainer.train().metrics["evaluation.loss"] for _ in range(3)]
        assert trainer.storage.history("evaluation.loss").values() == list(zip(losses, (5, 10, 15), strict=True))


class TestOptimizer:
    def test_moments_are_carried_on_or_start_anew(self, toy: Build) -> None:
        for fresh, carried in ((False, [0, 2, 2]), (True, [0, 0, 0])):
            found: list[int] = []
            trainer = toy(out=f"run{fresh}", local_update_steps=3, fresh_optimizer=fresh, optimizer="adam")
            trainer.register_hook_in_train(
                lambda ctx, found=found: found.append(len(ctx.optimizer.state)), "on_fit_start"
            )
            for _ in carried:
                trainer.train()
            assert found == carried

    def test_a_fresh_optimizer_starts_its_schedule_anew_too(self, toy: Build) -> None:
        rates: list[float] = []
        trainer = toy(
            local_update_steps=2, fresh_optimizer=True, lr_scheduler="exponential",
            lr_scheduler_kwargs={"gamma": 0.5}, lr_scheduling_steps=1,
        )  # fmt: skip
        trainer.register_hook_in_train(
            lambda ctx: rates.append(ctx.optimizer.param_groups[0]["lr"]), "on_batch_forward"
        )
        trainer.train()
        trainer.train()
        assert rates == pytest.approx([0.1, 0.05, 0.1, 0.05])

    def test_a_fresh_optimizer_makes_a_round_a_function_of_its_weights_and_data(self, toy: Build, rows: Rows) -> None:
        def after_two(first: list[float]) -> list[float]:
            trainer = toy(
                out=str(first[0]), local_update_steps=1, batch_or_epoch="epoch", fresh_optimizer=True, optimizer="adam",
                train_dataset=rows(4),
            )  # fmt: skip
            trainer.update({"layer.bias": first})
            trainer.train()
            trainer.update({"layer.weight": torch.zeros(3, 4), "layer.bias": [0.0, 0.0, 0.0]})
            trainer.train()
            found: list[float] = trainer.get_model_para()["layer.bias"].tolist()
            return found

        assert after_two([1.0, 2.0, 3.0]) == after_two([-9.0, 0.0, 9.0])


KILLED: dict[str, Any] = {
    "local_update_steps": 4, "optimizer": "adam", "save_steps": 1, "resume_from_checkpoint": True,
    "lr_scheduler": "exponential", "lr_scheduler_kwargs": {"gamma": 0.9}, "lr_scheduling_steps": 1,
}  # fmt: skip


def train_to(trainer: Trainer, step: int) -> None:
    """Call train() until a step is reached."""
    while trainer.state.global_step < step:
        trainer.train()


class TestKill:
    @pytest.mark.parametrize("moment", ["on_batch_start", "on_batch_backward", "on_batch_end", "on_update"])
    @pytest.mark.parametrize("step", [1, 5, 6, 11])
    @pytest.mark.parametrize("fresh", [False, True])
    def test_a_round_that_was_killed_ends_like_the_unbroken_one(
        self, toy: Build, fresh: bool, step: int, moment: str
    ) -> None:
        settings = {**KILLED, "fresh_optimizer": fresh}
        unbroken = toy(out="unbroken", **settings)
        train_to(unbroken, 12)
        with pytest.raises(RuntimeError, match="killed"):
            train_to(toy(hooks=[Crash(step, moment)], **settings), 12)
        resumed = toy(**settings)
        train_to(resumed, 12)
        assert everything(resumed) == everything(unbroken)

    def test_the_rest_of_a_killed_round_is_what_the_next_call_does_and_the_round_is_counted_as_a_whole(
        self, toy: Build
    ) -> None:
        with pytest.raises(RuntimeError, match="killed"):
            toy(hooks=[Crash(3)], **KILLED).train()
        resumed = toy(**KILLED)
        before, whole = resumed.state.global_step, resumed.train().num_samples
        assert (before, resumed.state.global_step, whole) == (3, 4, 16)
        assert resumed.train().num_samples == 16

    def test_a_round_that_failed_goes_on_in_the_same_process(self, toy: Build) -> None:
        unbroken = toy(out="unbroken", **KILLED)
        unbroken.train()
        crash = Crash(2)
        failing = toy(hooks=[crash], **KILLED)
        with pytest.raises(RuntimeError, match="killed"):
            failing.train()
        crash._step = -1
        assert failing.train().num_samples == 16
        assert everything(failing) == everything(unbroken)

    def test_a_kill_inside_an_accumulated_window_of_a_round_repeats_the_window(self, toy: Build) -> None:
        settings = {**KILLED, "gradient_accumulation_steps": 3, "local_update_steps": 4}
        unbroken = toy(out="unbroken", **settings)
        train_to(unbroken, 8)
        with pytest.raises(RuntimeError, match="killed"):
            toy(hooks=[Crash(2, "on_batch_end")], **settings).train()
        resumed = toy(**settings)
        train_to(resumed, 8)
        assert everything(resumed) == everything(unbroken)

    def test_what_a_server_sent_is_in_the_checkpoints_of_the_round(self, toy: Build) -> None:
        sent = {"layer.bias": [5.0, -5.0, 0.0]}
        unbroken = toy(out="unbroken", **KILLED)
        unbroken.update(sent)
        unbroken.train()
        broken = toy(hooks=[Crash(2)], **KILLED)
        broken.update(sent)
        with pytest.raises(RuntimeError, match="killed"):
            broken.train()
        resumed = toy(**KILLED)
        resumed.train()
        assert everything(resumed) == everything(unbroken)
