"""lernomatic's way to train: a run that is extended, epochs with a body of their own, setters, checkpoints at paths."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

from hezar_train import EventStorage, Hook, TrainerConfig
from hezar_train.compat.lernomatic import Trainer
from hezar_train.errors import CheckpointError, ConfigError, DataError, HookError, NonFiniteError
from hezar_train.events import EventWriter
from hezar_train.types import Mode

Build = Callable[..., Trainer]

UNEQUAL = ("time", "samples_per_second")


@pytest.fixture
def toy(toy: Build) -> Build:
    """Build the toy with lernomatic's Trainer."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        return toy(cls, **given)

    return build


class OwnEpoch(Trainer):
    """The body of an epoch, as lernomatic's users write it."""

    def train_epoch(self) -> None:
        self.model.train()
        for batch in self.train_loader:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(batch["x"]), batch["labels"])
            loss.backward()
            self.optimizer.step()
            self.note_loss(loss)


KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import toy_run
from test_lernomatic import OwnEpoch
from hezar_train import EventStorage, Hook, TrainerConfig

class Kill(Hook):
    def before_step(self):
        if self.trainer.state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

config = TrainerConfig(sys.argv[1] + "/killed", batch_size=4, learning_rate=0.1, criterion="CrossEntropyLoss",
                       num_epochs=2, save_steps=2, log_steps=2, optimizer="adam")
OwnEpoch(config, toy_run.Classifier(), toy_run.make_rows(), hooks=[Kill()]).train()
"""


class Stop(RuntimeError):  # noqa: N818 - what happens, not what went wrong
    """What a test's hook raises."""


class StopAt(Hook):
    """Raise at a moment of the step that follows `step` finished ones."""

    def __init__(self, step: int, moment: str, mode: Mode = Mode.TRAIN) -> None:
        self.modes = frozenset({mode})
        self._step = step
        setattr(self, moment, self._raise)

    def _raise(self, _: Any) -> None:
        if self.trainer.state.global_step == self._step:
            raise Stop


class Rows(IterableDataset[dict[str, Any]]):
    """A stream whose place can be kept."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows, self._next = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < len(self._rows):
            self._next += 1
            yield self._rows[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _tensors(run: Path) -> dict[str, list[float]]:
    """Return model and optimizer of a run's last checkpoint."""
    last = max((run / "checkpoints").glob("[0-9]*"))
    found = {f"{name}.{key}": value for name in ("model", "optimizer")
             for key, value in load_file(last / f"{name}.safetensors").items()}  # fmt: skip
    return {name: value.flatten().tolist() for name, value in sorted(found.items())}


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith(UNEQUAL)}


def _weights(trainer: Trainer) -> list[float]:
    return [value for parameter in trainer.model.parameters() for value in parameter.detach().flatten().tolist()]


@pytest.fixture
def equal_runs(tmp_path: Path, logged: Any) -> Callable[[str, str], None]:
    """Return a function that compares two runs: last checkpoint, rows, ledger, evaluations, best."""

    def compare(one: str, other: str) -> None:
        first, second = tmp_path / one, tmp_path / other
        assert _tensors(first) == _tensors(second)
        assert [_same(row) for row in logged(one)] == [_same(row) for row in logged(other)]
        for name in ("ledger.jsonl", "best.json", *(f"evaluations/{p.name}" for p in first.glob("evaluations/*"))):
            assert (first / name).read_text() == (second / name).read_text()

    return compare


