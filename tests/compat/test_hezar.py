"""Hezar's door: every name is the very object of ours, under the same name or one that the door tells, but `Trainer`.

What Hezar's users know of its Trainer is on the plain one; tested here are also the methods that they override.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hezar_train import Trainer, config, data, events, metrics, state, types
from hezar_train.compat import hezar
from hezar_train.errors import ConfigError, HezarTrainError
from hezar_train.metrics import handlers
from hezar_train.trainer.door_names import NAMES_BY_DOOR

Build = Callable[..., Any]

OURS: dict[str, Any] = {
    **dict.fromkeys(("AverageMeter", "CSVLogger", "MetricsTracker"), events),
    **dict.fromkeys(("CharLevelOCRDataCollator", "ImageCaptioningDataCollator", "SequenceLabelingDataCollator"), data),
    **dict.fromkeys(("SpeechRecognitionDataCollator", "TextGenerationDataCollator", "TextPaddingDataCollator"), data),
    "RangedSampler": data,
    **dict.fromkeys(("LRSchedulerType", "MetricType", "OptimizerType", "PrecisionType", "TaskType"), types),
    **dict.fromkeys(("Metric", "MetricsHandler", "build_metric", "register_metric"), metrics),
    **dict.fromkeys(("MetricConfig", "TrainerConfig"), config),
    "TrainerState": state,
}
"""Where each name is ours as well."""

ALIASES: dict[str, Any] = {
    "Image2TextMetricHandler": handlers.ErrorRateHandler,
    "SequenceLabelingMetricsHandler": handlers.SequenceLabelingHandler,
    "SpeechRecognitionMetricsHandler": handlers.ErrorRateHandler,
    "TextClassificationMetricsHandler": handlers.ClassificationHandler,
    "TextGenerationMetricsHandler": handlers.TextGenerationHandler,
}
"""What is called otherwise here."""


def test_the_tables_have_every_name_once() -> None:
    assert sorted([*OURS, *ALIASES, "Trainer"]) == sorted(hezar.__all__)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_name_of_both_is_the_same_object(name: str) -> None:
    assert getattr(hezar, name) is getattr(OURS[name], name)


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_a_name_of_hezars_alone_is_an_alias_that_the_door_tells(name: str) -> None:
    assert getattr(hezar, name) is ALIASES[name]
    lines = [line.split() for line in (hezar.__doc__ or "").splitlines()]
    assert [name, ALIASES[name].__name__] in lines


def test_a_run_is_written_as_in_hezars_own_tutorial(classifier: Any, rows: Callable[..., Any], tmp_path: Path) -> None:
    train_config = hezar.TrainerConfig(
        output_dir=str(tmp_path / "run"), task=hezar.TaskType.TEXT_CLASSIFICATION, batch_size=4, num_epochs=2,
        optimizer=hezar.OptimizerType.ADAMW, criterion="CrossEntropyLoss", metrics=["f1"], metric_for_best_model="f1",
    )  # fmt: skip
    run = hezar.Trainer(config=train_config, model=classifier(), train_dataset=rows(), eval_dataset=rows(6))
    run.train()
    assert run.state.epoch == 2
    assert run.state.metric_for_best_checkpoint == "evaluation.f1"


def test_a_tasks_handler_of_hezars_name_is_the_one_that_the_task_has(toy: Callable[..., Any], rows: Any) -> None:
    own = toy(eval_dataset=rows(6), metrics_handler=hezar.TextClassificationMetricsHandler(["accuracy", "f1"]))
    by_task = toy(out="other", eval_dataset=rows(6), task="text_classification", metrics=["accuracy", "f1"])
    assert own.evaluate() == by_task.evaluate()


def test_its_trainer_is_the_plain_one_with_a_few_names_to_read() -> None:
    own = {name for name in vars(hezar.Trainer) if not name.startswith("__")}
    assert own == {"device", "load_csv_logs", *NAMES_BY_DOOR["hezar"]}
    assert hezar.Trainer.__bases__ == (Trainer,)


def test_the_logs_have_a_row_for_each_epoch(toy: Build, rows: Any) -> None:
    run = toy(hezar.Trainer, eval_dataset=rows(6), num_epochs=3, log_steps=1, eval_steps=2)
    run.train()
    logs = run.load_csv_logs()
    assert logs["step"] == {0: 5, 1: 10, 2: 15}
    assert list(logs) == ["step", "train.loss", "evaluation.loss"]
    assert logs["train.loss"][2] == run.state.loss_tracker_avg
    assert logs["evaluation.loss"][2] == run.evaluate()["loss"]
    assert len(Trainer.load_csv_logs(run)["step"]) > 15


def test_an_epoch_that_has_not_ended_has_no_row(toy: Build) -> None:
    seen: list[Any] = []

    class Watching(hezar.Trainer):
        def training_step(self, batch: Any) -> Any:
            if self.state.global_step == 7:
                seen.append(self.load_csv_logs()["step"])
            return super().training_step(batch)

    toy(Watching, num_epochs=2, log_steps=1).train()
    assert seen == [{0: 5}]


def test_a_run_that_ends_within_an_epoch_has_a_row_for_it(toy: Build) -> None:
    run = toy(hezar.Trainer, max_steps=7, num_epochs=2)
    run.train()
    assert run.load_csv_logs()["step"] == {0: 5, 1: 7}


def test_what_hezars_trainer_tells_of_itself(toy: Build, tmp_path: Path) -> None:
    run = toy(hezar.Trainer, num_epochs=2)
    assert (run.device, run.total_steps, run.steps_in_epoch) == ("cpu", 10, 5)
    assert toy(out="plain").device == torch.device("cpu")
    assert toy(hezar.Trainer, out="short", max_steps=3).steps_in_epoch == 3
    assert run.checkpoints_dir == str(tmp_path / "run/checkpoints")
    run.state.logs_dir = "logs/before"
    before = run.logs_dir
    run.train()
    assert run.logs_dir == before == str(tmp_path / "run/logs/before")
    assert (Path(before) / "training_logs.csv").exists()
    elsewhere = toy(hezar.Trainer, out="elsewhere", logs_dir=tmp_path / "logs")
    assert Path(elsewhere.logs_dir).is_relative_to(tmp_path / "logs")


def test_the_loss_tracker_shows_the_mean_of_the_run_and_refuses_to_be_written(toy: Build) -> None:
    run = toy(hezar.Trainer)
    assert run.train_loss_tracker.avg == 0.0
    run.train()
    tracker = run.train_loss_tracker
    assert (tracker.avg, tracker.name) == (run.state.loss_tracker_avg, "train.loss")
    assert tracker.val > 0
    with pytest.raises(HezarTrainError, match=r"trainer\.note_loss\(loss\)"):
        tracker.update(1.0)
    with pytest.raises(HezarTrainError, match=r"train\.recent_loss"):
        tracker.reset()


class Telling(Trainer):
    """Override `log` and `save`, as users of Hezar do."""

    calls: list[Any]

    def log(self, logs: Mapping[str, float], step: int) -> None:
        super().log({**logs, "own": 2.0}, step)
        self.calls.append((step, dict(logs)))

    def save(self, path: Any, *args: Any, **kwargs: Any) -> Path:
        self.calls.append(Path(path))
        return super().save(path, *args, **kwargs)


def test_an_overridden_log_is_called_for_each_epoch_and_nothing_is_logged_twice(
    toy: Build, rows: Any, logged: Any
) -> None:
    Telling.calls = []
    run = toy(Telling, eval_dataset=rows(6), num_epochs=2, log_steps=1, save_enabled=False)
    run.train()
    assert [step for step, _ in Telling.calls] == [5, 10]
    assert [sorted(logs) for _, logs in Telling.calls] == [["evaluation.loss", "train.loss"]] * 2
    assert [row["step"] for row in logged() if "evaluation.loss" in row] == [5, 10]
    assert [row["step"] for row in logged() if "train.loss" in row] == list(range(1, 11))
    assert [row["step"] for row in logged() if "own" in row] == [5, 10]


def test_an_overridden_save_is_called_beside_each_checkpoint(toy: Build, tmp_path: Path, saved_steps: Any) -> None:
    Telling.calls = []
    toy(Telling, num_epochs=2, save_steps=2).train()
    paths = [call for call in Telling.calls if isinstance(call, Path)]
    assert [int(path.name) for path in paths] == saved_steps() == [2, 4, 5, 6, 8, 10]
    assert all((path / "model.safetensors").exists() for path in paths)
    assert {path.parent for path in paths} == {tmp_path / "run/exports"}


def test_a_run_with_both_overridden_learns_what_the_plain_one_does(toy: Build) -> None:
    Telling.calls = []
    own, plain = toy(Telling, num_epochs=2), toy(out="plain", num_epochs=2)
    own.train()
    plain.train()
    assert torch.equal(own.model.layer.weight, plain.model.layer.weight)


class Prepared(Trainer):
    """Make loaders as Hezar's own methods do."""

    def create_train_dataloader(self, dataset: Any) -> Any:
        sampler = hezar.RangedSampler(
            dataset, self.config.batch_size, start_index=self.state.epoch_step * self.config.batch_size,
            shuffle=self.config.dataloader_shuffle, seed=self.config.seed, drop_last=False,
        )  # fmt: skip
        loader = DataLoader(dataset, batch_size=self.config.batch_size, collate_fn=self.data_collator, sampler=sampler)
        return self.prepared(loader)

    def create_eval_dataloader(self, dataset: Any) -> Any:
        return self.prepared(DataLoader(dataset, batch_size=3))

    def prepared(self, loader: Any) -> Any:
        return self.accelerator.prepare(loader)


