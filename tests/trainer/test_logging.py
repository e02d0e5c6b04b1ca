"""What is written down, where, under which names; and what is not."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hezar_train import Hook, Trainer, get_event_storage
from hezar_train.errors import ConfigError, DataError, HezarTrainError

Build = Callable[..., Trainer]

TRAIN_NAMES = {"train.loss", "train.recent_loss", "train.learning_rate", "train.grad_norm", "train.samples_per_second"}


def csv_rows(run: Path) -> list[dict[str, str]]:
    (path,) = (run / "logs").glob("*/training_logs.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    (folder,) = (run / "logs").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def single(value: float) -> float:
    """Return a number as TensorBoard's float32 holds it."""
    return float(np.float32(value))


class TestSinks:
    def test_all_three_hold_the_same_rows(self, toy: Build, rows: Any, logged: Any, tmp_path: Path) -> None:
        toy(task="text_classification", eval_dataset=rows(6), num_epochs=2, log_steps=2).train()
        written = logged()
        assert [row["step"] for row in written] == [2, 4, 5, 5, 6, 8, 10, 10]
        table = csv_rows(tmp_path / "run")
        tags = scalars(tmp_path / "run")
        for row, line in zip(written, table, strict=True):
            values = {name: value for name, value in row.items() if "." in name}
            assert {name: float(text) for name, text in line.items() if "." in name and text} == values
            assert (int(line["step"]), int(line["epoch"])) == (row["step"], row["epoch"])
            for name, value in values.items():
                assert (row["step"], single(value)) in tags[name]
        assert sum(map(len, tags.values())) == sum("." in name for row in written for name in row)

    def test_names_are_exact(self, toy: Build, rows: Any, logged: Any, tmp_path: Path) -> None:
        toy(task="text_classification", eval_dataset=rows(6)).train()
        training, evaluation = logged()
        assert set(training) == {"step", "epoch", "time"} | TRAIN_NAMES
        assert set(evaluation) == {"step", "epoch", "time", "evaluation.loss", "evaluation.accuracy"}
        assert set(scalars(tmp_path / "run")) == TRAIN_NAMES | {"evaluation.loss", "evaluation.accuracy"}

    def test_the_final_evaluation_is_in_all_of_them(self, toy: Build, rows: Any, logged: Any, tmp_path: Path) -> None:
        result = toy(task="text_classification", eval_dataset=rows(7), num_epochs=2, max_steps=8).train()
        loss, accuracy = result.metrics["evaluation.loss"], result.metrics["evaluation.accuracy"]
        last = logged()[-1]
        assert (last["step"], last["evaluation.loss"], last["evaluation.accuracy"]) == (8, loss, accuracy)
        line = csv_rows(tmp_path / "run")[-1]
        assert (float(line["evaluation.loss"]), float(line["evaluation.accuracy"])) == (loss, accuracy)
        assert scalars(tmp_path / "run")["evaluation.accuracy"][-1] == (8, single(accuracy))

    def test_there_is_one_event_file(self, toy: Build, tmp_path: Path) -> None:
        toy(num_epochs=2).train()
        assert len(list((tmp_path / "run/logs").glob("*/events.out.tfevents.*"))) == 1

    def test_an_empty_list_of_trackers_means_no_event_file(self, toy: Build, tmp_path: Path) -> None:
        toy(trackers=[]).train()
        assert sorted(path.name for path in (tmp_path / "run/logs").glob("*/*")) == [
            "metrics.json",
            "training_logs.csv",
        ]

    def test_rows_survive_a_resume(self, toy: Build, tmp_path: Path, logged: Any) -> None:
        toy(num_epochs=1, log_steps=2).train()
        trainer = toy(num_epochs=2, log_steps=2, resume_from_checkpoint=True)
        trainer.train()
        assert [row["step"] for row in logged()] == [2, 4, 5, 6, 8, 10]
        assert [int(row["step"]) for row in csv_rows(tmp_path / "run")] == [2, 4, 5, 6, 8, 10]
        assert [step for step, _ in scalars(tmp_path / "run")["train.loss"]] == [2, 4, 5, 6, 8, 10]
        assert trainer.load_csv_logs()["step"] == [2, 4, 5, 6, 8, 10]


