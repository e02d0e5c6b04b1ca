"""The methods that a user may override, each honoured; and the models that train without a word of protocol."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hezar_train import Hook, Moment, Trainer, TrainerConfig
from hezar_train.errors import ConfigError, DataError, HookError
from hezar_train.types import Mode

Build = Callable[..., Trainer]


def weights_of(trainer: Trainer) -> list[float]:
    return [value for parameter in trainer.model.parameters() for value in parameter.flatten().tolist()]


class TestLoaders:
    def test_an_overridden_train_loader_is_used_and_planned_with(self, toy: Build, saved_steps: Any) -> None:
        class Halved(Trainer):
            def create_train_dataloader(self, dataset: Any) -> DataLoader[Any]:
                return DataLoader(dataset, batch_size=10)

        seen: list[list[int]] = []
        trainer = toy(Halved, lr_scheduler="one_cycle", lr_scheduling_steps=1, num_epochs=2)
        trainer.hooks[Mode.TRAIN].register(lambda ctx: seen.append(ctx.batch["labels"].tolist()), "on_batch_forward")
        trainer.train()
        assert trainer.plan.total_steps == 4
        assert trainer.lr_scheduler.total_steps == 4  # type: ignore[union-attr]
        assert seen[0] == [row["labels"] for row in trainer.train_dataset[:10]]
        assert saved_steps() == [2, 4]

    def test_a_run_with_an_overridden_train_loader_can_be_resumed(self, toy: Build) -> None:
        class Halved(Trainer):
            def create_train_dataloader(self, dataset: Any) -> DataLoader[Any]:
                return DataLoader(dataset, batch_size=10, shuffle=True)

        toy(Halved, num_epochs=1).train()
        again = toy(Halved, num_epochs=2, resume_from_checkpoint=True)
        assert again.state.global_step == 2
        assert again.train().num_samples == 20

    def test_an_overridden_eval_loader_is_used(self, toy: Build, rows: Any) -> None:
        class Cut(Trainer):
            def create_eval_dataloader(self, dataset: Any) -> DataLoader[Any]:
                return DataLoader(dataset[:6], batch_size=5)

        sizes: list[int] = []
        trainer = toy(Cut, eval_dataset=rows())
        trainer.hooks[Mode.VAL].register(lambda ctx: sizes.append(len(ctx.batch["x"])), "on_batch_end")
        trainer.evaluate()
        assert sizes == [5, 1]


class TestPrepareInputBatch:
    def test_it_sees_every_training_and_evaluation_batch(self, toy: Build, rows: Any) -> None:
        seen: list[tuple[str, int]] = []

        class Watching(Trainer):
            def prepare_input_batch(self, batch: Any) -> Any:
                seen.append((str(self.ctx.mode), len(batch["x"])))
                return batch

        toy(Watching, eval_dataset=rows(6)).train()
        assert seen == [("train", 4)] * 5 + [("val", 4), ("val", 2)]

    def test_what_it_returns_is_what_the_model_gets(self, toy: Build) -> None:
        class Zeroed(Trainer):
            def prepare_input_batch(self, batch: Any) -> Any:
                return {**batch, "x": torch.zeros_like(batch["x"])}

        trainer = toy(Zeroed, optimizer="sgd")
        before = trainer.model.layer.weight.clone()  # type: ignore[union-attr, operator]
        trainer.train()
        assert torch.equal(trainer.model.layer.weight, before)  # type: ignore[union-attr, arg-type]


class TestForward:
    def test_keys_that_the_model_does_not_take_are_dropped(self, toy: Build, rows: Any) -> None:
        extra = [{**row, "id": number, "text": "خط"} for number, row in enumerate(rows())]
        assert toy(train_dataset=extra).train().num_samples == 20

    def test_a_model_with_keyword_arguments_gets_every_key(self, toy: Build, rows: Any) -> None:
        seen: set[str] = set()

        class Greedy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 3)

            def forward(self, **batch: Any) -> dict[str, Any]:
                seen.update(batch)
                return {"logits": self.layer(batch["x"])}

        extra = [{**row, "id": number} for number, row in enumerate(rows())]
        toy(model=Greedy(), train_dataset=extra, max_steps=1).train()
        assert seen == {"x", "labels", "id"}

    def test_an_override_is_used_in_training_and_evaluation(self, toy: Build, rows: Any) -> None:
        modes: list[str] = []

        class Own(Trainer):
            def forward(self, batch: Any) -> dict[str, Any]:
                modes.append(str(self.ctx.mode))
                return {"logits": self.model(batch["x"])}

        toy(Own, eval_dataset=rows(3)).train()
        assert modes == ["train"] * 5 + ["val"]

    def test_an_override_may_return_a_bare_tensor(self, toy: Build, rows: Any) -> None:
        class Own(Trainer):
            def forward(self, batch: Any) -> Any:
                return self.model(batch["x"])

        one, other = toy(Own, eval_dataset=rows(3)), toy(eval_dataset=rows(3), out="default")
        assert one.train() == other.train()

    def test_what_the_model_returned_is_not_changed(self, toy: Build) -> None:
        kept: list[dict[str, Any]] = []

        class Keeping(nn.Linear):
            def forward(self, x: torch.Tensor) -> Any:
                kept.append({"logits": super().forward(x)})
                return kept[-1]

        trainer = toy(model=Keeping(4, 3), data_collator=None)
        trainer.train()
        trainer.evaluate(trainer.train_dataset)
        assert len(kept) == 10
        assert all(list(outputs) == ["logits"] for outputs in kept)

    def test_tuple_outputs_are_refused(self, toy: Build) -> None:
        class Pair(nn.Linear):
            def forward(self, x: torch.Tensor) -> Any:
                return super().forward(x), None

        with pytest.raises(DataError, match=r"the model returned a tuple of 2 \(.*; None\); expected a tensor"):
            toy(model=Pair(4, 3)).train()

    def test_a_missing_argument_is_told_with_the_keys_that_are_there(self, toy: Build) -> None:
        class Needy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 3)

            def forward(self, x: torch.Tensor, token_ids: torch.Tensor, mask: Any = None) -> Any:
                return self.layer(x)

        with pytest.raises(DataError, match=r"forward\(\) needs token_ids, but the batch has only: labels, x"):
            toy(model=Needy()).train()

    def test_a_batch_of_another_kind_is_refused(self, toy: Build) -> None:
        with pytest.raises(DataError, match="the batch is a set; expected a mapping"):
            toy(data_collator=lambda samples: {1, 2}, loss_weight="samples").train()

    def test_a_tensor_goes_to_the_model_as_it_is(self, toy: Build) -> None:
        class Norm(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).square().mean()

        assert toy(model=Norm(4, 3), train_dataset=torch.randn(20, 4), criterion=None).train().num_samples == 20

    def test_a_tuple_of_inputs_and_labels_trains(self, toy: Build, classifier: Any) -> None:
        data = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
        assert toy(train_dataset=data, eval_dataset=data).train().metrics.keys() == {"train.loss", "evaluation.loss"}


class TestLoss:
    """The model's own `compute_loss`, else the criterion, else what the model returned."""

    class Full(nn.Module):
        """Has all three; each gives another value."""

        def __init__(self, own: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            if own:
                self.compute_loss = self._loss

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"logits": logits, "loss": logits.sum() * 0 + 3.0}

        def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return logits.sum() * 0 + 1.0 + 0 * labels.sum()

    def loss(self, trainer: Trainer) -> float:
        return trainer.train().metrics["train.loss"]

    def test_the_models_own_comes_first(self, toy: Build) -> None:
        assert self.loss(toy(model=self.Full(own=True), criterion=None)) == 1.0

    def test_a_criterion_beside_it_is_refused_because_nobody_would_call_it(self, toy: Build) -> None:
        with pytest.raises(
            ConfigError, match=r"the model has a compute_loss\(\) of its own.*never be called. Take `cr"
        ):
            toy(model=self.Full(own=True))

    def test_a_run_that_began_with_both_goes_on(self, toy: Build, caplog: pytest.LogCaptureFixture) -> None:
        class Both(Trainer):  # as an earlier version let it in
            def compute_loss(self, *given: Any, **more: Any) -> torch.Tensor:
                return super().compute_loss(*given, **more)

        toy(Both, model=self.Full(own=True)).train()
        resumed = toy(model=self.Full(own=True), num_epochs=2, resume_from_checkpoint=True)
        assert "the criterion would never be called" in caplog.text
        assert self.loss(resumed) == 1.0

    @pytest.mark.parametrize("name", ["model_outputs", "self"])
    def test_a_key_that_is_an_argument_of_compute_loss_is_refused(self, name: str, toy: Build, rows: Any) -> None:
        data = [{**row, name: 1.0} for row in rows()]
        with pytest.raises(
            DataError, match=f"the key {name}, which is the name of an argument of.*another name in the da"
        ):
            toy(train_dataset=data).train()

    def test_what_an_own_forward_returned_is_left_as_it_is(self, toy: Build) -> None:
        kept: dict[str, Any] = {}

        class Keeping(Trainer):
            def forward(self, batch: Any) -> dict[str, Any]:
                kept["logits"] = self.model(batch["x"])
                return kept

        trainer, seen = toy(Keeping), []
        trainer.register_hook_in_train(lambda ctx: seen.append(sorted(ctx.outputs)), "on_batch_end")
        trainer.train()
        assert sorted(kept) == ["logits"]
        assert seen == [["logits", "loss"]] * 5

    def test_then_the_criterion(self, toy: Build) -> None:
        model = self.Full(own=False)
        nn.init.zeros_(model.layer.weight)
        nn.init.zeros_(model.layer.bias)
        assert self.loss(toy(model=model, max_steps=1)) == pytest.approx(torch.tensor(3.0).log().item())

    def test_then_the_loss_that_the_model_returned(self, toy: Build) -> None:
        assert self.loss(toy(model=self.Full(own=False), criterion=None)) == 3.0

    def test_an_override_comes_before_all_and_sees_the_rest_of_the_batch(self, toy: Build, rows: Any) -> None:
        seen: list[set[str]] = []

        class Own(Trainer):
            def compute_loss(self, model_outputs: Any, labels: Any, **kwargs: Any) -> torch.Tensor:
                seen.append(set(kwargs))
                return model_outputs["logits"].sum() * 0 + 5.0

        extra = [{**row, "weight": 0.5} for row in rows()]
        assert self.loss(toy(Own, model=self.Full(own=True), train_dataset=extra, max_steps=1)) == 5.0
        assert seen == [{"x", "weight"}]

    def test_compute_loss_of_the_model_gets_what_it_asks_for_by_name(self, toy: Build, rows: Any) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 3)

            def forward(self, x: torch.Tensor) -> dict[str, Any]:
                return {"logits": self.layer(x), "hidden": x}

            def compute_loss(self, logits: Any, labels: Any, hidden: Any, mask: Any) -> torch.Tensor:
                assert (logits.shape, labels.shape, hidden.shape, mask.shape) == ((4, 3), (4,), (4, 4), (4,))
                return functional.cross_entropy(logits, labels)

        extra = [{**row, "mask": 1} for row in rows()]
        assert toy(model=Masked(), train_dataset=extra, criterion=None).train().num_samples == 20

    def test_a_criterion_by_dotted_path_is_used(self, toy: Build) -> None:
        trainer = toy(criterion="torch.nn.functional.cross_entropy", max_steps=1)
        named = toy(criterion="CrossEntropyLoss", max_steps=1, out="named")
        assert self.loss(trainer) == self.loss(named)

    def test_no_loss_at_all_is_told_at_the_first_step(self, toy: Build) -> None:
        trainer = toy(criterion=None)
        with pytest.raises(DataError, match=r"no loss: the model has no compute_loss\(\).*it returned: logits"):
            trainer.train()
        assert trainer.state.global_step == 0

    def test_a_criterion_without_labels_is_told(self, toy: Build, rows: Any) -> None:
        with pytest.raises(DataError, match="criterion is set, but the batch has no labels"):
            toy(train_dataset=[{"x": row["x"]} for row in rows()]).train()

    @pytest.mark.parametrize(("logits_shape", "labels_shape"), [((-1, 1), (-1,)), ((-1,), (-1, 1))])
    def test_a_column_against_a_row_does_not_broadcast(
        self, toy: Build, logits_shape: tuple[int, ...], labels_shape: tuple[int, ...]
    ) -> None:
        points, targets = torch.randn(20, 4), torch.randn(20)

        class Regressor(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).reshape(logits_shape)

        model = Regressor(4, 1)
        expected = functional.mse_loss(nn.Linear.forward(model, points).squeeze(-1), targets).item()
        data = TensorDataset(points, targets.reshape(labels_shape))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of the broadcast
            found = self.loss(toy(model=model, train_dataset=data, batch_size=20, criterion="MSELoss"))
        assert found == pytest.approx(expected, rel=1e-6)

    def test_python_numbers_as_targets_train_in_the_models_precision(self, toy: Build, rows: Any) -> None:
        data = [{"x": row["x"], "labels": 0.5 * row["labels"]} for row in rows()]
        trainer = toy(model=nn.Sequential(nn.Linear(4, 1)), train_dataset=data, criterion="MSELoss", max_steps=2,
                      data_collator=_first_argument)  # fmt: skip
        trainer.train()
        assert trainer.state.update_step == 2