class Unprepared(Prepared):
    """The same loaders, as they are."""

    def prepared(self, loader: Any) -> Any:
        return loader


def test_loaders_that_accelerate_prepared_give_each_sample_once(toy: Build, rows: Any) -> None:
    settings = {"eval_dataset": rows(7), "num_epochs": 2}
    own, plain = toy(Prepared, **settings), toy(Unprepared, out="plain", **settings)
    assert own.train().metrics == plain.train().metrics
    assert (own.state.samples_seen, own.state.global_step) == (40, 10)
    assert torch.equal(own.model.layer.weight, plain.model.layer.weight)


class TestMetricConfigs:
    @pytest.fixture(scope="class")
    def theirs(self) -> Any:
        return pytest.importorskip("hezar.metrics")

    def test_one_of_hezars_is_what_its_name_alone_would_be(self, theirs: Any, tmp_path: Path) -> None:
        made = hezar.TrainerConfig(
            tmp_path, task="text_classification", metrics=[theirs.AccuracyConfig(), "recall", theirs.F1Config()]
        )
        assert made.metrics == [hezar.MetricConfig("accuracy"), "recall", hezar.MetricConfig("f1")]

    def test_what_it_says_otherwise_is_kept_in_files_too(self, theirs: Any, tmp_path: Path) -> None:
        asked = theirs.F1Config(average="micro", n_decimals=2)
        made = hezar.TrainerConfig(tmp_path, task="text_classification", metrics=[asked])
        assert made.metrics == [hezar.MetricConfig("f1", n_decimals=2, options={"average": "micro"})]
        made.save(tmp_path)
        assert hezar.TrainerConfig.load(tmp_path).metrics == made.metrics

    def test_it_is_measured_as_hezar_measures(self, theirs: Any, toy: Build, rows: Any) -> None:
        run = toy(
            eval_dataset=rows(9), eval_batch_size=9, task="text_classification",
            metrics=[theirs.F1Config(average="micro"), theirs.PrecisionConfig()],
        )  # fmt: skip
        found, batch = run.evaluate(), rows(9)
        with torch.no_grad():
            predictions = run.model(torch.stack([row["x"] for row in batch])).argmax(1).tolist()
        labels = [row["labels"] for row in batch]
        for made, name in ((theirs.F1(theirs.F1Config(average="micro")), "f1"),
                           (theirs.Precision(theirs.PrecisionConfig()), "precision")):  # fmt: skip
            assert found[name] == pytest.approx(made.compute(predictions, labels)[name], abs=1e-4)

    def test_an_option_that_is_not_offered_is_told_by_name(self, theirs: Any, toy: Build) -> None:
        with pytest.raises(ConfigError, match="metric 'f1' has no option 'sample_weight'"):
            toy(task="text_classification", metrics=[theirs.F1Config(sample_weight=[1.0])])

    def test_a_config_without_a_name_is_refused(self, theirs: Any, toy: Build) -> None:
        del theirs
        from hezar.configs import MetricConfig

        with pytest.raises(ConfigError, match=r"metrics\[0\]: name"):
            toy(task="text_classification", metrics=[MetricConfig(objective="minimize")])


