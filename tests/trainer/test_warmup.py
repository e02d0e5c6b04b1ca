"""A warm-up and the ticks of schedules in real runs: the rates that updates use, killed and resumed, on processes."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from hezar_train import Hook, MultiModelTrainer, Trainer, TrainerConfig
from hezar_train.compat.lernomatic import Trainer as LernomaticTrainer
from hezar_train.compat.libai import Trainer as LiBaiTrainer
from hezar_train.errors import ConfigError

Build = Callable[..., Trainer]


class Rates(Hook):
    """Note the learning rate of each update."""

    def __init__(self, breaks_after: int | None = None) -> None:
        self.used: list[float] = []
        self._breaks_after = breaks_after

    def on_update(self, ctx: Any) -> None:
        self.used.append(self.trainer.optimizer.param_groups[0]["lr"])

    def after_step(self) -> None:
        if self.trainer.state.global_step == self._breaks_after:
            raise KeyError("broken")


def rates(trainer: Trainer) -> list[float]:
    """Train; return the learning rate of each update."""
    watch = Rates()
    trainer.register_hooks([watch])
    trainer.train()
    return watch.used


def told_of_rates(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of a schedule that would hardly train."""
    found = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in found if "of the learning rate" in message]


def test_a_warm_up_of_a_tenth_of_three_epochs_does_not_train_the_first_epoch_at_nothing(
    toy: Build, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = toy(num_epochs=3, lr_scheduler="warmup_linear", lr_scheduler_kwargs={"warmup_ratio": 0.1})
    before = copy.deepcopy(trainer.model.state_dict())
    used = rates(trainer)
    assert used == pytest.approx([0.0, 0.05, *(0.1 * left / 13 for left in range(13, 0, -1))])
    assert all(rate > 0 for rate in used[1:])
    assert not torch.equal(before["layer.weight"], trainer.model.state_dict()["layer.weight"])
    assert told_of_rates(caplog) == []


def test_the_field_does_it_from_the_first_update_on(toy: Build) -> None:
    used = rates(toy(num_epochs=3, lr_scheduler="warmup_linear", warmup_steps=0.2))
    assert used == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, *(0.1 * left / 12 for left in range(12, 0, -1))])


def test_a_schedule_that_would_idle_is_warned_of_once_and_not_when_it_goes_on(
    toy: Build, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"num_epochs": 3, "lr_scheduler": "warmup_linear", "lr_scheduler_kwargs": {"warmup_iter": 2}}
    trainer = toy(save_steps=2, hooks=[Rates(breaks_after=7)], **given)
    with pytest.raises(KeyError):
        trainer.train()
    (told,) = told_of_rates(caplog)
    assert "5 of 15 updates (33%), the first of them number 1," in told
    assert "Set lr_scheduling_steps=1 for a tick after every update" in told
    caplog.clear()
    toy(resume_from_checkpoint=True, save_steps=2, **given).train()
    assert told_of_rates(caplog) == []


def test_a_run_that_ends_in_its_warm_up_is_told(toy: Build, caplog: pytest.LogCaptureFixture) -> None:
    assert rates(toy(warmup_steps=50)) == pytest.approx([0.1 * update / 50 for update in range(1, 6)])
    assert "the run ends inside its warm-up" in caplog.text


