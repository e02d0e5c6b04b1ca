"""A run that crashed goes on as if nothing had happened; a run that should not go on says why."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from workload import (
    Crash,
    CrashAt,
    NoisyPoints,
    checkpoint_steps,
    crash,
    differences,
    last_checkpoint,
    make_config,
    make_net,
    make_trainer,
    rows_of,
    scalars_of,
)

from hezar_train import Hook, Trainer
from hezar_train.errors import CheckpointError, ConfigError, DataError, RunLockedError
from hezar_train.events import EventWriter
from hezar_train.types import Mode

PLACES = {
    "before the first save": (1, "on_batch_start", Mode.TRAIN),
    "inside a window": (4, "on_batch_backward", Mode.TRAIN),
    "at an update, before it is counted": (5, "on_update", Mode.TRAIN),
    "between save and evaluation": (8, "on_fit_start", Mode.VAL),
    "in the middle of an evaluation": (8, "on_batch_end", Mode.VAL),
    "after the evaluation was recorded": (8, "on_epoch_start", Mode.TRAIN),
    "right after a save": (11, "on_batch_start", Mode.TRAIN),
    "in the last window": (15, "on_batch_forward", Mode.TRAIN),
    "in the last evaluation": (16, "on_batch_end", Mode.VAL),
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {"lr_scheduler": None},
    "cosine": {"lr_scheduler": "cosine_annealing", "lr_scheduling_steps": 1},
    "step": {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": None},
    "one_cycle": {"lr_scheduler": "one_cycle", "lr_scheduling_steps": 1},
    "plateau": {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}},
}
OPTIMIZERS: list[dict[str, Any]] = [{"optimizer": "adam"}, {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}}]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    out: Path = tmp_path_factory.mktemp("unbroken")
    make_trainer(out).train()
    return out


class CountedEvaluations(Trainer):
    """Count the evaluations that are really run."""

    num_evaluations = 0

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        self.num_evaluations += 1
        return super().evaluate(eval_dataset)


class BetterAndBetter(Trainer):
    """Every evaluation is better than the one before."""

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        return {"loss": 1 / self.state.global_step, "accuracy": 0.0}


class WorseAndWorse(Trainer):
    """Every evaluation is worse than the one before."""

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        return {"loss": float(self.state.global_step), "accuracy": 0.0}


class CrashingWriter(EventWriter, Hook):
    """Crash when an evaluation is logged: after the other writers, before anything is made of the result."""

    def before_train(self) -> None:
        self.trainer.storage.writers.append(self)

    def write(self, rows: Any) -> None:
        if any(name.startswith("evaluation.") for row in rows for name in row.values):
            raise Crash


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_crashed_anywhere_ends_like_the_unbroken_run(tmp_path: Path, unbroken: Path, place: str) -> None:
    crash(make_trainer(tmp_path, hooks=[CrashAt(*PLACES[place])]))
    make_trainer(tmp_path).train()
    assert differences(unbroken, tmp_path) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_a_run_that_crashes_again_and_again_ends_like_the_unbroken_run(
    tmp_path: Path, accumulation: int, schedule: str
) -> None:
    optimizer = OPTIMIZERS[(accumulation + list(SCHEDULES).index(schedule)) % 2]
    changes = {"gradient_accumulation_steps": accumulation, **SCHEDULES[schedule], **optimizer}
    make_trainer(tmp_path / "unbroken", **changes).train()
    for step, moment, mode in PLACES.values():
        crash(make_trainer(tmp_path / "broken", hooks=[CrashAt(step, moment, mode)], **changes))
    make_trainer(tmp_path / "broken", **changes).train()
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []
    rates = {row["train.learning_rate"] for row in rows_of(tmp_path / "broken") if "train.learning_rate" in row}
    assert len(rates) > 1 or schedule == "none"


@pytest.mark.parametrize("step", [8, 16])
def test_a_crash_between_the_logged_evaluation_and_the_best_result_loses_neither(tmp_path: Path, step: int) -> None:
    def build(name: str, *hooks: Hook) -> Trainer:
        config = make_config(tmp_path / name, num_epochs=2, save_steps=3, eval_steps=None)
        return BetterAndBetter(config, make_net(), NoisyPoints(30), NoisyPoints(10), hooks=hooks)

    build("unbroken").train()
    if step == 16:
        crash(build("broken", CrashAt(15, "on_batch_start")))
    crash(build("broken", CrashingWriter()))
    build("broken").train()
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []
    assert json.loads((tmp_path / "broken" / "best.json").read_text())["step"] == 16


def test_a_crash_before_the_best_result_was_written_loses_nothing_without_evaluations(tmp_path: Path) -> None:
    make_trainer(tmp_path, do_evaluate=False).train()
    best = (tmp_path / "best.json").read_text()
    assert json.loads(best)["metric"] == "train.loss"
    (tmp_path / "best.json").unlink()
    make_trainer(tmp_path, do_evaluate=False).train()
    assert (tmp_path / "best.json").read_text() == best


def test_resuming_fetches_no_sample_that_was_trained_before(tmp_path: Path) -> None:
    whole, first, second = NoisyPoints(30), NoisyPoints(30), NoisyPoints(30)
    make_trainer(tmp_path / "unbroken", data=whole).train()
    crash(make_trainer(tmp_path / "broken", hooks=[CrashAt(11, "on_batch_start")], data=first))
    trainer = make_trainer(tmp_path / "broken", data=second)
    assert (trainer.state.global_step, trainer.state.position) == (11, 12)
    trainer.train()
    assert second.fetched == whole.fetched[30 + 12 :]
    assert first.fetched[: 30 + 12] == whole.fetched[: 30 + 12]


def test_epochs_meet_every_sample_once_in_orders_that_differ_and_runs_are_equal(tmp_path: Path) -> None:
    one, other = NoisyPoints(30), NoisyPoints(30)
    make_trainer(tmp_path / "one", data=one).train()
    make_trainer(tmp_path / "other", data=other).train()
    assert one.fetched == other.fetched
    assert sorted(one.fetched[:30]) == sorted(one.fetched[30:]) == list(range(30))
    assert one.fetched[:30] != one.fetched[30:]


def test_an_older_checkpoint_brings_its_own_state(tmp_path: Path, unbroken: Path) -> None:
    make_trainer(tmp_path).train()
    older = tmp_path / "checkpoints" / "00000006"
    trainer = make_trainer(tmp_path, resume_from_checkpoint=str(older))
    stored = json.loads((older / "trainer_state.json").read_text())["state"]
    assert trainer.state.to_dict() == stored
    assert (trainer.state.global_step, trainer.state.best_checkpoint) == (6, None)
    trainer.train()
    assert differences(unbroken, tmp_path) == []


@pytest.mark.parametrize("form", ["{}/checkpoints/00000008", "{}/checkpoints/00000008/", "{}/checkpoints/copy", "best"])
def test_a_checkpoint_can_be_named_in_any_form(tmp_path: Path, unbroken: Path, form: str) -> None:
    make_trainer(tmp_path).train()
    (tmp_path / "best.json").write_text(json.dumps({"step": 8, "metric": "evaluation.loss", "value": 1.0}))
    shutil.copytree(tmp_path / "checkpoints" / "00000008", tmp_path / "checkpoints" / "copy")
    trainer = make_trainer(tmp_path, resume_from_checkpoint=form.format(tmp_path))
    assert (trainer.state.global_step, trainer.state.epoch) == (8, 1)
    trainer.train()
    assert differences(unbroken, tmp_path) == []


@pytest.mark.parametrize("content", ["{}", '{"step": "x"}', "not json"])
def test_a_best_that_names_no_step_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    make_trainer(tmp_path).train()
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(CheckpointError, match="expected the step of the best checkpoint"):
        make_trainer(tmp_path, resume_from_checkpoint="best")


def test_going_back_takes_the_best_result_back_too(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    (tmp_path / "best.json").write_text(json.dumps({"step": 16, "metric": "evaluation.loss", "value": 0.0}))
    older = tmp_path / "checkpoints" / "00000011"
    hooks = [CrashAt(12, "on_batch_start")]
    crash(make_trainer(tmp_path, resume_from_checkpoint=str(older), hooks=hooks))
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 8


@pytest.mark.parametrize("path", ["nowhere", "checkpoints"])
def test_a_path_without_a_checkpoint_is_refused_with_what_there_is(tmp_path: Path, path: str) -> None:
    make_trainer(tmp_path).train()
    with pytest.raises(CheckpointError, match="has 00000003, 00000006, 00000008, 00000011, 00000014, 00000016"):
        make_trainer(tmp_path, resume_from_checkpoint=str(tmp_path / path))


@pytest.mark.parametrize("resume", [False, None])
def test_without_resume_a_run_starts_afresh_and_keeps_the_earlier_one(
    tmp_path: Path, unbroken: Path, resume: bool | None
) -> None:
    crash(make_trainer(tmp_path, hooks=[CrashAt(9, "on_batch_start")]))
    trainer = make_trainer(tmp_path, resume_from_checkpoint=resume)
    assert (trainer.state.global_step, trainer.state.epoch) == (0, 1)
    trainer.train()
    assert differences(unbroken, tmp_path) == []
    assert checkpoint_steps(tmp_path / "previous" / "0001") == [3, 6, 8]
    assert (tmp_path / "previous" / "0001" / "ledger.jsonl").exists()


def test_a_finished_run_goes_on_with_more_epochs(tmp_path: Path) -> None:
    changes = {"lr_scheduler": None, "lr_scheduling_steps": None}
    make_trainer(tmp_path / "long", num_epochs=4, **changes).train()
    make_trainer(tmp_path / "short", num_epochs=1, **changes).train()
    trainer = make_trainer(tmp_path / "short", num_epochs=4, **changes)
    assert (trainer.state.epoch, trainer.state.global_step, trainer.state.total_epochs) == (1, 8, 4)
    epochs: list[int] = []
    trainer.hooks[Mode.TRAIN].register(lambda _: epochs.append(trainer.state.epoch), "on_epoch_start")
    trainer.train()
    assert epochs == [2, 3, 4]
    assert differences(tmp_path / "long", tmp_path / "short") == []


def test_a_finished_run_says_that_it_is_done_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Trainer:
        return BetterAndBetter(make_config(tmp_path, num_epochs=2), make_net(), NoisyPoints(30), NoisyPoints(10))

    result = build().train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with caplog.at_level(logging.INFO, "hezar_train"):
        trainer = build()
        again = trainer.train()
    (row,) = [row for row in rows_of(tmp_path) if row["step"] == 16 and "train.loss" in row]
    losses = f"loss {row['train.recent_loss']:.4g}, mean_loss {row['train.loss']:.4g}, evaluation.loss "
    assert f"already trained to the end (step 16, epoch 2): {losses}" in caplog.text
    assert (again.num_samples, again.metrics) == (0, result.metrics)
    assert trainer.state.best_metric_value == json.loads((tmp_path / "best.json").read_text())["value"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_nothing_to_resume_is_a_fresh_start_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hezar_train"):
        trainer = make_trainer(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing to resume in {tmp_path / 'checkpoints'}: starting from the beginning"
    ]
    assert trainer.state.global_step == 0


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "batch_size": ({"batch_size": 5}, "batch_size: 4 in the checkpoint, 5 now"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 3 in the checkpoint, 2 now"),
    "seed": ({"seed": 7}, "seed: 42 in the checkpoint, 7 now"),
    "learning_rate": ({"learning_rate": 0.5}, "learning_rate: 0.02 in the checkpoint, 0.5 now"),
    "data": ({"data": NoisyPoints(31)}, "num_samples: 30 in the checkpoint, 31 now"),
    "less data": ({"data": NoisyPoints(20)}, "num_samples: 30 in the checkpoint, 20 now"),
    "schedule": ({"lr_scheduling_steps": 6}, "lr_scheduling_steps: 1 in the checkpoint, 6 now"),
    "length": ({"num_epochs": 3}, "total steps: 16 in the checkpoint, 24 now"),
    "shuffle": ({"dataloader_shuffle": False}, "dataloader_shuffle: True in the checkpoint, False now"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_breaks_exactness_is_refused_unless_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    change, words = CHANGES[name]
    crash(make_trainer(tmp_path, hooks=[CrashAt(7, "on_batch_start")]))
    with pytest.raises(ConfigError, match="cannot be resumed exactly") as refused:
        make_trainer(tmp_path, **change)
    assert words in str(refused.value)
    trainer = make_trainer(tmp_path, accept_changes=True, **change)
    assert words in caplog.text
    trainer.train()
    assert trainer.state.epoch == trainer.config.num_epochs
    assert trainer.state.epoch_finished


def test_all_changes_are_listed_at_once(tmp_path: Path) -> None:
    crash(make_trainer(tmp_path, hooks=[CrashAt(7, "on_batch_start")]))
    with pytest.raises(ConfigError) as refused:
        make_trainer(tmp_path, batch_size=5, seed=7, learning_rate=0.5)
    assert [name for name in ("batch_size", "seed", "learning_rate") if f"  {name}: " in str(refused.value)] == [
        "batch_size",
        "seed",
        "learning_rate",
    ]


def test_changes_that_matter_to_nobody_are_not_asked_about(tmp_path: Path, unbroken: Path) -> None:
    crash(make_trainer(tmp_path, hooks=[CrashAt(7, "on_batch_start")]))
    make_trainer(tmp_path, num_dataloader_workers=2, async_save=False, save_total_limit=9).train()
    assert differences(unbroken, tmp_path) == []


def test_another_best_metric_starts_a_new_best(tmp_path: Path) -> None:
    make_trainer(tmp_path, lr_scheduler=None, lr_scheduling_steps=None, num_epochs=1).train()
    changes: dict[str, Any] = {"lr_scheduler": None, "lr_scheduling_steps": None, "metric_for_best_model": "accuracy"}
    make_trainer(tmp_path, **changes).train()
    best = json.loads((tmp_path / "best.json").read_text())
    records = {
        int(path.stem): json.loads(path.read_text())["metrics"]["accuracy"]
        for path in (tmp_path / "evaluations").glob("*.json")
    }
    assert best["metric"] == "evaluation.accuracy"
    assert best["value"] == max(records.values())
    assert records[best["step"]] == best["value"]


def test_the_config_is_never_changed(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_epochs=1, save_steps=0.5, log_steps=0.25, max_steps=0.5)
    before = config.to_dict()
    trainer = Trainer(config, make_net(), NoisyPoints(30), NoisyPoints(10))
    trainer.train()
    assert config.to_dict() == before == trainer.config.to_dict()


def test_the_running_loss_goes_on_where_it_was(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "log_steps": 2, "save_steps": 4}
    make_trainer(tmp_path / "unbroken", **changes).train()
    crash(make_trainer(tmp_path / "broken", hooks=[CrashAt(5, "on_batch_start")], **changes))
    trainer = make_trainer(tmp_path / "broken", **changes)
    assert (trainer.state.global_step, trainer.state.loss_tracker_count) == (4, 16)
    trainer.train()
    losses = [[row.get("train.loss") for row in rows_of(tmp_path / name)] for name in ("unbroken", "broken")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10  # eight log periods, two evaluations


def test_nothing_is_saved_when_saving_is_off(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_enabled=False).train()
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "best.json").exists()
    assert (tmp_path / "evaluations" / "00000016.json").exists()


@pytest.mark.parametrize(
    ("save_steps", "expected"), [(3, [3, 5, 6, 9, 10]), (None, [5, 10]), (0, [5, 10]), (0.5, [5, 10])]
)
def test_checkpoints_are_where_the_config_says(tmp_path: Path, save_steps: float | None, expected: list[int]) -> None:
    data = NoisyPoints(20)
    make_trainer(tmp_path, data=data, gradient_accumulation_steps=1, save_steps=save_steps).train()
    assert checkpoint_steps(tmp_path) == expected


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_epochs=4, save_steps=3, eval_steps=None, save_total_limit=2)
    WorseAndWorse(config, make_net(), NoisyPoints(30), NoisyPoints(10)).train()
    assert checkpoint_steps(tmp_path) == [8, 30, 32]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 8


def test_a_recorded_evaluation_is_not_run_again(tmp_path: Path) -> None:
    crash(make_trainer(tmp_path, hooks=[CrashAt(8, "on_epoch_start")]))
    trainer = CountedEvaluations(make_trainer(tmp_path).config, make_net(), NoisyPoints(30), NoisyPoints(10))
    trainer.train()
    assert trainer.num_evaluations == 1  # the one at the end of the second epoch


@pytest.mark.parametrize("content", ["", "{", '{"metrics": {"loss": "x"}}', "[]"])
def test_a_damaged_evaluation_record_is_made_again(tmp_path: Path, unbroken: Path, content: str) -> None:
    crash(make_trainer(tmp_path, hooks=[CrashAt(8, "on_epoch_start")]))
    (tmp_path / "evaluations" / "00000008.json").write_text(content)
    trainer = CountedEvaluations(make_trainer(tmp_path).config, make_net(), NoisyPoints(30), NoisyPoints(10))
    trainer.train()
    assert trainer.num_evaluations == 2
    assert differences(unbroken, tmp_path) == []


def test_a_run_that_was_asked_to_stop_stays_stopped(tmp_path: Path) -> None:
    class Stopper(Hook):
        def after_step(self) -> None:
            if self.trainer.state.global_step == 5:
                self.trainer.request_stop("enough")

    make_trainer(tmp_path / "unbroken", hooks=[Stopper()]).train()
    crash(make_trainer(tmp_path / "broken", hooks=[Stopper(), CrashAt(6, "on_batch_end", Mode.VAL)]))
    trainer = make_trainer(tmp_path / "broken", hooks=[Stopper()])
    trainer.train()
    assert (trainer.state.global_step, trainer.state.stop_reason) == (6, "enough")
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []


def test_what_a_hook_keeps_and_what_it_measured_survive_a_crash(tmp_path: Path) -> None:
    class Counting(Hook):
        count = 0

        def after_step(self) -> None:
            self.count += 1
            if self.count % 9 == 0:
                self.trainer.storage.put_scalar("count", self.count)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    changes = {"log_steps": 6, "save_steps": 3, "gradient_accumulation_steps": 1}
    make_trainer(tmp_path / "unbroken", hooks=[Counting()], **changes).train()
    crash(make_trainer(tmp_path / "broken", hooks=[Counting(), CrashAt(11, "on_batch_start")], **changes))
    make_trainer(tmp_path / "broken", hooks=[Counting()], **changes).train()
    assert [row["count"] for row in rows_of(tmp_path / "unbroken") if "count" in row] == [9.0]  # logged at 12
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []


def test_a_second_trainer_in_the_same_folder_is_refused_while_the_first_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals: list[str] = []

    class Intruder(Hook):
        def after_step(self) -> None:
            if self.trainer.state.global_step == 4:
                capsys.readouterr()
                with pytest.raises(RunLockedError) as refused:
                    make_trainer(tmp_path).train()
                refusals.append(str(refused.value))
                assert "Output folder" not in capsys.readouterr().out, "the facts are those of a run that begins"

    make_trainer(tmp_path, hooks=[Intruder()]).train()
    assert len(refusals) == 1
    assert f"{tmp_path} is in use by" in refusals[0]
    make_trainer(tmp_path, resume_from_checkpoint=False).train()  # the first one has given it back


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index, union-attr]


def test_evaluating_and_saving_do_not_move_the_global_generators(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run")
    before = _random_state()
    first = trainer.evaluate()
    assert trainer.evaluate() == first
    trainer.save(tmp_path / "export")
    trainer.verify_invariance()
    assert _random_state() == before


def test_an_empty_dataset_is_not_replaced_by_the_default_one_and_nothing_is_shuffled(tmp_path: Path) -> None:
    trainer, given = make_trainer(tmp_path), NoisyPoints(10)
    with pytest.raises(DataError, match="the evaluation data is empty"):
        trainer.evaluate([])
    trainer.evaluate(given)
    assert given.fetched == list(range(10))


@pytest.mark.parametrize("step", [None, 8, 14])
def test_every_value_is_in_every_log_exactly_once(tmp_path: Path, step: int | None) -> None:
    if step is not None:
        crash(make_trainer(tmp_path, hooks=[CrashAt(step, "on_batch_start")]))
    trainer = make_trainer(tmp_path)
    trainer.train()
    values = [(row["step"], name) for row in rows_of(tmp_path) for name in row]
    logged = [(at, name) for at, name in values if name not in {"step", "epoch"}]
    assert len(logged) == len(set(logged))
    assert [at for at, name in logged if name == "evaluation.loss"] == [8, 16]
    assert [at for at, name in logged if name == "train.loss"] == [3, 6, 8, 11, 14, 16]
    table = trainer.load_csv_logs()
    assert table["step"] == [row["step"] for row in rows_of(tmp_path)]
    for name, values_of_name in scalars_of(tmp_path).items():
        rows = [(row["step"], row[name]) for row in rows_of(tmp_path) if name in row]
        assert values_of_name == [(at, pytest.approx(value)) for at, value in rows]
        assert [value for value in table[name] if not math.isnan(value)] == [value for _, value in rows]


def test_training_works_outside_the_main_thread(tmp_path: Path, unbroken: Path) -> None:
    thread = threading.Thread(target=make_trainer(tmp_path).train)
    thread.start()
    thread.join()
    assert differences(unbroken, tmp_path) == []


def test_the_last_checkpoint_is_the_trained_module(tmp_path: Path) -> None:
    net = make_net()
    Trainer(make_config(tmp_path, num_epochs=1), net, NoisyPoints(30), NoisyPoints(10)).train()
    from safetensors.torch import load_file

    stored = load_file(last_checkpoint(tmp_path) / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in net.state_dict().items())
    assert not torch.equal(stored["layers.0.weight"], make_net().state_dict()["layers.0.weight"])