class TestExtending:
    @pytest.mark.parametrize(
        "settings",
        [
            {"optimizer": "adam"},
            {"gradient_accumulation_steps": 2, "log_steps": 2, "save_steps": 2},
            {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}},
            {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}},
        ],
    )
    def test_two_stages_are_the_run_that_was_planned_at_once(
        self, toy: Build, rows: Any, equal_runs: Any, settings: dict[str, Any]
    ) -> None:
        toy(out="whole", num_epochs=5, eval_dataset=rows(6), **settings).train()
        staged = toy(out="staged", num_epochs=2, eval_dataset=rows(6), **settings)
        staged.train()
        assert (staged.get_num_epochs(), staged.get_cur_epoch()) == (2, 2)
        staged.set_num_epochs(5)
        assert staged.train().num_samples == 60
        assert (staged.get_num_epochs(), staged.get_cur_epoch()) == (5, 5)
        equal_runs("whole", "staged")

    def test_epochs_that_are_finished_are_counted_from_nought(self, toy: Build) -> None:
        seen: list[int] = []

        class Look(Hook):
            def after_step(self) -> None:
                seen.append(self.trainer.get_cur_epoch())

        trainer = toy(num_epochs=2, hooks=[Look()])
        assert trainer.get_cur_epoch() == 0
        trainer.train()
        assert seen == [0] * 4 + [1] * 5 + [2]  # the last step of an epoch has finished it
        assert trainer.get_cur_epoch() == 2

    def test_a_length_set_before_the_first_step_is_the_one_the_schedule_is_laid_out_over(
        self, toy: Build, equal_runs: Any
    ) -> None:
        settings = {"lr_scheduler": "one_cycle", "lr_scheduling_steps": 1}
        toy(out="planned", num_epochs=4, **settings).train()
        late = toy(out="set", num_epochs=2, **settings)
        late.set_num_epochs(4)
        late.train()
        equal_runs("planned", "set")

    def test_a_schedule_under_way_that_spans_the_run_refuses_another_length(self, toy: Build) -> None:
        trainer = toy(num_epochs=2, lr_scheduler="one_cycle", lr_scheduling_steps=1)
        trainer.train()
        with pytest.raises(ConfigError, match=r"schedule is under way and cannot follow: total steps: 10 .* 20 now"):
            trainer.set_num_epochs(4)
        assert trainer.get_num_epochs() == 2
        assert trainer.plan.total_steps == 10

    def test_a_killed_second_stage_goes_on_exactly(self, toy: Build, rows: Any, equal_runs: Any) -> None:
        toy(out="whole", num_epochs=4, eval_dataset=rows(6), save_steps=2).train()

        def staged(*hooks: Hook) -> Trainer:
            settings = {"num_epochs": 2, "save_steps": 2, "resume_from_checkpoint": True}
            trainer = toy(out="staged", eval_dataset=rows(6), hooks=hooks, **settings)
            trainer.train()
            trainer.set_num_epochs(4)
            trainer.train()
            return trainer

        with pytest.raises(Stop):
            staged(StopAt(13, "on_batch_forward"))
        staged()
        equal_runs("whole", "staged")

    def test_the_place_in_a_stream_survives_another_length(self, toy: Build, rows: Any, tmp_path: Path) -> None:
        def run(out: str, *stages: int) -> list[float]:
            trainer = toy(out=out, train_dataset=Rows(rows()), max_steps=stages[0], num_epochs=3)
            for stage in stages:
                trainer.set_trainer_params({"max_steps": stage})
                trainer.train()
            return _weights(trainer)

        assert run("whole", 9) == run("staged", 3, 9)

    def test_nothing_changes_while_training(self, toy: Build) -> None:
        class Meddle(Hook):
            def after_step(self) -> None:
                self.trainer.set_num_epochs(9)

        with pytest.raises(HookError, match=r"another config or other data in the middle of training.*between two"):
            toy(hooks=[Meddle()]).train()


