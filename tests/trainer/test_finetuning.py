"""Finetuning: its own length, optimizer and parameters; the run it interrupts does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Trainer
from hezar_train.errors import ConfigError, DataError
from hezar_train.loop import Context

Build = Callable[..., Trainer]
Rows = Callable[..., list[dict[str, Any]]]


class TwoLayers(nn.Module):
    """A body and a head, by fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x).tanh())
        return logits


@pytest.fixture
def build(toy: Build) -> Build:
    def make(out: str = "run", **given: Any) -> Trainer:
        return toy(out=out, **{"model": TwoLayers(), **given})

    return make


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], trainer: Trainer) -> set[str]:
    after = trainer.model.state_dict()
    return {name for name in before if not torch.equal(before[name], after[name])}


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


class TestLength:
    @pytest.mark.parametrize(
        ("settings", "count"),
        [
            ({"finetune_steps": 7}, 7),
            ({"finetune_steps": 2, "finetune_batch_or_epoch": "epoch"}, 10),
            ({"finetune_steps": 7, "gradient_accumulation_steps": 2}, 7),
            ({"finetune_steps": 1, "num_epochs": 3, "local_update_steps": 4}, 1),
        ],
    )
    def test_it_runs_as_many_batches_as_it_is_told(self, build: Build, settings: dict[str, Any], count: int) -> None:
        trainer = build(**settings)
        batches: list[int] = []
        trainer.register_hook_in_ft(lambda ctx: batches.append(len(ctx.batch["x"])), "on_batch_end")
        result = trainer.finetune()
        assert batches == [4] * count
        assert result.num_samples == 4 * count

    def test_its_result_unpacks_like_that_of_training(self, build: Build) -> None:
        num_samples, parameters, metrics = build(finetune_steps=2).finetune()
        assert (num_samples, set(parameters), set(metrics)) == (8, set(TwoLayers().state_dict()), {"train.loss"})

    def test_it_goes_over_the_split_that_it_is_told(self, build: Build, rows: Rows) -> None:
        trainer = build(train_dataset={"train": rows(), "val": rows(3, seed=2)}, finetune_batch_or_epoch="epoch")
        assert trainer.finetune("val").num_samples == 3
        assert trainer.finetune(target_data_split_name="train").num_samples == 20
        with pytest.raises(DataError, match=r"no split 'vaal'.*Did you mean 'val'"):
            trainer.finetune("vaal")

    def test_two_calls_from_the_same_weights_are_equal(self, build: Build) -> None:
        first, second = build(finetune_steps=3), build(finetune_steps=3)
        torch.rand(1)  # what others draw does not matter
        first.finetune()
        second.finetune()
        assert not changed(state_of(first), second)


class TestOptimizer:
    def test_each_call_has_a_new_optimizer_of_its_own_kind_and_rate(self, build: Build) -> None:
        seen: list[Any] = []

        def note(ctx: Context) -> None:
            group = ctx.optimizer.param_groups[0]
            seen.append((type(ctx.optimizer), group["lr"], group["weight_decay"], group["momentum"], id(ctx.optimizer)))

        trainer = build(
            optimizer="adam", finetune_optimizer="sgd", finetune_learning_rate=0.03, finetune_weight_decay=0.01,
            finetune_optimizer_kwargs={"momentum": 0.5},
        )  # fmt: skip
        trainer.register_hook_in_ft(note, "on_fit_start")
        trainer.finetune()
        trainer.finetune()
        assert [one[:4] for one in seen] == [(torch.optim.SGD, 0.03, 0.01, 0.5)] * 2

    def test_without_settings_of_its_own_it_has_those_of_training(self, build: Build) -> None:
        seen: list[tuple[type, float]] = []
        trainer = build(optimizer="sgd", optimizer_kwargs={"momentum": 0.9})
        trainer.register_hook_in_ft(
            lambda ctx: seen.append((type(ctx.optimizer), ctx.optimizer.param_groups[0]["momentum"])), "on_fit_start"
        )
        trainer.finetune()
        assert seen == [(torch.optim.SGD, 0.9)]
        assert trainer.ctx.optimizer is trainer.optimizer

    def test_its_schedule_ticks_after_each_update(self, build: Build) -> None:
        rates: list[float] = []
        trainer = build(
            finetune_steps=4, finetune_lr_scheduler="exponential", finetune_lr_scheduler_kwargs={"gamma": 0.5}
        )
        trainer.register_hook_in_ft(lambda ctx: rates.append(ctx.optimizer.param_groups[0]["lr"]), "on_batch_forward")
        trainer.finetune()
        assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125])

    def test_the_step_is_that_of_the_optimizer_by_hand(self, build: Build, rows: Rows) -> None:
        data = rows(4)
        trainer = build(train_dataset=data, finetune_optimizer="sgd", finetune_learning_rate=0.5)
        by_hand = copy.deepcopy(trainer.model)
        logits = by_hand(torch.stack([row["x"] for row in data]))
        nn.functional.cross_entropy(logits, torch.tensor([row["labels"] for row in data])).backward()
        trainer.finetune()
        for mine, theirs in zip(trainer.model.parameters(), by_hand.parameters(), strict=True):
            assert torch.allclose(mine, theirs - 0.5 * theirs.grad, atol=1e-6)