def test_a_trainer_without_a_run_is_not_told_that_the_warm_up_it_has_is_missing(
    tmp_path: Path, classifier: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainerConfig(tmp_path, criterion="CrossEntropyLoss", lr_scheduler="warmup_cosine", warmup_steps=0.1)
    assert Trainer(config, classifier(), eval_dataset=rows()).plan.warmup_updates == 0  # of a run of no steps
    assert "has no warm-up" not in caplog.text


@pytest.mark.parametrize("cut", [1, 3, 4, 8])
@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_steps": 4},
        {"warmup_steps": 4, "lr_scheduler": "cosine_annealing", "lr_scheduling_steps": 1},
        {"warmup_steps": 0.4, "lr_scheduler": "inverse_sqrt"},
        {"warmup_steps": 7, "lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}},
    ],
)
def test_a_killed_run_goes_on_with_the_rates_of_the_unbroken_one(toy: Build, cut: int, fields: dict[str, Any]) -> None:
    fields = {"num_epochs": 2, "optimizer": "adamw", "save_steps": 1, **fields}
    whole = toy(out="whole", **fields)
    unbroken = rates(whole)
    broken = toy(hooks=[watch := Rates(breaks_after=cut + 1)], **fields)
    with pytest.raises(KeyError):
        broken.train()
    resumed = toy(resume_from_checkpoint=True, **fields)
    begun = resumed.state.global_step
    assert begun == cut
    assert watch.used[:begun] + rates(resumed) == unbroken
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_another_warm_up_is_refused_at_resume(toy: Build) -> None:
    toy(warmup_steps=2).train()
    with pytest.raises(ConfigError, match="warmup_steps: 2 in the checkpoint, 3 now"):
        toy(warmup_steps=3, num_epochs=2, resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="warmup_steps: 2 in the checkpoint, None now"):
        toy(num_epochs=2, resume_from_checkpoint=True)


def test_an_object_is_led_to_as_well(toy: Build, classifier: Any) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}
    assert rates(toy(num_epochs=2, warmup_steps=2, **given)) == [0.4] + [0.8] * 4 + [0.4] * 5


def test_an_object_ticks_at_epoch_ends_whatever_the_config_names(toy: Build, classifier: Any) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    given = {"model": model, "optimizer": optimizer, "train_dataset": None}
    config = TrainerConfig("run", lr_scheduler="warmup_linear")
    trainer = toy(lr_scheduler=StepLR(optimizer, 1, 0.5), **given)
    named = Trainer(config, model, trainer.train_dataset, optimizer=optimizer, lr_scheduler=trainer.lr_scheduler)
    assert named.plan.schedule_updates is None


def test_a_default_schedule_of_a_class_ticks_as_a_named_one(toy: Build) -> None:
    class WithDefault(Trainer):
        default_lr_scheduler = "warmup_linear"

    assert rates(toy(WithDefault, warmup_steps=1)) == pytest.approx([0.1, 0.1, 0.075, 0.05, 0.025])

    class WithNoam(Trainer):
        default_lr_scheduler = "warmup_noam"

    with pytest.raises(ConfigError, match="'warmup_noam' has its warm-up in its formula"):
        toy(WithNoam, warmup_steps=1, lr_scheduler_kwargs={"warmup_iter": 2})


def test_a_warm_up_begins_anew_in_each_round_with_a_fresh_optimizer(toy: Build) -> None:
    trainer = toy(local_update_steps=4, fresh_optimizer=True, warmup_steps=2)
    trainer.register_hooks([watch := Rates()])
    trainer.train()
    trainer.train()
    assert watch.used == [0.05, 0.1, 0.1, 0.1] * 2


def test_several_models_are_each_led_to_their_rate(tmp_path: Path, classifier: Any, rows: Any) -> None:
    config = TrainerConfig(
        tmp_path / "run", batch_size=4, learning_rate=0.1, criterion="CrossEntropyLoss", optimizer="sgd",
        warmup_steps=2, lr_scheduler="warmup_linear",
    )  # fmt: skip
    trainer = MultiModelTrainer(config, {"a": classifier(0), "b": classifier(1)}, rows())
    used: dict[str, list[float]] = {"a": [], "b": []}

    class Watch(Hook):
        def on_batch_start(self, _: Any) -> None:
            for name in trainer.schedule.learning:
                used[name] += trainer.schedule.schedules[name].rates()

    trainer.register_hooks([Watch()])
    assert trainer.schedule.is_warming
    trainer.train()
    expected = pytest.approx([0.05, 0.1, 0.1, 0.2 / 3, 0.1 / 3])
    assert (used["a"], used["b"]) == (expected, expected)
    assert not trainer.schedule.is_warming