class TestBodies:
    def test_a_body_of_ones_own_keeps_everything_around_it(self, toy: Build, rows: Any, equal_runs: Any) -> None:
        settings = {"num_epochs": 2, "save_steps": 2, "log_steps": 2, "eval_steps": 3, "eval_dataset": rows(6)}
        moments: list[str] = []
        own = toy(OwnEpoch, out="own", **settings)
        for moment in ("on_epoch_start", "on_batch_start", "on_batch_end", "on_epoch_end"):
            own.register_hook_in_train(lambda _, moment=moment: moments.append(moment), moment)
        own.train()
        toy(out="plain", **settings).train()
        assert moments == (["on_epoch_start", *["on_batch_start", "on_batch_end"] * 5, "on_epoch_end"]) * 2
        assert _tensors(Path(own.config.output_dir)) == _tensors(Path(own.config.output_dir).with_name("plain"))
        assert len(own.get_loss_history()) == 10
        assert own.state.best_checkpoint is not None

    @pytest.mark.parametrize(
        ("step", "moment"),
        [
            *((step, "on_batch_start") for step in range(10)),
            *((step, "on_batch_end") for step in range(1, 11)),
            (5, "on_epoch_start"),
            (5, "on_epoch_end"),
        ],
    )
    def test_a_body_of_ones_own_that_crashes_goes_on_exactly(
        self, toy: Build, rows: Any, equal_runs: Any, step: int, moment: str
    ) -> None:
        settings = {"num_epochs": 2, "save_steps": 2, "log_steps": 2, "eval_dataset": rows(6), "optimizer": "adam"}
        toy(OwnEpoch, out="whole", **settings).train()
        with pytest.raises(Stop):
            toy(OwnEpoch, out="killed", hooks=[StopAt(step, moment)], **settings).train()
        toy(OwnEpoch, out="killed", resume_from_checkpoint=True, **settings).train()
        equal_runs("whole", "killed")

    @pytest.mark.parametrize("step", [3, 7])
    def test_a_body_of_ones_own_that_is_killed_goes_on_exactly(
        self, toy: Build, equal_runs: Any, tmp_path: Path, step: int
    ) -> None:
        settings = {"num_epochs": 2, "save_steps": 2, "log_steps": 2, "optimizer": "adam"}
        toy(OwnEpoch, out="whole", **settings).train()
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(step)], check=False, cwd=Path.cwd())
        assert killed.returncode == -signal.SIGKILL
        toy(OwnEpoch, out="killed", resume_from_checkpoint=True, **settings).train()
        equal_runs("whole", "killed")

    def test_a_loop_that_is_left_early_is_told(self, toy: Build) -> None:
        class Hasty(Trainer):
            def train_epoch(self) -> None:
                for number, _ in enumerate(self.train_loader):
                    self.run_step()
                    if number == 2:
                        break

        with pytest.raises(DataError, match=r"train_epoch\(\) left its loop before the epoch's end"):
            toy(Hasty).train()

    def test_a_loss_that_is_not_finite_stops_a_body_of_ones_own(self, toy: Build, saved_steps: Any) -> None:
        class Exploding(OwnEpoch):
            def note_loss(self, loss: Any) -> None:
                super().note_loss(loss * float("nan") if self.state.global_step == 3 else loss)

        with pytest.raises(NonFiniteError, match="loss nan in the update at step 4"):
            toy(Exploding, save_steps=2).train()
        assert saved_steps() == [2]

    def test_a_body_without_a_loss_is_told(self, toy: Build) -> None:
        class Forgetful(Trainer):
            def train_epoch(self) -> None:
                for batch in self.train_loader:
                    self.model(batch["x"])

        with pytest.raises(DataError, match=r"without a loss.*note_loss"):
            toy(Forgetful).train()

    def test_validation_and_test_bodies_go_over_their_loaders(self, toy: Build, rows: Any) -> None:
        seen: list[tuple[str, int, bool]] = []

        class Own(OwnEpoch):
            def val_epoch(self) -> dict[str, float]:
                return {"loss": self._mean("val", self.val_loader)}

            def test_epoch(self) -> dict[str, float]:
                return {"loss": self._mean("test", self.test_loader)}

            def _mean(self, split: str, loader: Any) -> float:
                assert len(loader) == -(-len(self.splits.data[split]) // 4)
                sizes = [len(batch["x"]) for batch in loader]
                seen.append((split, sum(sizes), torch.is_grad_enabled() or self.model.training))
                return 1.0 / len(seen)

        result = toy(Own, num_epochs=2, train_dataset={"train": rows(), "val": rows(6), "test": rows(9)}).train()
        assert seen == [("val", 6, False), ("test", 9, False)] * 2
        assert result.metrics["evaluation.loss"] == 1 / 3
        assert result.metrics["evaluation.test.loss"] == 1 / 4

    def test_what_a_validation_body_draws_is_the_same_after_a_kill(
        self, toy: Build, rows: Any, equal_runs: Any
    ) -> None:
        class Draws(OwnEpoch):
            def val_epoch(self) -> dict[str, float]:
                for hook in self.parts.checkpointing.hooks:
                    hook.on_fit_start(None)  # type: ignore[attr-defined]
                return {"loss": float(torch.rand(()))}

        settings = {"num_epochs": 2, "eval_dataset": rows(6)}
        toy(Draws, out="whole", **settings).train()
        with pytest.raises(Stop):
            toy(Draws, out="killed", hooks=[StopAt(5, "on_fit_start")], **settings).train()
        toy(Draws, out="killed", resume_from_checkpoint=True, **settings).train()
        equal_runs("whole", "killed")

    def test_a_validation_without_a_result_is_no_obstacle(
        self, toy: Build, rows: Any, saved_steps: Any, tmp_path: Path
    ) -> None:
        class Silent(Trainer):
            def val_epoch(self) -> None:  # type: ignore[override]
                pass

        assert set(toy(Silent, num_epochs=2, eval_dataset=rows(6)).train().metrics) == {"train.loss"}
        assert saved_steps() == [5, 10]
        assert not (tmp_path / "run/best.json").exists()

    def test_a_test_set_alone_is_not_evaluated_while_training(self, toy: Build, rows: Any) -> None:
        trainer = toy(train_dataset={"train": rows(), "test": rows(9)})
        assert set(trainer.train().metrics) == {"train.loss"}
        assert trainer.test_epoch() == trainer.evaluate("test")


class TestRates:
    def test_a_rate_is_set_in_every_group_or_in_the_first(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        groups = [{"params": [model.layer.weight]}, {"params": [model.layer.bias], "lr": 0.2}]
        trainer = toy(model=model, optimizer=torch.optim.SGD(groups, lr=0.1))
        assert trainer.get_learning_rate() == 0.1
        trainer.set_learning_rate(0.7, param_zero=True)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.7, 0.2]
        trainer.set_learning_rate(0.5)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5, 0.5]

    def test_a_rate_that_was_set_survives_a_resume_and_a_fresh_optimizer(self, toy: Build) -> None:
        trainer = toy(num_epochs=2)
        trainer.set_learning_rate(0.5)
        trainer.train()
        assert toy(num_epochs=2, resume_from_checkpoint=True).get_learning_rate() == 0.5
        rounds = toy(out="rounds", local_update_steps=2, fresh_optimizer=True)
        rounds.set_learning_rate(0.5)
        rounds.train()
        assert rounds.get_learning_rate() == 0.5

    @pytest.mark.parametrize("name", ["sgd", "adam"])
    def test_a_momentum_is_read_and_set(self, toy: Build, name: str) -> None:
        trainer = toy(optimizer=name, momentum=0.5)
        assert trainer.get_momentum() == 0.5
        trainer.set_momentum(0.8)
        assert trainer.get_momentum() == 0.8
        assert toy(optimizer="adagrad").get_momentum() is None

    def test_a_schedule_is_set_by_name_from_its_first_tick_on(self, toy: Build, equal_runs: Any) -> None:
        settings = {"lr_scheduling_steps": 1, "num_epochs": 2}
        toy(out="asked", lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5}, **settings).train()
        for number, first in enumerate([None, "one_cycle", "step"]):
            kwargs = {"lr_scheduler_kwargs": {"step_size": 1}} if first == "step" else {}
            trainer = toy(out=f"set{number}", lr_scheduler=first, **kwargs, **settings)
            trainer.set_lr_scheduler("exponential", gamma=0.5)
            assert trainer.get_lr_scheduler() is trainer.lr_scheduler
            trainer.train()
            equal_runs("asked", f"set{number}")

    def test_a_schedule_may_be_an_object_or_none(self, toy: Build) -> None:
        trainer = toy(num_epochs=3)
        trainer.set_lr_scheduler(StepLR(trainer.optimizer, step_size=1, gamma=0.5))
        trainer.train()
        assert trainer.get_learning_rate() == 0.1 * 0.5**3
        trainer.set_lr_scheduler(None)
        assert trainer.get_lr_scheduler() is None
        trainer.set_num_epochs(5)
        trainer.train()
        assert trainer.get_learning_rate() == 0.1 * 0.5**3

    def test_a_schedule_that_cannot_be_built_changes_nothing(self, toy: Build) -> None:
        trainer = toy(lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5})
        trainer.train()
        before = trainer.schedule
        with pytest.raises(ConfigError, match="gama"):
            trainer.set_lr_scheduler("exponential", gama=0.5)
        assert trainer.schedule is before
        assert trainer.config.lr_scheduler_kwargs == {"gamma": 0.5}
        assert trainer.get_learning_rate() == 0.05

    def test_a_momentum_follows_a_curve_that_was_set(self, toy: Build) -> None:
        settings = {"optimizer": "sgd", "momentum": 0.9, "lr_scheduling_steps": 1}
        trainer = toy(**settings)
        trainer.set_mtm_scheduler("triangular", min=0.5, max=0.8, stepsize=5)
        asked = toy(out="asked", momentum_scheduler="triangular",
                    momentum_scheduler_kwargs={"min": 0.5, "max": 0.8, "stepsize": 5}, **settings)  # fmt: skip
        assert trainer.get_mtm_scheduler() is not None
        trainer.train()
        asked.train()
        assert trainer.get_momentum() == asked.get_momentum() != 0.9
        assert _weights(trainer) == _weights(asked)


