"""How a run on several processes ends before its time, by signals, deaths and errors: together, at once, no hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cases import Fail, FailAt, build, ledger_of, points, steps_saved
from ranks import Group, Outcome, on_ranks, outcomes_on
from workload import differences, make_trainer

from hezar_train import Hook
from hezar_train.errors import NonFiniteError
from hezar_train.types import Mode

AT_ONCE_SECONDS = 20.0
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class SendAt(Hook):
    """Send a signal to this process, if it is the one, in the forward that follows so many updates."""

    def __init__(self, rank: int, update: int, number: signal.Signals, mode: Mode = Mode.TRAIN) -> None:
        self.modes = frozenset({mode})
        self._place, self._number = (rank, update), number

    def on_batch_forward(self, _: Any) -> None:
        if (self.trainer.runtime.rank, self.trainer.state.update_step) == self._place:
            os.kill(os.getpid(), self._number)


WORKLOAD: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "global_batch_size": 8,
    "batch_size": 4,
    "save_steps": None,
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", CODES)
def test_a_signal_to_one_process_stops_all_after_the_same_update(
    number: signal.Signals, rank: int, tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    outcomes = outcomes_on(2, lambda: make_trainer(out, hooks=[SendAt(rank, 2, number)], **WORKLOAD).train())
    assert outcomes[rank].exit_code == CODES[number]
    assert outcomes[1 - rank].exit_code in CODES.values()
    assert all("TrainingInterrupted" in one.error for one in outcomes)
    assert len(steps_saved(out)) == 1
    on_ranks(2, lambda: make_trainer(tmp_path / "unbroken", **WORKLOAD).train().metrics)
    on_ranks(2, lambda: make_trainer(out, **WORKLOAD).train().metrics)
    assert differences(tmp_path / "unbroken", out) == []


class OwnGuard(Hook):
    """Read the loss in a way of its own, in the place of the default hook `guard`."""

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        trainer.replace_hook_in_train(self.read, "on_update", "guard")

    def read(self, ctx: Any) -> None:
        ctx.loss_value = ctx.grad_norm = 1.0


def test_a_signal_stops_all_processes_also_where_the_guard_is_a_users_own(tmp_path: Path) -> None:
    hooks = [OwnGuard(), SendAt(1, 2, signal.SIGTERM)]
    outcomes = outcomes_on(2, lambda: make_trainer(tmp_path / "stopped", hooks=hooks, **WORKLOAD).train())
    assert [one.exit_code for one in outcomes] == [143, 143]
    assert len(steps_saved(tmp_path / "stopped")) == 1


def test_a_signal_during_an_evaluation_stops_all_and_the_resumed_run_is_the_same(tmp_path: Path) -> None:
    out, hook = tmp_path / "stopped", SendAt(1, 4, signal.SIGTERM, Mode.VAL)
    outcomes = outcomes_on(2, lambda: make_trainer(out, hooks=[hook], **WORKLOAD).train())
    assert [one.exit_code for one in outcomes] == [143, 143]
    on_ranks(2, lambda: make_trainer(tmp_path / "unbroken", **WORKLOAD).train().metrics)
    on_ranks(2, lambda: make_trainer(out, **WORKLOAD).train().metrics)
    assert differences(tmp_path / "unbroken", out) == []


class StopAtEpochEnd(Hook):
    """Ask one process to stop after its first epoch, in the training or at the end of the evaluation."""

    def __init__(self, mode: Mode) -> None:
        self.modes = frozenset({mode})

    def on_epoch_end(self, _: Any) -> None:
        if self.trainer.runtime.rank == 1:
            self.trainer.request_stop("enough")


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL])
def test_a_stop_that_one_process_is_asked_for_at_an_epochs_end_stops_all(mode: Mode, tmp_path: Path) -> None:
    def train() -> tuple[int, str | None]:
        trainer = make_trainer(tmp_path, hooks=[StopAtEpochEnd(mode)], **WORKLOAD)
        trainer.train()
        return trainer.state.epoch, trainer.state.stop_reason

    assert on_ranks(2, train) == [(1, "enough")] * 2


class Slow(Hook):
    def after_step(self) -> None:
        time.sleep(0.02)


def test_a_signal_from_outside_to_any_process_stops_all(tmp_path: Path) -> None:
    def train() -> None:
        build("plain", tmp_path, [Slow()], num_epochs=1000, save_steps=3).train()

    with Group(3, train) as group:
        while not (tmp_path / "checkpoints").exists() or not steps_saved(tmp_path):
            assert all(process.is_alive() for process in group.processes), group.wait()
            time.sleep(0.01)
        group.send(2, signal.SIGTERM)
        outcomes = group.wait()
    assert [one.exit_code for one in outcomes] == [143] * 3
    assert all("saved at step" in one.error for one in outcomes)
    assert len({one.error.strip().splitlines()[-1] for one in outcomes}) == 1


def assert_ended_at_once(outcomes: list[Outcome], ended: int) -> None:
    """Check that all others ended soon after the one did, with an error."""
    for one in outcomes:
        assert one.exit_code is not None, one.output
        assert one.seconds - outcomes[ended].seconds < AT_ONCE_SECONDS
        assert one.rank == ended or (one.exit_code != 0 and one.error), one.output


@pytest.mark.parametrize("rank", [0, 2])
def test_when_a_process_dies_the_others_end_at_once(rank: int, tmp_path: Path) -> None:
    hook = SendAt(rank, 3, signal.SIGKILL)
    outcomes = outcomes_on(3, lambda: build("plain", tmp_path, [hook]).train())
    assert outcomes[rank].exit_code == -signal.SIGKILL
    assert_ended_at_once(outcomes, rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_ends_all_and_is_told_there(rank: int, tmp_path: Path) -> None:
    outcomes = outcomes_on(2, lambda: build("plain", tmp_path, [FailAt(3, rank)]).train())
    assert Fail.__name__ in outcomes[rank].error
    assert_ended_at_once(outcomes, rank)
    on_ranks(2, lambda: build("plain", tmp_path, resume_from_checkpoint=True).train().metrics)
    assert [line["update"] for line in ledger_of(tmp_path)] == list(range(1, 9))


class FailInEvaluation(Hook):
    modes = frozenset({Mode.VAL})

    def on_batch_end(self, _: Any) -> None:
        if self.trainer.runtime.rank == 1:
            raise Fail("in an evaluation")


def test_an_error_in_an_evaluation_on_one_process_ends_all(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, lambda: build("plain", tmp_path, [FailInEvaluation()]).train())
    assert Fail.__name__ in outcomes[1].error
    assert_ended_at_once(outcomes, 1)


def train_past_a_bad_sample(out: Path) -> tuple[int, int]:
    """Train until the loss is not finite, then once more without that sample; return the updates of both calls."""
    rows = points(24)
    trainer = build("plain", out, batch_size=4, global_batch_size=8)
    trainer.train_dataset[:] = [{**row, "x": row["x"].float()} for row in rows]
    bad = trainer.train_dataset[5]["x"]
    good = bad.clone()
    bad.fill_(float("inf"))
    trainer = type(trainer)(trainer.config, trainer.model, trainer.train_dataset)
    with pytest.raises(NonFiniteError):
        trainer.train()
    before = trainer.state.update_step
    bad.copy_(good)
    trainer.train()
    return before, trainer.state.update_step


def test_a_loss_that_is_not_finite_on_one_process_stops_all_before_the_update(tmp_path: Path) -> None:
    told = on_ranks(2, train_past_a_bad_sample, tmp_path)
    assert told[0] == told[1]
    assert told[0][1] == 6


def test_a_folder_in_use_is_refused_on_all_processes(tmp_path: Path) -> None:
    def enter_twice() -> str:
        from hezar_train.checkpoint import RunLock

        trainer = build("plain", tmp_path)
        if trainer.runtime.is_main:
            RunLock(trainer.folder.lock).acquire()
        trainer.train()
        return "trained"

    outcomes = outcomes_on(2, enter_twice)
    assert all("is in use by" in one.error for one in outcomes)
