"""Writers of rows: files that read back exactly and survive a kill, trackers, printed lines, results to paste."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.events import (
    CommonMetricPrinter,
    CSVLogger,
    CSVWriter,
    EventStorage,
    EventWriter,
    JSONLinesWriter,
    JSONWriter,
    Row,
    TensorBoardWriter,
    TrackerWriter,
    flatten_results_dict,
    keep_until,
    load_csv,
    print_csv_format,
    read_rows,
)


def rows_of(*values: dict[str, float]) -> list[Row]:
    return [Row(step, 1, 1000.0 + step, dict(logged)) for step, logged in enumerate(values, start=1)]


def write(writer: EventWriter, rows: list[Row]) -> None:
    writer.write(rows)
    writer.flush()


@pytest.mark.parametrize("make", [JSONLinesWriter, CSVWriter, lambda path: TensorBoardWriter(path.parent)])
def test_every_writer_holds_what_was_flushed_and_closes_twice(tmp_path, make):
    writer = make(tmp_path / "log")
    before = writer.path.stat().st_size
    writer.write(rows_of({"train.loss": 0.5}))
    assert writer.path.stat().st_size == before
    writer.flush()
    assert writer.path.stat().st_size > before
    writer.sync()
    writer.close()
    writer.close()
    writer.sync()


def test_a_writer_without_write_says_so():
    with pytest.raises(NotImplementedError, match="Mine must define write"):
        type("Mine", (EventWriter,), {})().write([])


names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
    lambda name: name not in {"step", "epoch", "time"}
)
values = st.dictionaries(names, st.floats(allow_nan=False), max_size=4)


@settings(deadline=None)
@given(st.lists(st.builds(Row, st.integers(0, 2**63 - 1), st.integers(0), st.floats(0, 1e12), values), max_size=5))
def test_json_rows_read_back_exactly(tmp_path_factory, rows):
    writer = JSONLinesWriter(tmp_path_factory.mktemp("json") / "metrics.json")
    write(writer, rows)
    assert read_rows(writer.path) == rows
    assert writer.size == writer.path.stat().st_size
    writer.close()


def test_a_json_row_has_step_epoch_time_and_its_values(tmp_path):
    writer = JSONLinesWriter(tmp_path / "metrics.json")
    write(writer, rows_of({"train.loss": 0.1, "train.دقت": math.inf}))
    line = writer.path.read_text(encoding="utf-8")
    assert line == '{"step": 1, "epoch": 1, "time": 1001.0, "train.loss": 0.1, "train.دقت": Infinity}\n'
    assert list(json.loads(line)) == ["step", "epoch", "time", "train.loss", "train.دقت"]


def test_a_json_writer_under_libai_s_name_writes_lines_too(tmp_path):
    storage = EventStorage(writers=[JSONWriter(tmp_path / "metrics.json")])
    for step, name in ((1, "a"), (1, "b"), (2, "a")):
        storage.log({name: float(step)}, step=step, epoch=1)
        storage.flush()
    storage.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [(line["step"], line.get("a"), line.get("b")) for line in lines] == [
        (1, 1.0, None),
        (1, None, 1.0),
        (2, 2.0, None),
    ]


def test_json_rows_survive_a_reopen_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.json"
    one, two = rows_of({"a": 1.0}, {"a": 2.0})
    write(JSONLinesWriter(path), [one])
    with path.open("a") as file:
        file.write('{"step": 9')
    assert read_rows(path) == [one]
    write(JSONLinesWriter(path), [two])
    assert read_rows(path) == [one, two]


def test_a_resume_cuts_json_back_to_the_recorded_size(tmp_path):
    rows = rows_of({"a": 1.0}, {"a": 2.0}, {"a": 3.0})
    writer = JSONLinesWriter(tmp_path / "metrics.json")
    write(writer, rows[:2])
    recorded = writer.size
    write(writer, rows[2:])
    writer.close()
    keep_until(writer.path, recorded)
    assert read_rows(writer.path) == rows[:2]
    assert read_rows(f"{writer.path}.dropped") == rows[2:]


def test_a_damaged_line_is_named_and_a_missing_file_has_no_rows(tmp_path):
    path = tmp_path / "metrics.json"
    assert read_rows(path) == []
    path.write_text('{"step": 1, "epoch": 1, "time": 1.0}\n[]\n')
    with pytest.raises(DataError, match="line 2 is not a logged row"):
        read_rows(path)


@pytest.mark.parametrize(("step", "value"), [(1 << 63, "1.0"), (-(1 << 63), "1.0"), (1, "9" * 400)])
def test_a_row_with_numbers_that_no_run_has_is_refused(tmp_path, step, value):
    path = tmp_path / "metrics.json"
    path.write_text(f'{{"step": {step}, "epoch": 1, "time": 1.0, "loss": {value}}}\n')
    with pytest.raises(DataError, match="line 1 is not a logged row"):
        read_rows(path)


def test_csv_columns_are_the_union_in_order_of_appearance(tmp_path):
    writer = CSVWriter(tmp_path / "training_logs.csv")
    write(writer, rows_of({"train.loss": 0.5}))
    write(writer, [Row(2, 1, 0.0, {"evaluation.loss": 0.25, "train.loss": 0.1}), Row(3, 2, 0.0, {"a,b": 1.0})])
    assert writer.path.read_text() == (
        'step,epoch,train.loss,evaluation.loss,"a,b"\n1,1,0.5,,\n2,1,0.1,0.25,\n3,2,,,1.0\n'
    )
    loaded = load_csv(writer.path)
    assert loaded["step"] == [1, 2, 3]
    assert loaded["epoch"] == [1, 1, 2]
    assert loaded["train.loss"][:2] == [0.5, 0.1]
    assert math.isnan(loaded["train.loss"][2])


def test_csv_rows_survive_a_reopen_and_a_known_column_only_appends(tmp_path):
    path = tmp_path / "training_logs.csv"
    write(CSVWriter(path), rows_of({"a": 1.0}))
    inode = path.stat().st_ino
    writer = CSVWriter(path)
    write(writer, [Row(2, 1, 0.0, {"a": 2.0})])
    assert path.stat().st_ino == inode
    write(writer, [Row(3, 1, 0.0, {"b": 3.0})])
    write(writer, [Row(4, 1, 0.0, {"a": 4.0})])
    assert path.read_text() == "step,epoch,a,b\n1,1,1.0,\n2,1,2.0,\n3,1,,3.0\n4,1,4.0,\n"
    assert os.listdir(tmp_path) == [path.name]


def test_csv_is_rebuilt_from_kept_rows_and_continued(tmp_path):
    writer = CSVWriter(tmp_path / "training_logs.csv")
    rows = rows_of({"a": 1.0}, {"b": 2.0}, {"c": 3.0})
    write(writer, rows)
    writer.rebuild(rows[:2])
    write(writer, [Row(3, 1, 0.0, {"a": 3.5})])
    assert writer.path.read_text() == "step,epoch,a,b\n1,1,1.0,\n2,1,,2.0\n3,1,3.5,\n"
    writer.rebuild([])
    assert load_csv(writer.path) == {}


def test_a_failed_widening_leaves_the_csv_as_it_was(tmp_path, monkeypatch):
    writer = CSVWriter(tmp_path / "training_logs.csv")
    write(writer, rows_of({"a": 1.0}))
    before = writer.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
        writer.write([Row(2, 1, 0.0, {"b": 2.0})])
        with pytest.raises(PermissionError):
            writer.flush()
    assert writer.path.read_bytes() == before
    writer.flush()
    assert load_csv(writer.path)["step"] == [1, 2]


def test_a_csv_that_is_killed_while_it_widens_is_whole(tmp_path):
    code = """