class TestData:
    def test_sizes_and_data_count_from_the_next_epoch_on(self, toy: Build, rows: Any) -> None:
        trainer = toy()
        trainer.train()
        trainer.set_batch_size(10)
        assert trainer.plan.steps_in_epoch == 2
        trainer.set_train_dataset(rows(30))
        assert trainer.plan.steps_in_epoch == 3
        trainer.set_num_epochs(2)
        assert trainer.train().num_samples == 30
        assert trainer.state.global_step == 5 + 3
        assert trainer.ctx.num_train_data == 30

    def test_a_run_with_data_set_before_it_is_the_run_built_with_it(
        self, toy: Build, rows: Any, equal_runs: Any
    ) -> None:
        toy(out="built", train_dataset=rows(12, seed=3), eval_dataset=rows(6), num_epochs=2).train()
        trainer = toy(out="set", num_epochs=2)
        trainer.set_train_dataset(rows(12, seed=3))
        trainer.set_val_dataset(rows(6))
        trainer.train()
        equal_runs("built", "set")

    def test_validation_can_be_taken_up_and_left(self, toy: Build, rows: Any) -> None:
        trainer = toy(num_epochs=1)
        trainer.set_val_dataset(rows(6))
        assert "evaluation.loss" in trainer.train().metrics
        assert trainer.state.metric_for_best_checkpoint == "evaluation.loss"
        trainer.set_val_dataset(None)
        trainer.set_num_epochs(2)
        assert set(trainer.train().metrics) == {"train.loss"}
        assert trainer.val_loader is None

    def test_a_test_set_has_its_own_place(self, toy: Build, rows: Any) -> None:
        trainer = toy(task="text_classification", eval_dataset=rows(6))
        trainer.set_test_dataset(rows(9))
        assert trainer.test_epoch() == trainer.evaluate(rows(9))
        assert trainer.evaluate() == trainer.evaluate(rows(6))

    @pytest.mark.parametrize("change", ["batch size", "data"])
    def test_the_middle_of_an_epoch_is_no_place_for_it(self, toy: Build, rows: Any, change: str) -> None:
        trainer = toy(max_steps=3)
        trainer.train()
        before = (trainer.config, trainer.plan, trainer.train_dataset)
        with pytest.raises(DataError, match="cannot change in the middle of an epoch"):
            trainer.set_batch_size(10) if change == "batch size" else trainer.set_train_dataset(rows(12))
        assert (trainer.config, trainer.plan, trainer.train_dataset) == before


