"""A process that stops, or dies, or is slower than the limit: the others end in time, and name it and where it was."""

from __future__ import annotations

import os
import signal
import struct
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
from cases import Fail, FailAt, build
from ranks import Group, Outcome, outcomes_on

from hezar_train import Hook
from hezar_train.loop import Moment
from hezar_train.runtime import place
from hezar_train.state import TrainerState
from hezar_train.types import Mode

LIMIT = 4
WITHIN_SECONDS = 25.0
"""The limit, the time to listen, and a busy machine."""


class StopAt(Hook):
    """Do something to this process, if it is the one, in the forward after so many updates."""

    def __init__(self, rank: int, update: int, deed: Any) -> None:
        self._place, self._deed = (rank, update), deed

    def on_batch_forward(self, _: Any) -> None:
        if (self.trainer.runtime.rank, self.trainer.state.update_step) == self._place:
            self._deed()


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def train_until(out: Path, rank: int, deed: Any, **settings: Any) -> None:
    build("plain", out, [StopAt(rank, 3, deed)], collective_timeout_seconds=LIMIT, **settings).train()


def ends_of_others(count: int, rank: int, out: Path, deed: Any, **settings: Any) -> list[Outcome]:
    """Train on so many processes, of which one does something; return what became of the others."""
    with Group(count, lambda: train_until(out, rank, deed, **settings), seconds=60.0) as group:
        others = [process for number, process in enumerate(group.processes) if number != rank]
        until = time.monotonic() + 50.0
        while any(process.is_alive() for process in others) and time.monotonic() < until:
            time.sleep(0.05)
        group.send(rank, signal.SIGKILL)
        return [one for one in group.wait() if one.rank != rank]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_a_process_that_is_stopped_is_named_by_all_others_within_the_limit(
    count: int, rank: int, tmp_path: Path
) -> None:
    for one in ends_of_others(count, rank, tmp_path, stop_here):
        assert one.exit_code == 1
        last = one.error.strip().splitlines()[-1]
        assert "LostProcessError" in last
        assert f": process {rank} gives no sign of life; it was at on_batch_forward (train), after update 3 " in last
        assert one.seconds < WITHIN_SECONDS


def test_a_process_that_is_too_slow_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    (other,) = ends_of_others(2, 1, tmp_path, lambda: time.sleep(3600))
    last = other.error.strip().splitlines()[-1]
    assert "process 1 is alive and has not come as far as the others; it was at on_batch_forward (train)" in last


@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_that_dies_is_named_and_where_it_was(rank: int, tmp_path: Path) -> None:
    for one in ends_of_others(3, rank, tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        assert f"process {rank} gives no sign of life; it was at on_batch_forward (train)" in one.error


def test_a_process_that_fails_by_itself_is_named_by_the_others(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, lambda: build("plain", tmp_path, [FailAt(3, 1)]).train())
    assert Fail.__name__ in outcomes[1].error
    assert "LostProcessError" not in outcomes[1].error
    assert "process 1 has failed with an error of its own" in outcomes[0].error


def test_what_the_processes_showed_is_gone_after_a_run_that_ended(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, lambda: build("plain", tmp_path).train().metrics and None)
    assert [one.exit_code for one in outcomes] == [0, 0]
    assert list((tmp_path / ".processes").glob("*")) == []


def test_a_file_that_is_no_place_of_a_process_is_not_believed(tmp_path: Path) -> None:
    names = [str(moment) for moment in Moment]
    folder = tmp_path / ".processes"
    folder.mkdir()
    (folder / "1").write_bytes(b"\xff" * 64)
    (folder / "2").write_bytes(bytes(1 << 20))
    (folder / "3").symlink_to("/dev/zero")
    os.mkfifo(folder / "4")
    (folder / "5").write_bytes(struct.pack("<8Q", place.MAGIC, 0, 1, 255, 0, 0, 0, 0))  # a moment that there is not
    error = place.loss_explained(RuntimeError("Connection closed by peer"), folder, 0, 6, names)
    for rank in range(1, 6):
        assert f"process {rank} is not to be seen; it was never seen" in str(error)


def test_a_moment_is_noted_in_less_than_a_few_microseconds(tmp_path: Path) -> None:
    one, state = place.Place(), TrainerState()
    with one.shown(tmp_path / ".processes", 0, state):
        note = one.noting(Mode.TRAIN, 3)
        seconds = min(timeit.repeat(lambda: note(None), number=1000, repeat=20)) / 1000
    assert seconds < 5e-6
