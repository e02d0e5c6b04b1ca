"""lernomatic's Trainer built with its own keywords: attributes, `_init_` methods, epochs as its users write them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hezar_train import Hook
from hezar_train.compat.lernomatic import LernomaticModel, LogFinder, Trainer, schedule
from hezar_train.errors import CheckpointError, ConfigError, DataError, HookError

Build = Callable[..., Any]


def samples(count: int = 24, seed: int = 0) -> TensorDataset:
    """Return points of three classes."""
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points[:, :3].argmax(1))


def net() -> nn.Sequential:
    """Return a small classifier, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Points(LernomaticModel):
    """A classifier in lernomatic's wrapper."""

    def __init__(self) -> None:
        self.net = net()


class Own(Trainer):
    """The body of an epoch, as lernomatic's users write it."""

    def train_epoch(self) -> None:
        for data, labels in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(data.to(self.device)), labels.to(self.device))
            loss.backward()
            self.optimizer.step()
            self.loss_history[self.loss_iter] = loss.item()
            self.loss_iter += 1
            self.apply_lr_schedule()


class Pair(Trainer):
    """Two modules, each with an optimizer, and a rate that is changed after each epoch's loop."""

    def __init__(self, critic: nn.Module | None = None, maker: nn.Module | None = None, **kwargs: Any) -> None:
        self.critic, self.maker = critic, maker
        self.factor = kwargs.pop("factor", 0.5)
        self.num_drawn = 0
        super().__init__(None, **kwargs)

    def _init_optimizer(self) -> None:
        self.critic_optim = torch.optim.Adam(self.critic.parameters(), lr=self.learning_rate)
        self.maker_optim = torch.optim.Adam(self.maker.parameters(), lr=self.learning_rate)

    def _init_history(self) -> None:
        self.loss_iter = 0
        self.critic_loss_history = np.zeros(len(self.train_loader) * self.num_epochs)
        self.maker_loss_history = np.zeros(len(self.train_loader) * self.num_epochs)

    def _send_to_device(self) -> None:
        self.critic.to(self.device)
        self.maker.to(self.device)

    def train_epoch(self) -> None:
        for data, _ in self.train_loader:
            made = self.maker(torch.randn(len(data), 2))
            critic_loss = (self.critic(made.detach()) ** 2).mean() + ((self.critic(data) - 1) ** 2).mean()
            self.critic_optim.zero_grad()
            critic_loss.backward()
            self.critic_optim.step()
            maker_loss = ((self.critic(made) - 1) ** 2).mean()
            self.maker_optim.zero_grad()
            maker_loss.backward()
            self.maker_optim.step()
            self.critic_loss_history[self.loss_iter] = critic_loss.item()
            self.maker_loss_history[self.loss_iter] = maker_loss.item()
            self.loss_iter += 1
        self.num_drawn += len(next(iter(self.train_loader))[0])
        self.maker_optim.param_groups[0]["lr"] *= self.factor


def pair(folder: Path, **given: Any) -> Pair:
    """Build a trainer of two modules."""
    torch.manual_seed(1)
    settings = {"train_dataset": samples(), "batch_size": 4, "num_epochs": 3, "checkpoint_dir": str(folder)}
    return Pair(nn.Linear(4, 1), nn.Linear(2, 4), **settings | given)


class StopAt(Hook):
    """Raise before a step, as a kill would end it."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_batch_start(self, _: Any) -> None:
        if self.trainer.state.global_step == self._step:
            raise KeyboardInterrupt


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that builds a trainer with lernomatic's keywords."""

    def make(cls: type[Trainer] = Trainer, model: Any = None, out: str = "ck", **given: Any) -> Trainer:
        settings = {
            "train_dataset": samples(), "batch_size": 4, "num_epochs": 2, "learning_rate": 0.05,
            "checkpoint_dir": str(tmp_path), "checkpoint_name": out,
        }  # fmt: skip
        return cls(net() if model is None else model, **settings | given)

    return make


def weights(trainer: Any) -> list[float]:
    """Return every weight of what a trainer trains."""
    return [value for one in trainer.model.parameters() for value in one.detach().flatten().tolist()]