def _first_argument(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate for a model whose argument has another name, with targets as torch's own collator makes them: doubles."""
    labels = torch.utils.data.default_collate([sample["labels"] for sample in samples])
    assert labels.dtype == torch.float64
    return torch.stack([sample["x"] for sample in samples]), labels


class TestLossesThatTrainNothing:
    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda logits: 1.0, "the loss is 1.0, a float; expected a single number"),
            (lambda logits: logits.sum(-1), "the loss is float32 of shape 4; expected a single number"),
            (lambda logits: logits.sum().detach(), "without a gradient: it was detached"),
        ],
    )
    def test_they_are_told_at_the_first_step(self, toy: Build, loss: Any, message: str) -> None:
        class Own(Trainer):
            def compute_loss(self, model_outputs: Any, labels: Any, **_: Any) -> Any:
                return loss(model_outputs["logits"])

        with pytest.raises(DataError, match=message):
            toy(Own).train()


class TestTrainingStep:
    def batch(self, rows: Any) -> dict[str, torch.Tensor]:
        samples = rows(4)
        return {key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0]}

    def test_it_leaves_gradients_and_a_detached_loss_but_no_update(self, toy: Build, rows: Any) -> None:
        trainer = toy()
        before = weights_of(trainer)
        outputs = trainer.training_step(self.batch(rows))
        assert outputs["loss"].ndim == 0
        assert not outputs["loss"].requires_grad
        assert all(parameter.grad is not None for parameter in trainer.model.parameters())
        assert weights_of(trainer) == before
        assert trainer.state.global_step == 0

    def test_its_gradient_is_that_of_the_loss(self, toy: Build, rows: Any, classifier: Any) -> None:
        trainer, other, batch = toy(), classifier(), self.batch(rows)
        loss = functional.cross_entropy(other(batch["x"]), batch["labels"])
        loss.backward()
        assert trainer.training_step(batch)["loss"].item() == loss.item()
        assert torch.equal(trainer.model.layer.weight.grad, other.layer.weight.grad)  # type: ignore[union-attr, arg-type]

    def test_then_an_optimization_step_updates_and_frees_the_gradients(self, toy: Build, rows: Any) -> None:
        trainer = toy(optimizer="sgd", learning_rate=1.0)
        weight = trainer.model.layer.weight  # type: ignore[union-attr]
        trainer.training_step(self.batch(rows))
        expected = (weight - weight.grad).tolist()  # type: ignore[operator, union-attr]
        trainer.optimization_step()
        assert weight.tolist() == expected  # type: ignore[operator, union-attr]
        assert weight.grad is None  # type: ignore[union-attr]

    def test_gradients_from_before_the_run_do_not_enter_its_first_update(self, toy: Build, rows: Any) -> None:
        one, other = toy(optimizer="sgd"), toy(optimizer="sgd", out="clean")
        one.training_step(self.batch(rows))
        one.train()
        other.train()
        assert weights_of(one) == weights_of(other)

    def test_evaluation_step_gives_outputs_and_loss_without_gradients(self, toy: Build, rows: Any) -> None:
        trainer = toy()
        outputs = trainer.evaluation_step(self.batch(rows))
        assert outputs["logits"].shape == (4, 3)
        assert not outputs["logits"].requires_grad
        assert not outputs["loss"].requires_grad
        assert all(parameter.grad is None for parameter in trainer.model.parameters())

    def test_an_overridden_evaluation_step_is_used(self, toy: Build, rows: Any) -> None:
        class Fixed(Trainer):
            def evaluation_step(self, batch: Any) -> dict[str, Any]:
                return {"loss": torch.tensor(float(len(batch["x"])))}

        assert toy(Fixed, eval_dataset=rows(6)).evaluate()["loss"] == (4 * 4 + 2 * 2) / 6