class TestValues:
    def test_the_loss_is_the_mean_since_the_start_and_the_recent_one_since_the_last_row(
        self, toy: Build, logged: Any
    ) -> None:
        losses: list[float] = []

        class Watching(Trainer):
            def training_step(self, batch: Any) -> dict[str, Any]:
                outputs = super().training_step(batch)
                losses.append(outputs["loss"].item())
                return outputs

        toy(Watching, log_steps=2).train()
        found = [(row["train.loss"], row["train.recent_loss"]) for row in logged()]
        expected = [(losses[:2], losses[:2]), (losses[:4], losses[2:4]), (losses, losses[4:])]
        for (loss, recent), (all_losses, recent_losses) in zip(found, expected, strict=True):
            assert loss == pytest.approx(sum(all_losses) / len(all_losses))
            assert recent == pytest.approx(sum(recent_losses) / len(recent_losses))

    def test_the_console_shows_what_is_logged_with_the_recent_loss_as_the_loss(
        self, toy: Build, logged: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        toy(log_steps=2, num_epochs=2).train()
        lines = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line]
        for line, row in zip(lines, logged(), strict=True):
            losses = f"  loss {row['train.recent_loss']:.4g}  mean_loss {row['train.loss']:.4g}  lr "
            assert losses in line
            assert f"  {row['train.samples_per_second']:,.0f} samples/s" in line

    def test_the_bar_has_the_loss_since_the_last_row(self, toy: Build, logged: Any) -> None:
        class Bar(Hook):
            def on_batch_end(self, _: Any) -> None:
                shown[self.trainer.state.global_step] = self.trainer.progress.loss

        shown: dict[int, float] = {}
        toy(log_steps=2, hooks=[Bar()]).train()
        assert [shown[row["step"]] for row in logged()] == [row["train.recent_loss"] for row in logged()]

    def test_the_time_left_has_the_evaluations_that_are_to_come(self, toy: Build, rows: Any) -> None:
        class Watch(Hook):
            def on_epoch_start(self, _: Any) -> None:
                seconds_left.append(self.trainer.progress.seconds_left())

        class Slow(Trainer):
            def evaluate_while_training(self) -> dict[str, float]:
                time.sleep(0.3)
                return super().evaluate_while_training()

        seconds_left: list[float | None] = []
        toy(Slow, num_epochs=4, eval_dataset=rows(6), hooks=[Watch()]).train()
        assert seconds_left[0] is None
        for left, evaluations in zip(seconds_left[1:], (3, 2, 1), strict=True):
            assert 0.3 * evaluations <= left < 0.3 * evaluations + 5

    def test_the_learning_rate_is_the_one_the_next_update_will_use(self, toy: Build, logged: Any) -> None:
        toy(lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1}, lr_scheduling_steps=1, log_steps=2).train()
        assert [row["train.learning_rate"] for row in logged()] == pytest.approx([1e-3, 1e-5, 1e-6])

    def test_the_gradient_norm_is_that_before_clipping(self, toy: Build, logged: Any) -> None:
        toy(max_grad_norm=1e-3, log_steps=1).train()
        assert all(row["train.grad_norm"] > 0.1 for row in logged())

    @pytest.mark.parametrize(
        ("log_steps", "steps"),
        [(5, [5, 10, 15, 20]), (0.25, [5, 10, 15, 20]), (0.3, [6, 12, 18, 20]), (None, [20]), (0, [20])],
    )
    def test_log_steps_says_how_often(self, toy: Build, tmp_path: Path, log_steps: Any, steps: list[int]) -> None:
        toy(batch_size=1, log_steps=log_steps).train()
        assert [step for step, _ in scalars(tmp_path / "run")["train.loss"]] == steps

    @pytest.mark.filterwarnings("ignore:log_steps=3 is not a multiple")
    def test_what_falls_due_inside_a_window_is_logged_at_its_end(self, toy: Build, logged: Any) -> None:
        toy(batch_size=1, log_steps=3, gradient_accumulation_steps=2, max_steps=12).train()
        assert [row["step"] for row in logged()] == [4, 8, 12]

    def test_what_the_model_puts_is_in_the_next_row(self, toy: Build, classifier: Any, logged: Any) -> None:
        class Talking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.count = classifier(), 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.count += 1
                get_event_storage().put_scalar("model.calls", torch.tensor(float(self.count)))
                logits: torch.Tensor = self.inner(x)
                return logits

        toy(model=Talking(), log_steps=2).train()
        assert [row["model.calls"] for row in logged()] == [2, 4, 5]

    def test_what_a_hook_put_once_is_in_one_row_only(self, toy: Build, logged: Any) -> None:
        class Once(Hook):
            def after_step(self) -> None:
                if self.trainer.state.global_step == 2:
                    self.trainer.storage.put_scalar("once", 7)

        toy(hooks=[Once()], log_steps=1).train()
        assert [row.get("once") for row in logged()] == [None, 7, None, None, None]


