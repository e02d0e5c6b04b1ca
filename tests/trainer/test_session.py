"""What is written down of each start of a run: where it began, where its time went, how it ended."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hezar_train import Hook, Trainer
from hezar_train.errors import ConfigError, DataError, HookError, TrainingInterrupted
from hezar_train.events import EventWriter, JSONLinesWriter
from hezar_train.trainer.run_actions import TimeSpent

Build = Callable[..., Trainer]


class At(Hook):
    """Do something after a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def after_step(self) -> None:
        if self.trainer.state.global_step == self.step:
            self.act()


def starts(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "environment.json").read_text())["starts"]
    return found


def fail() -> None:
    raise OSError("the disk is gone")


def test_a_start_ends_finished_with_its_time_split(toy: Build, rows: Any, tmp_path: Path) -> None:
    toy(eval_dataset=rows(8)).train()
    (start,) = starts(tmp_path / "run")
    assert (start["step"], start["end"]["how"], start["end"]["step"]) == (0, "finished", 5)
    assert list(start["seconds"]) == ["training", "data", "evaluation", "saving"]
    assert all(value > 0 for value in start["seconds"].values())
    assert sum(start["seconds"].values()) == pytest.approx(start["end"]["time"] - start["time"], abs=0.5)


def test_a_signal_and_an_error_are_told_apart_and_a_resume_says_where_it_began(toy: Build, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        toy(save_steps=1, hooks=[At(2, lambda: signal.raise_signal(signal.SIGTERM))]).train()
    with pytest.raises(OSError, match="gone"):
        toy(save_steps=1, resume_from_checkpoint=True, hooks=[At(4, fail)]).train()
    toy(save_steps=1, resume_from_checkpoint=True).train()
    first, second, third = starts(tmp_path / "run")
    assert (first["end"]["how"], first["end"]["signal"], first["end"]["step"]) == ("interrupted", "SIGTERM", 2)
    assert (second["step"], second["end"]["how"], second["end"]["error"]) == (2, "failed", "OSError")
    assert "gone" not in json.dumps(second)
    assert (third["step"] in (3, 4), third["end"]["how"]) == (True, "finished")


def test_a_signal_without_saving_says_that_nothing_was_saved(toy: Build) -> None:
    stop = At(2, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingInterrupted, match=r"SIGTERM: stopped, nothing saved \(save_enabled=False\)\."):
        toy(save_enabled=False, hooks=[stop]).train()


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_a_full_disk_refuses_is_not_told_as_saved(
    toy: Build, async_save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(folder: Path) -> int:
        return 0 if "00000003" in folder.name else 1 << 40

    monkeypatch.setattr("hezar_train.checkpoint.writer.free_bytes", room)
    stop = At(3, lambda: signal.raise_signal(signal.SIGTERM))
    words = "SIGTERM: stopped, step 3 could NOT be saved, the newest checkpoint is that of step 2."
    with pytest.raises(TrainingInterrupted, match=words):
        toy(save_steps=1, async_save=async_save, hooks=[stop]).train()


def test_a_disk_that_was_full_from_the_start_leaves_no_checkpoint_and_says_so(
    toy: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hezar_train.checkpoint.writer.free_bytes", lambda _: 0)
    stop = At(2, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingInterrupted, match="step 2 could NOT be saved, there is no checkpoint"):
        toy(hooks=[stop]).train()


class Stumbling(Trainer):
    """Its writers cannot be made at first."""

    stumbles = 1

    def build_writers(self) -> list[EventWriter]:
        if self.stumbles:
            self.stumbles -= 1
            raise OSError("the tracker does not answer")
        return super().build_writers()


def open_files_below(folder: Path) -> list[str]:
    targets = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [target for target in targets if target.startswith(str(folder.resolve()))]


def test_a_start_that_failed_before_its_first_step_can_be_made_again(
    toy: Build, logged: Any, saved_steps: Any, tmp_path: Path
) -> None:
    toy().train()
    trainer = toy(Stumbling)
    with pytest.raises(OSError, match="does not answer"):
        trainer.train()
    assert open_files_below(tmp_path) == []
    trainer.train()
    assert saved_steps() == [5]
    assert [row["step"] for row in logged()] == [5]


class FailsOnce:
    """A hook that fails the third time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            fail()


def test_an_update_that_was_applied_and_not_counted_is_not_trained_a_second_time(toy: Build) -> None:
    unbroken = toy(save_steps=1)
    unbroken.train()
    trainer = toy(save_steps=1)
    trainer.register_hook_in_train(FailsOnce(), "on_update")  # which comes after the optimizer's step
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    with pytest.raises(HookError, match="going on would train on the same samples twice"):
        trainer.train()
    trainer.evaluate(trainer.train_dataset)
    with pytest.raises(HookError, match="resume_from_checkpoint=True"):
        trainer.train()
    again = toy(save_steps=1, resume_from_checkpoint=True)
    again.train()
    assert torch.equal(again.model.layer.weight, unbroken.model.layer.weight)


@pytest.mark.parametrize("moment", ["on_batch_forward", "on_gradients", "on_batch_end"])
def test_a_call_that_failed_before_an_update_or_after_its_count_is_finished_by_the_next(
    toy: Build, moment: str
) -> None:
    unbroken = toy()
    unbroken.train()
    trainer = toy()
    trainer.register_hook_in_train(FailsOnce(), moment)
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    trainer.train()
    assert torch.equal(trainer.model.layer.weight, unbroken.model.layer.weight)


class FailsAt:
    """A hook that raises after one step, the first time."""

    def __init__(self, step: int) -> None:
        self.step, self.has_failed = step, False

    def __call__(self, ctx: Any) -> None:
        if ctx.state.global_step == self.step and not self.has_failed:
            self.has_failed = True
            fail()


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize(("moment", "step"), [("on_batch_end", 3), ("on_batch_end", 5), ("on_batch_end", 10),
                                              ("on_epoch_end", 5), ("on_epoch_end", 10)])  # fmt: skip
def test_what_fell_due_when_a_hook_failed_is_done_by_the_next_call(
    toy: Build, rows: Any, logged: Any, saved_steps: Any, moment: str, step: int, evaluates: bool
) -> None:
    data: dict[str, Any] = {"num_epochs": 2, "save_steps": 3, "log_steps": 3, "save_total_limit": None}
    data |= {"eval_dataset": rows(8), "eval_steps": 3} if evaluates else {}
    toy(out="unbroken", **data).train()
    trainer = toy(out="failed", **data)
    trainer.register_hook_in_train(FailsAt(step), moment)
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    trainer.train()
    assert saved_steps("failed") == saved_steps("unbroken")
    assert [row["step"] for row in logged("failed")] == [row["step"] for row in logged("unbroken")]
    assert trainer.train().num_samples == 0  # nothing is left to do


def test_a_round_whose_last_update_was_not_saved_is_saved_by_the_next_call(toy: Build, saved_steps: Any) -> None:
    trainer = toy(local_update_steps=3, save_total_limit=None)
    trainer.register_hook_in_train(FailsAt(3), "on_batch_end")
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    trainer.train()
    assert saved_steps() == [3, 5, 6]  # an epoch ends at 5


def test_a_failure_inside_a_window_makes_nothing_due_a_second_time(toy: Build, rows: Any, logged: Any) -> None:
    settings = {"gradient_accumulation_steps": 2, "batch_size": 2, "log_steps": 2, "eval_steps": 4, "num_epochs": 1}
    toy(out="unbroken", eval_dataset=rows(8), **settings).train()
    trainer = toy(out="failed", eval_dataset=rows(8), **settings)
    trainer.register_hook_in_train(FailsAt(5), "on_batch_forward")  # the second micro-batch of the third update
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    trainer.train()
    assert [row["step"] for row in logged("failed")] == [row["step"] for row in logged("unbroken")]


def test_an_update_that_the_schedule_does_not_know_of_yet_is_not_gone_on_from(toy: Build) -> None:
    trainer = toy()
    trainer.hooks_in_train.register(FailsAt(3), "on_batch_end", after="count")
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    with pytest.raises(HookError, match="train on the same samples twice"):
        trainer.train()


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a place: whoever begins again begins at the first one."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_a_second_call_in_the_middle_of_a_stream_without_a_place_is_refused_as_a_resume_is(
    toy: Build, rows: Any
) -> None:
    trainer = toy(train_dataset=Stream(rows()), max_steps=8)
    trainer.register_hook_in_train(FailsAt(3), "on_batch_end")
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    with pytest.raises(DataError, match="cannot resume in the middle of an epoch"):
        trainer.train()


@pytest.mark.parametrize(("name", "value"), [("num_total_train_batch", 7), ("num_train_epoch", 2)])
def test_lengths_that_a_hook_assigns_are_the_same_after_a_resume(toy: Build, name: str, value: int) -> None:
    def build(**given: Any) -> Any:
        trainer = toy(num_epochs=4, save_steps=1, **given)
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, name, value), "on_fit_start")
        return trainer

    unbroken = build(out="unbroken")
    unbroken.train()
    killed = build(out="killed")
    killed.register_hook_in_train(FailsAt(3), "on_batch_forward")
    with pytest.raises(OSError, match="gone"):
        killed.train()
    again = build(out="killed", resume_from_checkpoint=True)
    again.train()
    assert again.state.global_step == unbroken.state.global_step == (7 if value == 7 else 10)
    assert torch.equal(again.model.layer.weight, unbroken.model.layer.weight)


def test_more_epochs_that_a_hook_asks_for_leave_max_steps_as_it_is(toy: Build) -> None:
    trainer = toy(max_steps=4)
    trainer.register_hook_in_train(lambda ctx: setattr(ctx, "num_train_epoch", 3), "on_fit_start")
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_refused_reconfiguration_builds_the_old_data_by_the_old_config(toy: Build) -> None:
    class Own(Trainer):
        def create_train_dataloader(self, dataset: Any) -> Any:
            return DataLoader(dataset, batch_size=4 * (self.config.num_epochs or 1))

        def build_lr_scheduler(self) -> Any:
            if self.config.num_epochs == 5:
                raise ConfigError("no schedule for five epochs")
            return super().build_lr_scheduler()

    trainer = toy(Own, num_epochs=1)
    with pytest.raises(ConfigError, match="five epochs"):
        trainer.reconfigure(copy.deepcopy(trainer.config).update(num_epochs=5))
    assert trainer.config.num_epochs == 1
    trainer.train()
    assert (trainer.state.global_step, trainer.plan.total_steps) == (5, 5)


def test_a_save_of_the_users_own_that_failed_is_made_again_by_the_next_call(toy: Build, saved_steps: Any) -> None:
    class Own(Trainer):
        failures = 1

        def save(self, folder: Any, **given: Any) -> Any:
            if self.failures:
                self.failures -= 1
                fail()
            return super().save(folder, **given)

    trainer = toy(Own, num_epochs=2, save_total_limit=None)
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    trainer.train()
    assert (saved_steps(), trainer.failures) == ([5, 10], 0)


def test_where_one_file_cannot_be_opened_no_other_stays_open(toy: Build, tmp_path: Path) -> None:
    toy(max_steps=2).train()
    (table,) = (tmp_path / "run/logs").glob("*/*.csv")
    table.unlink()
    table.mkdir()
    trainer = toy(resume_from_checkpoint=True, accept_changes=True)
    with pytest.raises(IsADirectoryError):
        trainer.train()
    assert open_files_below(tmp_path) == []
    assert trainer.storage.writers == []


def test_why_a_run_stopped_early_is_told(toy: Build, tmp_path: Path) -> None:
    trainer = toy()
    trainer.register_hooks([At(3, lambda: trainer.request_stop("enough"))])
    trainer.train()
    assert starts(tmp_path / "run")[0]["end"]["reason"] == "enough"


def test_a_record_that_cannot_be_written_ends_nothing(
    toy: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def block() -> None:
        (tmp_path / "run/environment.json").unlink()
        (tmp_path / "run/environment.json").mkdir()

    toy(hooks=[At(3, block)]).train()
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("[0-9]*")] == ["00000005"]


def test_a_new_run_moves_the_report_of_the_old_one_aside(toy: Build, tmp_path: Path) -> None:
    toy().train()
    for name in ("report.html", "curves.png"):
        (tmp_path / "run" / name).write_text("old")
    toy().train()
    assert not (tmp_path / "run/report.html").exists()
    assert (tmp_path / "run/previous/0001/report.html").read_text() == "old"
    assert (tmp_path / "run/previous/0001/curves.png").read_text() == "old"


def test_time_is_counted_once_and_the_rest_is_training() -> None:
    spent = TimeSpent()
    assert list(spent.waiting_for(range(3))) == [0, 1, 2]
    with pytest.raises(ValueError, match="no"), spent.on("saving"):
        raise ValueError("no")
    split = spent.split()
    assert all(value > 0 for name, value in split.items() if name != "evaluation")
    assert split["evaluation"] == 0
    spent.start()
    assert spent.split()["data"] == 0


@pytest.fixture
def _threads_as_they_were() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("_threads_as_they_were")
def test_a_run_computes_with_the_threads_of_its_config_and_other_threads_are_told_at_a_resume(
    toy: Build, rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy(max_steps=2, num_threads=2).train()
    assert torch.get_num_threads() == starts(tmp_path / "run")[-1]["hardware"]["threads"] == 2
    toy(max_steps=3, num_threads=2, resume_from_checkpoint=True, accept_changes=True).train()
    assert "not bit by bit" not in caplog.text
    toy(max_steps=4, num_threads=1, resume_from_checkpoint=True, accept_changes=True).train()
    assert "it computed with 2 threads before, and with 1 now. num_threads=2" in caplog.text


def test_other_versions_and_another_device_are_told_at_a_resume(toy: Build, tmp_path: Path, caplog: Any) -> None:
    toy(num_epochs=1).train()
    record = tmp_path / "run" / "environment.json"
    content = json.loads(record.read_text())
    content["starts"][-1]["versions"]["torch"] = "1.13.0"
    content["starts"][-1]["hardware"]["device"] = "Tesla T4"
    record.write_text(json.dumps(content))
    toy(num_epochs=2, resume_from_checkpoint=True).train()
    (told,) = [line.getMessage() for line in caplog.records if "perhaps not bit by bit" in line.getMessage()]
    assert f"torch 1.13.0 before, {torch.__version__.partition('+')[0]}" in told
    assert "device Tesla T4 before, cpu now" in told


def test_what_an_overridden_builder_keeps_of_the_state_is_the_trainers_own(toy: Build) -> None:
    class Own(Trainer):
        def build_optimizer(self) -> Any:
            self.kept_state = self.state
            return super().build_optimizer()

    trainer = toy(Own)
    trainer.train()
    assert trainer.kept_state is trainer.state
    assert trainer.kept_state.global_step == trainer.plan.total_steps


def test_a_writer_of_the_users_own_is_cut_back_to_the_checkpoint_wherever_it_writes(toy: Build, tmp_path: Path) -> None:
    class Copying(Trainer):
        def build_writers(self) -> list[EventWriter]:
            return [JSONLinesWriter(tmp_path / f"elsewhere-{self.folder.root.name}.json")]

    settings = {"save_steps": 2, "log_steps": 1}
    toy(Copying, out="unbroken", **settings).train()
    with pytest.raises(OSError, match="gone"):
        toy(Copying, hooks=[At(4, fail)], **settings).train()
    toy(Copying, resume_from_checkpoint=True, **settings).train()
    broken, unbroken = (
        [json.loads(line)["step"] for line in (tmp_path / f"elsewhere-{run}.json").read_text().splitlines()]
        for run in ("run", "unbroken")
    )
    assert broken == unbroken == [1, 2, 3, 4, 5]
