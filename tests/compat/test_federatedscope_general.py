"""FederatedScope's own routines behind its door: what users override, assign and register is what is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fs_toy import build, cfg, loaders, net, points, reference, weights
from torch import nn
from torch.utils.data import DataLoader

from hezar_train.compat.federatedscope import (
    LIFECYCLE,
    MODE,
    BaseTrainer,
    Context,
    CtxVar,
    GeneralMultiModelTrainer,
    GeneralTorchTrainer,
    Monitor,
    Trainer,
    get_optimizer,
    get_trainer,
    lifecycle,
    register_plugin,
    register_trainer,
    stand_in,
    unknown_keys,
    wrap_fedprox_trainer,
    wrap_regularized_optimizer,
)
from hezar_train.errors import ConfigError, DataError, HookError


class OwnBackward(GeneralTorchTrainer):
    """FederatedScope's documented backward, written out."""

    def _hook_on_batch_backward(self, ctx: Any) -> None:
        ctx.optimizer.zero_grad()
        ctx.loss_task.backward()
        if ctx.grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), ctx.grad_clip)
        ctx.optimizer.step()
        if ctx.scheduler is not None:
            ctx.scheduler.step()


class Sampler(DataLoader[Any]):
    """A loader that is its own dataset and makes each batch itself, as samplers of graphs are."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        super().__init__(self, batch_size=1, collate_fn=lambda batches: batches[0])  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        x, y = points(5 + index, index).tensors
        return x, y


class OwnLoops(GeneralTorchTrainer):
    """FederatedScope's loops, written out."""

    @lifecycle(LIFECYCLE.EPOCH)
    def _run_epoch(self, hooks_set: Any) -> None:
        for epoch in range(self.ctx.get(f"num_{self.ctx.cur_split}_epoch")):
            self.ctx.cur_epoch_i = CtxVar(epoch, "epoch")
            for hook in hooks_set["on_epoch_start"]:
                hook(self.ctx)
            self._run_batch(hooks_set)

    @lifecycle(LIFECYCLE.BATCH)
    def _run_batch(self, hooks_set: Any) -> None:
        for batch in range(self.ctx.get(f"num_{self.ctx.cur_split}_batch")):
            self.ctx.cur_batch_i = CtxVar(batch, LIFECYCLE.BATCH)
            for trigger in ("on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end"):
                for hook in hooks_set[trigger]:
                    hook(self.ctx)
            is_last = self.ctx.cur_epoch_i == self.ctx.num_train_epoch - 1
            if self.ctx.cur_mode == MODE.TRAIN and is_last and batch >= self.ctx.num_train_batch_last_epoch - 1:
                break