def test_the_rate_finder_leaves_a_warm_up_as_it_was(toy: Build) -> None:
    trainer = toy(warmup_steps=3, lr_scheduler="warmup_linear", num_epochs=2)
    before = json.dumps(trainer.schedule.state_dict())
    trainer.find_lr(num_steps=4)
    assert json.dumps(trainer.schedule.state_dict()) == before
    assert rates(trainer)[:3] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])


def test_another_schedule_has_the_tick_and_the_warm_up_of_its_config(toy: Build) -> None:
    trainer = toy(num_epochs=2)
    wanted = copy.deepcopy(trainer.config).update(lr_scheduler="warmup_linear", warmup_steps=2)
    trainer.reschedule(wanted)
    assert (trainer.plan.schedule_updates, trainer.plan.warmup_updates, trainer.plan.total_ticks) == (1, 2, 8)
    trainer.reschedule(copy.deepcopy(wanted).update(warmup_steps=4))  # from the base again, not from half of it
    assert rates(trainer)[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_a_scheduler_built_over_a_rate_that_warms_up_is_refused(toy: Build) -> None:
    trainer = toy(num_epochs=2, warmup_steps=4, lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1})
    with pytest.raises(ConfigError, match="the rates of the optimizer are those of a warm-up"):
        trainer.reschedule(lr_scheduler=StepLR(trainer.optimizer, 1))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.025


def test_more_epochs_before_the_first_step_are_planned_anew(toy: Build, classifier: Any) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}
    trainer = toy(warmup_steps=0.4, **given)
    trainer.reconfigure(copy.deepcopy(trainer.config).update(num_epochs=2))
    assert rates(trainer) == [0.2, 0.4, pytest.approx(0.6), 0.8, 0.8] + [0.4] * 5


def test_more_epochs_in_the_middle_keep_the_tick(toy: Build) -> None:
    trainer = toy(lr_scheduler="warmup_linear", lr_scheduler_kwargs={"warmup_ratio": 0.2}, local_update_steps=5,
                  fresh_optimizer=True)  # fmt: skip
    trainer.train()
    trainer.reconfigure(copy.deepcopy(trainer.config).update(log_steps=2))
    assert trainer.plan.schedule_updates == 1


def test_behind_libais_door_every_schedule_ticks_in_each_iteration(toy: Build) -> None:
    assert rates(toy(LiBaiTrainer, lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1, "gamma": 0.5})) == [
        0.1 * 0.5**update for update in range(5)
    ]


def test_behind_lernomatics_door_a_named_form_over_the_run_ticks_every_update(toy: Build) -> None:
    found = rates(toy(LernomaticTrainer, lr_scheduler="linear_decay"))
    assert found == pytest.approx([0.1, 0.082, 0.064, 0.046, 0.028])


def test_the_table_of_facts_says_when_a_schedule_ticks(toy: Build, capsys: pytest.CaptureFixture[str]) -> None:
    for fields, words in (
        (
            {"lr_scheduler": "warmup_linear", "warmup_steps": 2},
            "warmup_linear, ticks every update, after a warm-up of 2",
        ),
        ({"lr_scheduler": "linear"}, "LinearLR, ticks at epoch ends"),
        ({"lr_scheduler": "linear", "lr_scheduling_steps": 2}, "LinearLR, ticks every 2 updates"),
        ({"lr_scheduler": "reduce_on_plateau"}, "ReduceLROnPlateau, ticks after evaluations"),
        ({"warmup_steps": 2}, "Schedule               a warm-up of 2 updates"),
        ({"warmup_steps": 2}, "Learning rate          0.1 (now 0.05)"),
    ):
        toy(**fields).print_info()
        assert words in capsys.readouterr().out