def saved(folder: Path) -> dict[str, list[float]]:
    """Return every tensor of a run's last checkpoint."""
    last = max((folder / "checkpoints").glob("[0-9]*"))
    return {f"{path.name}.{name}": value.flatten().tolist() for path in sorted(last.glob("*.safetensors"))
            for name, value in sorted(load_file(path).items())}  # fmt: skip


def by_hand(epochs: int, rate: float = 0.05) -> nn.Sequential:
    """Train the classifier with a plain loop over the samples in order."""
    model, data = net(), samples()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-5)
    for _ in range(epochs):
        for points, labels in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()
    return model


class TestKeywords:
    def test_defaults_are_lernomatics(self, build: Build) -> None:
        trainer = Trainer(net())
        shown = (trainer.num_epochs, trainer.learning_rate, trainer.momentum, trainer.weight_decay, trainer.batch_size)
        assert shown == (10, 1e-4, 0.5, 1e-5, 64)
        assert (trainer.loss_function, trainer.optim_function) == ("CrossEntropyLoss", "Adam")
        assert (trainer.checkpoint_dir, trainer.checkpoint_name, trainer.device) == (
            "checkpoint",
            "ck",
            torch.device("cpu"),
        )
        assert (trainer.train_loader, trainer.val_loader, trainer.loss_history, trainer.cur_epoch) == (
            None,
            None,
            None,
            0,
        )

    @pytest.mark.parametrize("cls", [Trainer, Own])
    @pytest.mark.parametrize("model", [net, Points])
    def test_it_trains_as_a_plain_loop_does(self, build: Build, cls: type[Trainer], model: Any) -> None:
        trainer = build(cls, model(), shuffle=False)
        trainer.train()
        expected = [value for one in by_hand(2).parameters() for value in one.detach().flatten().tolist()]
        assert weights(trainer) == expected
        assert (trainer.cur_epoch, trainer.loss_iter, len(trainer.loss_history)) == (2, 12, 12)
        assert (trainer.get_loss_history() > 0).all()

    def test_names_and_classes_choose_optimizer_and_loss(self, build: Build) -> None:
        trainer = build(optim_function="SGD", loss_function="MSELoss", momentum=0.7)
        assert type(trainer.optimizer) is torch.optim.SGD
        assert (type(trainer.criterion), trainer.get_momentum()) == (nn.MSELoss, 0.7)
        assert type(build(optim_function=torch.optim.RMSprop).optimizer) is torch.optim.RMSprop
        loss = nn.NLLLoss()
        assert build(loss_function=loss).criterion is loss

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"num_epoch": 3}, "num_epoch=3 is no keyword of Trainer.*num_epochs"),
            ({"optim_function": "Adm"}, "optim_function='Adm' is no optimizer of torch.optim.*Adam"),
            ({"loss_function": "Nope"}, "loss_function='Nope' is no loss of torch.nn"),
            ({"device_map": {"a": 1}}, "device_map=.*: nothing reads it"),
            ({"lr_scheduler": object()}, "lr_scheduler is a object; expected an object with get_lr"),
        ],
    )
    def test_what_is_not_known_is_told_when_it_is_built(self, build: Build, given: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            build(**given)

    def test_two_values_without_names_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="2 values without names; expected the model alone"):
            Trainer(net(), samples())

    def test_fields_of_the_config_and_hooks_may_be_given_beside_them(self, build: Build) -> None:
        trainer = build(max_grad_norm=0.5, seed=3, hooks=[StopAt(1)], test_batch_size=7)
        assert (trainer.config.max_grad_norm, trainer.config.seed, trainer.val_batch_size) == (0.5, 3, 7)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()

    @pytest.mark.parametrize(("save_every", "steps"), [(-1, [6, 12]), (0, []), (4, [4, 6, 8, 12])])
    def test_it_saves_as_often_as_it_is_told(
        self, build: Build, tmp_path: Path, save_every: int, steps: list[int]
    ) -> None:
        build(save_every=save_every).train()
        assert sorted(int(path.name) for path in (tmp_path / "ck/checkpoints").glob("[0-9]*")) == steps

    def test_what_has_no_model_says_so(self, build: Build) -> None:
        with pytest.raises(ConfigError, match="Trainer has no model: pass one"):
            Trainer(train_dataset=samples()).train()
        with pytest.raises(DataError, match="Trainer has nothing to train on: pass train_dataset"):
            build(train_dataset=None).train()