@pytest.mark.parametrize("stop_at", [3, 5, 7])
def test_a_run_behind_the_door_goes_on_bit_by_bit(toy: Build, rows: Any, stop_at: int) -> None:
    class Killed(BaseException):
        pass

    class Dying(hezar.Trainer):
        def optimization_step(self) -> None:
            if self.state.global_step == stop_at:
                raise Killed
            super().optimization_step()

    settings = {"eval_dataset": rows(6), "num_epochs": 2, "save_steps": 1, "task": "text_classification"}
    unbroken = toy(hezar.Trainer, out="unbroken", **settings)
    unbroken.train()
    with pytest.raises(Killed):
        toy(Dying, **settings).train()
    resumed = toy(hezar.Trainer, resume_from_checkpoint=True, **settings)
    resumed.train()
    ours, theirs = resumed.model.state_dict(), unbroken.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.load_csv_logs() == unbroken.load_csv_logs()


class OwnSteps(hezar.Trainer):
    """Do a step as Hezar's own methods do it."""

    def training_step(self, input_batch: Any) -> Any:
        with self.accelerator.autocast():
            outputs = self.forward(input_batch)
        loss = self.compute_loss(outputs, **input_batch)
        self.accelerator.backward(loss)
        outputs["loss"] = loss.detach()
        return outputs

    def optimization_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluation_step(self, input_batch: Any) -> Any:
        with self.accelerator.autocast():
            outputs = self.forward(input_batch)
        outputs["loss"] = self.compute_loss(outputs, **input_batch)
        return outputs


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_steps_as_hezars_own_methods_do_them_are_those_of_the_trainer(toy: Build, rows: Any, accumulation: int) -> None:
    settings = {
        "eval_dataset": rows(7), "num_epochs": 2, "gradient_accumulation_steps": accumulation,
        "task": "text_classification", "optimizer": "adamw",
    }  # fmt: skip
    own, plain = toy(OwnSteps, **settings), toy(hezar.Trainer, out="plain", **settings)
    assert own.train().metrics == pytest.approx(plain.train().metrics, rel=1e-6)
    assert torch.allclose(own.model.layer.weight, plain.model.layer.weight, atol=1e-6)
    assert (own.state.global_step, own.state.update_step) == (plain.state.global_step, plain.state.update_step)


def test_a_loop_of_ones_own_that_counts_for_itself_is_told_what_to_do(toy: Build) -> None:
    class OwnLoop(hezar.Trainer):
        def inner_training_loop(self, epoch_num: int) -> Mapping[str, float]:
            self.train_loss_tracker.update(1.0)
            return {"loss": self.train_loss_tracker.avg}

    with pytest.raises(HezarTrainError, match="the run counts the loss of each step itself"):
        toy(OwnLoop).train()


def test_a_loop_of_ones_own_that_trains_nothing_is_refused(toy: Build) -> None:
    class OwnLoop(hezar.Trainer):
        def inner_training_loop(self, epoch_num: int) -> Mapping[str, float]:
            for row in self.train_dataset:
                self.training_step({key: torch.as_tensor(value)[None] for key, value in row.items()})
            return {"loss": 0.0}

    with pytest.raises(HezarTrainError, match=r"self\.parts\.loop\.epoch_batches\(epoch_num\)"):
        toy(OwnLoop).train()