class TestOptimizationStep:
    def test_weights_change_only_at_a_windows_end(self, toy: Build) -> None:
        changed: list[int] = []

        class Watching(Trainer):
            def run_step(self) -> Any:
                before = weights_of(self)
                outputs = super().run_step()
                if weights_of(self) != before:
                    changed.append(self.state.global_step + 1)
                return outputs

        trainer = toy(Watching, gradient_accumulation_steps=2, num_epochs=2)
        trainer.train()
        assert changed == [2, 4, 5, 7, 9, 10]
        assert trainer.state.update_step == 6

    def test_it_is_called_on_the_last_micro_batch_of_every_window(self, toy: Build) -> None:
        calls: list[bool] = []

        class Watching(Trainer):
            def optimization_step(self) -> None:
                calls.append(self.ctx.closes_window)
                super().optimization_step()

        toy(Watching, gradient_accumulation_steps=2).train()
        assert calls == [True, True, True]


class TestInnerTrainingLoop:
    def test_it_returns_the_mean_of_all_losses_since_the_start(self, toy: Build, rows: Any) -> None:
        losses: list[tuple[float, int]] = []
        results: list[float] = []

        class Watching(Trainer):
            def training_step(self, batch: Any) -> dict[str, Any]:
                outputs = super().training_step(batch)
                losses.append((outputs["loss"].item(), len(batch["x"])))
                return outputs

            def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
                result = super().inner_training_loop(epoch_num)
                total = sum(size for _, size in losses)
                assert result["loss"] == pytest.approx(sum(loss * size for loss, size in losses) / total, rel=1e-6)
                results.append(result["loss"])
                return result

        # 18 rows in windows of 3 x 4: the last window is short and so is its last batch
        toy(Watching, train_dataset=rows(18), num_epochs=2, gradient_accumulation_steps=3).train()
        assert len(results) == 2
        assert results[0] != results[1]

    def test_it_gets_the_number_of_the_epoch(self, toy: Build) -> None:
        epochs: list[int] = []

        class Watching(Trainer):
            def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
                epochs.append(epoch_num)
                return super().inner_training_loop(epoch_num)

        toy(Watching, num_epochs=3).train()
        assert epochs == [1, 2, 3]