class TestAttributes:
    def test_more_epochs_are_trained_when_they_are_assigned(self, build: Build) -> None:
        staged, whole = build(Own, out="staged"), build(Own, out="whole", num_epochs=5)
        staged.train()
        staged.num_epochs = 5
        staged.train()
        whole.train()
        assert weights(staged) == weights(whole)
        assert (staged.cur_epoch, staged.loss_iter) == (5, 30)
        assert staged.get_loss_history().tolist() == whole.get_loss_history().tolist()

    def test_a_rate_a_momentum_and_a_decay_reach_the_optimizer(self, build: Build) -> None:
        trainer = build(optim_function="SGD", momentum=0.1)
        trainer.learning_rate, trainer.momentum, trainer.weight_decay = 0.5, 0.9, 0.01
        group = trainer.optimizer.param_groups[0]
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.9, 0.01)

    def test_another_criterion_is_the_one_that_trains(self, build: Build) -> None:
        trainer, asked = build(), []

        def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            asked.append(len(labels))
            return nn.functional.cross_entropy(outputs, labels)

        trainer.criterion = criterion
        trainer.train()
        assert asked == [4] * 12

    def test_another_batch_size_makes_other_loaders(self, build: Build) -> None:
        trainer = build()
        trainer.train()
        trainer.batch_size, trainer.num_epochs = 8, 3
        trainer.train()
        assert (len(trainer.train_loader), trainer.state.global_step) == (3, 15)

    def test_a_loader_of_ones_own_is_the_one_that_is_trained_on(self, build: Build) -> None:
        trainer = build(train_dataset=None)
        trainer.train_loader = DataLoader(samples(8), batch_size=2)
        trainer._init_history()
        trainer.train()
        assert trainer.state.samples_seen == 16

    def test_a_loader_that_is_none_of_torch_is_told(self, build: Build) -> None:
        trainer = build(train_dataset=None)
        trainer.train_loader = [1, 2]
        with pytest.raises(DataError, match=r"train_loader is a list; expected a torch\.utils\.data\.DataLoader"):
            trainer.train()

    def test_an_epoch_that_is_assigned_is_where_it_goes_on(self, build: Build) -> None:
        seen: list[int] = []

        class Look(Own):
            def train_epoch(self) -> None:
                seen.append(self.cur_epoch)
                super().train_epoch()

        trainer = build(Look, num_epochs=4)
        trainer.cur_epoch = 2
        trainer.train()
        assert (seen, trainer.cur_epoch) == ([2, 3], 4)
        trainer.train()
        assert seen == [2, 3]
        trainer.cur_epoch = 3
        trainer.train()
        assert seen == [2, 3, 3]

    @pytest.mark.parametrize("name", ["num_epochs", "batch_size", "train_loader", "optimizer", "cur_epoch", "device"])
    def test_nothing_that_the_run_is_made_of_changes_under_way(self, build: Build, name: str) -> None:
        class Meddle(Own):
            def train_epoch(self) -> None:
                setattr(self, name, getattr(self, name))

        with pytest.raises(HookError, match="assigned in the middle of training"):
            build(Meddle).train()

    def test_the_loader_has_its_length_before_and_while_it_trains(self, build: Build) -> None:
        seen: list[Any] = []

        class Look(Own):
            def train_epoch(self) -> None:
                seen.append((len(self.train_loader), self.train_loader.batch_size, len(self.train_loader.dataset)))
                super().train_epoch()

        trainer = build(Look)
        assert (len(trainer.train_loader), trainer.train_loader.batch_size) == (6, 4)
        trainer.train()
        assert seen == [(6, 4, 24)] * 2

    def test_on_a_trainer_from_a_config_names_are_read_and_verbs_are_called(self, tmp_path: Path) -> None:
        from hezar_train import TrainerConfig

        config = TrainerConfig(tmp_path / "run", batch_size=4, learning_rate=0.1, criterion="CrossEntropyLoss")
        trainer = Trainer(config, net(), samples(), samples(8, 1))
        assert (trainer.num_epochs, trainer.batch_size, trainer.cur_epoch, trainer.loss_iter) == (1, 4, 0, 0)
        assert (len(trainer.train_loader), len(trainer.val_loader), str(trainer.device)) == (6, 2, "cpu")
        trainer.num_epochs, trainer.learning_rate = 2, 0.2
        trainer.train()
        assert (trainer.cur_epoch, trainer.loss_iter, trainer.get_learning_rate()) == (2, 12, 0.2)
        with pytest.raises(AttributeError, match="cur_epoch cannot be assigned on a trainer that was built from a"):
            trainer.cur_epoch = 0