class TestFreezing:
    @pytest.mark.parametrize("settings", [{"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adamw"}])
    def test_exactly_the_first_tensors_stay_bit_by_bit(self, toy: Build, rows: Any, settings: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        trainer = toy(model=model, data_collator=_pairs, weight_decay=0.1, num_epochs=1, **settings)
        trainer.train()  # every tensor now has a state in the optimizer
        trainer.freeze_to(3)
        assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 3 + [True] * 3
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.set_num_epochs(2)
        trainer.train()
        kept = [torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True)]
        assert kept == [True] * 3 + [False] * 3
        trainer.unfreeze_to(2)
        assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, False, True, True, True]

    def test_what_is_frozen_is_frozen_after_a_resume(self, toy: Build) -> None:
        trainer = toy(num_epochs=1)
        trainer.freeze_to(1)
        trainer.train()
        resumed = toy(num_epochs=2, resume_from_checkpoint=True)
        assert [parameter.requires_grad for parameter in resumed.model.parameters()] == [False, True]
        assert [parameter.requires_grad for parameter in toy(out="new").model.parameters()] == [True, True]

    def test_more_tensors_than_there_are_is_an_error(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="3 parameter tensors were asked for; expected 0 to 2"):
            toy().freeze_to(3)

    def test_what_the_optimizer_does_not_hold_cannot_be_thawed(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        model.layer.weight.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"the optimizer does not hold layer\.weight"):
            toy(model=model).unfreeze_to(2)