class TestLog:
    def test_a_hook_may_log_a_row_into_all_sinks(self, toy: Build, logged: Any, tmp_path: Path) -> None:
        class Noting(Hook):
            def after_step(self) -> None:
                if self.trainer.state.global_step == 3:
                    self.trainer.log({"note.value": 0.25}, step=3)

        toy(hooks=[Noting()]).train()
        assert [(row["step"], row.get("note.value")) for row in logged()] == [(3, 0.25), (5, None)]
        assert csv_rows(tmp_path / "run")[0]["note.value"] == "0.25"
        assert scalars(tmp_path / "run")["note.value"] == [(3, 0.25)]

    def test_a_row_may_be_added_after_the_run(self, toy: Build, logged: Any, tmp_path: Path, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(3))
        trainer.train()
        trainer.log({"test.loss": 0.5}, step=trainer.state.global_step)
        assert [set(row) & {"train.loss", "evaluation.loss", "test.loss"} for row in logged()] == [
            {"train.loss"}, {"evaluation.loss"}, {"test.loss"},
        ]  # fmt: skip
        assert csv_rows(tmp_path / "run")[2]["test.loss"] == "0.5"
        assert scalars(tmp_path / "run")["test.loss"] == [(5, 0.5)]

    def test_before_the_run_there_is_nowhere_to_log_to(self, toy: Build, tmp_path: Path) -> None:
        with pytest.raises(HezarTrainError, match=r"log\(\) was called before train\(\)"):
            toy().log({"x": 1.0}, step=0)
        assert list(tmp_path.iterdir()) == []

    def test_load_csv_logs_gives_a_list_per_column(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(3), num_epochs=2)
        trainer.train()
        table = trainer.load_csv_logs()
        assert table["step"] == [5, 5, 10, 10]
        assert table["epoch"] == [1, 1, 2, 2]
        assert [math.isnan(value) for value in table["evaluation.loss"]] == [True, False, True, False]

    def test_load_csv_logs_reads_another_folder_too(self, toy: Build, tmp_path: Path) -> None:
        toy(out="one").train()
        (folder,) = (tmp_path / "one/logs").iterdir()
        assert toy(out="other").load_csv_logs(folder)["step"] == [5]

    def test_load_csv_logs_before_anything_was_logged_says_so(self, toy: Build) -> None:
        with pytest.raises(DataError, match="nothing was logged yet"):
            toy().load_csv_logs()


