"""How several models learn: each as if it were alone, in turns on the same batch, or one after another."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BOTH, Plain, make_noisy, make_plain, plain_config, plain_pair, same_bits, train_alone
from torch import nn
from workload import Crash, NoisyPoints, crash, rows_of

from hezar_train import Hook, MultiModelTrainer, Trainer
from hezar_train.errors import ConfigError, HookError, NonFiniteError
from hezar_train.loop import Context, CtxVar, Lifecycle, Moment
from hezar_train.types import Mode

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short last windows": {"gradient_accumulation_steps": 3},
    "a schedule that ticks at every second update": {
        "lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": 2, "num_epochs": 1,
    },
    "ticks across short windows": {
        "lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": 4,
        "gradient_accumulation_steps": 2,
    },
    "a schedule over the whole run": {"lr_scheduler": "one_cycle", "lr_scheduling_steps": 1},
    "max_steps": {"max_steps": 7, "gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.05, "optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}},
    "weight decay": {"optimizer": "adamw", "weight_decay": 0.1, "weight_decay_bias": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("interact", BOTH)
def test_each_model_learns_what_it_would_learn_alone(tmp_path: Path, interact: str, run: str) -> None:
    trainer = make_plain(tmp_path / "both", interact, **RUNS[run])
    trainer.train()
    for name, model in plain_pair().items():
        assert not same_bits(trainer.models[name], model)
        assert same_bits(trainer.models[name], train_alone(tmp_path / name, model, **RUNS[run]))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("interact", BOTH)
def test_in_rounds_each_model_goes_on_where_its_own_last_round_ended(
    tmp_path: Path, interact: str, fresh: bool
) -> None:
    changes = {"local_update_steps": 3, "batch_or_epoch": "batch", "fresh_optimizer": fresh, "optimizer": "adam",
               "lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": 2}  # fmt: skip
    trainer = make_plain(tmp_path / "both", interact, **changes)
    samples = [trainer.train().num_samples for _ in range(3)]
    for name, model in plain_pair().items():
        alone = Trainer(plain_config(tmp_path / name, **changes), model, NoisyPoints(20))
        assert [alone.train().num_samples for _ in range(3)] == samples
        assert same_bits(trainer.models[name], model)


def test_the_result_has_the_mean_of_the_samples_and_a_list_of_parameters(tmp_path: Path) -> None:
    for interact in BOTH:
        trainer = make_plain(tmp_path / interact, interact)
        num_samples, parameters, metrics = trainer.train()
        assert num_samples == 40
        assert [sorted(one) for one in parameters] == [sorted(model.state_dict()) for model in trainer.models.values()]
        assert metrics.keys() == {"train.loss"}


@pytest.mark.parametrize("interact", BOTH)
def test_a_hook_of_one_model_fires_in_its_turns_only(tmp_path: Path, interact: str) -> None:
    trainer = make_plain(tmp_path, interact, num_epochs=1)
    seen: list[Any] = []
    for moment in Moment:
        trainer.register_hook_in_train(lambda ctx: seen.append((ctx.cur_model_idx, ctx.model)), moment, model_idx=1)
    trainer.train()
    assert len(seen) == 4 + 5 * 6
    assert {(index, id(model)) for index, model in seen} == {(1, id(trainer.models["wide"]))}


def test_hook_sets_are_the_models_own_and_start_alike(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path)
    trainer.register_hook_in_train(lambda ctx: None, "on_batch_forward", model_idx="wide", base_hook="forward")
    names = [hooks.names("on_batch_forward") for hooks in trainer.hooks_in_train_multiple_models]
    assert names == [["forward"], ["<lambda>", "forward"]]
    assert trainer.hooks_in_train.names("on_batch_forward") == []


class TestTurns:
    def test_both_models_see_the_same_batch_and_each_has_its_own_loss_outputs_and_gradients(
        self, tmp_path: Path
    ) -> None:
        trainer = make_plain(tmp_path, "parallel", num_epochs=1)
        seen: dict[int, list[Any]] = {0: [], 1: []}

        def look(ctx: Context) -> None:
            gradient = next(ctx.model.parameters()).grad.clone()
            loss = nn.functional.cross_entropy(ctx.model(ctx.batch["x"]), ctx.batch["labels"])
            wanted = torch.autograd.grad(loss, next(ctx.model.parameters()))[0]
            seen[ctx.cur_model_idx].append((id(ctx.batch), ctx.loss, loss, ctx.outputs["logits"], gradient, wanted))

        for model in (0, 1):
            trainer.register_hook_in_train(look, "on_batch_backward", model)
        trainer.train()
        for first, second in zip(*seen.values(), strict=True):
            assert first[0] == second[0]
            assert first[3] is not second[3]
            for _, loss, same_loss, _, gradient, same_gradient in (first, second):
                torch.testing.assert_close(loss, same_loss)
                torch.testing.assert_close(gradient, same_gradient)

    def test_what_a_hook_says_of_a_batch_is_its_models_own_and_gone_afterwards(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path, "parallel", num_epochs=1)
        seen: list[Any] = []

        def tell(ctx: Context) -> None:
            assert "note" not in ctx
            ctx.note = CtxVar(ctx.cur_model_idx, Lifecycle.BATCH)

        for model in (0, 1):
            trainer.register_hook_in_train(tell, "on_batch_start", model)
            trainer.register_hook_in_train(lambda ctx: seen.append((ctx.cur_model_idx, ctx.note)), "on_update", model)
        trainer.train()
        assert seen == [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1)]
        assert "note" not in trainer.ctx

    def test_what_shared_hooks_say_at_the_start_of_a_batch_is_seen_by_all(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path, "parallel", num_epochs=1, max_steps=2)
        seen: list[Any] = []

        def tell(ctx: Context) -> None:
            ctx.mask = CtxVar((ctx.cur_batch_i, ctx.cur_model_idx), Lifecycle.BATCH)

        trainer.register_hook_in_train(tell, "on_batch_start", model_idx=None)
        for model in (0, 1):
            trainer.register_hook_in_train(lambda ctx: seen.append((ctx.cur_model_idx, ctx.mask)), "on_update", model)
        trainer.train()
        assert seen == [(0, (0, 0)), (1, (0, 0)), (0, (1, 0)), (1, (1, 0))]

    def test_a_batch_is_counted_once_with_the_sum_of_the_losses(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path, "parallel", gradient_accumulation_steps=3, log_steps=3)
        own: list[float] = []
        sums: list[float] = []
        for model in (0, 1):
            trainer.register_hook_in_train(lambda ctx: own.append(ctx.loss_value), "on_update", model)
        trainer.register_hook_in_train(
            lambda ctx: sums.append(ctx.loss_value) if ctx.closes_window else None, "on_batch_end", model_idx=None
        )
        trainer.train()
        assert sums == [first + second for first, second in zip(own[::2], own[1::2], strict=True)]
        assert (trainer.state.global_step, trainer.state.update_step, trainer.state.samples_seen) == (10, 4, 40)
        rows = [row for row in rows_of(tmp_path) if "train.recent_loss" in row]
        assert [(row["train.small.loss"], row["train.wide.loss"]) for row in rows] == list(
            zip(own[::2], own[1::2], strict=True)
        )

    def test_the_loss_of_a_window_is_its_models_own(self, tmp_path: Path) -> None:
        changes = {"gradient_accumulation_steps": 3, "log_steps": 3}
        make_plain(tmp_path / "both", "parallel", **changes).train()
        for name, model in plain_pair().items():
            train_alone(tmp_path / name, model, **changes)
            together = [row[f"train.{name}.loss"] for row in rows_of(tmp_path / "both")]
            assert together == [row["train.recent_loss"] for row in rows_of(tmp_path / name)]

    @pytest.mark.parametrize("moment", ["on_batch_end", "on_epoch_end"])
    def test_what_is_logged_does_not_depend_on_who_has_hooks(self, tmp_path: Path, moment: str) -> None:
        trainer = make_plain(tmp_path / "one", "parallel")
        trainer.register_hook_in_train(lambda ctx: None, moment, model_idx=0)
        trainer.train()
        make_plain(tmp_path / "two", "parallel").train()
        assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two")

    def test_an_evaluation_in_the_middle_of_a_turn_leaves_everything_as_it_was(self, tmp_path: Path) -> None:
        class Meddling(MultiModelTrainer):
            def evaluation_step(self, batch: Any) -> dict[str, Any]:
                self._switch_model_ctx()
                return super().evaluation_step(batch)

        def evaluate(ctx: Context) -> None:
            before = (ctx.cur_model_idx, ctx.loss, ctx.outputs, ctx.model.training)
            trainer.evaluate()
            assert (ctx.cur_model_idx, ctx.loss, ctx.outputs, ctx.model.training) == before

        trainer = make_plain(tmp_path / "one", "parallel", Meddling, eval_dataset=NoisyPoints(6))
        for model in (0, 1):
            trainer.register_hook_in_train(evaluate, "on_batch_forward", model)
        trainer.train()
        undisturbed = make_plain(tmp_path / "two", "parallel", eval_dataset=NoisyPoints(6))
        undisturbed.train()
        assert all(same_bits(model, undisturbed.models[name]) for name, model in trainer.models.items())

    def test_the_turn_goes_round_and_the_context_follows(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path, "parallel")
        for index in (1, 0, 1, 0):
            trainer._switch_model_ctx()
            assert trainer.ctx.cur_model_idx == index
            assert trainer.ctx.model is trainer.ctx.models[index] is list(trainer.models.values())[index]
            assert trainer.ctx.optimizer is trainer.ctx.optimizers[index]
        trainer._switch_model_ctx(1)
        assert trainer.current == "wide"
        with pytest.raises(HookError, match="there is no model 2"):
            trainer._switch_model_ctx(2)

    @pytest.mark.parametrize("interact", BOTH)
    def test_after_a_run_good_or_bad_the_first_model_has_its_turn(self, tmp_path: Path, interact: str) -> None:
        trainer = make_plain(tmp_path, interact)
        trainer.train()
        assert trainer.ctx.cur_model_idx == 0
        failing = make_plain(tmp_path, interact)

        def fail(ctx: Context) -> None:
            raise Crash

        failing.register_hook_in_train(fail, "on_update", model_idx=1)
        crash(failing)
        assert failing.ctx.cur_model_idx == 0
        assert "loss" not in failing.ctx


class TestInteraction:
    def test_after_each_turn_of_each_moment_in_parallel(self, tmp_path: Path) -> None:
        calls: list[tuple[str, int]] = []

        class Told(MultiModelTrainer):
            def interact(self, ctx: Context) -> None:
                calls.append((str(ctx.moment), ctx.cur_model_idx))

        make_plain(tmp_path, "parallel", Told, max_steps=1).train()
        assert calls == [
            ("on_fit_start", 0), ("on_fit_start", 1), ("on_epoch_start", 0), ("on_epoch_start", 1),
            ("on_batch_start", 0), ("on_batch_start", 1), ("on_batch_forward", 0), ("on_batch_forward", 1),
            ("on_batch_backward", 0), ("on_batch_backward", 1), ("on_gradients", 0), ("on_gradients", 1),
            ("on_update", 0), ("on_update", 1),
            ("on_batch_end", 0), ("on_batch_end", 1), ("on_epoch_end", 0), ("on_epoch_end", 1),
            ("on_fit_end", 0), ("on_fit_end", 1),
        ]  # fmt: skip

    def test_at_the_end_of_each_routine_one_after_another(self, tmp_path: Path) -> None:
        calls: list[Any] = []

        class Told(MultiModelTrainer):
            def interact(self, ctx: Context) -> None:
                calls.append((str(ctx.moment), ctx.cur_model_idx, self.state.global_step))
                self.models["wide"].load_state_dict(self.models["wide"].state_dict())

        make_plain(tmp_path, "sequential", Told).train()
        assert calls == [("on_fit_end", 0, 10), ("on_fit_end", 1, 20)]

    def test_what_one_model_leaves_the_next_one_finds(self, tmp_path: Path) -> None:
        class Handing(MultiModelTrainer):
            def interact(self, ctx: Context) -> None:
                self.models["second"].load_state_dict(self.models["first"].state_dict())

        models = {"first": Plain(1), "second": Plain(2)}
        make_plain(tmp_path / "both", "sequential", Handing, models, num_epochs=1).train()
        once = train_alone(tmp_path / "once", Plain(1), num_epochs=1)
        assert same_bits(models["first"], once)
        assert same_bits(models["second"], once)  # at the end of its own routine it was handed over again

    @pytest.mark.parametrize("interact", BOTH)
    def test_not_after_a_failure(self, tmp_path: Path, interact: str) -> None:
        calls: list[str] = []

        class Told(MultiModelTrainer):
            def interact(self, ctx: Context) -> None:
                calls.append(str(ctx.moment))

        def fail(ctx: Context) -> None:
            raise Crash

        trainer = make_plain(tmp_path, interact, Told)
        trainer.register_hook_in_train(fail, "on_batch_end")
        crash(trainer)
        assert "on_fit_end" not in calls


class Adversaries(MultiModelTrainer):
    """A step of one's own, in which one model's loss depends on the other model."""

    def training_step(self, batch: Any) -> torch.Tensor:
        first = nn.functional.cross_entropy(self.models["small"](batch["x"]), batch["labels"])
        self.learn("small", first)
        mixed = self.models["small"](batch["x"]) + self.models["wide"](batch["x"])
        second = nn.functional.cross_entropy(mixed, batch["labels"])
        before = {name: value.clone() for name, value in self.models["small"].state_dict().items()}
        self.learn("wide", second)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in self.models["small"].state_dict().items())
        return first.detach() + second.detach()


class TestAStepOfOnesOwn:
    def test_no_gradient_reaches_another_model(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path / "both", "parallel", Adversaries, log_steps=1)
        trainer.train()
        assert same_bits(trainer.models["small"], train_alone(tmp_path / "small", plain_pair()["small"]))
        assert not same_bits(trainer.models["wide"], plain_pair()["wide"])
        row = rows_of(tmp_path / "both")[-1]
        assert row["train.recent_loss"] == pytest.approx(row["train.small.loss"] + row["train.wide.loss"])

    @pytest.mark.parametrize("model", [0, 1])
    @pytest.mark.parametrize("moment", ["on_batch_start", "on_batch_end"])
    def test_hooks_of_one_model_do_not_disturb_it(self, tmp_path: Path, model: int, moment: str) -> None:
        trainer = make_plain(tmp_path / "one", "parallel", Adversaries, gradient_accumulation_steps=2)
        trainer.register_hook_in_train(lambda ctx: None, moment, model)
        trainer.train()
        plain = make_plain(tmp_path / "two", "parallel", Adversaries, gradient_accumulation_steps=2)
        plain.train()
        assert trainer.state.loss_tracker_avg == plain.state.loss_tracker_avg
        assert all(same_bits(one, plain.models[name]) for name, one in trainer.models.items())

    @pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
    def test_a_loss_that_is_not_finite_raises_before_the_step(self, tmp_path: Path, spoiled: float) -> None:
        class Spoiled(MultiModelTrainer):
            def training_step(self, batch: Any) -> torch.Tensor:
                loss = nn.functional.cross_entropy(self.models["small"](batch["x"]), batch["labels"]) + spoiled
                self.learn("small", loss)
                return loss.detach()

        trainer = make_plain(tmp_path, "parallel", Spoiled)
        with pytest.raises(NonFiniteError, match=r"of 'small' in the update at step 1 .* it was not applied") as raised:
            trainer.train()
        assert len(raised.value.samples) == 4
        assert same_bits(trainer.models["small"], plain_pair()["small"])
        assert all(parameter.grad is None for parameter in trainer.model.parameters())

    def test_a_gradient_that_is_not_finite_raises_before_the_step(self, tmp_path: Path) -> None:
        class Spoiled(MultiModelTrainer):
            def training_step(self, batch: Any) -> torch.Tensor:
                loss = torch.sqrt(self.models["small"](batch["x"]).sum() * 0.0)  # 0, with a slope without end
                self.learn("small", loss)
                return loss.detach()

        trainer = make_plain(tmp_path, "parallel", Spoiled)
        with pytest.raises(NonFiniteError, match=r"gradient norm nan \(loss 0\.0\) of 'small'"):
            trainer.train()
        assert same_bits(trainer.models["small"], plain_pair()["small"])

    def test_one_after_another_only_the_model_that_has_its_turn_may_learn(self, tmp_path: Path) -> None:
        with pytest.raises(HookError, match=r"learn\('wide', ...\) while 'small' has its turn.*interact='parallel'"):
            make_plain(tmp_path, "sequential", Adversaries).train()

    def test_a_model_that_is_not_there_cannot_learn(self, tmp_path: Path) -> None:
        with pytest.raises(HookError, match=r"there is no model 'wid'.*Did you mean 'wide'"):
            make_plain(tmp_path, "parallel").learn("wid", torch.zeros(()))

    @pytest.mark.parametrize("interact", BOTH)
    def test_an_override_that_calls_ours_changes_nothing(self, tmp_path: Path, interact: str) -> None:
        class Calling(MultiModelTrainer):
            def training_step(self, batch: Any) -> dict[str, Any]:
                return super().training_step(batch)

        trainer = make_plain(tmp_path / "one", interact, Calling, gradient_accumulation_steps=2)
        trainer.train()
        plain = make_plain(tmp_path / "two", interact, gradient_accumulation_steps=2)
        plain.train()
        assert all(same_bits(one, plain.models[name]) for name, one in trainer.models.items())
        assert not same_bits(trainer.models["wide"], plain_pair()["wide"])

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_step_outside_of_training_is_one_models(self, tmp_path: Path, index: int) -> None:
        trainer = make_plain(tmp_path, "parallel")
        trainer._switch_model_ctx(index)
        batch = {"x": torch.ones(2, 6), "labels": torch.zeros(2, dtype=torch.long)}
        assert trainer.training_step(batch)["logits"].shape == (2, 3)
        trainer.optimization_step()
        changed = [not same_bits(one, plain_pair()[name]) for name, one in trainer.models.items()]
        assert changed == [index == 0, index == 1]


class TestEvaluation:
    def loss_of(self, model: nn.Module) -> float:
        trainer = Trainer(plain_config("unused"), model, NoisyPoints(20), NoisyPoints(6))
        return trainer.evaluate()["loss"]

    @pytest.mark.parametrize("interact", BOTH)
    def test_evaluation_and_prediction_are_of_the_model_named(self, tmp_path: Path, interact: str) -> None:
        trainer = make_plain(tmp_path, interact, eval_model="wide", eval_dataset=NoisyPoints(6))
        trainer.train()
        assert trainer.evaluate()["loss"] == self.loss_of(trainer.models["wide"])
        assert (
            trainer.predict()
            == Trainer(plain_config("unused"), trainer.models["wide"], NoisyPoints(20), NoisyPoints(6)).predict()
        )

    def test_one_after_another_the_model_that_learns_is_evaluated(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path / "both", "sequential", eval_dataset=NoisyPoints(6), num_epochs=1)
        trainer.train()
        records = [json.loads((tmp_path / f"both/evaluations/{step:08d}.json").read_text()) for step in (5, 10)]
        losses = [self.loss_of(trainer.models[name]) for name in ("small", "wide")]
        assert [one["metrics"]["loss"] for one in records] == losses
        assert trainer.evaluate()["loss"] == losses[0]

    def test_patience_and_the_best_result_begin_anew_with_each_model(self, tmp_path: Path) -> None:
        class Judged(MultiModelTrainer):
            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                super().evaluate(*args, **kwargs)
                step = self.state.global_step  # the second model is worse throughout, and gets better
                return {"loss": 1.0 - step / 100 if self.current == "small" else 9.0 - step / 100, "accuracy": 0.0}

        changes = {"early_stopping_patience": 1, "num_epochs": 4}
        trainer = make_plain(tmp_path, "sequential", Judged, eval_dataset=NoisyPoints(6), **changes)
        trainer.train()
        assert (trainer.state.global_step, trainer.state.stop_reason) == (40, None)
        assert json.loads((tmp_path / "best.json").read_text())["step"] == 40

    def test_finetuning_changes_the_model_named_alone(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path, "parallel", eval_model="wide", finetune_steps=2)
        trainer.finetune()
        assert same_bits(trainer.models["small"], plain_pair()["small"])
        assert not same_bits(trainer.models["wide"], plain_pair()["wide"])


class TestStopping:
    class Stop(Hook):
        def after_step(self) -> None:
            if self.trainer.state.global_step == 3:
                self.trainer.request_stop("enough")

    @pytest.mark.parametrize("interact", BOTH)
    def test_a_stop_ends_the_whole_run_for_good(self, tmp_path: Path, interact: str) -> None:
        changes: dict[str, Any] = {"resume_from_checkpoint": True}
        trainer = make_plain(tmp_path, interact, hooks=[self.Stop()], **changes)
        trainer.train()
        assert trainer.state.global_step == 3
        again = make_plain(tmp_path, interact, **changes)
        assert again.train().num_samples == 0
        assert (again.state.global_step, again.state.stop_reason) == (3, "enough")

    def test_hooks_may_shorten_one_models_routine(self, tmp_path: Path) -> None:
        trainer = make_plain(tmp_path / "both", "sequential")

        def shorten(ctx: Context) -> None:
            ctx.num_train_epoch = 1

        trainer.register_hook_in_train(shorten, "on_fit_start", model_idx=0)
        trainer.train()
        assert trainer.state.global_step == 15
        assert same_bits(trainer.models["small"], train_alone(tmp_path / "a", plain_pair()["small"], num_epochs=1))
        assert same_bits(trainer.models["wide"], train_alone(tmp_path / "b", plain_pair()["wide"], num_epochs=2))


@pytest.mark.parametrize("interact", BOTH)
def test_a_second_run_is_the_first_run(tmp_path: Path, interact: str) -> None:
    one, other = (make_noisy(tmp_path / name, interact) for name in ("one", "other"))
    one.train()
    other.train()
    assert all(same_bits(model, other.models[name]) for name, model in one.models.items())


@pytest.mark.parametrize("interact", BOTH)
def test_what_is_logged_is_of_the_model_that_learns(tmp_path: Path, interact: str) -> None:
    changes = {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.5}, "log_steps": 5}
    make_plain(tmp_path, interact, **changes).train()
    rows = rows_of(tmp_path)
    if interact == "sequential":
        assert [row["train.learning_rate"] for row in rows] == [0.05, 0.025, 0.05, 0.025]
        assert [[name for name in row if name.endswith(("small.loss", "wide.loss"))] for row in rows] == [
            ["train.small.loss"], ["train.small.loss"], ["train.wide.loss"], ["train.wide.loss"],
        ]  # fmt: skip
        assert rows[2]["train.loss"] == rows[2]["train.recent_loss"]  # the second model's mean begins anew
    else:
        assert [row["train.learning_rate"] for row in rows] == [0.05, 0.025]
        assert all(row.keys() >= {"train.small.loss", "train.wide.loss"} for row in rows)


def test_a_trainer_that_nobody_holds_is_gone(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path)
    trainer.train()
    seen = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert seen() is None


def test_hook_objects_watch_all_models(tmp_path: Path) -> None:
    class Watching(Hook):
        modes = frozenset({Mode.TRAIN})
        num_updates = 0

        def on_update(self, ctx: Context) -> None:
            self.num_updates += 1

    for interact, expected in (("sequential", 20), ("parallel", 10)):
        watching = Watching()
        make_plain(tmp_path / interact, interact, hooks=[watching]).train()
        assert watching.num_updates == expected


def test_a_sweep_over_rates_is_refused_for_there_is_no_one_rate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are several: small, wide"):
        make_plain(tmp_path).find_lr()


def test_a_failure_between_the_steps_of_two_models_is_not_trained_over(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path, "parallel")
    before = trainer.models["small"].layers[0].weight.clone()

    def fail(_: Context) -> None:
        raise OSError("the disk is gone")

    trainer.register_hook_in_train(fail, "on_update", "wide", insert_pos=0)  # the first model has stepped by then
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    assert not torch.equal(trainer.models["small"].layers[0].weight, before)
    with pytest.raises(HookError, match="would train on the same samples twice"):
        trainer.train()
