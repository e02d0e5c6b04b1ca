"""A user's own code in a step, in the context and with the trainer's attributes: it counts, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from hezar_train import Trainer, TrainerConfig
from hezar_train.errors import ConfigError, DataError, HookError
from hezar_train.loop import Context, Hook, HookSet
from hezar_train.types import Mode

Build = Callable[..., Trainer]


def weights_of(trainer: Trainer) -> list[float]:
    return [value for parameter in trainer.model.parameters() for value in parameter.flatten().tolist()]


def counts_of(trainer: Trainer) -> tuple[int, int, int]:
    return trainer.state.global_step, trainer.state.update_step, trainer.state.samples_seen


def trained(trainer: Trainer) -> Trainer:
    trainer.train()
    return trainer


def step_alone(ctx: Context) -> None:
    """Do what FederatedScope's own hook of that moment does."""
    ctx.optimizer.zero_grad()
    ctx.loss.backward()
    ctx.optimizer.step()


class HezarSteps(Trainer):
    """Hezar's own two methods, as its source has them."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        with self.accelerator.autocast():
            outputs = self.forward(batch)
        loss = self.compute_loss(outputs, **batch)
        self.accelerator.backward(loss)
        outputs["loss"] = loss.detach()
        return outputs

    def optimization_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainBackward(Trainer):
    def training_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.forward(batch)
        loss = self.compute_loss(outputs, batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        return {**outputs, "loss": loss.detach()}


class TestSteps:
    def test_a_hook_that_replaces_backward_and_steps_is_the_update(self, toy: Build) -> None:
        default, own = toy(out="default"), toy()
        own.replace_hook_in_train(step_alone, "on_batch_backward", "backward")
        assert weights_of(trained(own)) == weights_of(trained(default))
        assert counts_of(own) == counts_of(default) == (5, 5, 20)

    def test_the_hooks_of_the_update_still_run(self, toy: Build) -> None:
        seen: list[float | None] = []
        own = toy()
        own.replace_hook_in_train(step_alone, "on_batch_backward", "backward")
        own.register_hook_in_train(lambda ctx: seen.append(ctx.loss_value), "on_update")
        own.train()
        assert len(seen) == 5
        assert None not in seen

    def test_in_the_middle_of_a_window_it_is_refused_before_it_changes_a_weight(self, toy: Build) -> None:
        own = toy(gradient_accumulation_steps=2)
        before = weights_of(own)
        own.replace_hook_in_train(step_alone, "on_batch_backward", "backward")
        with pytest.raises(HookError, match=r"stepped the optimizer on micro-batch 1 of 2.*closes_window"):
            own.train()
        assert weights_of(own) == before

    @pytest.mark.parametrize("accumulation", [1, 2, 3])
    def test_hezars_own_methods_in_a_subclass_train_as_ours(self, accumulation: int, toy: Build) -> None:
        settings = {"gradient_accumulation_steps": accumulation, "num_epochs": 2, "optimizer": "sgd"}
        default, own = toy(out="default", **settings), toy(HezarSteps, **settings)
        assert weights_of(trained(own)) == pytest.approx(weights_of(trained(default)), rel=1e-6)
        assert counts_of(own) == counts_of(default)
        assert own.state.loss_tracker_avg == pytest.approx(default.state.loss_tracker_avg)

    def test_a_plain_backward_of_ones_own_trains_as_ours(self, toy: Build) -> None:
        assert weights_of(trained(toy(PlainBackward))) == weights_of(trained(toy(out="default")))

    def test_a_plain_backward_in_a_window_of_several_is_refused_before_the_update(self, toy: Build) -> None:
        own = toy(PlainBackward, gradient_accumulation_steps=2)
        before = weights_of(own)
        with pytest.raises(DataError, match=r"window of 2 micro-batches.*accelerator\.backward"):
            own.train()
        assert weights_of(own) == before

    def test_gradients_that_a_scaler_scales_are_not_stepped_by_others(self, toy: Build, with_scaler: Any) -> None:
        own = toy(HezarSteps, accelerator=with_scaler())
        with pytest.raises(HookError, match=r"fp16.*super\(\)\.optimization_step\(\)"):
            own.train()

    def test_a_loss_that_is_not_finite_is_told_with_who_applied_it(self, toy: Build) -> None:
        def spoil(ctx: Context) -> None:
            ctx.loss = ctx.loss * float("nan")

        own = toy()
        own.register_hook_in_train(spoil, "on_batch_forward")
        own.replace_hook_in_train(step_alone, "on_batch_backward", "backward")
        with pytest.raises(ArithmeticError, match="your own code has applied it"):
            own.train()

    def test_an_optimizer_that_is_stepped_outside_of_a_run_is_left_alone(self, toy: Build) -> None:
        own = toy()
        own.optimizer.step()
        own.train()
        own.optimizer.step()
        assert counts_of(own) == (5, 5, 20)

    def test_backward_is_accelerates_own_again_after_the_run(self, toy: Build) -> None:
        own = toy(HezarSteps, finetune_before_eval=True)
        own.train()
        assert "backward" not in vars(own.accelerator)


class TestLengthOfAnEpoch:
    """A progress bar over an epoch's batches ends with them."""

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"num_epochs": 2}, [5, 5]),
            ({"num_epochs": 2, "max_steps": 7}, [5, 2]),
            ({"num_epochs": 2, "gradient_accumulation_steps": 2, "max_steps": 7}, [5, 2]),
            ({"local_update_steps": 7}, [5, 2]),
            ({"local_update_steps": 3, "global_batch_size": 4}, [3]),
        ],
    )
    def test_what_is_told_is_what_is_walked(self, settings: dict[str, Any], expected: list[int], toy: Build) -> None:
        trainer = toy(Measured, **settings)
        trainer.train()
        assert trainer.told == trainer.walked == expected  # type: ignore[attr-defined]

    def test_after_a_resume_it_is_that_of_the_rest(self, toy: Build) -> None:
        toy(Measured, max_steps=3).train()
        resumed = toy(Measured, resume_from_checkpoint=True, accept_changes=True)
        resumed.train()
        assert resumed.told == resumed.walked == [2]  # type: ignore[attr-defined]

    def test_hooks_that_shorten_an_epoch_shorten_its_length(self, toy: Build) -> None:
        trainer = toy(Measured, num_epochs=2)
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, "num_train_batch", 3), "on_fit_start")
        trainer.train()
        assert trainer.told == trainer.walked == [3, 3]  # type: ignore[attr-defined]

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_a_schedule_ticks_at_the_end_of_a_shortened_epoch(self, toy: Build, accumulation: int) -> None:
        schedule = {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.5}, "learning_rate": 0.8}
        trainer = toy(num_epochs=3, gradient_accumulation_steps=accumulation, **schedule)
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, "num_train_batch", 3), "on_fit_start")
        rates = []
        trainer.register_hook_in_train(lambda ctx: rates.append(ctx.optimizer.param_groups[0]["lr"]), "on_epoch_start")
        trainer.train()
        assert rates == [0.8, 0.4, 0.2]


