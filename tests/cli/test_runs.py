"""`hezar-train runs`: how far each run is, and in which state."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]
HOLDER = {"pid": os.getpid(), "host": socket.gethostname(), "since": "now"}


def row_of(invoke: Invoke, name: str) -> list[str]:
    (row,) = [line for line in invoke("runs").stdout.splitlines() if line.startswith(f"{name} ")]
    return row.split()


def test_a_finished_run_is_listed_with_its_recipe_steps_and_best(invoke: Invoke, trained: Path) -> None:
    best = json.loads((trained / "best.json").read_text())
    row = row_of(invoke, "sums")
    assert row[:3] == ["sums", "sums", "6/6"]
    assert row[3:6] == ["even.loss", f"{best['value']:.4g}", "finished"]


def shown_at(columns: int, folder: Path, environment: dict[str, str]) -> list[str]:
    """Return the lines of `runs` on a terminal."""
    reads, writes = pty.openpty()
    command = [sys.executable, "-m", "hezar_train", "runs"]
    subprocess.run(command, cwd=folder, env={**environment, "COLUMNS": str(columns)}, stdout=writes, check=True)
    os.close(writes)
    with open(reads, "rb", closefd=True) as terminal:
        text = terminal.read1(65_536).decode()
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(("columns", "recipe"), [(71, ""), (80, r"image_\w+… +"), (120, "image_classification +")])
def test_names_are_whole_on_a_terminal_and_the_recipe_takes_what_room_is_left(
    trained: Path, tmp_path: Path, environment: dict[str, str], columns: int, recipe: str
) -> None:
    run = trained.rename(trained.with_name("image_classification-smoke"))
    (run / "recipe.json").write_text('{"path": "recipes/image_classification"}')
    (run / "plan.json").write_text('{"total_steps": 12000}')
    (run / "best.json").write_text('{"step": 6, "metric": "evaluation.accuracy", "value": 0.9722}')
    (run / "environment.json").unlink()
    titles, row, *_ = shown_at(columns, tmp_path, environment)
    assert re.match(rf"image_classification-smoke +{recipe}6/12000  accuracy 0.9722  finished ", row)
    assert max(len(titles), len(row)) <= columns


def test_a_run_short_of_its_end_is_interrupted_and_one_whose_process_lives_is_running(
    invoke: Invoke, trained: Path
) -> None:
    shutil.rmtree(trained / "checkpoints/00000006")
    (trained / "evaluations/00000006.json").unlink()
    shutil.rmtree(trained / "logs")
    (trained / "environment.json").unlink()
    assert row_of(invoke, "sums")[2:6:3] == ["3/6", "interrupted"]
    assert "Go on with an interrupted run: hezar-train resume RUN" in invoke("runs").stdout
    (trained / "lock").write_text(json.dumps(HOLDER))
    assert "running" in row_of(invoke, "sums")


def test_a_run_that_ended_with_an_error_has_failed_until_it_is_started_again(invoke: Invoke, trained: Path) -> None:
    record = trained / "environment.json"
    start = json.loads(record.read_text())["starts"][0]
    failed = {**start, "end": {"how": "failed", "error": "NonFiniteError"}}
    record.write_text(json.dumps({"starts": [failed]}))
    assert "failed" in row_of(invoke, "sums")
    assert "Go on with a failed run: hezar-train resume RUN" in invoke("runs").stdout
    record.write_text(json.dumps({"starts": [failed, start]}))
    assert "finished" in row_of(invoke, "sums")


def test_a_lock_that_a_killed_process_left_does_not_count(invoke: Invoke, trained: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    (trained / "lock").write_text(json.dumps({**HOLDER, "pid": dead.pid}))
    assert "running" not in row_of(invoke, "sums")


def test_a_run_that_was_stopped_on_purpose_is_finished(invoke: Invoke, trained: Path) -> None:
    plan = json.loads((trained / "plan.json").read_text())
    (trained / "plan.json").write_text(json.dumps({**plan, "total_steps": 600}))
    record = trained / "evaluations/00000006.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "stop_reason": "patience is at its end"}))
    assert "finished" in row_of(invoke, "sums")


@pytest.mark.parametrize("name", ["plan.json", "best.json", "train_config.yaml", "lock", "recipe.json"])
def test_a_damaged_file_costs_its_cell_and_not_the_list(invoke: Invoke, trained: Path, name: str) -> None:
    (trained / name).write_bytes(b"\xff{")
    done = invoke("runs")
    assert (done.exit_code, done.stderr) == (0, "")
    assert row_of(invoke, "sums")


def test_runs_in_folders_of_folders_are_found_and_their_insides_are_not(invoke: Invoke, trained: Path) -> None:
    (trained.parent / "deeper").mkdir()
    trained.rename(trained.parent / "deeper" / "sums")
    names = [line.split()[0] for line in invoke("runs").stdout.splitlines()]
    assert names == ["run", "deeper/sums"]


def test_a_folder_without_runs_and_one_that_is_not_there_are_told(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("runs").exit_code == 2
    (tmp_path / "runs").mkdir()
    assert invoke("runs").stdout.startswith("There are no runs in runs.")


def test_models_that_learn_one_after_another_are_counted_together(invoke: Invoke, tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data_of_versions" / "0.1.0" / "two_models"
    run = shutil.copytree(source, tmp_path / "runs" / "two_models")
    assert row_of(invoke, "two_models")[2] == "34/42"
    for path in [*run.glob("evaluations/*"), *run.glob("logs/*/metrics.json"), run / "environment.json"]:
        path.unlink()
    shutil.rmtree(run / "checkpoints/00000032")
    state_file = run / "checkpoints/00000028/trainer_state.json"
    content = json.loads(state_file.read_text())
    content["state"] |= {"global_step": 21, "epoch": 3, "model_index": 0}  # the first has come to its end
    state_file.write_text(json.dumps(content))
    assert (row_of(invoke, "two_models")[2], "interrupted" in row_of(invoke, "two_models")) == ("21/42", True)
