"""`hezar-train train`, as a user runs it, and the report that it leaves behind, however the run ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import write_recipe

Invoke = Callable[..., Result]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
ENDLESS = ["num_epochs=1000", "do_evaluate=false", "metric_for_best_model=loss", "save_steps=1000000"]


def test_a_run_that_is_done_says_so_when_it_is_started_again(
    run: Run, invoke: Invoke, smoke: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hezar_train")
    first, second = run("train", smoke), invoke("train", smoke)
    assert (first.returncode, second.exit_code) == (0, 0)
    assert (
        "nothing to resume in runs/image_classification-smoke/checkpoints: starting from the beginning" in first.stderr
    )
    assert "Training done!" in first.stdout
    assert "Everything lies in runs/image_classification-smoke\n" in first.stdout
    assert "The best checkpoint is that of step 12: evaluation.accuracy 0." in first.stdout
    assert "already trained to the end (step 12, epoch 1)" in caplog.text
    assert "Training done!" not in second.stdout
    record = json.loads((tmp_path / "runs/image_classification-smoke/recipe.json").read_text())
    assert (record["config"], record["options"]) == ("smoke.yaml", {"channels": 4})
    assert len(record["sha256"]) == 64
    assert "\x1b" not in first.stdout + first.stderr


def test_a_run_that_was_to_be_uploaded_and_was_not_leaves_with_75(
    invoke: Invoke, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    wish = ["push_to_hub=true", "hub_model_id=me/sums", "hub_wait_seconds=0.1"]
    done = invoke("train", "sums", "output_dir=runs/pushed", *wish)
    assert done.exit_code == 75
    assert "Not uploaded. `hezar-train push runs/pushed` finishes it." in done.stderr
    assert (trained.parent / "pushed/checkpoints/00000006").is_dir()


def test_a_hub_that_cannot_be_read_is_a_failure_and_no_run_that_waits_for_its_upload(
    invoke: Invoke, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert invoke("train", "sums", "output_dir=runs/new", "resume_from_checkpoint=hub://me/sums").exit_code == 1
    assert invoke("reproduce", "me/sums").exit_code == 1


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/proc/x", "/proc/x cannot be written to: No such file or directory."),
        ("taken", "taken cannot be written to: it is a file. Expected a folder, or a place where one can be made."),
        ("taken/below", "taken/below cannot be written to: Not a directory."),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_built(
    invoke: Invoke, trained: Path, tmp_path: Path, place: str, words: str
) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "recipes/sums/recipe.py").write_text("def build(width):\n    raise AssertionError\n")
    done = invoke("train", "sums", f"output_dir={place}")
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
    assert done.stderr.endswith("Name another: output_dir=FOLDER\n")


def test_a_loss_that_is_not_finite_ends_a_run_without_a_promise_that_it_was_saved(
    invoke: Invoke, trained: Path
) -> None:
    wild = ["learning_rate=1.0e+30", "max_grad_norm=null"]
    done = invoke("train", "sums", "output_dir=runs/wild", "save_enabled=false", *wild)
    assert (done.exit_code, "what was saved so far is intact" in done.stderr) == (1, True), done.stderr
    assert "checkpoint" not in done.stderr


def test_an_unknown_key_is_refused_with_the_right_one(invoke: Invoke) -> None:
    done = invoke("train", "image_classification", "learning_rte=0.1", "recipe.dropuot=0.5", "epochs=3")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "recipe.dropuot is not an option of this recipe" in done.stderr
    assert "Did you mean 'dropout'?" in done.stderr
    assert "'learning_rte' is not a field. Did you mean 'learning_rate'?" in done.stderr
    assert "'epochs' is not a field. Here it is called 'num_epochs'." in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_recipe_is_refused_with_the_known_ones(invoke: Invoke) -> None:
    done = invoke("train", "image_clasification")
    meant = "Did you mean 'image_classification'? Recipes found: "
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: there is no recipe 'image_clasification'. {meant}")


def test_a_missing_argument_is_a_usage_error(invoke: Invoke) -> None:
    done = invoke("train")
    assert done.exit_code == 2
    assert "Missing argument 'RECIPE'" in done.stderr


def test_sigterm_saves_and_leaves_with_143_and_the_same_command_goes_on(
    run: Run, smoke: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    # without evaluations, so that the signal meets an update
    overrides = ["num_epochs=1000", "do_evaluate=false", "metric_for_best_model=loss", "save_steps=1000000"]
    command = [sys.executable, "-m", "hezar_train", "train", smoke, "max_steps=20000", *overrides]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert any("epoch 2/1000" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "SIGTERM: stopped, saved at step" in errors
    assert "The same command goes on from there." in errors
    saved = max(int(path.name) for path in (tmp_path / "runs/image_classification-smoke/checkpoints").glob("[0-9]*"))
    again = run("train", smoke, f"max_steps={saved + 3}", *overrides)
    assert again.returncode == 0
    assert f"resuming from runs/image_classification-smoke/checkpoints/{saved:08d}" in again.stderr


def test_a_damaged_run_is_a_failure_and_not_a_mistake(invoke: Invoke, smoke: str, tmp_path: Path) -> None:
    damaged = tmp_path / "runs/image_classification-smoke/checkpoints/00000005"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{}")
    done = invoke("train", smoke)
    assert done.exit_code == 1
    assert "error: no checkpoint in runs/image_classification-smoke/checkpoints can be loaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fast_dev_run_tries_everything_in_a_folder_of_its_own(invoke: Invoke, smoke: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second one starts anew
        done = invoke("train", smoke, "batch_size=64", "--fast-dev-run")
        assert (done.exit_code, "Training done!" in done.stdout) == (0, True)
    run = tmp_path / "runs/image_classification-smoke-dev"
    assert {int(path.stem) for path in (run / "evaluations").glob("*.json")} == {10, 20}
    assert not (tmp_path / "runs/image_classification-smoke").exists()
    logged = [json.loads(line) for path in run.glob("logs/*/metrics.json") for line in path.read_text().splitlines()]
    assert {row["step"] for row in logged if "train.loss" in row} == set(range(1, 21))


def test_a_fast_dev_run_leaves_the_real_run_alone_whatever_the_overrides_say(invoke: Invoke, trained: Path) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    for _ in range(2):
        hub = ["push_to_hub=true", "hub_model_id=nobody/sums"]
        wishes = ["output_dir=runs/sums/", "resume_from_checkpoint=true", "max_steps=5", *hub]
        assert invoke("train", "sums", *wishes, "--fast-dev-run").exit_code == 0
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before
    assert (trained.parent / "sums-dev/checkpoints/00000005").is_dir()
    assert (trained.parent / "sums-dev/previous/0001").is_dir(), "the second one starts anew"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nofile.yaml", "nofile.yaml: there is no such file. Name a config file in a recipe's folder, or a recipe"),
        (
            "recipes/sums/confg.yaml",
            "recipes/sums/confg.yaml: there is no such file. Did you mean 'recipes/sums/config.yaml'?",
        ),
        ("runs/sums/plan.json", "plan.json is not a config. The config of this run is runs/sums/train_config.yaml."),
        ("runs/sums/train_confg.yaml", "is not there. The config of this run is runs/sums/train_config.yaml."),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_what_there_is(
    invoke: Invoke, trained: Path, given: str, words: str
) -> None:
    done = invoke("train", given)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_a_field_written_as_an_option_is_answered_with_how_to_write_it(invoke: Invoke) -> None:
    done = invoke("train", "image_classification", "--learning-rate", "0.1")
    assert done.exit_code == 2
    assert "A field of the config is given without dashes: learning_rate=VALUE." in done.stderr
    assert "without dashes" not in invoke("runs", "--learning-rate").stderr


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