class Measured(Trainer):
    """Note how long each epoch says that it is, and how long it was."""

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        with self.parts.loop.epoch_batches(epoch_num) as batches:
            steps = [(len(batches), self.run_step()) for _ in batches]
        self.told = [*getattr(self, "told", []), steps[0][0]]
        self.walked = [*getattr(self, "walked", []), len(steps)]
        assert {told for told, _ in steps} == {steps[0][0]}  # the same while it is walked
        return {}


class TestWrappedSteps:
    def test_a_step_that_is_wrapped_after_the_trainer_was_built_is_called(self, toy: Build) -> None:
        plain, wrapped = toy(out="plain"), toy()
        calls: list[int] = []

        def timed(*given: Any, **named: Any) -> Any:
            calls.append(wrapped.state.global_step)
            return own(*given, **named)

        own = wrapped.optimizer.step
        wrapped.optimizer.step = timed  # type: ignore[method-assign]
        wrapped.train()
        assert calls == [0, 1, 2, 3, 4]
        assert weights_of(wrapped) == weights_of(trained(plain))


class TestParameterGroups:
    def test_a_group_that_is_added_while_it_trains_is_clipped_and_freed_like_the_others(self, toy: Build) -> None:
        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(x))  # type: ignore[no-any-return]

        torch.manual_seed(0)
        model = Late()
        optimizer = torch.optim.SGD(model.first.parameters(), lr=1.0)
        trainer = toy(model=model, optimizer=optimizer, max_grad_norm=1e-3, max_steps=1)
        trainer.register_hook_in_train(
            lambda ctx: optimizer.add_param_group({"params": list(model.second.parameters())}), "on_fit_start"
        )
        before = torch.cat([one.detach().clone().flatten() for one in model.parameters()])
        trainer.train()
        moved = torch.cat([one.detach().flatten() for one in model.parameters()]) - before
        assert moved.norm() == pytest.approx(1e-3, rel=1e-2)
        assert all(one.grad is None for one in model.parameters())

    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize(
        ("moment", "step"), [("on_fit_start", 0), ("on_epoch_start", 5), ("on_update", 4), ("on_gradients", 4)]
    )
    def test_a_parameter_that_is_added_to_a_group_is_trained_like_the_others(
        self, moment: str, step: int, accumulation: int, toy: Build
    ) -> None:
        class Shifted(nn.Linear):
            def __init__(self) -> None:
                super().__init__(4, 3)
                self.shift = nn.Parameter(torch.zeros(3))  # has a gradient also while nothing trains it

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + self.shift

        model = Shifted()
        optimizer = torch.optim.SGD([model.weight, model.bias], lr=1.0)
        trainer = toy(
            model=model, optimizer=optimizer, max_grad_norm=0.1, num_epochs=2, gradient_accumulation_steps=accumulation
        )

        def add(ctx: Context) -> None:
            params = optimizer.param_groups[0]["params"]
            if ctx.state.global_step >= step and len(params) == 2:
                params.append(model.shift)
                seen.clear()

        seen: list[tuple[float, float]] = []

        def look(_: Context) -> None:  # what is added to the bias has the bias's gradient
            assert model.shift.grad is not None
            assert model.bias.grad is not None
            total = torch.stack([one.grad.norm() for one in model.parameters() if one.grad is not None]).norm()
            seen.append((float(total), float((model.shift.grad - model.bias.grad).abs().max())))

        trainer.register_hook_in_train(add, moment)
        trainer.register_hook_in_train(look, "on_update", base_hook="step")
        trainer.train()
        assert len(seen) > 1
        assert all(clipped <= 0.1 + 1e-5 for clipped, _ in seen)
        late = moment == "on_gradients"  # in the window that it came in, it still has what was added up before
        assert all(difference < 1e-6 for _, difference in seen[late:])
        assert model.shift.grad is None