class TestMethods:
    def test_every_init_method_is_called_in_lernomatics_order(self, build: Build) -> None:
        called: list[str] = []
        names = ("_init_device", "_init_optimizer", "_init_dataloaders", "_init_history", "_send_to_device")

        def noted(name: str) -> Callable[[Trainer], None]:
            def method(self: Trainer) -> None:
                called.append(name)
                getattr(Trainer, name)(self)

            return method

        build(type("Noted", (Trainer,), {name: noted(name) for name in names})).train()
        assert called == list(names)

    def test_loaders_optimizers_and_devices_may_be_made_there(self, build: Build) -> None:
        class Made(Own):
            def _init_device(self) -> None:
                self.device = torch.device("cpu")

            def _init_optimizer(self) -> None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate)
                self.criterion = nn.CrossEntropyLoss()

            def _init_dataloaders(self) -> None:
                self.train_loader = DataLoader(samples(10), batch_size=self.batch_size, shuffle=self.shuffle)
                self.val_loader = self.test_loader = None

        trainer = build(Made, train_dataset=None)
        trainer.train()
        assert (trainer.state.samples_seen, trainer.loss_iter) == (20, 6)

    def test_a_loader_that_is_not_made_there_is_none(self, build: Build) -> None:
        class TrainAlone(Own):
            def _init_dataloaders(self) -> None:
                self.train_loader = DataLoader(samples(10), batch_size=self.batch_size)

        trainer = build(TrainAlone)
        trainer.train()
        assert (trainer.val_loader, trainer.test_loader, trainer.loss_iter) == (None, None, 6)

    def test_validation_is_read_from_the_histories_that_it_writes(self, build: Build) -> None:
        class Val(Own):
            def val_epoch(self) -> None:
                for data, _ in self.val_loader:
                    self.val_loss_history[self.val_loss_iter] = float(len(data))
                    self.val_loss_iter += 1
                self.acc_history[self.acc_iter] = 0.25
                self.acc_iter += 1

        result = build(Val, val_dataset=samples(8, 1)).train()
        assert (result.metrics["evaluation.loss"], result.metrics["evaluation.accuracy"]) == (4.0, 0.25)

    @pytest.mark.parametrize("rest", [{"val_dataset": samples(8, 1)}, {"test_dataset": samples(8, 1)}, {}])
    def test_validation_may_do_nothing(self, build: Build, rest: dict[str, Any]) -> None:
        class Silent(Own):
            def val_epoch(self) -> None:
                pass

        assert build(Silent, **rest).train().num_samples == 48

    def test_the_default_measures_loss_and_accuracy_and_keeps_the_best(self, build: Build, tmp_path: Path) -> None:
        trainer = build(val_dataset=samples(8, 1), num_epochs=3, save_best=True)
        result = trainer.train()
        assert trainer.acc_iter == 3
        assert trainer.best_acc == max(trainer.get_acc_history())
        assert trainer.get_cur_acc() == result.metrics["evaluation.accuracy"]
        assert trainer.evaluate()["accuracy"] == trainer.get_cur_acc()
        assert (tmp_path / "best_ck.pkl").is_file()

    def test_it_stops_when_the_accuracy_is_reached_or_no_longer_grows(self, build: Build) -> None:
        class Given(Own):
            def val_epoch(self) -> None:
                self.acc_history[self.acc_iter] = [0.5, 0.6, 0.61, 0.61, 0.61][self.cur_epoch]
                self.acc_iter += 1

        reached = build(Given, val_dataset=samples(4), num_epochs=5, stop_when_acc=0.6)
        reached.train()
        assert reached.cur_epoch == 2
        slow = build(
            Given, out="slow", val_dataset=samples(4), num_epochs=5, early_stop={"num_epochs": 2, "improv": 0.02}
        )
        slow.train()
        assert slow.cur_epoch == 4

    def test_a_body_that_forgets_the_loader_or_the_loss_is_told(self, build: Build) -> None:
        class Idle(Trainer):
            def train_epoch(self) -> None:
                pass

        class Mute(Trainer):
            def train_epoch(self) -> None:
                for data, _ in self.train_loader:
                    self.model(data)

        with pytest.raises(DataError, match=r"train_epoch\(\) of Idle did not go over self.train_loader"):
            build(Idle).train()
        with pytest.raises(DataError, match="a batch went by without a loss"):
            build(Mute).train()

    def test_a_second_walk_may_look_and_not_step(self, build: Build) -> None:
        class Twice(Own):
            def train_epoch(self) -> None:
                super().train_epoch()
                assert len(next(iter(self.train_loader))[0]) == 4
                super().train_epoch()

        with pytest.raises(HookError, match=r"second walk over self\.train_loader"):
            build(Twice).train()

    def test_a_train_of_ones_own_runs_as_written_and_is_told_what_it_lacks(
        self, build: Build, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Alone(Own):
            def train(self) -> None:  # type: ignore[override]
                for _ in range(self.cur_epoch, self.num_epochs):
                    self.train_epoch()
                    self.cur_epoch += 1

        trainer = build(Alone, shuffle=False)
        assert "Alone.train() goes its own way" in caplog.text
        trainer.train()
        expected = [value for one in by_hand(2).parameters() for value in one.detach().flatten().tolist()]
        assert (weights(trainer), trainer.cur_epoch, trainer.loss_iter) == (expected, 2, 12)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="its processes would drift apart"):
            build(Alone)

    def test_a_finder_sweeps_and_leaves_everything_as_it_was(self, build: Build) -> None:
        trainer = build(Own, val_dataset=samples(8, 1))
        before, history = weights(trainer), trainer.loss_history.copy()
        finder = LogFinder(trainer, lr_min=1e-4, lr_max=1.0, beta=0.5)
        low, high = finder.find()
        assert 1e-4 <= low < high <= 1.0
        assert (weights(trainer), trainer.loss_iter, trainer.get_learning_rate()) == (before, 0, 0.05)
        assert np.array_equal(trainer.loss_history, history)