import sys
from hezar_train.events import CSVWriter, Row
writer = CSVWriter(sys.argv[1])
for step in range(1, 100000):
    writer.write([Row(step, 1, 0.0, {f"column_{step}": float(step)})])
    writer.flush()
    print(step, flush=True)
"""
    for attempt in range(3):
        path = tmp_path / f"{attempt}.csv"
        process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.02 + 0.03 * attempt)
        process.send_signal(signal.SIGKILL)
        told = len(process.communicate()[0].splitlines()) + 1
        before = load_csv(path)["step"]
        assert before in ([*range(1, told + 1)], [*range(1, told + 2)])
        write(CSVWriter(path), [Row(len(before) + 1, 1, 0.0, {"after": 1.0})])
        loaded = load_csv(path)
        assert loaded["step"] == [*before, len(before) + 1]
        assert [loaded[f"column_{step}"][step - 1] for step in before] == [float(step) for step in before]


def test_csv_waits_for_room_on_a_full_disk(tmp_path):
    code = """
import resource, sys
from hezar_train.events import CSVWriter, Row
writer = CSVWriter(sys.argv[1])
def write(step, **values):
    writer.write([Row(step, 1, 0.0, values)])
    writer.flush()
write(1, a=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
write(2, a=2.0)
write(3, b=3.0)
write(4, a=4.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.close()
"""
    path = tmp_path / "training_logs.csv"
    subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True)
    assert path.read_text() == "step,epoch,a,b\n1,1,1.0,\n2,1,2.0,\n3,1,,3.0\n4,1,4.0,\n"
    assert os.listdir(tmp_path) == [path.name]


def test_the_csv_logger_keeps_the_rows_of_an_earlier_run(tmp_path):
    logger = CSVLogger(tmp_path, "training_logs.csv")
    logger.write({"train.loss": 0.5}, 1)
    logger.close()
    again = CSVLogger(tmp_path, csv_filename="training_logs.csv")
    again.write({"train.loss": 0.25, "evaluation.loss": 1}, step=2)
    assert again.save_path.read_text() == "step,train.loss,evaluation.loss\n1,0.5,\n2,0.25,1.0\n"


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self):
        return self.logged

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


def test_trackers_of_an_accelerator_receive_the_rows():
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    storage = EventStorage(writers=[TrackerWriter(accelerator)])
    storage.log({"train.loss": 1.0}, step=1, epoch=1)
    storage.flush()
    assert tracker.logged == []
    accelerator.init_trackers("run")
    storage.log({"train.loss": 0.5, "train.learning_rate": 0.1}, step=5, epoch=1)
    storage.close()
    assert tracker.logged == [(5, {"train.loss": 0.5, "train.learning_rate": 0.1})]


def lines_of(storage: EventStorage, rows: list[Row], **options) -> list[str]:
    printer = CommonMetricPrinter(stream=io.StringIO(), **options)
    with storage:
        printer.write(rows)
        printer.flush()
    return printer._stream.getvalue().splitlines()


def test_a_line_has_everything_a_reader_of_libai_s_log_looks_for():
    storage = EventStorage()
    for step, loss in enumerate((9.0, 3.0, 1.0), start=1):
        storage.step = step
        storage.put_scalar("lm_loss", loss)
    storage.put_scalar("accuracy", 0.5)
    storage.samples = 96
    values = {"train.learning_rate": 2e-5, "train.data_seconds": 0.25}
    _, line = lines_of(storage, [Row(10, 1, 100.0, values), Row(20, 1, 105.0, values)], batch_size=32, max_iter=200)
    assert re.fullmatch(
        r"eta: 0:01:30  iteration: 20/200  consumed_samples: 96  lm_loss: 3  time: 0\.5 s/iter  "
        r"data_time: 0\.25 s/iter  total_throughput: 64\.00 samples/s  lr: 2\.00e-05  max_mem: \d+M",
        line,
    )
    assert storage.history("eta_seconds").values() == [(90.0, 3)]


def test_the_first_line_and_a_run_without_end_leave_out_what_is_not_known():
    first, second = lines_of(EventStorage(), [Row(1, 1, 1.0, {"x": 1.0}), Row(2, 1, 1.5, {"x": 1.0})], batch_size=2)
    assert first.startswith("iteration: 1  consumed_samples: 0  max_mem: ")
    assert second.startswith("iteration: 2  consumed_samples: 0  time: 0.5 s/iter  total_throughput: 4.00 samples/s")


def test_an_evaluation_has_no_line():
    assert lines_of(EventStorage(), [Row(1, 1, 1.0, {"evaluation.loss": 1.0})], batch_size=2) == []


result_names = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=3)
nested = st.recursive(
    st.floats(allow_nan=False), lambda inner: st.dictionaries(result_names, inner, min_size=1, max_size=3)
)


def unflatten(flat: dict) -> dict:
    results: dict = {}
    for name, value in flat.items():
        *outer, last = name.split("/")
        place = results
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return results


@given(st.dictionaries(result_names, nested, max_size=3))
def test_flat_results_make_the_nested_ones_again(results):
    assert unflatten(flatten_results_dict(results)) == results


def test_names_are_joined_by_slashes_in_order():
    results = {"dev": {"f1": {"macro": 0.5, "micro": 0.75}, "loss": 1}, "epoch": 2}
    assert list(flatten_results_dict(results).items()) == [
        ("dev/f1/macro", 0.5), ("dev/f1/micro", 0.75), ("dev/loss", 1), ("epoch", 2),
    ]  # fmt: skip


def test_two_results_of_one_flat_name_are_refused():
    with pytest.raises(DataError, match="flatten to the name 'a/b'"):
        flatten_results_dict({"a": {"b": 1}, "a/b": 2})


def test_results_are_printed_as_lines_to_paste(capsys):
    print_csv_format({"dev": {"f1": 2 / 3, "loss": 1.5e-7, "by_class": {"a": 1}}, "epoch": 2})
    expected = "task: dev\nf1,loss,by_class/a\n0.666667,1.5e-07,1\nepoch=2\n"
    assert capsys.readouterr().out == expected
    print_csv_format({"epoch": 2}, stream := io.StringIO())
    assert stream.getvalue() == "epoch=2\n"