class TestContext:
    def default_and_changed(self, toy: Build, change: Any, moment: str = "on_batch_forward") -> tuple[Any, Any]:
        default, changed = toy(out="default", optimizer="sgd"), toy(optimizer="sgd")
        changed.register_hook_in_train(change, moment)
        return trained(default), trained(changed)

    @pytest.mark.parametrize("name", ["loss_batch", "loss_task", "loss"])
    def test_a_loss_that_is_assigned_is_trained_on(self, name: str, toy: Build) -> None:
        default, changed = self.default_and_changed(toy, lambda ctx: setattr(ctx, name, ctx.loss * 0))
        assert weights_of(changed) == weights_of(toy(out="untrained"))
        assert weights_of(default) != weights_of(changed)
        assert (changed.state.loss_tracker_avg == 0.0) == (name != "loss_task")  # what is logged is the batch's

    def test_a_batch_that_is_assigned_is_what_the_model_gets(self, toy: Build) -> None:
        def empty(ctx: Context) -> None:
            ctx.data_batch = {**ctx.data_batch, "x": torch.zeros_like(ctx.data_batch["x"])}

        _, changed = self.default_and_changed(toy, empty, "on_batch_start")
        assert changed.model.layer.weight.tolist() == toy(out="untrained").model.layer.weight.tolist()  # type: ignore[union-attr, operator]

    @pytest.mark.parametrize(
        ("moment", "name", "value", "instead"),
        [
            ("on_batch_end", "closes_window", False, "The loop sets it"),
            ("on_batch_start", "cur_batch_i", 100, "The loop counts it"),
            ("on_update", "applied", False, "The optimizer has stepped"),
            ("on_batch_end", "applied", False, "The update is counted"),
            ("on_batch_end", "loss_value", 3.0, "The update is counted: assign it at on_update"),
            ("on_batch_backward", "loss", torch.zeros(()), "assign it before, at on_batch_forward"),
            ("on_batch_backward", "loss_batch", torch.zeros(()), "assign it before, at on_batch_forward"),
            ("on_batch_end", "loss_task", torch.zeros(()), "assign it before, at on_batch_forward"),
            ("on_gradients", "grad_norm", 1e9, "after='guard'"),
            ("on_gradients", "loss_value", 5.0, "after='guard'"),
            ("on_epoch_start", "num_train_batch", 2, "assign it at on_fit_start"),
            ("on_fit_start", "num_train_batch_last_epoch", 2, "It follows from ctx.num_total_train_batch"),
            ("on_epoch_start", "mode", "val", "The routine sets it"),
        ],
    )  # fmt: skip
    def test_what_the_loop_would_not_use_any_more_is_refused(
        self, moment: str, name: str, value: Any, instead: str, toy: Build
    ) -> None:
        trainer = toy()
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, name, value), moment)
        with pytest.raises(
            HookError, match=rf"ctx\.{name.replace('_batch', '(_batch)?')}.*would change nothing.*{instead}"
        ):
            trainer.train()

    def test_what_is_known_of_an_update_is_refused_inside_its_window(self, toy: Build) -> None:
        trainer = toy(gradient_accumulation_steps=2)
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, "loss_value", 1.0), "on_batch_backward")
        with pytest.raises(HookError, match=r"ctx\.loss_value .* assign it where ctx\.closes_window"):
            trainer.train()

    def test_a_norm_and_a_loss_that_are_assigned_after_the_guard_are_used(self, toy: Build) -> None:
        def look(ctx: Context) -> None:
            ctx.grad_norm, ctx.loss_value = 1e9, 5.0

        trainer = toy(max_grad_norm=1.0, optimizer="sgd")
        trainer.hooks_in_train.register(look, "on_update", after="guard")
        before = weights_of(trainer)
        trainer.train()
        assert weights_of(trainer) == pytest.approx(before, abs=1e-6)  # clipped as if the norm were that
        assert trainer.state.loss_tracker_avg == 5.0

    def test_a_limit_of_the_gradients_that_is_assigned_is_used(self, toy: Build) -> None:
        def limit(ctx: Context) -> None:
            ctx.grad_clip = 1e-3

        _, changed = self.default_and_changed(toy, limit, "on_fit_start")
        clipped = trained(toy(out="clipped", optimizer="sgd", max_grad_norm=1e-3))
        assert changed.ctx.grad_clip == 1e-3
        assert weights_of(changed) == weights_of(clipped)

    def test_a_forward_of_ones_own_may_set_the_loss_alone(self, toy: Build) -> None:
        def forward(ctx: Context) -> None:
            ctx.y_prob = ctx.model(ctx.data_batch["x"])
            ctx.loss_batch = functional.cross_entropy(ctx.y_prob, ctx.data_batch["labels"])

        own = toy()
        own.replace_hook_in_train(forward, "on_batch_forward", "forward")
        assert weights_of(trained(own)) == weights_of(trained(toy(out="default")))

    @pytest.mark.parametrize(
        "name",
        [
            "model",
            "optimizer",
            "scheduler",
            "criterion",
            "regularizer",
            "num_samples",
            "config",
            "train_loader",
            "data",
        ],
    )
    def test_what_the_loop_would_not_look_at_is_refused_by_name(self, name: str, toy: Build) -> None:
        own = toy()
        own.register_hook_in_train(lambda ctx: setattr(ctx, name, None), "on_batch_start")
        with pytest.raises(HookError, match=rf"ctx\.{name} was assigned, which would change nothing"):
            own.train()