class TestSchedules:
    @pytest.mark.parametrize("cls", [Trainer, Own])
    def test_an_object_is_asked_after_every_batch(self, build: Build, cls: type[Trainer]) -> None:
        given = schedule.TriangularScheduler(stepsize=3, lr_min=0.01, lr_max=0.04, lr_history_size=12)
        trainer = build(cls, lr_scheduler=given)
        trainer.train()
        assert given.lr_history[:6] == pytest.approx([0.02, 0.03, 0.04, 0.03, 0.02, 0.01])
        assert trainer.get_learning_rate() == given.lr_history[-1]

    def test_momentum_epochs_and_accuracies_are_asked_for_too(self, build: Build) -> None:
        class Sinking(schedule.DecayWhenAcc):
            seen: list[float] = []  # noqa: RUF012

            def rate(self, cur_acc: float) -> float:
                self.seen.append(cur_acc)
                return super().rate(cur_acc)

        epochs = schedule.EpochSetScheduler({0: 0.3, 1: 0.2})
        trainer = build(optim_function="SGD", momentum=0.5, lr_scheduler=epochs, mtm_scheduler=Sinking(),
                        val_dataset=samples(8, 1))  # fmt: skip
        trainer.train()
        assert trainer.get_learning_rate() == 0.2
        assert Sinking.seen == [0.0] * 6 + [trainer.get_acc_history()[0]] * 6
        assert trainer.get_momentum() == pytest.approx(0.01)

    def test_the_values_of_epochs_are_rates_and_a_wish_to_multiply_is_refused(self) -> None:
        by_default, asked = (
            schedule.EpochSetScheduler({0: 0.3, 2: 0.2}),
            schedule.EpochSetScheduler({0: 1.0}, lr_value=True),
        )
        assert (by_default.lr_value, asked.lr_value) == (False, True)
        assert [by_default.get_lr(epoch) for epoch in range(4)] == [0.3, 0.3, 0.2, 0.2]
        with pytest.raises(ConfigError, match="lr_value=False was given, to multiply the rate"):
            schedule.EpochSetScheduler({0: 1.0}, lr_value=False)

    def test_a_name_and_a_scheduler_of_torch_tick_by_themselves(self, build: Build) -> None:
        named = build(lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5})
        named.train()
        assert named.get_learning_rate() == 0.0125
        torchs = build(out="torchs", optim_function="SGD")
        torchs.set_lr_scheduler(torch.optim.lr_scheduler.ExponentialLR(torchs.optimizer, 0.5))
        torchs.train()
        assert torchs.get_learning_rate() == 0.0125

    def test_a_warm_up_leads_to_a_name_and_is_refused_beside_an_object(self, build: Build) -> None:
        given = schedule.TriangularScheduler(stepsize=3)
        with pytest.raises(ConfigError, match="warmup_steps=2 would have no effect: TriangularScheduler sets the rate"):
            build(lr_scheduler=given, warmup_steps=2).train()
        trainer = build(out="named", lr_scheduler="linear_decay", warmup_steps=2)
        with pytest.raises(ConfigError, match="warmup_steps=2 would have no effect"):
            trainer.lr_scheduler = given
        trainer.train()
        assert trainer.get_learning_rate() == pytest.approx(0.005)

    def test_each_shape_is_lernomatics(self) -> None:
        settings = {"lr_min": 0.1, "lr_max": 1.1, "stepsize": 4}
        shapes = {
            "TriangularScheduler": [0.1, 0.35, 0.6, 0.85, 1.1, 0.85],
            "InvTriangularScheduler": [1.1, 0.75, 0.5, 0.25, 0.0, 0.25],
            "Triangular2Scheduler": [0.1, 0.725, 0.85, 0.975, 1.1, 0.975],
            "ExponentialDecayScheduler": [1.1 * np.exp(-0.001 * n) for n in range(6)],
        }
        for name, rates in shapes.items():
            made = getattr(schedule, name)(**settings)
            assert [made.get_lr(n) for n in range(6)] == pytest.approx(rates), name

    def test_an_unknown_setting_is_told(self) -> None:
        with pytest.raises(ConfigError, match=r"step_size=3 is no setting of TriangularScheduler.*stepsize"):
            schedule.TriangularScheduler(step_size=3)


