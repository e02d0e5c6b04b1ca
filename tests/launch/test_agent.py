"""The launcher of several processes, with a stand-in for the training: deaths, errors, signals, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Start = Callable[..., "subprocess.Popen[str]"]
Wait = Callable[..., None]
Group = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def group(start: Start, tmp_path: Path) -> Iterator[Group]:
    """Start two processes that count to a number; end whatever the test leaves."""
    fronts = []

    def call(total: int, seconds: float, *deeds: str, restarts: int = 3) -> subprocess.Popen[str]:
        numbers = map(str, (2, restarts, total, seconds))
        fronts.append(start(sys.executable, str(HERE / "front.py"), *numbers, *deeds, TMPDIR=str(tmp_path)))
        return fronts[-1]

    yield call
    for front in fronts:
        front.kill()
        front.communicate()


def pids(folder: Path) -> list[int]:
    return [int((folder / f"pid{rank}").read_text()) for rank in (0, 1)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_group_that_is_done_leaves_with_zero_and_one_voice(group: Group, tmp_path: Path) -> None:
    front = group(3, 0)
    output, errors = front.communicate(timeout=120)
    assert (front.returncode, errors) == (0, "")
    assert output == "rank 0 of 2 begins at 0, restart 0\n"
    assert not any(is_alive(pid) for pid in pids(tmp_path))
    assert not list(tmp_path.glob("hezar_train_*"))


@pytest.mark.slow
def test_after_a_kill_all_start_again_from_what_was_saved(group: Group) -> None:
    front = group(6, 0, "die:1:4:1")
    output, errors = front.communicate(timeout=120)
    assert front.returncode == 0
    assert output.splitlines() == ["rank 0 of 2 begins at 0, restart 0", "rank 0 of 2 begins at 4, restart 1"]
    assert "process 1 of 2 was killed by SIGKILL\nstarting all processes again (restart 1 of 3)" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_kills_beyond_the_number_of_restarts_are_a_failure(group: Group) -> None:
    front = group(6, 0, "die:0:4:99", restarts=1)
    _, errors = front.communicate(timeout=120)
    assert front.returncode == 1
    assert errors.count("process 0 of 2 was killed by SIGKILL") == 2
    assert errors.count("starting all processes again") == 1


def test_an_error_before_any_progress_is_not_tried_again_and_is_shown_whoever_had_it(group: Group) -> None:
    front = group(6, 0, "fail:1:0")
    _, errors = front.communicate(timeout=120)
    assert front.returncode == 1
    assert "process 1 of 2 failed first. Its last words:" in errors
    assert errors.count("RuntimeError: rank 1 cannot count past 0") == 1
    assert "starting all processes again" not in errors


@pytest.mark.slow
def test_an_error_after_progress_is_tried_again_and_if_it_comes_back_at_once_no_more(group: Group) -> None:
    front = group(6, 0, "fail:1:4")
    _, errors = front.communicate(timeout=120)
    assert front.returncode == 1
    assert errors.count("RuntimeError: rank 1 cannot count past 4") == 2
    assert errors.count("starting all processes again") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_is_told_once_and_its_exit_code_passes_through(group: Group, rank: int) -> None:
    front = group(6, 0, f"refuse:{rank}:4")
    _, errors = front.communicate(timeout=120)
    assert front.returncode == 2
    assert errors.count(f"error: rank {rank} refuses") == 1
    assert "starting all processes again" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)],
)
def test_a_signal_to_the_front_ends_all_after_the_same_addition(
    group: Group, tmp_path: Path, number: signal.Signals, code: int, wait_for: Wait
) -> None:
    front = group(100_000, 0.01)
    wait_for((tmp_path / "saved").exists)
    front.send_signal(number)
    output, errors = front.communicate(timeout=60)
    assert (front.returncode, errors) == (code, "")
    assert output.splitlines()[-1] == f"rank 0 stopped at {(tmp_path / 'saved').read_text()}"
    assert not any(is_alive(pid) for pid in pids(tmp_path))


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_and_none_is_started_again(
    group: Group, tmp_path: Path, wait_for: Wait
) -> None:
    front = group(100_000, 0.01)
    wait_for((tmp_path / "saved").exists)
    os.kill(pids(tmp_path)[1], signal.SIGTERM)
    output, errors = front.communicate(timeout=60)
    assert (front.returncode, errors) == (143, "")
    assert output.count("begins at") == 1


@pytest.mark.slow
def test_processes_whose_front_is_killed_stop_by_themselves(group: Group, tmp_path: Path, wait_for: Wait) -> None:
    front = group(100_000, 0.01)
    wait_for((tmp_path / "saved").exists)
    front.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), seconds=30)
    assert "rank 0 stopped at" in front.communicate()[0]


@pytest.mark.slow
def test_a_signal_while_the_processes_start_is_not_lost(group: Group, tmp_path: Path, wait_for: Wait) -> None:
    front = group(100_000, 0.01)
    wait_for((tmp_path / "pid0").exists)
    front.send_signal(signal.SIGTERM)
    front.communicate(timeout=60)
    assert front.returncode == 143