class TestHooks:
    def test_the_hooks_of_a_moment_are_a_list_that_may_be_changed(self, toy: Build) -> None:
        seen: list[str] = []
        own = toy()
        own.hooks_in_train["on_batch_end"].append(lambda ctx: seen.append("appended"))
        own.hooks_in_train["on_batch_end"].insert(0, lambda ctx: seen.append("first"))
        own.train()
        assert seen == ["first", "appended"] * 5
        assert own.hooks_in_train.names("on_batch_end")[-1] == "due"

    def test_all_hooks_of_a_moment_may_be_taken_out_and_the_run_counts_and_ends(self, toy: Build) -> None:
        own = toy(max_steps=7, num_epochs=3)
        for moment in ("on_batch_end", "on_epoch_end", "on_fit_end"):
            assert own.reset_hook_in_train(moment) == -1
        own.train()
        assert counts_of(own)[0] == 7

    @pytest.mark.parametrize("name", ["count", "keep_place", "due"])
    def test_what_a_run_needs_to_end_stays(self, name: str, toy: Build) -> None:
        own = toy()
        hooks = own.hooks_in_train["on_batch_end"]
        with pytest.raises(HookError, match=f"{name}.*is required"):
            own.reset_hook_in_train("on_batch_end", name)
        with pytest.raises(HookError, match=f"{name}.*is required"):
            own.replace_hook_in_train(print, "on_batch_end", name)
        with pytest.raises(HookError, match="is required"):
            hooks.clear()
        assert name in own.hooks_in_train.names("on_batch_end")

    def test_a_hook_set_for_one_call_without_them_is_refused(self, toy: Build) -> None:
        with pytest.raises(HookError, match=r"lack.*count.*hooks_in_train\.copy"):
            toy().train(hooks_set=HookSet())

    def test_another_hook_set_cannot_take_the_place_of_one(self, toy: Build) -> None:
        own = toy()
        with pytest.raises(TypeError):
            own.hooks["train"] = HookSet()  # type: ignore[index]

    def test_an_inner_loop_that_trains_nothing_is_refused_and_does_not_go_on_for_ever(self, toy: Build) -> None:
        class Idle(Trainer):
            def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
                return {"loss": 0.0}

        with pytest.raises(HookError, match="an epoch went by without a step"):
            toy(Idle).train()

    def test_a_stop_that_is_asked_for_before_the_first_step_is_no_empty_data(self, toy: Build) -> None:
        own = toy(num_epochs=2)
        own.register_hook_in_train(
            lambda ctx: own.request_stop("enough") if own.state.epoch == 2 else None, "on_epoch_start"
        )
        own.train()
        assert (own.state.global_step, own.state.stop_reason) == (5, "enough")