class TestCheckpoints:
    def test_a_whole_one_brings_a_trainer_to_where_it_was_saved(
        self, toy: Build, rows: Any, equal_runs: Any, tmp_path: Path
    ) -> None:
        toy(out="whole", num_epochs=4, optimizer="adam", eval_dataset=rows(6)).train()
        first = toy(out="first", num_epochs=2, optimizer="adam", eval_dataset=rows(6))
        first.train()
        path = first.save_checkpoint(tmp_path / "kept/here")
        other = toy(out="other", num_epochs=4, optimizer="adam", eval_dataset=rows(6))
        other.load_checkpoint(path)
        assert (other.get_cur_epoch(), _weights(other)) == (2, _weights(first))
        other.train()
        assert _tensors(tmp_path / "other") == _tensors(tmp_path / "whole")

    @pytest.mark.parametrize("step", [4, 5, 8])
    def test_going_back_in_the_same_trainer_does_the_rest_again(
        self, toy: Build, rows: Any, equal_runs: Any, saved_steps: Any, tmp_path: Path, step: int
    ) -> None:
        settings = {"num_epochs": 2, "eval_dataset": rows(6), "save_steps": 4}
        toy(out="whole", **settings).train()
        trainer = toy(out="again", **settings)
        trainer.train()
        trainer.load_checkpoint(tmp_path / f"again/checkpoints/{step:08d}")
        assert trainer.train().num_samples == (10 - step) * 4
        assert saved_steps("again") == [4, 5, 8, 10]
        equal_runs("whole", "again")

    def test_the_weights_alone_leave_rate_epoch_and_optimizer(self, toy: Build, tmp_path: Path) -> None:
        trained = toy(num_epochs=2, optimizer="adam")
        trained.train()
        path = trained.save_checkpoint(tmp_path / "kept")
        other = toy(out="other", optimizer="adam", learning_rate=0.7)
        other.load_model_checkpoint(path)
        assert _weights(other) == _weights(trained)
        assert (other.get_cur_epoch(), other.get_learning_rate(), dict(other.optimizer.state)) == (0, 0.7, {})

    def test_one_that_is_there_is_replaced_and_anything_else_is_not(self, toy: Build, tmp_path: Path) -> None:
        trainer = toy(num_epochs=1)
        path = trainer.save_checkpoint(tmp_path / "kept")
        trainer.train()
        assert trainer.save_checkpoint(path) == path
        other = toy(out="other")
        other.load_checkpoint(path)
        assert other.get_cur_epoch() == 1
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept", "run"]
        (tmp_path / "mine").mkdir()
        with pytest.raises(CheckpointError, match="is there and is not a checkpoint"):
            trainer.save_checkpoint(tmp_path / "mine")

    def test_a_kill_between_two_names_loses_nothing(self, toy: Build, tmp_path: Path) -> None:
        toy().save_checkpoint(tmp_path / "kept")
        shutil.move(tmp_path / "kept", tmp_path / ".replaced-kept")
        toy(out="other").load_checkpoint(tmp_path / "kept")

    def test_damage_and_absence_are_told(self, toy: Build, tmp_path: Path) -> None:
        path = toy().save_checkpoint(tmp_path / "kept")
        (path / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="is damaged"):
            toy(out="other").load_model_checkpoint(path)
        with pytest.raises(CheckpointError, match="nowhere"):
            toy(out="other").load_checkpoint(tmp_path / "nowhere")

    def test_none_is_taken_in_the_middle_of_a_step(self, toy: Build, tmp_path: Path) -> None:
        class Own(Trainer):
            def train_epoch(self) -> None:
                for _ in self.train_loader:
                    self.run_step()
                    self.save_checkpoint(tmp_path / "torn")

        with pytest.raises(
            HookError, match=r"save_checkpoint\(\) in the middle.* set save_steps, or call request_save"
        ):
            toy(Own).train()

    def test_one_may_be_asked_for_from_a_body(self, toy: Build, saved_steps: Any) -> None:
        class Own(Trainer):
            def train_epoch(self) -> None:
                for number, _ in enumerate(self.train_loader, start=1):
                    self.run_step()
                    if number == 2:
                        self.request_save()

        toy(Own).train()
        assert saved_steps() == [2, 5]

    @pytest.mark.parametrize(
        ("settings", "steps"), [({}, [5, 10, 15]), ({"save_steps": 5}, [5, 10, 15]), ({"save_enabled": False}, [])]
    )
    def test_they_come_once_an_epoch_without_drifting_or_never(
        self, toy: Build, saved_steps: Any, settings: dict[str, Any], steps: list[int]
    ) -> None:
        toy(OwnEpoch, num_epochs=3, **settings).train()
        assert saved_steps() == steps


