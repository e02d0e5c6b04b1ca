"""Rows of the FederatedScope table: its verbs, hooks, context and data forms, on the one loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hezar_train import Hook
from hezar_train.compat.federatedscope import (
    HOOK_TRIGGER,
    LIFECYCLE,
    MODE,
    CtxVar,
    Trainer,
    TrainerConfig,
    calculate_batch_epoch_num,
    lifecycle,
)
from hezar_train.errors import ConfigError, DataError, HookError
from hezar_train.loop import Context

Build = Callable[..., Trainer]


@pytest.fixture
def toy(toy: Build) -> Build:
    """Build the toy with FederatedScope's Trainer."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        return toy(cls, **given)

    return build


def splits(rows: Any, **more: Any) -> dict[str, Any]:
    return {"train": rows(), "val": rows(6, seed=2), "test": rows(7, seed=3), **more}


class TestRoutines:
    def test_train_unpacks_into_samples_parameters_and_metrics(self, toy: Build) -> None:
        trainer = toy()
        num_samples, parameters, metrics = trainer.train()
        assert num_samples == 20
        assert set(parameters) == set(trainer.model.state_dict())
        assert np.isfinite(metrics["train.loss"])

    @pytest.mark.parametrize(("split", "count"), [("val", 6), ("test", 7), ("train", 20)])
    def test_a_split_is_evaluated_once_whole_and_changes_no_weight(
        self, toy: Build, rows: Any, weights_of: Any, split: str, count: int
    ) -> None:
        sizes: list[int] = []
        trainer = toy(num_epochs=2, arguments={"train_dataset": splits(rows)})
        trainer.register_hook_in_eval(lambda ctx: sizes.append(len(ctx.batch["x"])), "on_batch_end")
        before = weights_of(trainer)
        assert set(trainer.evaluate(split)) == {"loss"}
        assert sum(sizes) == count
        assert weights_of(trainer) == before

    def test_a_split_that_a_worker_lacks_is_evaluated_to_nothing_and_never_trained(
        self, toy: Build, rows: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = toy(arguments={"train_dataset": splits(rows)})
        assert trainer.evaluate("nope") == {}
        assert "there is no evaluation set 'nope'. There are: test, train, val" in caplog.text
        with pytest.raises(DataError, match="nope"):
            trainer.train("nope")

    def test_finetune_runs_its_own_batches_with_an_optimizer_of_its_own(self, toy: Build) -> None:
        rates: list[float] = []
        trainer = toy(finetune_steps=7, finetune_learning_rate=0.03, finetune_optimizer="sgd")
        trainer.register_hook_in_ft(lambda ctx: rates.append(ctx.optimizer.param_groups[0]["lr"]), "on_batch_end")
        trainer.finetune()
        assert rates == [0.03] * 7
        assert trainer.optimizer.param_groups[0]["lr"] == 0.1
        assert not trainer.optimizer.state
        assert (trainer.state.global_step, trainer.state.samples_seen) == (0, 0)

    @pytest.mark.parametrize(("fresh", "carried"), [(True, [0, 0]), (False, [0, 2])])
    def test_a_call_of_train_starts_with_a_fresh_optimizer_if_asked(
        self, toy: Build, fresh: bool, carried: list[int]
    ) -> None:
        found: list[int] = []
        trainer = toy(local_update_steps=3, fresh_optimizer=fresh, optimizer="adam")
        trainer.register_hook_in_train(lambda ctx: found.append(len(ctx.optimizer.state)), "on_fit_start")
        trainer.train()
        trainer.train()
        assert found == carried

    def test_two_epochs_of_five_batches_fire_these_events(self, toy: Build, rec: Any) -> None:
        toy(num_epochs=2, arguments={"hooks": [rec]}).train()
        batch = ["on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end"]
        epoch = ["on_epoch_start", *batch * 5, "on_epoch_end"]
        fired = [name for _, name in rec.events if name in HOOK_TRIGGER]
        assert fired == ["on_fit_start", *epoch * 2, "on_fit_end"]
        assert {mode for mode, _ in rec.events} == {"train"}

    def test_an_evaluation_inside_training_looks_only_and_gives_the_mode_back(self, toy: Build, rows: Any) -> None:
        seen: list[tuple[str, bool]] = []
        trainer = toy(arguments={"train_dataset": splits(rows)}, do_evaluate=False)

        def nested(ctx: Context) -> None:
            trainer.evaluate("val")
            seen.append((str(ctx.mode), trainer.model.training))

        trainer.register_hook_in_eval(lambda ctx: seen.append((str(ctx.mode), trainer.model.training)), "on_fit_end")
        trainer.register_hook_in_train(nested, "on_epoch_end")
        trainer.train()
        assert seen == [("val", False), ("train", True)]

    def test_evaluating_the_training_split_is_a_test_on_that_split(self, toy: Build, rows: Any) -> None:
        seen: set[tuple[str, str]] = set()
        trainer = toy(arguments={"train_dataset": splits(rows)})
        trainer.register_hook_in_eval(lambda ctx: seen.add((str(ctx.cur_mode), ctx.cur_split)), "on_batch_end")
        trainer.evaluate("train")
        assert seen == {("test", "train")}

    def test_two_evaluations_around_the_training_are_in_its_result(self, toy: Build, rows: Any) -> None:
        data = splits(rows)
        before = toy(out="other", arguments={"train_dataset": data}).evaluate("val")["loss"]
        trainer = toy(use_diff=True, arguments={"train_dataset": data}, do_evaluate=False)
        _, _, metrics = trainer.train()
        assert metrics["val_avg_loss_before"] == before
        assert metrics["val_avg_loss_after"] == trainer.evaluate("val")["loss"]
        assert metrics["val_total"] == 6

    def test_a_call_may_be_longer_than_an_epoch_and_the_next_goes_on(self, toy: Build, rows: Any) -> None:
        ids = [{**row, "id": number} for number, row in enumerate(rows())]
        seen: list[int] = []
        trainer = toy(local_update_steps=7, arguments={"train_dataset": ids})
        trainer.register_hook_in_train(lambda ctx: seen.extend(ctx.batch["id"].tolist()), "on_batch_end")
        assert [trainer.train().num_samples, trainer.train().num_samples] == [28, 28]
        for first in (0, 20):
            assert sorted(seen[first : first + 20]) == list(range(20))

    def test_a_new_config_is_planned_anew(self, toy: Build) -> None:
        trainer = toy()
        assert trainer.plan.steps_in_epoch == 5
        changed = trainer.cfg.to_dict() | {"batch_size": 10}
        trainer.cfg = TrainerConfig.from_dict(changed)
        assert trainer.plan.steps_in_epoch == 2
        assert trainer.train().num_samples == 20


class TestExchange:
    def test_a_partial_update_changes_its_names_only_and_leaves_the_callers_dict(self, toy: Build) -> None:
        trainer = toy()
        before = trainer.model.state_dict()["layer.weight"].clone()
        given: dict[str, Any] = {"layer.bias": [1.0, 2.0, 3.0]}
        trainer.update(given)
        assert trainer.model.state_dict()["layer.bias"].tolist() == [1.0, 2.0, 3.0]
        assert torch.equal(trainer.model.state_dict()["layer.weight"], before)
        assert given == {"layer.bias": [1.0, 2.0, 3.0]}

    def test_a_strict_update_wants_every_name_and_a_text_is_never_unpickled(self, toy: Build) -> None:
        trainer = toy()
        with pytest.raises(DataError, match=r"layer\.weight"):
            trainer.update({"layer.bias": [1.0, 2.0, 3.0]}, strict=True)
        with pytest.raises(DataError, match="text"):
            trainer.update({"layer.bias": "gASVAAAA"})

    def test_what_is_given_away_does_not_follow_later_training(self, toy: Build) -> None:
        trainer = toy()
        given = trainer.get_model_para()
        kept = {name: value.clone() for name, value in given.items()}
        trainer.train()
        assert all(torch.equal(given[name], kept[name]) for name in kept)
        assert not torch.equal(given["layer.weight"], trainer.model.state_dict()["layer.weight"])

    def test_local_parameters_neither_leave_nor_enter(self, toy: Build) -> None:
        model = nn.Sequential()
        model.add_module("body", nn.Linear(4, 3))
        model.add_module("bn", nn.BatchNorm1d(3))
        trainer = toy(local_param=["bn"], arguments={"model": model})
        assert set(trainer.get_model_para()) == {"body.weight", "body.bias"}
        trainer.update({"bn.weight": [9.0] * 3, "body.bias": [1.0] * 3})
        assert model.bn.weight.tolist() == [1.0] * 3  # type: ignore[union-attr, operator]
        assert model.body.bias.tolist() == [1.0] * 3  # type: ignore[union-attr, operator]

    def test_what_is_not_trained_stays_unless_asked_for(self, toy: Build) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        names = {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert set(toy(arguments={"model": model}).get_model_para()) == names
        shared = set(toy(share_non_trainable_para=True, arguments={"model": model}).get_model_para())
        assert shared == names | {"0.running_mean", "0.running_var", "0.num_batches_tracked"}

    def test_a_saved_model_brings_its_round_and_its_weights_back(
        self, toy: Build, weights_of: Any, tmp_path: Path
    ) -> None:
        trainer, other = toy(), toy(out="other", arguments={"model": nn.Sequential(nn.Linear(4, 3))})
        trainer.train()
        trainer.save_model(tmp_path / "global", cur_round=7)
        again = toy(out="again")
        assert again.load_model(tmp_path / "global") == 7
        assert weights_of(again) == weights_of(trainer)
        with pytest.raises(ValueError, match="nowhere"):
            again.load_model(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"layer\.weight"):
            other.load_model(tmp_path / "global")

    def test_the_model_goes_to_the_cpu_after_a_call_and_not_after_an_evaluation_inside_it(
        self, toy: Build, rows: Any
    ) -> None:
        moves: list[str] = []

        class Watched(nn.Linear):
            def to(self, *args: Any, **kwargs: Any) -> Any:
                moves.append(str(args[0]))
                return super().to(*args, **kwargs)

        data = TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
        trainer = toy(
            offload_after_routine=True, arguments={"model": Watched(4, 3), "train_dataset": data, "eval_dataset": data}
        )
        trainer.register_hook_in_train(lambda ctx: moves.append("the end"), "on_fit_end")
        moves.clear()
        trainer.train()
        assert moves[-2:] == ["the end", "cpu"]
        assert moves.count("cpu") == 2  # to the device of the run, which is the CPU here, and back
        assert all(parameter.device.type == "cpu" for parameter in trainer.model.parameters())


def a(_: Context) -> None: ...


def b(_: Context) -> None: ...


def c(_: Context) -> None: ...


def new(_: Context) -> None: ...


class TestHooks:
    @pytest.fixture
    def trainer(self, toy: Build) -> Trainer:
        built = toy()
        for hook in (a, b, c):
            built.register_hook_in_train(hook, "on_epoch_start")
        return built

    def names(self, trainer: Trainer) -> list[str]:
        return trainer.hooks[MODE.TRAIN].names("on_epoch_start")

    @pytest.mark.parametrize(
        ("given", "order"),
        [
            ({}, "a b c new"),
            ({"insert_pos": -1}, "a b c new"),
            ({"insert_pos": 0}, "new a b c"),
            ({"insert_pos": 3}, "a b c new"),
            ({"base_hook": c, "insert_mode": "before"}, "a b new c"),
            ({"base_hook": b, "insert_mode": "after"}, "a b new c"),
            ({"base_hook": a, "insert_mode": "after", "insert_pos": 2}, "a b new c"),
        ],
    )
    def test_a_hook_goes_where_it_is_told(self, trainer: Trainer, given: dict[str, Any], order: str) -> None:
        trainer.register_hook_in_train(new, "on_epoch_start", **given)
        assert self.names(trainer) == order.split()

    @pytest.mark.parametrize(
        "given", [{"insert_pos": 9}, {"base_hook": new}, {"base_hook": a, "insert_mode": "beside"}]
    )
    def test_a_place_that_is_not_there_is_refused(self, trainer: Trainer, given: dict[str, Any]) -> None:
        with pytest.raises(HookError):
            trainer.register_hook_in_train(print, "on_epoch_start", **given)
        assert self.names(trainer) == ["a", "b", "c"]

    def test_a_moment_that_is_not_there_is_refused_with_the_list(self, trainer: Trainer) -> None:
        with pytest.raises(HookError, match=r"'on_foo'.*on_fit_start"):
            trainer.register_hook_in_train(a, "on_foo")

    @pytest.mark.parametrize("mode", ["train", "eval", "ft"])
    def test_a_reset_tells_the_place_it_emptied(self, toy: Build, mode: str) -> None:
        trainer = toy()
        register, reset = (getattr(trainer, f"{verb}_hook_in_{mode}") for verb in ("register", "reset"))
        for hook in (a, b, c):
            register(hook, "on_epoch_start")
        assert reset("on_epoch_start", "b") == 1
        assert [call.__name__ for call in getattr(trainer, f"hooks_in_{mode}")["on_epoch_start"]] == ["a", "c"]
        with pytest.raises(HookError, match=r"'d'"):
            reset("on_epoch_start", "d")
        assert reset("on_epoch_start") == -1
        assert getattr(trainer, f"hooks_in_{mode}")["on_epoch_start"] == []

    @pytest.mark.parametrize("mode", ["train", "eval", "ft"])
    def test_a_replacement_keeps_the_place_and_a_missing_one_is_refused(self, toy: Build, mode: str) -> None:
        trainer = toy()
        register, replace = (getattr(trainer, f"{verb}_hook_in_{mode}") for verb in ("register", "replace"))
        for hook in (a, b, c):
            register(hook, "on_epoch_start")
        replace(new, "on_epoch_start", "b")
        assert getattr(trainer, f"hooks_in_{mode}")["on_epoch_start"] == [a, new, c]
        with pytest.raises(HookError, match=r"'d'"):
            replace(new, "on_epoch_start", "d")
        assert getattr(trainer, f"hooks_in_{mode}")["on_epoch_start"] == [a, new, c]

    def test_functions_named_lambdas_and_bound_methods_are_hooks_of_their_names(self, toy: Build) -> None:
        called: list[str] = []
        named = lambda ctx: called.append("lambda")  # noqa: E731
        named.__name__ = "short"

        class Owner:
            def method(self, ctx: Context) -> None:
                called.append("method")

        def function(ctx: Context) -> None:
            called.append("function")

        trainer = toy(max_steps=1)
        for hook in (function, named, Owner().method):
            trainer.register_hook_in_train(hook, "on_fit_start")
        trainer.train()
        assert called == ["function", "lambda", "method"]
        assert trainer.hooks[MODE.TRAIN].names("on_fit_start")[-3:] == ["function", "short", "method"]

    def test_the_sets_of_modes_are_independent(self, trainer: Trainer) -> None:
        assert trainer.hooks_in_train["on_epoch_start"] == [a, b, c]
        assert trainer.hooks_in_eval["on_epoch_start"] == []
        assert trainer.hooks_in_ft["on_epoch_start"] == []

    def test_a_set_for_one_call_is_used_in_it_alone(self, toy: Build, weights_of: Any) -> None:
        seen: list[str] = []
        trainer = toy(local_update_steps=2)
        other = trainer.hooks[MODE.TRAIN].copy()
        other.register(lambda ctx: seen.append("other"), "on_batch_end", name="other")
        trainer.train(hooks_set=other)
        assert seen == ["other"] * 2
        trainer.train()
        assert seen == ["other"] * 2
        assert "other" not in trainer.hooks[MODE.TRAIN].names("on_batch_end")

    def test_all_eight_moments_fire_in_an_evaluation_and_no_gradient_is_made(
        self, toy: Build, rows: Any, rec: Any
    ) -> None:
        trainer = toy(arguments={"eval_dataset": rows(3), "hooks": [rec]})
        trainer.evaluate()
        batch = ["on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end"]
        expected = ["on_fit_start", "on_epoch_start", *batch, "on_epoch_end", "on_fit_end"]
        assert [name for _, name in rec.events] == expected
        assert all(parameter.grad is None for parameter in trainer.model.parameters())

    def test_replacing_the_backward_makes_an_attacker(self, toy: Build, rows: Any) -> None:
        def ascend(ctx: Context) -> None:
            ctx.loss = -ctx.loss
            backward(ctx)

        trainer = toy(optimizer="sgd", arguments={"eval_dataset": rows()})
        (backward,) = trainer.hooks_in_train["on_batch_backward"]
        before = trainer.evaluate()["loss"]
        trainer.replace_hook_in_train(ascend, "on_batch_backward", "backward")
        trainer.train()
        assert trainer.evaluate()["loss"] > before


class Reading(Hook):
    """Note what can be read at a moment."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.at_end: list[dict[str, Any]] = []
        self.at_start: list[list[str]] = []

    def on_batch_start(self, ctx: Context) -> None:
        self.at_start.append([name for name in self.names if ctx.get(name) is not None])

    def on_batch_end(self, ctx: Context) -> None:
        self.at_end.append({name: ctx[name] for name in self.names})


class TestContext:
    def test_it_is_a_bag_of_names_in_six_spellings(self) -> None:
        ctx = Context()
        ctx.x = 1
        assert (ctx.x, ctx["x"], ctx.get("x"), ctx.get("y", 2), "x" in ctx) == (1, 1, 1, 2, True)
        ctx.merge_from_dict({"y": 3, "z": CtxVar(4, LIFECYCLE.BATCH)})
        assert (ctx.y, ctx.z) == (3, 4)
        del ctx.x
        assert "x" not in ctx
        with pytest.raises(AttributeError, match="'x'"):
            _ = ctx.x

    def test_a_variable_with_a_life_is_stored_bare(self) -> None:
        ctx = Context()
        ctx.a = CtxVar(0.0, "routine")
        assert type(ctx.a) is float
        with pytest.raises(ValueError, match="day"):
            ctx.b = CtxVar(0.0, "day")

    def test_variables_of_a_batch_an_epoch_and_a_routine_end_with_it(self, toy: Build) -> None:
        seen: list[tuple[str, bool, bool, bool]] = []

        class Setting(Hook):
            def look(self, name: str, ctx: Context) -> None:
                seen.append((name, "of_batch" in ctx, "of_epoch" in ctx, "of_routine" in ctx))

            def on_fit_start(self, ctx: Context) -> None:
                ctx.of_routine = CtxVar(1, LIFECYCLE.ROUTINE)

            def on_epoch_start(self, ctx: Context) -> None:
                self.look("epoch", ctx)
                ctx.of_epoch = CtxVar(1, LIFECYCLE.EPOCH)

            def on_batch_start(self, ctx: Context) -> None:
                self.look("batch", ctx)
                ctx.of_batch = CtxVar(1, LIFECYCLE.BATCH)

        trainer = toy(num_epochs=2, batch_size=10, arguments={"hooks": [Setting()]})
        trainer.train()
        epoch = [("epoch", False, False, True), *[("batch", False, True, True)] * 2]
        assert seen == epoch * 2
        assert not any(name in trainer.ctx for name in ("of_batch", "of_epoch", "of_routine"))

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_decorated_method_drops_its_variables_also_when_it_fails(self, toy: Build, fails: bool) -> None:
        class Own(Trainer):
            @lifecycle(LIFECYCLE.EPOCH)
            def measure(self) -> int:
                self.ctx.count = CtxVar(1, LIFECYCLE.EPOCH)
                if fails:
                    raise ZeroDivisionError
                return self.ctx.count  # type: ignore[no-any-return]

        trainer = toy(Own)
        if fails:
            with pytest.raises(ZeroDivisionError):
                trainer.measure()  # type: ignore[attr-defined]
        else:
            assert trainer.measure() == 1  # type: ignore[attr-defined]
        assert "count" not in trainer.ctx

    def test_forward_leaves_labels_outputs_loss_and_size_until_the_batch_ends(self, toy: Build) -> None:
        watch = Reading("y_true", "y_prob", "loss_batch", "batch_size")
        toy(arguments={"hooks": [watch]}).train()
        assert all(found == ["y_true", "batch_size"] for found in watch.at_start)  # of the batch that begins
        assert [found["batch_size"] for found in watch.at_end] == [4] * 5
        for found in watch.at_end:
            expected = nn.functional.cross_entropy(found["y_prob"], found["y_true"])
            assert torch.equal(found["loss_batch"], expected)

    def test_shared_references_are_the_same_objects_in_training_and_evaluation(self, toy: Build, rows: Any) -> None:
        seen: list[list[int]] = []
        trainer = toy(arguments={"eval_dataset": rows(3)})

        def note(ctx: Context) -> None:
            seen.append([id(ctx[name]) for name in ("model", "device", "cfg", "criterion", "data")])

        trainer.register_hook_in_train(note, "on_fit_start")
        trainer.register_hook_in_eval(note, "on_fit_start")
        trainer.train()
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert trainer.ctx.model is trainer.model

    def test_a_length_assigned_at_the_start_counts(self, toy: Build) -> None:
        def longer(ctx: Context) -> None:
            assert (ctx.num_train_batch, ctx.num_train_epoch, ctx.num_total_train_batch) == (5, 1, 5)
            ctx.num_train_epoch = 3

        trainer = toy()
        trainer.register_hook_in_train(longer, "on_fit_start")
        assert trainer.train().num_samples == 60

    def test_counters_count_from_zero(self, toy: Build) -> None:
        seen: list[tuple[int, int]] = []
        trainer = toy(num_epochs=2)
        trainer.register_hook_in_train(lambda ctx: seen.append((ctx.cur_epoch_i, ctx.cur_batch_i)), "on_batch_end")
        trainer.train()
        assert seen == [(epoch, batch) for epoch in range(2) for batch in range(5)]

    def test_the_documented_keys_resolve_at_the_end_of_a_routine(self, toy: Build, rows: Any) -> None:
        keys = """
            train_data num_train_data val_data num_val_data test_data num_test_data lifecycles cfg model data device
            cur_mode mode_stack cur_split split_stack trainable_para_names criterion regularizer grad_clip monitor
            models mirrored_models optimizer scheduler num_train_batch num_train_epoch num_total_train_batch
            num_val_batch num_val_epoch num_test_batch num_test_epoch loss_batch_total loss_regular_total num_samples
            ys_true ys_prob eval_metrics
        """
        missing: list[str] = []
        trainer = toy(arguments={"train_dataset": splits(rows)})
        trainer.register_hook_in_train(
            lambda ctx: missing.extend(key for key in keys.split() if not hasattr(ctx, key)), "on_fit_end"
        )
        trainer.train()
        assert missing == []

    def test_statistics_weigh_every_sample_alike(self, toy: Build, rows: Any) -> None:
        totals: list[tuple[int, float]] = []
        trainer = toy(learning_rate=0.0, arguments={"train_dataset": rows(18)})
        trainer.register_hook_in_train(
            lambda ctx: totals.append((ctx.num_samples, float(ctx.loss_batch_total))), "on_fit_end"
        )
        trainer.train()
        data = rows(18)
        logits = trainer.model(torch.stack([row["x"] for row in data]))
        expected = nn.functional.cross_entropy(logits, torch.tensor([row["labels"] for row in data]))
        ((count, total),) = totals
        assert count == 18
        assert total / count == pytest.approx(float(expected), rel=1e-5)

    def test_a_loss_scaled_by_a_hook_scales_the_gradient(self, toy: Build, weights_of: Any) -> None:
        def forget(ctx: Context) -> None:
            ctx.loss = ctx.loss * 0

        trainer = toy(optimizer="sgd")
        before = weights_of(trainer)
        trainer.register_hook_in_train(forget, "on_batch_forward")
        trainer.train()
        assert weights_of(trainer) == before


class TestRegularizer:
    def test_its_value_is_trained_on_and_not_logged(self, toy: Build) -> None:
        from hezar_train.trainer.model_runner import register_regularizer

        register_regularizer("one", lambda ctx: 1.0)
        watch = Reading("loss_task", "loss_batch", "loss_regular")
        plain = toy(out="plain").train().metrics["train.loss"]
        trainer = toy(regularizer="one", regularizer_mu=0.5, arguments={"hooks": [watch]})
        assert trainer.train().metrics["train.loss"] == plain
        for found in watch.at_end:
            assert float(found["loss_task"] - found["loss_batch"]) == pytest.approx(0.5, abs=1e-6)
            assert float(found["loss_regular"]) == 0.5

    def test_its_total_weighs_samples_as_that_of_the_loss_does(self, toy: Build, rows: Any) -> None:
        from hezar_train.trainer.model_runner import register_regularizer

        register_regularizer("one", lambda ctx: 1.0)
        totals: list[float] = []
        trainer = toy(regularizer="one", regularizer_mu=0.5, arguments={"train_dataset": rows(18)})
        trainer.register_hook_in_train(
            lambda ctx: totals.append(ctx.loss_regular_total / ctx.num_samples), "on_fit_end"
        )
        trainer.train()
        assert totals == [pytest.approx(0.5)]

    def test_an_unknown_one_is_refused_when_the_trainer_is_built(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="regularizer='nope'"):
            toy(regularizer="nope", regularizer_mu=0.5)


class TestDataForms:
    def test_a_dict_of_splits_may_have_other_keys_and_a_list_is_no_dict(self, toy: Build, rows: Any) -> None:
        from hezar_train.data import parse_splits

        trainer = toy(arguments={"train_dataset": splits(rows, extra=3)})
        assert trainer.train().num_samples == 20
        with pytest.raises(TypeError, match="expected a dict of splits"):
            parse_splits([1, 2])
        with pytest.raises(TypeError, match="'train' is an int"):
            toy(arguments={"train_dataset": {"train": 3}})
        assert parse_splits({"train": rows()})["num_val_data"] == 0

    def test_arrays_train_and_whole_labels_stay_whole(self, toy: Build) -> None:
        generator = np.random.default_rng(0)
        data = {"train": {"x": generator.normal(size=(20, 4)), "y": generator.integers(3, size=20)}}
        seen: set[tuple[torch.dtype, torch.dtype]] = set()
        trainer = toy(arguments={"train_dataset": data})
        trainer.register_hook_in_train(lambda ctx: seen.add((ctx.batch[0].dtype, ctx.batch[1].dtype)), "on_batch_end")
        assert trainer.train().num_samples == 20
        assert seen == {(torch.float32, torch.int64)}

    def test_a_loaders_own_batch_size_counts(self, toy: Build, rows: Any) -> None:
        loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(3, (40,))), batch_size=4)
        trainer = toy(batch_size=10, arguments={"train_dataset": {"train": loader}})
        assert trainer.plan.steps_in_epoch == 10
        assert trainer.train().num_samples == 40

    def test_evaluation_neither_shuffles_nor_drops(self, toy: Build, rows: Any) -> None:
        ids = [{**row, "id": number} for number, row in enumerate(rows(7))]
        seen: list[int] = []
        trainer = toy(drop_last=True, arguments={"train_dataset": {"train": rows(), "val": ids}})
        trainer.register_hook_in_eval(lambda ctx: seen.extend(ctx.batch["id"].tolist()), "on_batch_end")
        trainer.evaluate("val")
        assert seen == list(range(7))


class TestConfig:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ((7, "batch", 20, 4, False), (5, 2, 2, 7)),
            ((3, "batch", 20, 4, False), (3, 3, 1, 3)),
            ((2, "epoch", 21, 4, True), (5, 5, 2, 10)),
            ((2, "epoch", 21, 4, False), (6, 6, 2, 12)),
        ],
    )
    def test_batches_and_epochs_of_a_call(self, given: Any, expected: Any) -> None:
        assert calculate_batch_epoch_num(*given) == expected

    def test_a_call_without_a_batch_is_refused(self) -> None:
        with pytest.raises(DataError, match="3 samples give no batch of 4"):
            calculate_batch_epoch_num(1, "epoch", 3, 4, True)

    def test_a_bad_unit_raises_a_value_error_with_field_and_choices(self) -> None:
        with pytest.raises(ValueError, match=r"batch_or_epoch='day'.*batch, epoch"):
            TrainerConfig("run", batch_or_epoch="day")

    @pytest.mark.parametrize(("steps", "unit", "count"), [(3, "batch", 12), (2, "epoch", 40)])
    def test_a_call_trains_as_much_as_it_is_told(self, toy: Build, steps: int, unit: str, count: int) -> None:
        assert toy(local_update_steps=steps, batch_or_epoch=unit).train().num_samples == count

    def test_any_optimizer_of_torch_takes_its_own_keywords(self, toy: Build) -> None:
        trainer = toy(optimizer="RMSprop", optimizer_kwargs={"alpha": 0.9})
        assert isinstance(trainer.optimizer, torch.optim.RMSprop)
        assert trainer.optimizer.param_groups[0]["alpha"] == 0.9

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ("data_para_dids", "distributed"),
            ("grad_clip", "max_grad_norm"),
            ("grad_accum_count", "gradient_accumulation_steps"),
            ("patience", "early_stopping_patience"),
            ("delta", "early_stopping_threshold"),
            ("improve_indicator_mode", "early_stopping_mode"),
            ("before_eval", "finetune_before_eval"),
            ("freeze_param", "finetune_freeze_param"),
            ("simple_tuning", "finetune_reinit"),
            ("share_local_model", "offload_after_routine"),
            ("best_res_update_round_wise_key", "metric_for_best_model"),
            ("disp_freq", "log_steps"),
            ("val_freq", "eval_steps"),
            ("restore_from", "resume_from_checkpoint"),
            ("save_to", "output_dir"),
            ("num_workers", "num_dataloader_workers"),
        ],
    )
    def test_its_fields_are_answered_with_ours(self, theirs: str, ours: str) -> None:
        with pytest.raises(ConfigError, match=f"'{theirs}' is not a field. Here it is called '{ours}'"):
            TrainerConfig("run", **{theirs: 1})

    def test_a_check_of_ones_own_is_told_with_the_others(self) -> None:
        class Checked(TrainerConfig):
            def problems(self) -> Any:
                yield from super().problems()
                if self.batch_size % 2:
                    yield f"batch_size={self.batch_size} must be even"

        with pytest.raises(ConfigError) as raised:
            Checked("run", batch_size=3, num_epochs=0)
        assert raised.value.problems == ["num_epochs=0 must be at least 1", "batch_size=3 must be even"]


class TestFinetuning:
    def net(self) -> nn.Module:
        net = nn.Sequential()
        net.add_module("body", nn.Linear(4, 4))
        net.add_module("head", nn.Linear(4, 3))
        return net

    def changed(self, toy: Build, **given: Any) -> set[str]:
        data = TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
        trainer = toy(finetune_steps=3, arguments={"model": self.net(), "train_dataset": data}, **given)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.finetune()
        after = trainer.model.state_dict()
        return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}

    def test_frozen_parameters_stay_bit_by_bit(self, toy: Build) -> None:
        assert self.changed(toy) == {"body", "head"}
        assert self.changed(toy, finetune_freeze_param=["body"]) == {"head"}

    def test_a_head_that_is_named_is_made_anew_and_trained_alone(self, toy: Build) -> None:
        assert self.changed(toy, finetune_param=["head"], finetune_reinit=True) == {"head"}

    def test_an_evaluation_after_finetuning_leaves_the_model_as_it_was(self, toy: Build, rows: Any) -> None:
        settings = {"finetune_before_eval": True, "finetune_steps": 2, "finetune_batch_or_epoch": "epoch"}
        plain = toy(out="plain", arguments={"eval_dataset": rows(6)})
        tuned = toy(out="tuned", arguments={"eval_dataset": rows(6)}, **settings)
        before = {name: value.clone() for name, value in tuned.model.state_dict().items()}
        assert tuned.evaluate()["loss"] < plain.evaluate()["loss"]
        assert all(torch.equal(value, before[name]) for name, value in tuned.model.state_dict().items())

    @pytest.mark.parametrize("settings", [{"finetune_steps": 0}, {"finetune_reinit": True}])
    def test_settings_that_cannot_work_are_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            TrainerConfig("run", **settings)

    def test_a_head_that_cannot_be_reset_is_refused(self, toy: Build) -> None:
        model = nn.Sequential(nn.Linear(4, 3))
        model.register_parameter("scale", nn.Parameter(torch.ones(())))
        trainer = toy(finetune_param=["scale"], finetune_reinit=True, arguments={"model": model})
        with pytest.raises(ConfigError, match="cannot be reset"):
            trainer.finetune()


class TestMetrics:
    def test_labels_that_are_unknown_are_left_out_of_their_column(self, toy: Build) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.scale

        unknown = float("nan")
        points = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]])
        labels = torch.tensor([[1.0, 0.0], [unknown, 1.0], [0.0, unknown], [1.0, 1.0]])
        data = [{"x": point, "labels": label} for point, label in zip(points, labels, strict=True)]
        arguments = {"model": Scaled(), "train_dataset": data, "eval_dataset": data}
        trainer = toy(task="text_classification", metrics=["f1"], criterion="MSELoss", arguments=arguments)
        assert trainer.evaluate()["f1"] == pytest.approx((1 + 2 / 3) / 2)

    def test_the_best_record_holds_the_metrics_of_one_evaluation(self, toy: Build, rows: Any, tmp_path: Path) -> None:
        trainer = toy(
            task="text_classification", num_epochs=3, metric_for_best_model="accuracy",
            arguments={"eval_dataset": rows(6)},
        )  # fmt: skip
        trainer.train()
        best = json.loads((tmp_path / "run/best.json").read_text())
        record = json.loads((tmp_path / f"run/evaluations/{best['step']:08d}.json").read_text())
        assert record["metrics"]["accuracy"] == best["value"]
        assert set(record["metrics"]) == {"loss", "accuracy"}

    def test_the_history_has_one_entry_per_evaluation(self, toy: Build, rows: Any) -> None:
        trainer = toy(num_epochs=3, arguments={"eval_dataset": rows(6)})
        trainer.train()
        assert [step for _, step in trainer.storage.history("evaluation.loss").values()] == [5, 10, 15]


def test_what_a_worker_should_know_is_told_in_print(toy: Build) -> None:
    told = toy(local_param=["bias"]).print_trainer_meta_info()
    assert "model: Classifier" in told
    assert "exchanged: layer.weight" in told
    assert "local: layer.bias" in told
    assert "on_update: guard, clip, step, zero_grad" in told