class TestMethodsOfDoors:
    @pytest.mark.parametrize(
        ("name", "door"),
        [
            ("_hook_on_batch_forward", "federatedscope"),
            ("_run_epoch", "federatedscope"),
            ("register_default_hooks_train", "federatedscope"),
            ("before_step", "libai"),
            ("_init_optimizer", "lernomatic"),
        ],
    )
    def test_one_that_a_trainer_never_calls_is_told_with_the_door_that_does(
        self, name: str, door: str, toy: Build
    ) -> None:
        kind = type("Own", (Trainer,), {name: lambda self: None})
        with pytest.raises(ConfigError, match=rf"Own has {name}, .*from hezar_train\.compat\.{door} import Trainer"):
            toy(kind)


class TestAttributes:
    @pytest.mark.parametrize(
        ("name", "value", "way"),
        [
            ("num_epochs", 9, r"reconfigure\(config\)"),
            ("learning_rate", 1.0, "build a new Trainer"),
            ("criterion", nn.MSELoss(), "compute_loss"),
            ("model", nn.Linear(4, 3), "build a new Trainer"),
            ("optimizer", None, "build_optimizer"),
            ("train_dataset", [], "reconfigure"),
        ],
    )
    def test_one_without_effect_is_refused(self, name: str, value: Any, way: str, toy: Build) -> None:
        own = toy()
        with pytest.raises(AttributeError, match=rf"trainer\.{name} was assigned, which would change nothing.*{way}"):
            setattr(own, name, value)
        assert own.train().num_samples == 20

    @pytest.mark.parametrize(
        ("name", "value"), [("criterion", nn.MSELoss()), ("optimizer", object()), ("data", [1]), ("state", {})]
    )
    def test_one_that_the_constructor_would_lose_is_refused(self, name: str, value: Any, toy: Build) -> None:
        class Early(Trainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                setattr(self, name, value)
                super().__init__(*args, **kwargs)

        with pytest.raises(AttributeError, match=rf"self\.{name} was set before super\(\).__init__\(\)"):
            toy(Early)

    def test_one_that_is_also_passed_or_built_may_be_set_before_the_constructor(self, tmp_path: Path) -> None:
        class Early(Trainer):
            def __init__(self, config: TrainerConfig, dataset: Any) -> None:
                self.config, self.train_dataset, self.model = config, dataset, nn.Linear(4, 1)
                super().__init__(config, train_dataset=dataset)

            def build_model(self) -> nn.Module:
                return self.model

        rows = [{"input": torch.rand(4), "labels": torch.rand(1)} for _ in range(8)]
        own = Early(TrainerConfig(tmp_path, num_epochs=1, criterion="MSELoss"), rows)
        assert own.train().num_samples == 8

    def test_a_field_of_the_trainers_config_cannot_be_assigned_and_a_copy_can(self, toy: Build) -> None:
        own = toy()
        with pytest.raises(ConfigError, match="num_epochs=9 was assigned to the config of a trainer that is built"):
            own.config.num_epochs = 9
        wanted = copy.deepcopy(own.config).update(num_epochs=2)
        own.reconfigure(wanted)
        wanted.num_epochs = 3  # the user's own is free
        own.train()
        assert own.state.epoch == 2

    def test_another_schedule_follows_its_own_fields_alone_and_leaves_the_users_config_free(self, toy: Build) -> None:
        own = toy()
        wanted = copy.deepcopy(own.config).update(lr_scheduler="step", lr_scheduler_kwargs={"step_size": 2})
        own.reschedule(wanted)
        wanted.num_epochs = 3
        assert own.ctx.config.lr_scheduler == "step"
        with pytest.raises(ConfigError, match="cannot change: num_epochs"):
            own.reschedule(wanted)

    def test_ones_own_attributes_are_free(self, toy: Build) -> None:
        own = toy()
        own.note = "mine"  # type: ignore[attr-defined]
        assert own.note == "mine"  # type: ignore[attr-defined]


class TestBuiltModels:
    def test_the_same_config_makes_the_same_model(self, tmp_path: Path, rows: Any) -> None:
        class Building(Trainer):
            def build_model(self) -> nn.Module:
                return nn.Linear(4, 3)

        def build(seed: int) -> list[float]:
            config = TrainerConfig(tmp_path / "run", seed=seed, criterion="CrossEntropyLoss", save_enabled=False)
            return weights_of(Building(config, train_dataset=rows()))

        assert build(1) == build(1) != build(2)


class TwoNets(Trainer):
    """Trains a second network by an optimizer of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.critic = nn.Linear(4, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.1)

    def training_step(self, batch: Any) -> dict[str, Any]:
        self.critic_optimizer.zero_grad()
        self.critic(batch["x"]).square().mean().backward()
        self.critic_optimizer.step()
        return super().training_step(batch)


class TestOwnOptimizers:
    def test_they_and_what_they_train_are_resumed_bit_by_bit(self, toy: Build) -> None:
        unbroken = trained(toy(TwoNets, out="unbroken", num_epochs=2))
        trained(toy(TwoNets, num_epochs=1))
        resumed = trained(toy(TwoNets, num_epochs=2, resume_from_checkpoint=True))
        assert resumed.critic.state_dict().keys() == unbroken.critic.state_dict().keys()  # type: ignore[attr-defined]
        for name, value in unbroken.critic.state_dict().items():  # type: ignore[attr-defined]
            assert torch.equal(resumed.critic.state_dict()[name], value)  # type: ignore[attr-defined]
        ours, theirs = (one.critic_optimizer.state_dict()["state"] for one in (resumed, unbroken))  # type: ignore[attr-defined]
        assert all(torch.equal(ours[key]["exp_avg_sq"], theirs[key]["exp_avg_sq"]) for key in theirs)

    def test_one_that_a_user_has_registered_is_kept_once(self, toy: Build) -> None:
        own = toy(TwoNets)
        own.register_for_checkpointing("mine", own.critic_optimizer)  # type: ignore[attr-defined]
        own.train()
        names = [hook.name for hook in own.parts.checkpointing.hooks]
        assert sorted(names) == ["checkpointed.attribute.critic", "checkpointed.mine"]

    def test_parameters_that_no_checkpoint_would_hold_are_told(self, toy: Build) -> None:
        own = toy()
        own.adam = torch.optim.Adam([torch.zeros(2, requires_grad=True)])  # type: ignore[attr-defined]
        with pytest.raises(DataError, match=r"adam of the trainer steps parameters that no checkpoint would hold"):
            own.train()


class TestEvaluation:
    @pytest.mark.parametrize(("moment", "name"), [("on_fit_start", "start"), ("on_fit_end", "conclude")])
    def test_without_its_first_or_last_hook_it_is_refused_and_returns_no_other_result(
        self, moment: str, name: str, toy: Build, rows: Any
    ) -> None:
        own = toy(eval_dataset=rows(8))
        own.evaluate()
        own.reset_hook_in_eval(moment, name)
        with pytest.raises(HookError, match="the evaluation has no result"):
            own.evaluate(rows(4))


BUILT: list[Any] = []


def schedule_of_one_run(optimizer: Any) -> Any:
    if BUILT:
        raise ConfigError("no schedule today")
    BUILT.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    return BUILT[0]


def test_a_config_that_cannot_be_scheduled_leaves_the_trainer_as_it_was(toy: Any) -> None:
    BUILT.clear()
    trainer = toy(num_epochs=2, lr_scheduler=f"{__name__}.schedule_of_one_run")
    with pytest.raises(ConfigError, match="no schedule today"):
        trainer.reconfigure(copy.deepcopy(trainer.config).update({"num_epochs": 5}))
    assert (trainer.config.num_epochs, trainer.lr_scheduler) == (2, BUILT[0])
    trainer.train()
    assert trainer.state.epoch == 2


def test_what_takes_a_hooks_place_is_a_function(toy: Any) -> None:
    with pytest.raises(HookError, match="expected a function of the context"):
        toy().hooks[Mode.TRAIN].replace(None, "on_batch_end", "count")


def test_a_slice_of_hooks_stays_before_what_is_due(toy: Any) -> None:
    trainer, order = toy(max_steps=2, log_steps=1), []
    hooks = trainer.hooks_in_train["on_batch_end"]
    hooks[len(hooks) :] = [lambda ctx: order.append(trainer.state.global_step)]
    assert not hooks._entries[-2].is_last
    assert hooks._entries[-1].is_last
    trainer.train()
    assert order == [1, 2]


class Counting(Hook):
    """A hook that keeps a number in every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to take back."""


def test_the_state_of_a_hook_that_is_gone_is_told(toy: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = toy(num_epochs=1)
    first.register_hooks([Counting()])
    first.train()
    toy(num_epochs=2, resume_from_checkpoint=True, accept_changes=True).train()
    assert "holds the state of Counting, which this trainer does not have" in caplog.text


def test_a_hook_may_call_an_attribute_kept(toy: Build) -> None:
    class Keeping(Hook):
        def __init__(self) -> None:
            self.kept, self.number = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 0

        def state_dict(self) -> dict[str, Any]:
            return {"number": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.number = state["number"]

    toy(hooks=[Keeping()]).train()
    hook = Keeping()
    toy(hooks=[hook], num_epochs=2, resume_from_checkpoint=True)
    assert hook.number == 3


class TestHooksWhileTheyRun:
    """What runs is decided when a routine begins; a change that would wait for the next call is refused."""

    CHANGES: ClassVar[dict[str, Callable[[Trainer], object]]] = {
        "register_hooks": lambda trainer: trainer.register_hooks([Watcher()]),
        "register_hook_in_train": lambda trainer: trainer.register_hook_in_train(print, "on_batch_end"),
        "append": lambda trainer: trainer.hooks_in_train["on_batch_end"].append(print),
        "assign": lambda trainer: trainer.hooks_in_train["on_batch_forward"].__setitem__(0, print),
        "replace": lambda trainer: trainer.replace_hook_in_train(print, "on_update", "clip"),
        "remove": lambda trainer: trainer.reset_hook_in_train("on_update", "clip"),
        "clear": lambda trainer: trainer.reset_hook_in_train("on_update"),
    }

    @pytest.mark.parametrize("moment", ["on_fit_start", "on_epoch_start", "on_batch_end", "on_fit_end"])
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_change_is_refused_and_leaves_everything_as_it_was(self, change: str, moment: str, toy: Build) -> None:
        trainer = toy(num_epochs=2)
        trainer.register_hook_in_train(lambda _: self.CHANGES[change](trainer), moment, insert_pos=0)
        before, kept = str(trainer.hooks_in_train), list(trainer.parts.checkpointing.hooks)
        with pytest.raises(HookError, match="while the routine that they belong to runs"):
            trainer.train()
        assert (str(trainer.hooks_in_train), trainer.parts.checkpointing.hooks) == (before, kept)
        self.CHANGES[change](trainer)  # it has ended, however it did

    def test_hooks_of_another_routine_may_be_changed(self, toy: Build, rows: Any) -> None:
        seen: list[int] = []
        trainer = toy(num_epochs=2, eval_dataset=rows(4))

        def add(ctx: Context) -> None:
            if ctx.state.epoch == 2:
                trainer.register_hook_in_eval(lambda ctx: seen.append(ctx.state.global_step), "on_batch_end")

        trainer.register_hook_in_train(add, "on_epoch_start")
        trainer.train()
        assert seen == [10]

    def test_an_object_without_moments_may_be_kept_in_checkpoints_from_now_on(self, toy: Build) -> None:
        trainer, kept = toy(), nn.Linear(1, 1)
        trainer.register_hook_in_train(lambda _: trainer.register_for_checkpointing("mine", kept), "on_fit_start")
        trainer.train()
        assert [one.name for one in trainer.parts.checkpointing.hooks] == ["checkpointed.mine"]


class Watcher(Hook):
    def after_step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"is": "kept"}