class TestParameters:
    @pytest.mark.parametrize(
        ("settings", "parts"),
        [
            ({}, {"body", "head"}),
            ({"finetune_freeze_param": ["body"]}, {"head"}),
            ({"finetune_freeze_param": ["body", "head.bias"]}, {"head"}),
            ({"finetune_param": ["head"]}, {"head"}),
            ({"finetune_param": ["head"], "finetune_reinit": True}, {"head"}),
        ],
    )
    def test_only_what_is_to_be_trained_changes(self, build: Build, settings: dict[str, Any], parts: set[str]) -> None:
        trainer = build(finetune_steps=3, **settings)
        before = state_of(trainer)
        trainer.finetune()
        assert {name.split(".")[0] for name in changed(before, trainer)} == parts
        assert ("head.bias" in changed(before, trainer)) == (
            "head.bias" not in settings.get("finetune_freeze_param", [])
        )
        assert all(parameter.requires_grad for parameter in trainer.model.parameters())

    def test_a_new_head_does_not_depend_on_the_old_one(self, build: Build) -> None:
        settings = {"finetune_param": ["head"], "finetune_reinit": True, "finetune_steps": 3}
        one, other = build(out="one", **settings), build(out="other", **settings)
        with torch.no_grad():
            other.model.head.weight.fill_(9.0)
        one.finetune()
        other.finetune()
        assert not changed(state_of(one), other)

    def test_flags_come_back_when_finetuning_fails(self, build: Build) -> None:
        trainer = build(finetune_freeze_param=["body"])
        trainer.model.head.bias.requires_grad_(False)

        def fail(_: Context) -> None:
            raise ZeroDivisionError

        trainer.register_hook_in_ft(fail, "on_batch_end")
        with pytest.raises(ZeroDivisionError):
            trainer.finetune()
        flags = {name: parameter.requires_grad for name, parameter in trainer.model.named_parameters()}
        assert flags == {"body.weight": True, "body.bias": True, "head.weight": True, "head.bias": False}
        assert trainer.ctx.mode_stack == []

    def test_leaving_nothing_to_train_is_refused(self, build: Build) -> None:
        with pytest.raises(ConfigError, match="leave no parameter to train"):
            build(finetune_freeze_param=["body", "head"]).finetune()


class TestTheRunAround:
    def test_counters_optimizer_generators_and_folder_stay_as_they_are(self, build: Build, tmp_path: Path) -> None:
        trainer = build(local_update_steps=3, optimizer="adam", finetune_steps=4)
        trainer.train()
        state, optimizer = trainer.state.to_dict(), copy.deepcopy(trainer.optimizer.state_dict())
        files, generator = files_of(tmp_path), torch.random.get_rng_state()
        trainer.finetune()
        assert trainer.state.to_dict() == state
        assert files_of(tmp_path) == files
        assert torch.equal(torch.random.get_rng_state(), generator)
        now = trainer.optimizer.state_dict()
        assert now["param_groups"] == optimizer["param_groups"]
        for number, moments in optimizer["state"].items():
            assert all(torch.equal(value, now["state"][number][name]) for name, value in moments.items())

    def test_finetuning_inside_training_leaves_no_trace_but_the_weights(self, build: Build) -> None:
        seen: list[Any] = []

        def nested(ctx: Context) -> None:
            before = (ctx.mode_stack, ctx.num_samples, ctx.cur_epoch_i, ctx.cur_batch_i, ctx.state.global_step)
            kept = copy.deepcopy(ctx.model.state_dict())
            ctx.trainer_of_test.finetune()
            ctx.model.load_state_dict(kept)
            assert before == (ctx.mode_stack, ctx.num_samples, ctx.cur_epoch_i, ctx.cur_batch_i, ctx.state.global_step)
            seen.append(ctx.model.training)

        plain, tuned = build(out="plain", optimizer="adam"), build(out="tuned", optimizer="adam", finetune_steps=2)
        tuned.ctx.share({"trainer_of_test": tuned})
        tuned.register_hook_in_train(nested, "on_batch_end")
        plain.train()
        tuned.train()
        assert seen == [True] * 5
        assert not changed(state_of(plain), tuned)

    def test_a_run_that_finetunes_before_each_evaluation_trains_as_one_that_does_not(
        self, build: Build, rows: Rows
    ) -> None:
        settings: dict[str, Any] = {"eval_dataset": rows(6, seed=2), "num_epochs": 2}
        plain = build(out="plain", **settings)
        tuned = build(out="tuned", finetune_before_eval=True, finetune_steps=10, **settings)
        worse, better = plain.train().metrics, tuned.train().metrics
        assert better["evaluation.loss"] < worse["evaluation.loss"]
        assert better["train.loss"] == worse["train.loss"]
        assert not changed(state_of(plain), tuned)

    def test_an_evaluation_that_fails_gives_the_weights_back(self, build: Build, rows: Rows) -> None:
        trainer = build(finetune_before_eval=True, eval_dataset=rows(6))
        before = state_of(trainer)

        def fail(_: Context) -> None:
            raise ZeroDivisionError

        trainer.register_hook_in_eval(fail, "on_fit_start")
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate()
        assert not changed(before, trainer)


def test_another_config_counts_for_finetuning_too(build: Build) -> None:
    trainer = build(finetune_steps=4, batch_size=2)
    updates: list[bool] = []
    trainer.register_hook_in_ft(lambda ctx: updates.append(ctx.closes_window), "on_batch_end")
    trainer.finetune()
    trainer.reconfigure(copy.deepcopy(trainer.config).update({"gradient_accumulation_steps": 2}))
    trainer.finetune()
    assert updates == [True] * 4 + [False, True] * 2


def test_gradients_of_a_window_that_failed_do_not_reach_it(build: Build) -> None:
    def fail(_: Context) -> None:
        raise RuntimeError("out of memory")

    settings = {"gradient_accumulation_steps": 2, "finetune_steps": 4}
    failed, fresh = build("failed", **settings), build("fresh", **settings)
    failed.register_hook_in_train(fail, "on_batch_end")
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.train()
    failed.finetune()
    fresh.finetune()
    assert changed(state_of(fresh), failed) == set()
