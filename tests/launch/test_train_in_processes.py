"""`hezar-train train RECIPE --num-processes N`, as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "hezar_train", "train"]
TWO = ["--num-processes", "2"]
SLOWLY = "recipe.seconds=0.05"
Start = Callable[..., "subprocess.Popen[str]"]
Wait = Callable[..., None]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=200)
    return process.returncode, output, errors


def weights(folder: Path, step: int = 40) -> bytes:
    return (folder / "checkpoints" / f"{step:08d}" / "model.safetensors").read_bytes()


def process_of_rank(rank: int, front: int) -> int:
    """Return the pid of a process of a group."""
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    (found,) = [pid for pid in children if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()]
    return int(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-restarts", "2"], "--max-restarts is for several processes: give --num-processes, too."),
        (["--num-processes", "0"], "0 is not in the range x>=1"),
        ([*TWO, "batch_size=0"], "batch_size=0"),
    ],
)
def test_a_mistake_is_told_once_and_before_anything_starts(
    start: Start, recipe: str, arguments: list[str], words: str
) -> None:
    code, output, errors = finish(start(*COMMAND, recipe, *arguments))
    assert (code, output, errors.count(words)) == (2, "", 1)


def test_a_front_inside_another_launcher_is_refused(start: Start, recipe: str) -> None:
    code, _, errors = finish(start(*COMMAND, recipe, *TWO, WORLD_SIZE="2"))
    assert code == 2
    assert "another launcher has started this one already (WORLD_SIZE=2)" in " ".join(errors.split())


@pytest.mark.slow
def test_two_processes_train_together_and_speak_with_one_voice(start: Start, recipe: str, tmp_path: Path) -> None:
    code, output, errors = finish(start(*COMMAND, recipe, *TWO))
    assert code == 0, errors
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("Processes")] == ["2"]
    assert (output.count("Training done!"), output.count("Everything lies in run")) == (1, 1)
    assert "Traceback" not in errors
    assert weights(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_the_run_ends_with_one(
    start: Start, recipe: str, tmp_path: Path, rank: int, wait_for: Wait
) -> None:
    limits = ["--max-restarts", "0", "collective_timeout_seconds=5", "num_epochs=500"]
    front = start(*COMMAND, recipe, *TWO, SLOWLY, *limits)
    wait_for((tmp_path / "run/checkpoints/00000004").exists)
    os.kill(process_of_rank(rank, front.pid), signal.SIGSTOP)
    code, _, errors = finish(front)
    assert code == 1
    assert f"process {1 - rank} of 2 got no answer" in errors
    assert f"process {rank} gives no sign of life; it was at on_" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_replaced_and_the_run_ends_like_the_unbroken_one(
    start: Start, recipe: str, tmp_path: Path, rank: int, wait_for: Wait
) -> None:
    assert finish(start(*COMMAND, recipe, *TWO, "output_dir=unbroken"))[0] == 0
    front = start(*COMMAND, recipe, *TWO, SLOWLY)
    wait_for((tmp_path / "run/checkpoints/00000012").exists)
    os.kill(process_of_rank(rank, front.pid), signal.SIGKILL)
    code, _, errors = finish(front)
    assert code == 0, errors
    assert f"process {rank} of 2 was killed by SIGKILL" in errors
    assert "resuming from run/checkpoints/" in errors
    assert weights(tmp_path / "run") == weights(tmp_path / "unbroken")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_front_saves_and_the_same_command_goes_on(
    start: Start, recipe: str, tmp_path: Path, number: signal.Signals, code: int, wait_for: Wait
) -> None:
    command = [*COMMAND, recipe, *TWO, SLOWLY, "save_steps=1000", "resume_from_checkpoint=true"]
    front = start(*command)
    wait_for((tmp_path / "run/ledger.jsonl").exists)
    time.sleep(1)
    front.send_signal(number)
    got, _, errors = finish(front)
    assert got == code, errors
    assert errors.count(f"{number.name}: stopped, saved at step") == 1
    assert "starting all processes again" not in errors
    again, _, errors = finish(start(*command))
    assert (again, errors.count("resuming from run/checkpoints/")) == (0, 1), errors


@pytest.mark.slow
def test_a_refusal_in_the_processes_is_told_once_and_not_tried_again(start: Start, recipe: str) -> None:
    code, _, errors = finish(start(*COMMAND, recipe, *TWO, "mixed_precision=fp16"))
    assert (code, errors.count("'fp16' needs an accelerator")) == (2, 1), errors
    assert "starting all processes again" not in errors


@pytest.mark.slow
def test_an_error_of_the_recipe_is_shown_and_not_tried_again(start: Start, recipe: str) -> None:
    (Path(recipe) / "recipe.py").write_text("import nothing_of_this_name\ndef build(): ...\n")
    code, _, errors = finish(start(*COMMAND, recipe, *TWO))
    assert (code, errors.count("No module named 'nothing_of_this_name'")) == (1, 1), errors
