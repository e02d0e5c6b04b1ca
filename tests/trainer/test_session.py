"""What is written down of each start of a run: where it began, where its time went, how it ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import TrainingInterrupted
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