class TestWithoutAModel:
    @pytest.fixture
    def own(self, classifier: Any) -> type[Trainer]:
        class Own(Trainer):
            def build_model(self) -> nn.Module:
                model: nn.Module = classifier(seed=7)
                return model

        return Own

    def test_one_that_builds_its_own_loads_evaluates_and_predicts(
        self, own: type[Trainer], toy: Build, rows: Any, tmp_path: Path
    ) -> None:
        settings = {"task": "text_classification", "criterion": "CrossEntropyLoss"}
        trained = toy(**settings)
        trained.train()
        path = trained.save_checkpoint(tmp_path / "kept")
        bare = own(TrainerConfig(tmp_path / "bare", batch_size=4, **settings), None)
        bare.load_checkpoint(path)
        assert bare.evaluate(rows(9)) == trained.evaluate(rows(9))
        assert bare.predict(rows(9)) == trained.predict(rows(9))
        with pytest.raises(DataError, match="built without training data"):
            bare.train()

    def test_data_that_is_set_makes_it_train_like_any_other(
        self, own: type[Trainer], toy: Build, rows: Any, tmp_path: Path, classifier: Any, equal_runs: Any
    ) -> None:
        settings = {"num_epochs": 2, "lr_scheduler": "one_cycle", "lr_scheduling_steps": 1}
        toy(out="plain", model=classifier(seed=7), **settings).train()
        late = own(TrainerConfig(tmp_path / "late", batch_size=4, learning_rate=0.1, criterion="CrossEntropyLoss",
                                 **settings))  # fmt: skip
        late.set_train_dataset(rows())
        late.train()
        equal_runs("plain", "late")

    def test_a_trainer_that_has_no_model_says_how_to_get_one(self, tmp_path: Path, rows: Any) -> None:
        with pytest.raises(ConfigError, match=r"build_model\(\).*missing: model\."):
            Trainer(TrainerConfig(tmp_path), None, rows())