class TestFiles:
    def test_a_file_is_read_by_torch_and_brings_a_trainer_back(self, build: Build, tmp_path: Path) -> None:
        trained = build(Own, Points())
        trained.train()
        path = trained.save_checkpoint(tmp_path / "kept.pkl")
        assert sorted(torch.load(path)) == ["model", "optim", "trainer_params"]
        other = build(Own, None, out="other")
        other.model = None
        other.load_checkpoint(path)
        assert type(other.get_model()) is Points
        assert (weights(other), other.cur_epoch, other.num_epochs) == (weights(trained), 2, 2)
        other.set_num_epochs(3)
        other.train()
        assert (other.cur_epoch, other.loss_iter) == (3, 6)

    def test_a_wrapper_that_makes_itself_another_network_is_followed(self, build: Build) -> None:
        trainer = build(Own, Points())
        trainer.train()
        trainer.model.net = net()
        trainer.get_model().net = other = net()
        trainer._init_optimizer()
        assert trainer.get_model_params()["0.weight"].data_ptr() == other[0].weight.data_ptr()
        trainer.cur_epoch = 0
        trainer.train()
        assert not torch.equal(other[0].weight, net()[0].weight)

    def test_it_may_be_written_in_the_middle_of_an_epoch(self, build: Build, tmp_path: Path) -> None:
        class Saves(Own):
            def train_epoch(self) -> None:
                super().train_epoch()
                self.save_checkpoint(f"{self.checkpoint_dir}/{self.checkpoint_name}_epoch_{self.cur_epoch}.pkl")

        build(Saves).train()
        assert sorted(path.name for path in tmp_path.glob("*.pkl")) == [
            "ck_epoch_0.pkl",
            "ck_epoch_1.pkl",
            "ck_history.pkl",
        ]

    def test_in_the_middle_of_an_epoch_it_is_a_file_whatever_its_name(self, build: Build, tmp_path: Path) -> None:
        class Saves(Own):
            def train_epoch(self) -> None:
                super().train_epoch()
                self.save_checkpoint(f"{self.checkpoint_dir}/best_{self.checkpoint_name}")

        trained = build(Saves, Points())
        trained.train()
        assert sorted(torch.load(tmp_path / "best_ck")) == ["model", "optim", "trainer_params"]
        other = build(Own, Points(), out="other")
        other.load_checkpoint(tmp_path / "best_ck")
        assert weights(other) == weights(trained)
        assert trained.save_checkpoint(tmp_path / "whole").is_dir()

    def test_a_class_that_was_not_imported_is_not_imported_for_a_file(self, build: Build, tmp_path: Path) -> None:
        trained = build(Own, Points())
        path = trained.save_checkpoint(tmp_path / "kept.pkl")
        contents = torch.load(path)
        contents["model"]["model_import_path"] = "antigravity"
        torch.save(contents, path)
        with pytest.raises(CheckpointError, match=r"antigravity\.Points, which this program has not imported"):
            Own(checkpoint_dir=str(tmp_path)).load_checkpoint(path)

    def test_histories_come_back_also_from_a_file_with_arrays(self, build: Build, tmp_path: Path) -> None:
        trained = build(Own)
        trained.train()
        other = build(Own, out="other")
        other.load_history(tmp_path / "ck_history.pkl")
        assert other.get_loss_history().tolist() == trained.get_loss_history().tolist()
        torch.save({"loss_history": np.ones(3), "loss_iter": 3}, tmp_path / "theirs.pkl")
        other.load_history(tmp_path / "theirs.pkl")
        assert other.get_loss_history().tolist() == [1.0] * 3

    def test_a_file_that_would_run_something_is_refused(self, build: Build, tmp_path: Path) -> None:
        torch.save({"loss_history": Path("x")}, tmp_path / "odd.pkl")
        with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
            build(Own).load_history(tmp_path / "odd.pkl")


