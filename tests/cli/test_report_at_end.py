"""The report that `train` and `resume` leave behind, however the run ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import write_recipe

Invoke = Callable[..., Result]

ENDLESS = ["num_epochs=1000", "do_evaluate=false", "metric_for_best_model=loss", "save_steps=1000000"]


def test_a_finished_run_has_a_report_and_its_last_lines_say_where(invoke: Invoke, trained: Path) -> None:
    done = invoke("train", "sums", "output_dir=runs/new")
    assert "Report: runs/new/report.html" in done.stdout.splitlines()[-3:]
    page = (trained.parent / "new/report.html").read_text(encoding="utf-8")
    assert ">finished</span>" in page
    assert (trained.parent / "new/curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_failed_has_a_report_that_says_so(invoke: Invoke, trained: Path) -> None:
    done = invoke("train", "sums", "output_dir=runs/failed", "learning_rate=1.0e+30", "max_grad_norm=null")
    assert done.exit_code == 1
    assert "Report: runs/failed/report.html" in done.stdout
    assert "failed: NonFiniteError" in (trained.parent / "failed/report.html").read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_is_one_line_and_no_failure(invoke: Invoke, trained: Path) -> None:
    (trained / "report.html").unlink()
    (trained / "report.html").mkdir()
    done = invoke("resume", "runs/sums")
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: there is no report (IsADirectoryError")
    assert line.endswith("hezar-train report runs/sums")


@pytest.mark.parametrize("processes", [[], ["--num-processes", "2"]], ids=["one", "two"])
def test_an_interrupted_run_has_a_report(tmp_path: Path, environment: dict[str, str], processes: list[str]) -> None:
    write_recipe(tmp_path)
    command = [sys.executable, "-m", "hezar_train", "train", "sums", *ENDLESS, *processes]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert any("epoch 2/" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=90)
    assert (process.returncode, "saved at step" in errors) == (143, True)
    assert "Report: runs/sums/report.html" in said
    page = (tmp_path / "runs/sums/report.html").read_text(encoding="utf-8")
    assert "interrupted by SIGTERM" in page
    assert "stopped before its end" in page
