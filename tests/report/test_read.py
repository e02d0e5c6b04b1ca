"""Reading a run's folder: everything that is there, and nothing that can make it fail."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from hezar_train.errors import ConfigError
from hezar_train.events import Row
from hezar_train.report.read import STALE_SECONDS, Clock, read_run, read_runs, starts_of, time_split
from hezar_train.report.sections import status_badge, time_section
from tests.report.runs import BEGUN, HandmadeRun, finished_run


def test_a_real_run_is_read_whole(real_run: Path) -> None:
    run = read_run(real_run)
    assert run.problems == []
    assert [row.step for row in run.rows if "train.loss" in row.values] == list(range(1, 13))
    assert run.is_finished
    assert (run.last_step, run.total_steps) == (12, 12)
    assert run.best_evaluation is not None
    assert {table.name for table in run.best_evaluation.tables[""]} == {"confusion_matrix", "per_class"}


def test_what_an_interruption_undid_is_known_from_the_recorded_starts(real_run: Path) -> None:
    first, second = starts_of(read_run(real_run))
    assert (first.first_step, first.last_step) == (0, 8)
    assert (second.first_step, second.last_step, second.steps_done_again) == (6, 12, 2)
    assert [start.record["end"]["how"] for start in (first, second)] == ["interrupted", "finished"]
    assert first.record["end"]["signal"] == "SIGINT"


def test_what_a_kill_undid_is_known_from_the_rows_that_were_taken_back(real_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(real_run, tmp_path / "copy")
    (copy / "environment.json").unlink()
    first, second = starts_of(read_run(copy))
    assert (first.first_step, first.last_step) == (0, 7)
    assert (second.first_step, second.last_step, second.steps_done_again) == (6, 12, 1)


def test_the_recorded_seconds_of_all_starts_make_the_time_split(real_run: Path) -> None:
    run = read_run(real_run)
    starts = starts_of(run)
    split = time_split(run, starts)
    assert split.is_measured
    assert set(split.seconds) - {"other"} == {"training", "data", "evaluation", "saving"}
    assert all(split.seconds[name] > 0 for name in ("training", "data", "evaluation", "saving"))
    assert sum(split.seconds.values()) == pytest.approx(sum(start.seconds for start in starts), rel=0.05)


@pytest.mark.parametrize(
    ("end", "badge", "outcome"),
    [
        ({"how": "failed", "error": "NonFiniteError"}, "failed: NonFiniteError", "failed: NonFiniteError"),
        ({"how": "interrupted", "signal": "SIGTERM"}, "stopped before its end", "interrupted by SIGTERM"),
        ({"how": "finished", "reason": "patience is at its end"}, "finished", "patience is at its end"),
        (None, "stopped before its end", "killed"),
    ],
)
def test_how_the_last_start_ended_is_told(tmp_path: Path, end: dict[str, str] | None, badge: str, outcome: str) -> None:
    run = HandmadeRun(tmp_path).train(300)
    start = {"time": BEGUN, "step": 0}
    run.write("environment.json", {"starts": [start if end is None else {**start, "end": end}]})
    record = read_run(tmp_path)
    assert badge in status_badge(record)
    assert f"<td>{outcome}</td>" in time_section(record, starts_of(record), time_split(record, starts_of(record)))


def test_a_start_that_failed_before_it_logged_anything_is_on_the_time_line(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path).train(200)
    failed = {"how": "failed", "error": "OSError", "time": BEGUN + 5003, "step": 200}
    run.write("environment.json", {"starts": [{"time": BEGUN}, {"time": BEGUN + 5000, "step": 200, "end": failed}]})
    last = starts_of(read_run(tmp_path))[-1]
    assert (last.first_step, last.last_step, last.seconds) == (200, 200, 3.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", b'{"total_steps": 4'),
        ("best.json", b"[1, 2]"),
        ("environment.json", b"\xff\xfe\x00"),
        ("train_config.yaml", b"task: [unclosed"),
        ("evaluations/00000400.json", b"{}}"),
        ("evaluations/00000400.json", b'{"step": 400, "tables": {"": [{"name": "x", "rows": 3}]}, "metrics": []}'),
        ("logs/2026-01-02_03-04-05_host/metrics.json", b'{"step": 1}\nnonsense\n[]\n'),
    ],
)
def test_a_damaged_file_is_named_and_costs_only_itself(tmp_path: Path, name: str, content: bytes) -> None:
    finished_run(tmp_path)
    (tmp_path / name).write_bytes(content)
    run = read_run(tmp_path)
    assert len(run.problems) == 1
    assert Path(name).name in run.problems[0]
    assert run.rows or name.startswith("logs")
    assert run.last_evaluation is not None


def test_a_last_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path)
    path = run.log([Row(1, 1, BEGUN, {"train.loss": 1.0})])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "epo')
    found = read_run(tmp_path)
    assert ([row.step for row in found.rows], found.problems) == ([1], [])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run.*Name the output_dir"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no run was given"):
        read_runs([])


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("a/digits", "b/digits"):
        HandmadeRun(tmp_path / name)
    assert [run.name for run in read_runs([tmp_path / "a/digits", tmp_path / "b/digits"])] == ["a/digits", "b/digits"]


def test_time_at_work_leaves_the_pause_out(tmp_path: Path) -> None:
    finished_run(tmp_path)
    starts = starts_of(read_run(tmp_path))
    assert [(start.first_step, start.last_step) for start in starts] == [(0, 200), (200, 400)]
    assert Clock(starts).seconds(starts[1].ended) == pytest.approx(102 + 102, abs=1)


def test_the_starts_are_known_without_a_record_from_what_tensorboard_wrote(real_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(real_run, tmp_path / "copy")
    (copy / "environment.json").unlink(missing_ok=True)
    assert len(read_run(copy).start_times) == 2


def test_measured_seconds_are_summed_and_the_rest_is_other(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path)
    values = {"train.loss": 1.0, "time.data_seconds": 2.0, "time.evaluation_seconds": 1.0}
    run.log([Row(step, 1, BEGUN + 10 * step, values) for step in (0, 1)])
    record = read_run(tmp_path)
    split = time_split(record, starts_of(record))
    assert (split.is_measured, split.seconds) == (True, {"data": 4.0, "evaluation": 2.0, "other": 4.0})


def test_without_measured_seconds_the_time_before_an_evaluation_is_told_apart(tmp_path: Path) -> None:
    finished_run(tmp_path)
    record = read_run(tmp_path)
    split = time_split(record, starts_of(record))
    assert not split.is_measured
    assert split.seconds["saving and evaluation"] == pytest.approx(8 * 2)


def test_a_run_whose_lock_names_a_holder_and_that_just_wrote_is_under_way(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path)
    run.log([Row(5, 1, time.time(), {"train.loss": 1.0})])
    assert not read_run(tmp_path).is_running
    (tmp_path / "lock").write_text('{"pid": 1}')
    assert read_run(tmp_path).is_running


def test_a_run_is_under_way_before_its_first_row_and_not_when_nothing_was_written_for_long(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path)
    (run.root / "lock").write_text('{"pid": 1}')
    assert read_run(tmp_path).is_running
    long_ago = time.time() - 2 * STALE_SECONDS
    os.utime(run.root / "lock", (long_ago, long_ago))
    assert not read_run(tmp_path).is_running


def test_the_steps_of_models_that_learn_one_after_another_count_for_each(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data_of_versions" / "0.1.0" / "two_models"
    run = read_run(shutil.copytree(source, tmp_path / "run"))
    assert (run.last_step, run.total_steps, run.is_finished, run.problems) == (34, 42, False, [])
    assert run.steps_in_epoch is None  # each model has epochs of its own
