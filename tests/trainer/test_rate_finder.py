"""A sweep over learning rates: what it does, when it ends, and that the run never notices."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hezar_train import Hook, Trainer, get_event_storage
from hezar_train.errors import ConfigError, NonFiniteError
from hezar_train.trainer.lr_finder import SweepSettings, find_lr

Toy = Callable[..., Trainer]
Rows = Callable[..., list[dict[str, Any]]]


def sweep(trainer: Trainer, **settings: Any) -> Any:
    return find_lr(trainer.parts, SweepSettings(**{"num_steps": 12, **settings}))


class Recording(torch.optim.SGD):
    """Note the rates of every step."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.seen: list[list[float]] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append([float(group["lr"]) for group in self.param_groups])
        super().step(closure)


class Noisy(nn.Module):
    """A net with dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Scripted(Trainer):
    """Return losses that were written down, whatever the model does."""

    script: Callable[[int], float]
    calls = 0

    def compute_loss(self, model_outputs: Any, labels: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return super().compute_loss(model_outputs, labels) * 0.0 + self.script(self.calls - 1)


def scripted(script: Callable[[int], float]) -> type[Scripted]:
    return type("Scripted", (Scripted,), {"script": staticmethod(script)})


class TestSweep:
    def test_the_rates_grow_geometrically_from_the_least_to_the_largest_and_each_update_has_its_own(
        self, toy: Toy, classifier: type[nn.Module]
    ) -> None:
        model = classifier()
        optimizer = Recording(model.parameters(), lr=0.5)
        found = sweep(toy(model=model, optimizer=optimizer), lr_min=1e-6, lr_max=1.0)
        assert found.rates == pytest.approx(list(np.logspace(-6, 0, 12)))
        assert [rates for (rates,) in optimizer.seen] == found.rates
        assert (found.stopped_by, optimizer.param_groups[0]["lr"]) == ("end of the range", 0.5)

    def test_groups_keep_their_ratio_to_the_first(self, toy: Toy, classifier: type[nn.Module]) -> None:
        model = classifier()
        groups = [{"params": [p], "lr": rate} for p, rate in zip(model.parameters(), (0.1, 0.4), strict=True)]
        optimizer = Recording(groups)
        found = sweep(toy(model=model, optimizer=optimizer))
        assert optimizer.seen == [pytest.approx([rate, 4 * rate]) for rate in found.rates]

    def test_the_data_is_that_of_the_first_updates_of_training_also_beyond_an_epoch(self, toy: Toy) -> None:
        class Looking(Trainer):
            def prepare_input_batch(self, batch: Any) -> Any:
                seen.append(batch["x"].clone())
                return batch

        seen: list[torch.Tensor] = []
        sweep(toy(Looking, gradient_accumulation_steps=2, num_epochs=4, out="swept"), num_steps=7)
        swept, seen = seen, []
        toy(Looking, gradient_accumulation_steps=2, num_epochs=4, out="trained").train()
        assert len(swept) == 2 + 2 + 1 + 2 + 2 + 1 + 2  # an epoch of five steps has three updates
        assert all(torch.equal(one, other) for one, other in zip(swept, seen, strict=False))

    def test_the_losses_are_those_of_training_with_these_rates(self, toy: Toy, classifier: type[nn.Module]) -> None:
        found = sweep(toy(optimizer="sgd", gradient_accumulation_steps=2), num_steps=3, lr_min=0.1, lr_max=0.3)
        expected: list[float] = []

        class Growing(Hook):
            def before_step(self) -> None:
                for group in self.trainer.optimizer.param_groups:
                    group["lr"] = found.rates[len(expected)]

            def after_step(self) -> None:
                if self.trainer.ctx.closes_window:
                    expected.append(self.trainer.ctx.loss_value)

        toy(optimizer="sgd", gradient_accumulation_steps=2, hooks=[Growing()], num_epochs=1, out="other").train()
        assert found.losses == expected

    def test_the_smoothed_loss_is_the_exponential_mean_corrected_for_its_start(self, toy: Toy) -> None:
        found = sweep(toy(), beta=0.9)
        for number, smoothed in enumerate(found.smoothed):
            weights = [0.1 * 0.9 ** (number - n) for n in range(number + 1)]
            mean = sum(w * loss for w, loss in zip(weights, found.losses, strict=False)) / sum(weights)
            assert smoothed == pytest.approx(mean)

    def test_it_stops_when_the_smoothed_loss_is_so_many_times_the_best(self, toy: Toy) -> None:
        losses = [1.0, 0.5, 0.5, 1.9, 2.1, 9.9]
        found = sweep(toy(scripted(lambda n: losses[n])), beta=0.0, explode_thresh=4.0)
        assert (found.losses, found.stopped_by) == (pytest.approx(losses[:5]), "divergence")

    def test_a_negative_loss_is_no_divergence_until_it_is_far_from_the_best(self, toy: Toy) -> None:
        losses = [-1.0, -2.0, -1.0, 3.9, 4.1, 0.0]
        found = sweep(toy(scripted(lambda n: losses[n])), beta=0.0, explode_thresh=4.0)
        assert (found.losses, found.stopped_by) == (pytest.approx(losses[:5]), "divergence")

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite_ends_the_sweep_with_what_was_found(self, toy: Toy, bad: float) -> None:
        found = sweep(toy(scripted(lambda n: bad if n == 6 else 1.0 - n / 10)))
        assert (len(found.losses), found.stopped_by) == (6, "a loss that is not finite")
        assert all(map(math.isfinite, found.smoothed))

    def test_a_model_that_never_had_a_finite_loss_is_told_with_its_samples(self, toy: Toy) -> None:
        with pytest.raises(NonFiniteError, match="Samples of the update"):
            sweep(toy(scripted(lambda _: math.nan)))

    def test_a_step_in_the_users_own_way_is_swept_too(self, toy: Toy) -> None:
        class Own(Trainer):
            def run_step(self) -> Any:
                loss = nn.functional.cross_entropy(self.model(self.ctx.batch["x"]), self.ctx.batch["labels"])
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                return loss

        same = {"optimizer": "sgd", "max_grad_norm": None}
        assert sweep(toy(Own, **same)).losses == pytest.approx(sweep(toy(**same)).losses)

    def test_a_toy_is_told_a_rate_at_which_it_learns(self, toy: Toy, rows: Rows) -> None:
        found = sweep(toy(train_dataset=rows(200)), num_steps=100)
        assert found.suggestion is not None
        trained = toy(learning_rate=found.suggestion, train_dataset=rows(200), num_epochs=2, out="trained")
        trained.train()
        assert trained.state.loss_tracker_avg < found.losses[0]

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"lr_min": 0.0}, "lr_min=0.0, lr_max=10.0: expected positive rates, the first one lower"),
            ({"lr_max": 1e-9}, "lr_min=1e-07, lr_max=1e-09: expected positive rates, the first one lower"),
            ({"num_steps": 1}, "num_steps=1 must be at least 2"),
            ({"explode_thresh": 1.0}, "explode_thresh=1.0 must be greater than 1"),
            ({"beta": 1.0}, "beta=1.0 must be at least 0 and less than 1"),
        ],
    )
    def test_settings_that_make_no_sense_are_refused(self, settings: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError) as caught:
            SweepSettings(**settings)
        assert caught.value.problems == [problem]

    def test_all_mistakes_in_the_settings_are_told_at_once(self) -> None:
        with pytest.raises(ConfigError, match="3 problems"):
            SweepSettings(num_steps=0, beta=-1, lr_select_method="best")

    def test_a_trainer_offers_it_by_name(self, toy: Toy) -> None:
        found = toy().find_lr(1e-6, 1.0, 12, beta=0.5)
        assert found == sweep(toy(out="other"), lr_min=1e-6, lr_max=1.0, beta=0.5)


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return all that the run goes on with, as bytes and plain values."""
    tensors = {**dict(trainer.model.named_parameters()), **dict(trainer.model.named_buffers())}
    inner = [v for state in trainer.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return copy.deepcopy({
        "model": {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()},
        "modes": [module.training for module in trainer.model.modules()],
        "gradients": [parameter.grad for parameter in trainer.model.parameters()],
        "moments": [tensor.numpy().tobytes() for tensor in inner],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizer.param_groups],
        "schedule": trainer.schedule.state_dict(), "state": trainer.state.to_dict(),
        "python": random.getstate(), "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    })  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Counter(Hook):
    """Count everything it is told of."""

    count = 0

    def before_train(self) -> None:
        self.count += 1

    def after_step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class TestTheRun:
    @pytest.fixture
    def noisy(self, toy: Toy, rows: Rows) -> Callable[..., Trainer]:
        def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
            return toy(
                cls, model=Noisy(), optimizer="adamw", lr_scheduler="one_cycle", lr_scheduler_kwargs={"max_lr": 0.1},
                lr_scheduling_steps=1, num_epochs=3, eval_dataset=rows(8, 5), task="text_classification",
                hooks=[Counter()], **given,
            )  # fmt: skip

        return build

    @pytest.mark.parametrize("trains_first", [False, True], ids=["fresh", "trained"])
    @pytest.mark.parametrize("acc_test", [False, True])
    def test_everything_is_as_it_was_and_nothing_is_written(
        self, noisy: Toy, tmp_path: Path, trains_first: bool, acc_test: bool
    ) -> None:
        trainer = noisy()
        if trains_first:
            trainer.train()
        trainer.model.layers[1].eval()  # type: ignore[index,union-attr]
        before, written = everything(trainer), files(tmp_path)
        sweep(trainer, acc_test=acc_test, lr_max=1e4, explode_thresh=1e9)
        assert everything(trainer) == before
        assert files(tmp_path) == written
        assert trainer.ctx.get("mode") is None

    @pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
    def test_everything_is_as_it_was_after_a_failure_and_after_ctrl_c(
        self, noisy: Toy, failure: type[BaseException]
    ) -> None:
        class Failing(Trainer):
            calls = 0

            def compute_loss(self, *given: Any, **more: Any) -> torch.Tensor:
                self.calls += 1
                if self.calls == 5:
                    raise failure
                return super().compute_loss(*given, **more)

        trainer = noisy(Failing)
        before = everything(trainer)
        with pytest.raises(failure):
            sweep(trainer)
        assert everything(trainer) == before
        assert sweep(trainer).losses == sweep(trainer).losses

    def test_training_after_a_sweep_is_training_without_one_bit_by_bit(self, noisy: Toy, tmp_path: Path) -> None:
        plain, swept = noisy(out="plain"), noisy(out="swept")
        sweep(swept, acc_test=True)
        plain.train()
        swept.train()
        assert everything(swept)["model"] == everything(plain)["model"]
        assert everything(swept)["moments"] == everything(plain)["moments"]
        for name in ("model.safetensors", "optimizer.safetensors"):
            one, other = (tmp_path / run / "checkpoints" / "00000015" / name for run in ("plain", "swept"))
            assert one.read_bytes() == other.read_bytes()
        assert (tmp_path / "plain/ledger.jsonl").read_bytes() == (tmp_path / "swept/ledger.jsonl").read_bytes()

    def test_a_sweep_between_a_kill_and_a_resume_changes_nothing(self, noisy: Toy, tmp_path: Path) -> None:
        class Stop(Hook):
            def after_step(self) -> None:
                if self.trainer.state.global_step == 7:
                    raise RuntimeError("killed")

        noisy(out="plain").train()
        broken = noisy(out="broken", save_steps=3)
        broken.register_hooks([Stop()])
        with pytest.raises(RuntimeError, match="killed"):
            broken.train()
        resumed = noisy(out="broken", save_steps=3, resume_from_checkpoint=True)
        assert resumed.state.global_step == 6
        sweep(resumed)
        resumed.train()
        one, other = (tmp_path / run / "checkpoints/00000015/model.safetensors" for run in ("plain", "broken"))
        assert one.read_bytes() == other.read_bytes()

    def test_hooks_and_what_the_run_measures_see_nothing_of_it(self, toy: Toy) -> None:
        class Measuring(Trainer):
            def compute_loss(self, *given: Any, **more: Any) -> torch.Tensor:
                get_event_storage().put_scalar("mine", 1.0)
                return super().compute_loss(*given, **more)

        counter = Counter()
        trainer = toy(Measuring, hooks=[counter])
        sweep(trainer)
        assert counter.count == 0
        assert trainer.storage.unlogged() == {}

    def test_a_sweep_inside_a_step_of_training_leaves_the_step_intact(self, noisy: Toy) -> None:
        class Sweeping(Hook):
            def on_batch_end(self, ctx: Any) -> None:
                if self.trainer.state.global_step == 4:
                    sweep(self.trainer)

        plain, swept = noisy(out="plain"), noisy(out="swept")
        swept.register_hooks([Sweeping()])
        plain.train()
        swept.train()
        assert everything(swept)["model"] == everything(plain)["model"]

    def test_a_stream_that_keeps_its_place_keeps_it(self, toy: Toy, rows: Rows) -> None:
        class Stream(IterableDataset[Any]):
            place = 0

            def __iter__(self) -> Iterator[Any]:
                for row in rows(20)[self.place :]:
                    self.place += 1
                    yield row
                self.place = 0

            def state_dict(self) -> dict[str, int]:
                return {"place": self.place}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.place = state["place"]

        plain, swept = (toy(train_dataset=Stream(), max_steps=4, out=out) for out in ("plain", "swept"))
        sweep(swept, num_steps=2)
        assert swept.train_dataset.place == 0
        plain.train()
        swept.train()
        assert everything(swept)["model"] == everything(plain)["model"]

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_workers_do_not_matter_and_are_given_back(self, toy: Toy, num_workers: int) -> None:
        assert sweep(toy(num_dataloader_workers=num_workers)).losses == sweep(toy(out="other")).losses


class TestAccuracy:
    def test_it_is_measured_after_each_update_on_the_evaluation_data(self, toy: Toy, rows: Rows) -> None:
        trainer = toy(task="text_classification", eval_dataset=rows(40, 2), learning_rate=0.1)
        found = sweep(trainer, lr_select_method="max_acc", lr_min=1e-3, lr_max=0.3, num_steps=30)
        assert len(found.accuracies) == len(found.rates) == 30
        assert max(found.accuracies) > found.accuracies[0]
        assert found.suggestion == found.rates[int(np.argmax(found.accuracies))]

    def test_so_many_batches_are_enough(self, toy: Toy, rows: Rows) -> None:
        class Counting(Trainer):
            batches = 0

            def evaluation_step(self, batch: Any) -> dict[str, Any]:
                self.batches += 1
                return super().evaluation_step(batch)

        trainer = toy(Counting, task="text_classification", eval_dataset={"dev": rows(40), "test": rows(40)})
        sweep(trainer, acc_test=True, acc_batches=2, num_steps=3)
        assert trainer.batches == 6

    @pytest.mark.parametrize("settings", [{"acc_test": True}, {"lr_select_method": "max_acc"}])
    def test_without_evaluation_data_it_is_refused(self, toy: Toy, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="accuracies are measured on evaluation data, and there is none"):
            sweep(toy(), **settings)

    @pytest.mark.parametrize(
        ("metric", "message"), [("acuracy", "Did you mean 'accuracy'"), ("mse", "better when it is smaller")]
    )
    def test_a_metric_that_does_not_fit_is_refused(self, toy: Toy, rows: Rows, metric: str, message: str) -> None:
        class Handler(type(toy(task="text_classification", out="x").metrics_handler)):  # type: ignore[misc]
            @property
            def output_keys(self) -> list[str]:
                return ["accuracy", "mse"]

            def objective(self, key: str) -> str:
                return "minimize" if key == "mse" else "maximize"

        trainer = toy(task="text_classification", eval_dataset=rows(8), metrics_handler=Handler(["accuracy"]))
        with pytest.raises(ConfigError, match=message):
            sweep(trainer, acc_test=True, acc_metric=metric)