class Gradients(Hook):
    """Keep the gradients of each update, and what they are the gradients of."""

    modes = frozenset({Mode.TRAIN, Mode.FINETUNE})

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.samples: list[list[int]] = []
        self.norms: list[float] = []
        self.left: list[Any] = []

    def on_gradients(self, ctx: Any) -> None:
        named = dict(self.trainer.model.named_parameters())
        self.found.append({name: parameter.grad.clone() for name, parameter in named.items()})  # type: ignore[union-attr]
        self.weights.append({name: parameter.detach().clone() for name, parameter in named.items()})
        self.samples.append(ctx.window.samples())

    def on_update(self, ctx: Any) -> None:
        self.left += [parameter.grad for parameter in self.trainer.model.parameters()]

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window:
            self.norms.append(ctx.grad_norm)


class TestGradients:
    """The moment at which the gradients are those of the update: of the whole window, unscaled, not clipped."""

    @pytest.fixture(params=["plain", "with a scaler"])
    def build(self, request: pytest.FixtureRequest, toy: Build, with_scaler: Any) -> Build:
        if request.param == "plain":
            return toy
        return lambda **given: toy(accelerator=with_scaler(), **given)

    @pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
    @pytest.mark.parametrize(("accumulation", "sizes"), [(1, [4] * 5), (2, [8, 8, 4])])
    def test_a_hook_sees_those_of_the_whole_window(
        self, build: Build, classifier: Any, accumulation: int, sizes: list[int], max_grad_norm: float | None
    ) -> None:
        hook, other = Gradients(), classifier()
        trainer = build(hooks=[hook], gradient_accumulation_steps=accumulation, max_grad_norm=max_grad_norm)
        trainer.train()
        assert [len(samples) for samples in hook.samples] == sizes
        for found, weights, samples in zip(hook.found, hook.weights, hook.samples, strict=True):
            rows = [trainer.train_dataset[number] for number in samples]
            other.load_state_dict(weights)
            other.zero_grad()
            logits = other(torch.stack([row["x"] for row in rows]))
            functional.cross_entropy(logits, torch.tensor([row["labels"] for row in rows])).backward()
            expected = {name: parameter.grad for name, parameter in other.named_parameters()}
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
    def test_their_norms_by_layer_combine_to_the_norm_that_is_told(
        self, build: Build, max_grad_norm: float | None
    ) -> None:
        hook = Gradients()
        build(hooks=[hook], gradient_accumulation_steps=2, max_grad_norm=max_grad_norm, num_epochs=2).train()
        by_layer = [torch.stack([gradient.norm() for gradient in found.values()]) for found in hook.found]
        assert [norms.norm().item() for norms in by_layer] == pytest.approx(hook.norms, rel=1e-6)
        assert min(hook.norms) > 1e-2  # longer than what they are clipped to

    def test_by_the_end_of_the_update_they_are_freed(self, build: Build) -> None:
        hook = Gradients()
        build(hooks=[hook]).train()
        assert hook.left == [None] * 10

    def test_what_a_hook_changes_is_trained_on_and_measured(self, build: Build) -> None:
        norms: list[float] = []

        def clear(ctx: Any) -> None:
            for parameter in trainer.model.parameters():
                parameter.grad.zero_()  # type: ignore[union-attr]

        trainer = build(optimizer="sgd")
        before = weights_of(trainer)
        trainer.hooks[Mode.TRAIN].register(clear, Moment.GRADIENTS)
        trainer.hooks[Mode.TRAIN].register(lambda ctx: norms.append(ctx.grad_norm), "on_batch_end")
        trainer.train()
        assert weights_of(trainer) == before
        assert norms == [0.0] * 5

    @pytest.mark.parametrize("change", ["removed", "replaced", "cleared"])
    def test_without_the_hook_that_gathers_them_an_update_is_the_same(self, build: Build, change: str) -> None:
        given = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "optimizer": "sgd", "num_epochs": 2}
        usual, other = build(out="usual", **given), build(out="other", **given)
        if change == "removed":
            other.reset_hook_in_train(Moment.GRADIENTS, "gather")
        elif change == "replaced":
            other.replace_hook_in_train(lambda ctx: None, "on_gradients", "gather")
        else:
            other.reset_hook_in_train("on_gradients")
        usual.train()
        other.train()
        assert weights_of(other) == weights_of(usual)
        assert other.state.loss_tracker_avg == usual.state.loss_tracker_avg

    @pytest.mark.parametrize("moment", ["on_update", "on_batch_end"])
    def test_whoever_frees_them_the_next_update_has_its_own(self, build: Build, moment: str) -> None:
        given = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "optimizer": "sgd", "num_epochs": 2}
        usual, other = build(out="usual", **given), build(out="other", **given)

        def free(ctx: Any) -> None:
            if ctx.closes_window:
                other.optimizer.zero_grad()

        other.reset_hook_in_train("on_update", "zero_grad")
        other.register_hook_in_train(free, moment)
        usual.train()
        other.train()
        assert weights_of(other) == weights_of(usual)

    def test_finetuning_has_them_too(self, toy: Build) -> None:
        hook = Gradients()
        trainer = toy(hooks=[hook], finetune_steps=3)
        assert trainer.hooks[Mode.FINETUNE].names("on_gradients") == ["gather", "Gradients"]
        trainer.finetune()
        assert [len(samples) for samples in hook.samples] == [4, 4, 4]
        by_layer = [torch.stack([gradient.norm() for gradient in found.values()]) for found in hook.found]
        assert [norms.norm().item() for norms in by_layer] == pytest.approx(hook.norms, rel=1e-6)