def without_a_loss(trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
    """Take out the hooks that make a loss and those that read it."""
    for trigger in ("on_batch_forward", "on_batch_backward", "on_batch_end", "on_fit_end"):
        trainer.reset_hook_in_train(trigger)
    return trainer


class TestTraining:
    @pytest.mark.parametrize("kind", [GeneralTorchTrainer, OwnBackward, OwnLoops])
    @pytest.mark.parametrize("clip", [-1.0, 0.05])
    def test_rounds_give_the_weights_that_federatedscope_gives(
        self, tmp_path: Path, kind: type[GeneralTorchTrainer], clip: float
    ) -> None:
        trainer = build(tmp_path, kind, grad__grad_clip=clip)
        for _ in range(3):
            num_samples, parameters, metrics = trainer.train()
        assert torch.equal(weights(trainer), reference(3, 7, max(clip, 0.0)))
        assert (num_samples, metrics["train_total"]) == (50, 50)
        assert set(metrics) == {"train_loss", "train_avg_loss", "train_total", "train_acc"}
        assert torch.equal(parameters["0.weight"], trainer.model.state_dict()["0.weight"])
        assert trainer.state.global_step == 21

    def test_a_backward_in_the_place_of_the_default_one_is_the_only_update(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        own = OwnBackward._hook_on_batch_backward.__get__(trainer)
        trainer.replace_hook_in_train(own, "on_batch_backward", "_hook_on_batch_backward")
        trainer.train()
        assert torch.equal(weights(trainer), reference(1, 7))

    @pytest.mark.parametrize("kind", [GeneralTorchTrainer, OwnBackward])
    def test_a_schedule_ticks_once_for_each_batch_and_begins_anew_in_each_round(
        self, tmp_path: Path, kind: type[GeneralTorchTrainer]
    ) -> None:
        trainer = build(tmp_path, kind, train__scheduler__type="StepLR", train__scheduler__step_size=3)
        rates: list[float] = []
        trainer.register_hook_in_train(lambda ctx: rates.append(ctx.optimizer.param_groups[0]["lr"]), "on_batch_start")
        trainer.train()
        trainer.train()
        assert rates == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001] * 2)

    def test_accumulated_batches_are_one_update(self, tmp_path: Path) -> None:
        data = {"train": DataLoader(points(32, 1), batch_size=4)}
        trainer = build(
            tmp_path, data=data, dataloader__batch_size=4, grad__grad_accum_count=2, train__local_update_steps=4
        )
        trainer.train()
        assert (trainer.state.global_step, trainer.state.update_step) == (8, 4)

    def test_another_rate_in_the_config_holds_from_the_next_round_on(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        trainer.cfg.train.optimizer.lr = 0.0
        before = trainer.get_model_para()
        trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in trainer.get_model_para().items())

    def test_a_batch_with_an_update_and_without_a_loss_is_refused(self, tmp_path: Path) -> None:
        trainer = without_a_loss(build(tmp_path))
        trainer.register_hook_in_train(lambda ctx: ctx.optimizer.step(), "on_batch_backward")
        with pytest.raises(HookError, match=r"a batch went by without a loss"):
            trainer.train()

    def test_a_pass_without_losses_and_updates_counts_its_steps_and_is_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer, seen = without_a_loss(build(tmp_path)), []
        trainer.register_hook_in_train(lambda ctx: seen.append(len(ctx.data_batch[1])), "on_batch_forward")
        before = weights(trainer)
        trainer.train()
        assert (seen, trainer.state.global_step) == ([8, 8, 8, 8, 8, 2, 8], 7)
        assert torch.equal(weights(trainer), before)
        assert caplog.text.count("went by without a loss (no hook set ctx.loss_batch) and without an update") == 1

    def test_a_round_ends_whatever_hooks_are_taken_out(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        trainer.reset_hook_in_train("on_batch_end")
        trainer.reset_hook_in_train("on_fit_end")
        trainer.train()
        assert trainer.state.global_step == 7
        assert torch.equal(weights(trainer), reference(1, 7))

    def test_a_loop_that_takes_no_batch_is_refused(self, tmp_path: Path) -> None:
        class Idle(GeneralTorchTrainer):
            def _run_epoch(self, hooks_set: Any) -> None:
                self.ctx.num_samples = 0

        trainer = build(tmp_path, Idle)
        trainer.reset_hook_in_train("on_fit_end")
        with pytest.raises(HookError, match="no batch was taken"):
            trainer.train()


class TestLoadersOfHooks:
    """FederatedScope's loops take their batches from whatever loader the context has when an epoch begins."""

    def test_a_loader_that_a_hook_assigns_is_trained_on(self, tmp_path: Path) -> None:
        other = {"train": DataLoader(points(24, 77), batch_size=8)}
        assigned, given = build(tmp_path), build(tmp_path, data={**loaders(), **other})
        assigned.ctx.num_train_data = 24
        assigned.register_hook_in_train(
            lambda ctx: setattr(ctx, "train_loader", other["train"]), "on_fit_start", insert_pos=0
        )
        for trainer in (assigned, given):
            trainer.train()
            trainer.train()
        assert torch.equal(weights(assigned), weights(given))

    def test_a_loader_may_be_assigned_for_one_round_and_the_own_one_for_the_next(self, tmp_path: Path) -> None:
        trainer, seen = build(tmp_path), []
        own, other = trainer.ctx.train_loader, DataLoader(points(24, 77), batch_size=8)
        trainer.register_hook_in_train(lambda ctx: seen.append(ctx.data_batch[0]), "on_batch_end")
        for loader in (other, own, other):
            trainer.ctx.train_loader = loader
            trainer.train()
        of_other, of_own = ([x for x, _ in one] for one in (other, own))
        expected = [*of_other, *of_other, of_other[0], *of_own, of_own[0], *of_other, *of_other, of_other[0]]
        assert all(torch.equal(one, wanted) for one, wanted in zip(seen, expected, strict=True))

    def test_a_loader_assigned_for_an_evaluation_is_evaluated_on(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        own = trainer.evaluate("test")
        trainer.ctx.test_loader = trainer.ctx.val_loader
        trainer.ctx.num_test_data = 10
        changed = trainer.evaluate("test")
        assert changed["test_total"] == 10
        assert changed["test_loss"] == trainer.evaluate("val")["val_loss"] != own["test_loss"]

    def test_data_assigned_where_there_is_no_loader_is_refused(self, tmp_path: Path) -> None:
        arrays = {"train": {"x": torch.randn(16, 4), "y": torch.zeros(16, dtype=torch.long)}}
        trainer = build(tmp_path, data=arrays)
        trainer.ctx.train_data = {"x": torch.randn(16, 4), "y": torch.ones(16, dtype=torch.long)}
        with pytest.raises(DataError, match=r"ctx.train_data was assigned .* ctx.train_loader = DataLoader"):
            trainer.train()

    def test_a_loader_that_makes_its_batches_itself_is_read_for_the_length_that_the_config_counts(
        self, tmp_path: Path
    ) -> None:
        seen: list[torch.Tensor] = []
        trainer = build(tmp_path, data={**loaders(), "train": Sampler(20)})
        trainer.register_hook_in_train(lambda ctx: seen.append(ctx.data_batch[0]), "on_batch_end")
        assert trainer.train()[0] == 5 + 6 + 7 + 5 + 6 + 7 + 5  # an epoch is 3 batches: 20 items, 8 at a time
        expected = [points(5 + index, index).tensors[0] for index in (0, 1, 2, 0, 1, 2, 0)]
        assert all(torch.equal(one, wanted) for one, wanted in zip(seen, expected, strict=True))

    def test_batches_of_such_a_loader_are_not_weighed_in_longer_updates(self, tmp_path: Path) -> None:
        trainer = build(tmp_path, grad__grad_accum_count=2)
        trainer.ctx.train_loader = DataLoader(points(24, 77), batch_size=8)
        with pytest.raises(DataError, match=r"cannot be weighed in updates of 2 batches"):
            trainer.train()


class TestProcessDraws:
    """What a server draws between rounds comes from the process's generators, as in FederatedScope."""

    def test_rounds_leave_the_generators_as_they_were(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        np.random.seed(5)
        torch.manual_seed(5)
        expected = np.random.RandomState(5).permutation(50)
        trainer.train()
        trainer.evaluate("val")
        assert np.random.permutation(50).tolist() == expected.tolist()
        assert torch.equal(torch.randperm(9), torch.randperm(9, generator=torch.Generator().manual_seed(5)))

    def test_a_loader_that_shuffles_with_numpy_goes_on_with_its_draws(self, tmp_path: Path) -> None:
        orders: list[list[int]] = []

        class Shuffled:
            def __iter__(self) -> Iterator[Any]:
                orders.append(np.random.permutation(5).tolist())
                return iter([batches[number] for number in orders[-1]])

        class WithOwnLoader(GeneralTorchTrainer):
            def parse_data(self, data: Any) -> dict[str, Any]:
                return {"train_loader": data, "num_train_data": 40, "train_data": None}

        batches = list(loaders()["train"])[:5]
        trainer = build(tmp_path, WithOwnLoader, data=Shuffled(), train__local_update_steps=10)
        np.random.seed(5)
        for _ in range(2):
            trainer.train()
        draws = np.random.RandomState(5)
        assert orders == [draws.permutation(5).tolist() for _ in range(4)]


class TestContext:
    def test_names_live_as_long_as_the_trainer_unless_they_have_a_life(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        trainer.ctx.mine = 1
        seen: list[list[bool]] = []

        def set_names(ctx: Context) -> None:
            ctx.kept = CtxVar(2)
            ctx.of_batch, ctx.of_routine = CtxVar(3, LIFECYCLE.BATCH), CtxVar(4, LIFECYCLE.ROUTINE)
            ctx.mine += 1

        trainer.register_hook_in_train(set_names, "on_batch_start", insert_pos=0)
        trainer.register_hook_in_train(
            lambda ctx: seen.append([name in ctx for name in ("of_batch", "of_routine")]), "on_epoch_end"
        )
        trainer.train()
        assert seen[0] == [False, True]
        assert (trainer.ctx.mine, trainer.ctx.kept, "of_routine" in trainer.ctx) == (8, 2, False)
        assert {"mine", "kept", "model", "cfg", "train_loader"} <= set(trainer.ctx.keys())
        del trainer.ctx.mine
        assert not hasattr(trainer.ctx, "mine")
        with pytest.raises(AttributeError, match="no 'mine'"):
            del trainer.ctx.mine

    def test_what_a_hook_assigns_is_what_is_trained(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        other = net()
        trainer.register_hook_in_train(lambda ctx: ctx.merge_from_dict({"model": other}), "on_fit_start", insert_pos=0)
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, "grad_clip", 0.05), "on_fit_start")
        trainer.train()
        assert trainer.ctx.model is other
        assert torch.equal(weights(trainer), reference(1, 7, 0.05))
        assert torch.equal(trainer.model[0].weight, net()[0].weight)  # type: ignore[index]

    def test_another_loss_and_another_batch_are_used(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        x, y = next(iter(loaders()["train"]))

        def first_batch(ctx: Context) -> None:
            ctx.data_batch = (x, y)

        def nothing(ctx: Context) -> None:
            ctx.loss_task = ctx.loss_task * 0.0

        trainer.register_hook_in_train(first_batch, "on_batch_start")
        trainer.register_hook_in_train(nothing, "on_batch_forward")
        before = trainer.get_model_para()
        assert trainer.train()[0] == 56
        assert all(torch.equal(value, before[name]) for name, value in trainer.get_model_para().items())

    def test_lengths_that_hooks_or_wraps_set_hold(self, tmp_path: Path) -> None:
        trainer = build(tmp_path, train__batch_or_epoch="epoch", train__local_update_steps=2)
        assert (trainer.ctx.num_train_epoch, trainer.ctx.num_train_batch, trainer.ctx.num_total_train_batch) == (
            2,
            6,
            12,
        )
        trainer.ctx.num_train_epoch += 1
        trainer.train()
        assert trainer.state.global_step == 18

    def test_an_evaluation_in_a_round_leaves_the_round_as_it_is(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        trainer.register_hook_in_train(lambda _: trainer.evaluate("train"), "on_batch_end")
        num_samples, _, metrics = trainer.train()
        assert (num_samples, metrics["train_total"]) == (50, 50)
        assert torch.equal(weights(trainer), reference(1, 7))


class TestHooks:
    def test_the_default_hooks_have_federatedscopes_names(self, tmp_path: Path) -> None:
        hooks = build(tmp_path).hooks_in_train
        assert [hook.__name__ for hook in hooks["on_batch_forward"]] == [
            "_hook_on_batch_forward", "_hook_on_batch_forward_regularizer", "_hook_on_batch_forward_flop_count",
        ]  # fmt: skip
        assert [hook.__name__ for hook in hooks["on_fit_end"]] == ["_hook_on_fit_end"]

    def test_positions_and_base_hooks(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)

        def named(name: str) -> Any:
            def hook(_: Context) -> None: ...

            hook.__name__ = name
            return hook

        base = trainer.hooks_in_train["on_batch_forward"][1]
        trainer.register_hook_in_train(named("first"), "on_batch_forward", insert_pos=0)
        trainer.register_hook_in_train(named("before"), "on_batch_forward", base_hook=base)
        trainer.register_hook_in_train(named("after"), "on_batch_forward", base_hook=base, insert_mode="after")
        trainer.register_hook_in_train(named("last"), "on_batch_forward", insert_pos=-1)
        trainer.hooks_in_train["on_batch_forward"].append(named("appended"))
        found = trainer.hooks_in_train["on_batch_forward"]
        assert [hook.__name__.removeprefix("_hook_on_batch_") for hook in found] == [
            "first", "forward", "before", "forward_regularizer", "after", "forward_flop_count", "last", "appended",
        ]  # fmt: skip
        assert trainer.reset_hook_in_train("on_batch_forward", "before") == 2
        for wrong, words in (
            ({"trigger": "on_batch"}, "is not a trigger"),
            ({"trigger": "on_batch_end", "insert_pos": 9}, "expected 0 to 1"),
            ({"trigger": "on_batch_end", "base_hook": "nobody"}, "no hook 'nobody'"),
            ({"trigger": "on_batch_end", "base_hook": "y", "insert_mode": "in"}, "insert_mode='in'"),
        ):
            with pytest.raises(HookError, match=words):
                trainer.register_hook_in_train(named("x"), **wrong)

    def test_a_mode_of_insertion_without_a_base_hook_is_read_by_nobody(self, tmp_path: Path) -> None:
        """FederatedScope's attacks register with insert_mode=-1, and mean the end."""
        trainer = build(tmp_path)
        trainer.register_hook_in_train(print, "on_fit_start", insert_mode=-1)
        assert trainer.hooks_in_train["on_fit_start"][-1] is print

    def test_subclasses_register_and_replace_default_hooks(self, tmp_path: Path) -> None:
        seen: list[str] = []

        class Own(GeneralTorchTrainer):
            def register_default_hooks_train(self) -> None:
                super().register_default_hooks_train()
                self.register_hook_in_train(lambda _: seen.append("train"), "on_fit_end")

            def register_default_hooks_eval(self) -> None:
                super().register_default_hooks_eval()
                self.register_hook_in_eval(lambda _: seen.append("eval"), "on_fit_end")

            def _hook_on_fit_start_init(self, ctx: Any) -> None:
                super()._hook_on_fit_start_init(ctx)
                seen.append(str(ctx.cur_mode))

        trainer = build(tmp_path, Own)
        trainer.train()
        trainer.evaluate("val")
        assert seen == ["train", "train", "val", "eval"]

    @pytest.mark.parametrize("name", ["_hook_on_batch_forward", "_run_batch", "register_default_hooks_train"])
    def test_a_trainer_of_a_trainer_config_refuses_what_it_would_not_call(self, name: str) -> None:
        kind = type("Own", (Trainer,), {name: lambda *_: None})
        with pytest.raises(ConfigError, match=rf"Own has {name}.*GeneralTorchTrainer"):
            kind(None, nn.Linear(1, 1))


class TestPlugins:
    def test_a_factor_of_0_which_is_the_default_there_is_not_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = wrap_fedprox_trainer(build(tmp_path, regularizer__type="proximal_regularizer", fedprox__mu=0.0))
        trainer.train()
        assert trainer.cfg.regularizer.mu == 0
        assert "adds nothing" not in caplog.text

    def test_fedprox_draws_to_the_weights_that_a_round_began_with(self, tmp_path: Path) -> None:
        trainer = wrap_fedprox_trainer(build(tmp_path, fedprox__mu=0.3))
        trainer.train()
        trainer.train()
        assert torch.equal(weights(trainer), reference(2, 7, mu=0.3))

    def test_a_wrap_function_of_a_user_keeps_names_and_switches_optimizers(self, tmp_path: Path) -> None:
        def wrap(base_trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
            base_trainer.ctx.head = list(base_trainer.ctx.model[3].parameters())
            base_trainer.register_hook_in_train(use_head, "on_fit_start", insert_pos=-1)
            return base_trainer

        def use_head(ctx: Context) -> None:
            ctx.optimizer = get_optimizer(ctx.head, "SGD", 0.1)

        trainer = wrap(build(tmp_path))
        body = trainer.model[0].weight.detach().clone()  # type: ignore[index]
        trainer.train()
        assert torch.equal(trainer.model[0].weight, body)  # type: ignore[index]
        assert not torch.equal(trainer.model[3].weight, net()[3].weight)  # type: ignore[index]

    def test_a_regularised_optimizer_that_is_made_each_round_counts_once(self, tmp_path: Path) -> None:
        def draw(ctx: Context) -> None:
            ctx.optimizer = wrap_regularized_optimizer(ctx.optimizer, 1e6)
            ctx.optimizer.set_compared_para_group([{"params": [p * 0 for p in ctx.model.parameters()]}])

        trainer = build(tmp_path, train__local_update_steps=1, train__optimizer__lr=1e-6)
        trainer.register_hook_in_train(draw, "on_fit_start")
        norms = []
        for _ in range(3):
            trainer.train()
            norms.append(float(trainer.model[0].weight.norm()))  # type: ignore[index]
        assert norms[0] == pytest.approx(0.0, abs=1e-5)
        assert norms[2] == pytest.approx(0.0, abs=1e-5)

    def test_trainers_are_found_by_name_and_plug_ins_by_the_config(self, tmp_path: Path) -> None:
        class Mine(GeneralTorchTrainer): ...

        register_trainer("minetrainer", lambda asked: Mine if asked == "minetrainer" else None)
        made = get_trainer(model=net(), data=loaders(), device="cpu", config=cfg(tmp_path, trainer__type="minetrainer"))
        assert type(made) is Mine
        asked = cfg(tmp_path, federate__method="pfedme")
        with pytest.raises(ConfigError, match=r"asks for 'pfedme'.*register_plugin"):
            get_trainer(net(), loaders(), "cpu", asked)
        register_plugin("pfedme", lambda trainer: trainer.ctx.merge_from_dict({"wrapped": True}))
        assert get_trainer(net(), loaders(), "cpu", asked).ctx.wrapped
        with pytest.raises(ConfigError, match=r"trainer.type='mintrainer' is not registered. Did you mean"):
            get_trainer(net(), loaders(), "cpu", cfg(tmp_path, trainer__type="mintrainer"))


class TestRest:
    def test_evaluations_have_federatedscopes_names(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        found = trainer.evaluate("test")
        assert set(found) == {"test_loss", "test_avg_loss", "test_total", "test_acc"}
        assert found["test_loss"] == pytest.approx(found["test_avg_loss"] * 13)
        assert trainer.evaluate("nothing") == {}
        with pytest.raises(DataError, match="no split 'nothing'"):
            trainer.train("nothing")

    def test_more_splits_than_three(self, tmp_path: Path) -> None:
        class Own(GeneralTorchTrainer):
            def parse_data(self, data: Any) -> dict[str, Any]:
                return {**super().parse_data(data), "server_loader": data["server"], "num_server_data": 16}

        trainer = build(tmp_path, Own, {**loaders(), "server": DataLoader(points(16, 9), batch_size=8)})
        assert trainer.evaluate("server")["server_total"] == 16

    def test_any_iterable_of_batches_is_a_loader(self, tmp_path: Path) -> None:
        class Own(GeneralTorchTrainer):
            def parse_data(self, data: Any) -> dict[str, Any]:
                return {"train_loader": data, "train_data": None, "num_train_data": 42}

        trainer = build(tmp_path, Own, list(loaders()["train"]))
        trainer.train()
        assert torch.equal(weights(trainer), reference(1, 7))

    def test_finetuning_is_as_long_as_its_section_says(self, tmp_path: Path) -> None:
        trainer = build(
            tmp_path, finetune__before_eval=True, finetune__local_update_steps=2, finetune__batch_or_epoch="batch"
        )
        steps: list[int] = []
        trainer.register_hook_in_ft(lambda ctx: steps.append(ctx.cur_batch_i), "on_batch_end")
        trainer.finetune()
        assert (steps, trainer.state.global_step) == ([0, 1], 0)

    def test_the_monitor_counts_operations_only_if_it_is_asked_to(self, tmp_path: Path) -> None:
        trainer = build(tmp_path)
        trainer.train()
        monitor = trainer.ctx.monitor
        assert isinstance(monitor, Monitor)
        assert (monitor.total_flops, monitor.flops_per_sample, monitor.total_model_size) == (0, 0, 83)
        counting = build(tmp_path, eval__count_flops=True)
        counting.train()
        assert counting.ctx.monitor.flops_per_sample > 0

    def test_keys_that_nobody_knows_are_listed_and_those_that_cannot_be_kept_refused(self, tmp_path: Path) -> None:
        asked = cfg(tmp_path, flitplus__tmp=1, mine__key=2, train__clients=3)
        assert unknown_keys(asked) == ["mine", "train.clients"]
        wrong = cfg(tmp_path, backend="tensorflow", train__local_update_steps=0)
        with pytest.raises(ConfigError, match=r"(?s)backend='tensorflow'.*local_update_steps=0"):
            GeneralTorchTrainer(net(), loaders(), "cpu", wrong)
        with pytest.raises(ConfigError, match=r"the loader of 'train' has batch_size=8"):
            build(tmp_path, dataloader__batch_size=4)
        warmed = cfg(tmp_path)
        warmed.hezar_train = {"warmup_steps": 3}
        with pytest.raises(
            ConfigError, match=r"warmup_steps=3 is ours: behind FederatedScope's door a warm-up is a part"
        ):
            GeneralTorchTrainer(net(), loaders(), "cpu", warmed)

    def test_a_base_trainer_is_whatever_has_the_four_methods(self, tmp_path: Path) -> None:
        assert isinstance(build(tmp_path), BaseTrainer)
        with pytest.raises(TypeError, match="abstract"):
            type("Half", (BaseTrainer,), {"train": lambda _: None})(None, None, None)


class TestNamesOfAClass:
    def test_an_accelerator_is_there_if_the_class_has_set_one(self, tmp_path: Path) -> None:
        """Classes ask `hasattr(self, "accelerator")` to tell which loop of theirs to run."""
        assert not hasattr(build(tmp_path), "accelerator")
        mine = object()

        class Own(GeneralTorchTrainer):
            def __init__(self, *given: Any) -> None:
                self.accelerator = mine
                super().__init__(*given)

        trainer = build(tmp_path, Own)
        assert trainer.accelerator is mine
        trainer.train()
        assert torch.equal(weights(trainer), reference(1, 7))


class TestSeveralModels:
    def test_one_after_another_each_model_trains_a_whole_round(self, tmp_path: Path) -> None:
        trainer = GeneralMultiModelTrainer(2, "sequential", net(), loaders(), "cpu", cfg(tmp_path))
        trainer.train()
        assert trainer.state.global_step == 14
        for model in trainer.ctx.models:
            found = torch.cat([value.flatten().double() for value in model.state_dict().values()])
            assert torch.equal(found, reference(1, 7))

    def test_taking_turns_each_model_trains_on_every_batch(self, tmp_path: Path) -> None:
        switches: list[int] = []

        class Own(GeneralMultiModelTrainer):
            def _switch_model_ctx(self, next_model_idx: int | None = None) -> None:
                super()._switch_model_ctx(next_model_idx)
                switches.append(self.ctx.cur_model_idx)

        trainer = Own(2, "parallel", net(), loaders(), "cpu", cfg(tmp_path))
        trainer.train()
        assert trainer.state.global_step == 7
        assert set(switches) == {0, 1}
        for model in trainer.ctx.models:
            found = torch.cat([value.flatten().double() for value in model.state_dict().values()])
            assert torch.equal(found, reference(1, 7))

    def test_it_takes_over_the_hooks_and_names_of_a_trainer(self, tmp_path: Path) -> None:
        base = build(tmp_path, OwnBackward)
        base.ctx.mine = 7
        trainer = GeneralMultiModelTrainer(2, base_trainer=base)
        assert trainer.ctx.mine == 7
        trainer.train()
        assert torch.equal(weights(trainer), reference(1, 7))
        assert torch.equal(weights(base), torch.cat([v.flatten().double() for v in net().state_dict().values()]))

    def test_hooks_of_a_trainer_stay_methods_of_its_class(self, tmp_path: Path) -> None:
        class Base(GeneralTorchTrainer):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self.factor = [2.0]

            def parse_data(self, data: Any) -> Any:
                return super().parse_data({name: data[name] for name in ("train", "test")})

            def _hook_on_batch_forward(self, ctx: Any) -> None:
                super()._hook_on_batch_forward(ctx)
                ctx.loss_batch = ctx.loss_batch * self.factor[0]

        class OwnStart(GeneralMultiModelTrainer):
            def _hook_on_fit_start_init(self, ctx: Any) -> None:
                raise AssertionError("the hooks are the base trainer's")

        base = build(tmp_path, Base)
        base.ctx.criterion = lambda pred, y: torch.nn.functional.cross_entropy(pred, y) / 2
        base.ctx.of_model = list(base.ctx.model.parameters())
        trainer = OwnStart(2, base_trainer=base)
        trainer.train()
        assert torch.equal(weights(trainer), reference(1, 7))
        assert trainer.evaluate("val") == {}
        assert trainer.ctx.of_model[0] is next(trainer.ctx.models[0].parameters())
        assert trainer.factor == [2.0]
        assert trainer.factor is not base.factor

    def test_models_from_a_trainer_see_the_same_batch_in_turns(self, tmp_path: Path) -> None:
        trainer = GeneralMultiModelTrainer(2, "parallel", base_trainer=build(tmp_path))
        trainer.train()
        for model in trainer.ctx.models:
            found = torch.cat([value.flatten().double() for value in model.state_dict().values()])
            assert torch.equal(found, reference(1, 7))

    def test_numbers_that_do_not_fit_are_told(self, tmp_path: Path) -> None:
        class Short(GeneralMultiModelTrainer):
            def init_multiple_models(self) -> None:
                self.ctx.models = [self.ctx.model]

        with pytest.raises(ConfigError, match=r"model_nums=2, but ctx.models has 1"):
            Short(2, "sequential", net(), loaders(), "cpu", cfg(tmp_path))


class TestStandIn:
    @pytest.fixture
    def name(self) -> Iterator[str]:
        yield "federatedscope_for_a_test"
        for module in [one for one in sys.modules if one.startswith("federatedscope_for_a_test")]:
            del sys.modules[module]

    def test_code_that_imports_federatedscope_finds_the_door(self, name: str) -> None:
        stand_in(name)
        found: dict[str, Any] = {}
        code = (
            f"from {name}.core.trainers import GeneralTorchTrainer\nfrom {name}.core.trainers.context import CtxVar\n"
            f"from {name}.register import register_trainer\nfrom {name}.core.trainers.enums import MODE"
        )
        exec(code, found)
        assert found["GeneralTorchTrainer"] is GeneralTorchTrainer
        assert found["CtxVar"] is CtxVar