class TestEvaluate:
    def test_it_logs_and_writes_nothing(self, toy: Build, rows: Any, tmp_path: Path, logged: Any) -> None:
        trainer = toy(task="text_classification", eval_dataset=rows(6))
        assert set(trainer.evaluate()) == {"loss", "accuracy"}
        assert list(tmp_path.iterdir()) == []
        trainer.train()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        trainer.evaluate()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        assert len(logged()) == 2

    def test_before_and_after_training_it_measures_the_model_as_it_is(self, toy: Build, rows: Any) -> None:
        trainer = toy(task="text_classification", eval_dataset=rows(), num_epochs=5)
        before = trainer.evaluate()
        result = trainer.train()
        after = trainer.evaluate()
        assert after["loss"] < before["loss"]
        assert {f"evaluation.{name}": value for name, value in after.items()}.items() <= result.metrics.items()

    def test_the_result_does_not_depend_on_the_batch_size(self, toy: Build, rows: Any) -> None:
        found = [toy(task="text_classification", eval_dataset=rows(7), eval_batch_size=n).evaluate() for n in (1, 3, 7)]
        for result in found[1:]:
            assert result["accuracy"] == found[0]["accuracy"]
            assert result["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)

    def test_another_dataset_may_be_given(self, toy: Build, rows: Any) -> None:
        trainer, other = toy(eval_dataset=rows(6)), rows(9, seed=5)
        assert trainer.evaluate(other) == toy(eval_dataset=other).evaluate()
        assert trainer.evaluate(other) != trainer.evaluate()

    def test_an_empty_dataset_is_not_replaced_by_the_default_one(self, toy: Build, rows: Any) -> None:
        with pytest.raises(DataError, match="the evaluation data is empty"):
            toy(eval_dataset=rows(6)).evaluate([])

    def test_without_any_data_it_says_what_to_pass(self, toy: Build) -> None:
        with pytest.raises(DataError, match="there is no evaluation data: pass eval_dataset"):
            toy().evaluate()

    def test_evaluation_data_is_in_order(self, toy: Build, rows: Any) -> None:
        seen: list[int] = []

        class Watching(Trainer):
            def evaluation_step(self, batch: Any) -> dict[str, Any]:
                seen.extend(batch["id"].tolist())
                return super().evaluation_step(batch)

        toy(Watching, eval_dataset=[{**row, "id": number} for number, row in enumerate(rows(10))]).evaluate()
        assert seen == list(range(10))

    def test_every_submodule_gets_its_own_mode_back(self, toy: Build, rows: Any) -> None:
        class Frozen(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
                self.head = nn.Linear(4, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert not self.training
                assert not self.body[1].training
                logits: torch.Tensor = self.head(self.body(x))
                return logits

        model = Frozen()
        model.body[1].eval()
        toy(model=model, eval_dataset=rows(6)).evaluate()
        assert model.training
        assert [module.training for module in model.body] == [True, False, True]

    def test_the_modes_come_back_after_a_failure_too(self, toy: Build, rows: Any) -> None:
        class Broken(Trainer):
            def evaluation_step(self, batch: Any) -> dict[str, Any]:
                raise ZeroDivisionError

        trainer = toy(Broken, eval_dataset=rows(6))
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate()
        assert trainer.model.training
        assert torch.is_grad_enabled()

    def test_it_does_not_move_the_global_generators(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(6))
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        trainer.evaluate()
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[index, union-attr]

    def test_evaluating_from_a_hook_leaves_the_training_as_it_was(self, toy: Build, rows: Any) -> None:
        class Nosy(Hook):
            def on_batch_backward(self, ctx: Any) -> None:
                outer = (ctx.mode, ctx.batch, ctx.window, ctx.loss)
                self.trainer.evaluate()
                assert all(a is b for a, b in zip((ctx.mode, ctx.batch, ctx.window, ctx.loss), outer, strict=True))

        plain, nosy = toy(eval_dataset=rows(6), out="plain"), toy(eval_dataset=rows(6), hooks=[Nosy()])
        assert plain.train() == nosy.train()
        assert torch.equal(plain.model.layer.weight, nosy.model.layer.weight)  # type: ignore[union-attr, arg-type]

    def test_a_model_that_puts_scalars_can_be_evaluated_alone(self, toy: Build, rows: Any, classifier: Any) -> None:
        class Talking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = classifier()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                get_event_storage().put_scalar("calls", 1.0)
                logits: torch.Tensor = self.inner(x)
                return logits

        trainer = toy(model=Talking(), eval_dataset=rows(6))
        assert set(trainer.evaluate()) == {"loss"}
        assert trainer.verify_invariance().holds
        assert trainer.storage.latest() == {}


class Notebook(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, Any] = {}
        self.values: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    @property
    def tracker(self) -> Any:
        return self.values

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.facts = values

    def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
        self.values.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def tracked() -> Iterator[tuple[Accelerator, Notebook]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    notebook = Notebook()
    yield Accelerator(cpu=True, log_with=notebook), notebook
    AcceleratorState._reset_state(reset_partial_state=True)


class TestTrackers:
    def test_every_row_reaches_the_trackers_of_a_passed_accelerator(
        self, toy: Build, rows: Any, logged: Any, tracked: tuple[Accelerator, Notebook]
    ) -> None:
        accelerator, notebook = tracked
        settings = {
            "optimizer": "sgd",
            "optimizer_kwargs": {"momentum": 0.5},
            "metrics": ["accuracy", "f1"],
            "task": "text_classification",
        }
        toy(accelerator=accelerator, eval_dataset=rows(3), log_steps=2, **settings).train()
        written = [(row["step"], {name: row[name] for name in row if "." in name}) for row in logged()]
        assert notebook.values == written
        assert (notebook.facts["batch_size"], notebook.facts["criterion"]) == (4, "CrossEntropyLoss")
        assert (notebook.facts["optimizer_kwargs.momentum"], notebook.facts["metrics"]) == (0.5, "accuracy, f1")

    def test_trackers_that_the_trainer_started_are_finished_once(
        self, toy: Build, tracked: tuple[Accelerator, Notebook]
    ) -> None:
        accelerator, notebook = tracked
        toy(accelerator=accelerator).train()
        assert notebook.finished == 1

    def test_trackers_that_the_user_started_are_left_to_the_user(
        self, toy: Build, tracked: tuple[Accelerator, Notebook]
    ) -> None:
        accelerator, notebook = tracked
        accelerator.init_trackers("mine")
        toy(accelerator=accelerator).train()
        assert (len(notebook.values), notebook.finished) == (1, 0)

    @pytest.mark.filterwarnings("ignore:.*no supported trackers are currently installed")
    def test_a_tracker_whose_package_is_not_installed_is_named(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="trackers has 'clearml', but its package is not installed"):
            toy(trackers=["clearml", "tensorboard"])

    def test_a_tracker_that_nobody_knows_is_named(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match=r"trackers\[0\]='wandbb'.*Did you mean 'wandb'"):
            toy(trackers=["wandbb"])