class OwnSteps(Trainer):
    """Both methods written anew, as a user of Hezar would."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.forward(batch)
        loss = self.compute_loss(outputs, batch["labels"])
        self.accelerator.backward(loss)
        outputs["loss"] = loss.detach()
        return outputs

    def optimization_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class OwnRunStep(Trainer):
    """The whole step written anew; it returns the loss."""

    def run_step(self) -> Any:
        batch = self.ctx.batch
        loss = functional.cross_entropy(self.model(batch["x"]), batch["labels"])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class TestOverridesThatGoTheirOwnWay:
    @pytest.mark.parametrize("cls", [OwnSteps, OwnRunStep])
    def test_they_train_count_log_and_save_like_the_default(
        self, cls: type[Trainer], toy: Build, rows: Any, logged: Any, saved_steps: Any
    ) -> None:
        trainers = [
            toy(one, out=one.__name__, num_epochs=2, log_steps=2, eval_dataset=rows(6)) for one in (cls, Trainer)
        ]
        results = [trainer.train() for trainer in trainers]
        own, default = trainers
        assert weights_of(own) == weights_of(default)
        assert results[0] == results[1]
        assert (own.state.global_step, own.state.update_step) == (10, 10)
        assert saved_steps(cls.__name__) == [5, 10]
        assert [row["step"] for row in logged(cls.__name__)] == [row["step"] for row in logged("Trainer")]

    @pytest.mark.parametrize("cls", [OwnSteps, OwnRunStep])
    def test_they_can_be_resumed(self, cls: type[Trainer], toy: Build) -> None:
        unbroken = toy(cls, out="unbroken", num_epochs=2)
        unbroken.train()
        toy(cls, num_epochs=1).train()
        resumed = toy(cls, num_epochs=2, resume_from_checkpoint=True)
        resumed.train()
        assert weights_of(resumed) == weights_of(unbroken)

    @pytest.mark.parametrize("name", ["training_step", "run_step"])
    def test_one_that_returns_no_loss_is_told_at_the_first_step(self, name: str, toy: Build) -> None:
        silent = type("Silent", (Trainer,), {name: lambda self, *_: {"logits": torch.zeros(1)}})
        with pytest.raises(
            DataError, match=rf"overridden {name}\(\) returned a mapping of logits; expected the step's"
        ):
            toy(silent).train()

    def test_a_default_hook_may_be_replaced_instead(self, toy: Build) -> None:
        trainer = toy(optimizer="sgd")
        before = weights_of(trainer)

        def no_step(ctx: Any) -> None:
            ctx.applied = True

        trainer.hooks[Mode.TRAIN].replace(no_step, "on_update", "step")
        trainer.train()
        assert weights_of(trainer) == before
        assert trainer.state.update_step == 5


class TestModelsWithoutAProtocol:
    def test_an_argument_by_position_alone_cannot_be_given_by_name(self, toy: Build, rows: Any) -> None:
        class Positional(nn.Linear):
            def forward(self, x: torch.Tensor, /) -> torch.Tensor:
                return super().forward(x)

        with pytest.raises(
            DataError, match=r"takes x by position only.* Take the '/' out of forward\(\), or make the sam"
        ):
            toy(model=Positional(4, 3)).train()
        tuples = [(row["x"], row["labels"]) for row in rows()]
        assert toy(model=Positional(4, 3), train_dataset=tuples, out="tuples").train().num_samples == 20

    def test_five_lines_are_enough(self, tmp_path: Path) -> None:
        data = [{"input": torch.randn(4), "labels": number % 3} for number in range(20)]
        config = TrainerConfig(tmp_path, batch_size=4, criterion="CrossEntropyLoss")
        trainer = Trainer(config, nn.Linear(4, 3), data)
        assert trainer.train().num_samples == 20

    def test_a_model_with_its_own_compute_loss_trains(self, toy: Build) -> None:
        class Own(nn.Linear):
            def forward(self, x: torch.Tensor) -> Any:
                return {"logits": super().forward(x)}

            def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return functional.cross_entropy(logits, labels)

        assert toy(model=Own(4, 3), criterion=None).train().num_samples == 20

    def test_a_model_that_returns_its_own_loss_trains(self, toy: Build) -> None:
        class Own(nn.Linear):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
                logits = super().forward(x)
                return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}

        assert toy(model=Own(4, 3), criterion=None).train().num_samples == 20

    def test_a_model_that_returns_a_bare_loss_trains_and_evaluates(self, toy: Build, rows: Any) -> None:
        class Own(nn.Linear):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
                return functional.cross_entropy(super().forward(x), labels)

        trainer = toy(model=Own(4, 3), criterion=None, eval_dataset=rows(5))
        assert trainer.train().metrics.keys() == {"train.loss", "evaluation.loss"}

    def test_all_four_spellings_give_the_same_weights(self, toy: Build, classifier: Any) -> None:
        class Returning(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = classifier()

            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
                return {"loss": functional.cross_entropy(self.inner(x), labels)}

        class Bare(Returning):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
                return super().forward(x, labels)["loss"]

        class Computing(Returning):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
                return self.inner(x)

            def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return functional.cross_entropy(logits, labels)

        found = []
        for number, model in enumerate([classifier(), Returning(), Bare(), Computing()]):
            trainer = toy(model=model, out=str(number), criterion="CrossEntropyLoss" if number == 0 else None)
            trainer.train()
            found.append(weights_of(trainer))
        assert found == [found[0]] * 4

    def test_a_frozen_model_part_stays_as_it_is(self, toy: Build) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        trainer = toy(model=model, data_collator=lambda s: (torch.stack([r["x"] for r in s]),
                                                           torch.tensor([r["labels"] for r in s])))  # fmt: skip
        trainer.train()
        assert torch.equal(model[0].weight, before)
        assert model[0].weight.grad is None


def test_without_the_norm_nothing_goes_unclipped(toy: Build) -> None:
    trainer = toy(max_grad_norm=0.1)
    trainer.reset_hook_in_train("on_update", "guard")
    with pytest.raises(HookError, match="the hook 'guard' was taken out"):
        trainer.train()


def test_a_property_that_fails_tells_its_own_error(toy: Build) -> None:
    class Broken(Trainer):
        @property
        def half(self) -> float:
            return self.whole / 2  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="no attribute 'whole'"):
        toy(Broken).half  # noqa: B018