KILLED = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_lernomatic_keywords import pair
from hezar_train import Hook

class Kill(Hook):
    def on_batch_start(self, _):
        if self.trainer.state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

pair(Path(sys.argv[1]), checkpoint_name="killed", save_every=2, hooks=[Kill()]).train()
"""


class TestResume:
    @pytest.mark.parametrize("step", [1, 5, 6, 7, 12, 13, 17])
    def test_a_run_that_was_stopped_anywhere_ends_like_the_unbroken_one(self, tmp_path: Path, step: int) -> None:
        settings = {"save_every": 2, "resume_from_checkpoint": True}
        whole = pair(tmp_path, checkpoint_name="whole", **settings)
        whole.train()
        with pytest.raises(KeyboardInterrupt):
            pair(tmp_path, checkpoint_name="broken", hooks=[StopAt(step)], **settings).train()
        resumed = pair(tmp_path, checkpoint_name="broken", **settings)
        resumed.train()
        assert saved(tmp_path / "whole") == saved(tmp_path / "broken")
        assert weights(resumed) == weights(whole)
        assert resumed.critic_loss_history.tolist() == whole.critic_loss_history.tolist()
        assert (resumed.num_drawn, resumed.cur_epoch, resumed.loss_iter) == (whole.num_drawn, 3, 18)
        rates = [one.maker_optim.param_groups[0]["lr"] for one in (resumed, whole)]
        assert rates[0] == rates[1]

    def test_a_run_that_was_killed_ends_like_the_unbroken_one(self, tmp_path: Path) -> None:
        pair(tmp_path, checkpoint_name="whole", save_every=2).train()
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "9"], check=False, cwd=Path.cwd())
        assert killed.returncode == -signal.SIGKILL
        pair(tmp_path, checkpoint_name="killed", save_every=2, resume_from_checkpoint=True).train()
        assert saved(tmp_path / "whole") == saved(tmp_path / "killed")

    @pytest.mark.parametrize("is_set_later", [False, True])
    def test_a_schedule_object_goes_on_where_it_was(self, build: Build, is_set_later: bool) -> None:
        def run(out: str, *hooks: Hook, **given: Any) -> Any:
            kept = schedule.WarmRestartScheduler(stepsize=5, lr_min=0.01, lr_max=0.1)
            at_once = {} if is_set_later else {"lr_scheduler": kept}
            trainer = build(Own, out=out, save_every=2, hooks=hooks, **at_once, **given)
            trainer.set_lr_scheduler(kept)
            trainer.train()
            return trainer

        whole = run("whole")
        with pytest.raises(KeyboardInterrupt):
            run("broken", StopAt(7))
        resumed = run("broken", resume_from_checkpoint=True)
        assert weights(resumed) == weights(whole)
        assert resumed.lr_scheduler.batch_since_restart == whole.lr_scheduler.batch_since_restart

    def test_a_schedule_that_is_missing_after_a_resume_is_told(
        self, build: Build, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept = schedule.WarmRestartScheduler(stepsize=5, lr_min=0.01, lr_max=0.1)
        with pytest.raises(KeyboardInterrupt):
            build(Own, lr_scheduler=kept, save_every=2, hooks=[StopAt(7)]).train()
        build(Own, save_every=2, resume_from_checkpoint=True).train()
        assert "the checkpoint holds where lr_scheduler was" in caplog.text

    def test_a_setting_of_ones_own_that_was_changed_by_hand_stays_changed(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            pair(tmp_path, save_every=2, hooks=[StopAt(7)]).train()
        resumed = pair(tmp_path, save_every=2, factor=0.25, resume_from_checkpoint=True)
        resumed.train()
        assert resumed.factor == 0.25


class TestHistoryFile:
    """Once an epoch, after its validation, as in lernomatic."""

    class Telling(Own):
        """Remember which calls came, and how much had been noted."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.calls: list[Any] = []
            super().__init__(*args, **kwargs)

        def val_epoch(self) -> Any:
            self.calls.append("val")
            return super().val_epoch()

        def test_epoch(self) -> Any:
            self.calls.append("test")

        def save_history(self, path: Any) -> Any:
            self.calls.append((self.loss_iter, self.acc_iter))
            return super().save_history(path)

    def test_it_holds_the_validation_of_the_last_epoch(self, tmp_path: Path) -> None:
        trainer = self.Telling(
            net(), train_dataset=samples(), val_dataset=samples(8, 1), batch_size=8, num_epochs=2,
            checkpoint_dir=str(tmp_path), checkpoint_name="told",
        )  # fmt: skip
        trainer.train()
        assert trainer.calls == ["val", (3, 1), "val", (6, 2)]
        other = Own(net(), train_dataset=samples(), val_dataset=samples(8, 1), batch_size=8, num_epochs=2)
        other.load_history(str(tmp_path / "told_history.pkl"))
        assert other.acc_history.tolist() == trainer.acc_history.tolist()
        assert (other.acc_iter, other.val_loss_iter) == (trainer.acc_iter, trainer.val_loss_iter) == (2, 2)

    def test_without_a_name_the_run_has_the_usual_one(self, tmp_path: Path) -> None:
        settings = {"train_dataset": samples(), "batch_size": 8, "num_epochs": 1, "checkpoint_dir": str(tmp_path)}
        trainer = Own(net(), checkpoint_name=None, **settings)
        trainer.train()
        assert (trainer.checkpoint_name, trainer.loss_iter) == (None, len(trainer.train_loader))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "ck_history.pkl"]

    def test_without_validation_it_follows_the_training(self, tmp_path: Path) -> None:
        trainer = self.Telling(net(), train_dataset=samples(), batch_size=8, num_epochs=2, checkpoint_dir=str(tmp_path))
        trainer.train()
        assert trainer.calls == [(3, 0), (6, 0)]

    def test_a_loader_of_test_data_alone_is_gone_over_each_epoch(self, tmp_path: Path) -> None:
        class Tested(self.Telling):  # type: ignore[name-defined, misc]
            def _init_dataloaders(self) -> None:
                super()._init_dataloaders()
                self.test_loader = DataLoader(samples(8, 1), batch_size=4)

        trainer = Tested(net(), train_dataset=samples(), batch_size=8, num_epochs=2, checkpoint_dir=str(tmp_path))
        trainer.train()
        assert trainer.calls == ["test", (3, 0), "test", (6, 0)]