class TestConfigAndConstruction:
    def test_text_shows_where_the_run_is_and_every_field(self, toy: Build) -> None:
        trainer = toy(num_epochs=3)
        assert repr(trainer) == "Trainer(Classifier, epoch 0/3, step 0)"
        lines = str(trainer).splitlines()
        assert lines[0] == repr(trainer)
        assert [line.split(":")[0].strip() for line in lines[1:]] == trainer.config.keys()
        assert "  batch_size: 4" in lines

    def test_params_are_the_config_and_go_back_into_it(self, toy: Build) -> None:
        trainer = toy(num_epochs=3)
        given = trainer.get_trainer_params()
        assert TrainerConfig.from_dict(given) == trainer.config
        trainer.set_trainer_params({"num_epochs": 4, "batch_size": 10})
        assert (trainer.plan.num_epochs, trainer.plan.steps_in_epoch) == (4, 2)

    def test_params_that_cannot_change_any_more_are_told(self, toy: Build) -> None:
        trainer = toy()
        with pytest.raises(ConfigError, match=r"learning_rate \(set_learning_rate\(\)\), seed|seed.*learning_rate"):
            trainer.set_trainer_params({"learning_rate": 0.5, "seed": 1})
        with pytest.raises(ConfigError, match="'cur_epoch' is not a field"):
            trainer.set_trainer_params({"cur_epoch": 3})
        assert (trainer.config.learning_rate, trainer.config.seed) == (0.1, 42)

    def test_the_model_is_the_bare_one_and_its_params_are_live(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        trainer = toy(model=model)
        assert trainer.get_model() is model
        assert trainer.get_model_params()["layer.bias"].data_ptr() == model.layer.bias.data_ptr()

    def test_a_summary_writer_of_the_user_gets_every_row_and_is_left_open(self, toy: Build, rows: Any) -> None:
        class Notes:
            is_closed = False

            def __init__(self) -> None:
                self.scalars: list[tuple[str, int]] = []

            def add_scalar(self, tag: str, value: float, global_step: int, **_: Any) -> None:
                self.scalars.append((tag, global_step))

            def flush(self) -> None: ...

            def close(self) -> None:
                self.is_closed = True

        notes, trainer = Notes(), toy(log_steps=2, eval_dataset=rows(6))
        trainer.set_tb_writer(notes)
        trainer.train()
        assert [step for tag, step in notes.scalars if tag == "train.loss"] == [2, 4, 5]
        assert [step for tag, step in notes.scalars if tag == "evaluation.loss"] == [5]
        trainer.set_num_epochs(2)
        trainer.train()
        assert [step for tag, step in notes.scalars if tag == "train.loss"] == [2, 4, 5, 6, 8, 10]
        assert not notes.is_closed

    def test_every_part_of_the_construction_runs_once_in_order_and_may_be_overridden(self, toy: Build) -> None:
        called: list[str] = []
        names = ("_init_device", "_send_to_device", "_init_dataloaders", "_init_optimizer", "_init_history")

        def noted(name: str) -> Callable[[Trainer], None]:
            def method(self: Trainer) -> None:
                called.append(name)
                getattr(Trainer, name)(self)

            return method

        trainer = toy(type("Own", (Trainer,), {name: noted(name) for name in names}))
        assert called == list(names)
        assert trainer.train().num_samples == 20

    def test_an_optimizer_made_in_its_init_is_the_one_that_trains(self, toy: Build) -> None:
        class Own(Trainer):
            def _init_optimizer(self) -> None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.7)

        trainer = toy(Own)
        assert (trainer.get_learning_rate(), trainer.get_momentum()) == (0.3, 0.7)
        before = _weights(trainer)
        trainer.train()
        assert _weights(trainer) != before

    def test_a_schedule_drives_the_optimizer_that_was_made_in_its_init(self, toy: Build) -> None:
        class Own(Trainer):
            def _init_optimizer(self) -> None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.4)

        trainer = toy(Own, num_epochs=2, lr_scheduler="exponential", lr_scheduler_kwargs={"gamma": 0.5})
        trainer.train()
        assert trainer.get_learning_rate() == 0.1
        assert toy(Own, num_epochs=2, resume_from_checkpoint=True, lr_scheduler="exponential",
                   lr_scheduler_kwargs={"gamma": 0.5}).get_learning_rate() == 0.1  # fmt: skip

    @pytest.mark.parametrize(
        ("method", "name"),
        [("_init_device", "runtime"), ("_init_device", "accelerator"), ("_init_dataloaders", "train_dataset")],
    )
    def test_what_an_init_cannot_set_any_more_is_told(self, toy: Build, method: str, name: str) -> None:
        own = type("Own", (Trainer,), {method: lambda self: setattr(self, name, [])})
        with pytest.raises(ConfigError, match=f"the _init_ methods of Own set {name}, .* Pass accelerator and data"):
            toy(own)

    def test_another_storage_and_a_model_that_the_optimizer_does_not_hold_are_told(
        self, toy: Build, classifier: Any
    ) -> None:
        class OtherStorage(Trainer):
            def _init_history(self) -> None:
                self.storage = EventStorage()

        class OtherModel(Trainer):
            def _send_to_device(self) -> None:
                self.model = classifier(seed=3)

        with pytest.raises(ConfigError, match=r"_init_history\(\) set another storage"):
            toy(OtherStorage)
        with pytest.raises(ConfigError, match="holds none of the model's parameters"):
            toy(OtherModel)

    def test_writers_of_ones_own_stand_beside_the_summary_writer(self, toy: Build) -> None:
        seen: dict[str, list[int]] = {"own": [], "tb": []}

        class Own(EventWriter):
            def write(self, rows: Any) -> None:
                seen["own"] += [row.step for row in rows]

        class Notes:
            def add_scalar(self, tag: str, value: float, global_step: int, **_: Any) -> None:
                seen["tb"] += [global_step] if tag == "train.loss" else []

            def flush(self) -> None: ...

        class WithWriter(Trainer):
            def build_writers(self) -> list[EventWriter]:
                return [Own()]

        trainer = toy(WithWriter, log_steps=2)
        trainer.set_tb_writer(Notes())
        trainer.train()
        assert seen == {"own": [2, 4, 5], "tb": [2, 4, 5]}


def _pairs(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([sample["x"] for sample in samples]), torch.tensor([sample["labels"] for sample in samples])
