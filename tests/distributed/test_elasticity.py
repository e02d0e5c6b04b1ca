"""A run may be killed anywhere and go on with another number of processes; with the same number, bit by bit."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ADAMW_FLOAT64,
    Fail,
    FailAt,
    Watch,
    build,
    distance,
    last_weights,
    learn,
    ledger_of,
    samples_of_updates,
    steps_saved,
)
from ranks import Group, on_ranks
from workload import Crash, CrashAt, differences, make_trainer

from hezar_train import Hook

CASE, NUM_SAMPLES = "short last window", 49
SETTINGS: dict[str, Any] = {
    **ADAMW_FLOAT64, "num_epochs": 3, "save_steps": 12, "lr_scheduler": "one_cycle", "lr_scheduling_steps": 6,
    "resume_from_checkpoint": True,
}  # fmt: skip


class Slow(Hook):
    """Let each update take a while, so that a signal from outside can hit it."""

    def after_step(self) -> None:
        time.sleep(0.02)


def learn_until(out: Path, update: int) -> dict[int, list[int]]:
    """Train until all processes fail; return the samples of each update that was done here."""
    watch = Watch()
    with pytest.raises(Fail):
        build(CASE, out, [watch, FailAt(update)], torch.float64, **SETTINGS).train()
    return {number: samples for number, samples in watch.samples.items() if number <= update}


def train_slowly(out: Path) -> None:
    build(CASE, out, [Slow()], torch.float64, **SETTINGS).train()


def assert_each_sample_once_an_epoch(updates: dict[int, list[int]], out: Path) -> None:
    lines = ledger_of(out)
    assert [line["update"] for line in lines] == sorted(updates)
    for epoch in {line["epoch"] for line in lines}:
        seen = [number for line in lines if line["epoch"] == epoch for number in updates[line["update"]]]
        assert sorted(seen) == list(range(NUM_SAMPLES))


def test_a_run_that_changes_its_processes_at_each_crash_is_the_unbroken_run(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: learn(CASE, tmp_path / "alone", torch.float64, **SETTINGS))
    out, seen = tmp_path / "changing", {}
    for count, update in ((2, 3), (1, 5), (3, 9)):
        told = on_ranks(count, lambda update=update: learn_until(out, update))
        seen |= samples_of_updates([{"samples": one} for one in told])
    told = on_ranks(2, lambda: learn(CASE, out, torch.float64, **SETTINGS))
    seen |= samples_of_updates(told)
    assert seen == samples_of_updates([alone])
    assert_each_sample_once_an_epoch(seen, out)
    assert ledger_of(out) == ledger_of(tmp_path / "alone")
    assert told[0]["rates"] == alone["rates"][-len(told[0]["rates"]) :]
    assert told[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
    assert distance(told[1]["weights"], alone["weights"]) <= 1e-9


def kill_after_a_save(count: int, out: Path) -> None:
    """Start the run and kill all its processes, one after another, when it has saved once more."""
    before = len(steps_saved(out)) if out.exists() else 0
    with Group(count, train_slowly, out) as group:
        while not (out / "checkpoints").exists() or len(steps_saved(out)) == before:
            assert all(process.is_alive() for process in group.processes), group.wait()
            time.sleep(0.005)
        for rank in range(count):
            group.send(rank, signal.SIGKILL)
        assert {one.exit_code for one in group.wait()} <= {-signal.SIGKILL, 1}  # one may notice that another died


@pytest.mark.slow
def test_a_run_that_changes_its_processes_at_each_sigkill_is_the_unbroken_run(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: learn(CASE, tmp_path / "alone", torch.float64, **SETTINGS))
    out = tmp_path / "killed"
    for count in (2, 1, 3):
        kill_after_a_save(count, out)
    told = on_ranks(2, lambda: learn(CASE, out, torch.float64, **SETTINGS))
    assert ledger_of(out) == ledger_of(tmp_path / "alone")
    assert told[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
    assert distance(last_weights(out), last_weights(tmp_path / "alone")) <= 1e-9


def crash_twice_and_finish(out: Path) -> None:
    """Train the workload that uses everything, with two crashes."""
    for step in (3, 6):
        with pytest.raises(Crash):
            make_trainer(out, hooks=[CrashAt(step, "on_batch_forward")], save_steps=1, **WORKLOAD).train()
    make_trainer(out, save_steps=1, **WORKLOAD).train()


WORKLOAD = {"gradient_accumulation_steps": 1, "global_batch_size": 8, "batch_size": 4}


@pytest.mark.parametrize("count", [2, 3])
def test_with_the_same_number_of_processes_a_resumed_run_is_the_same_bit_by_bit(count: int, tmp_path: Path) -> None:
    on_ranks(count, lambda: make_trainer(tmp_path / "unbroken", save_steps=1, **WORKLOAD).train().metrics)
    on_ranks(count, crash_twice_and_finish, tmp_path / "broken")
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []


def test_what_was_changed_in_the_config_counts_also_with_another_number_of_processes(tmp_path: Path) -> None:
    on_ranks(2, lambda: learn_until(tmp_path, 3))
    on_ranks(1, lambda: learn(CASE, tmp_path, torch.float64, **{**SETTINGS, "save_steps": 6}))
    updates = [line["update"] for line in ledger_of(tmp_path)]
    assert len(updates) == 15
    assert len(steps_saved(tmp_path)) == 1 + 13  # after update 2, then after each one


def test_the_number_of_processes_may_change_back_and_the_periods_stay(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: learn(CASE, tmp_path / "alone", torch.float64, **SETTINGS))
    for count, update in ((2, 3), (1, 5), (1, 8)):
        on_ranks(count, learn_until, tmp_path / "changing", update)
    (told,) = on_ranks(1, lambda: learn(CASE, tmp_path / "changing", torch.float64, **SETTINGS))
    assert told["rates"] == alone["rates"][-len(told["rates"]) :]
    assert distance(told["weights"], alone["weights"]) <= 1e-9
