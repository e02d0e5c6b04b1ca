from __future__ import annotations

import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hezar_train.errors import MissingDependencyError
from hezar_train.events import EventStorage, Row, TensorBoardWriter


def read_scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def row(step: int, **values: float) -> Row:
    return Row(step, 1, 1e9 + step, {name.replace("__", "."): value for name, value in values.items()})


def test_values_read_back_under_their_names(tmp_path):
    storage = EventStorage(writers=[TensorBoardWriter(tmp_path)])
    storage.log({"train.loss": 0.1, "train.learning_rate": 2e-5}, step=50, epoch=1)
    storage.log({"evaluation.loss": 3.0, "evaluation.accuracy": 0.5}, step=50, epoch=1)
    storage.log({"train.loss": 0.05}, step=100, epoch=2)
    storage.close()
    assert read_scalars(tmp_path) == {
        "train.loss": [(50, float(np.float32(0.1))), (100, float(np.float32(0.05)))],
        "train.learning_rate": [(50, float(np.float32(2e-5)))],
        "evaluation.loss": [(50, 3.0)],
        "evaluation.accuracy": [(50, 0.5)],
    }
    assert [path.name.startswith("events.out.tfevents.") for path in tmp_path.iterdir()] == [True]


def test_wall_time_is_the_time_of_the_row(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write([row(1, a=1.0)])
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("a")[0].wall_time == 1e9 + 1


def test_after_two_resumes_every_value_is_there_once(tmp_path):
    first = TensorBoardWriter(tmp_path)
    kept = [row(2, train__loss=2.0), row(4, train__loss=4.0)]
    first.write([*kept, row(4, evaluation__loss=0.4), row(6, train__loss=-6.0), row(8, train__loss=-8.0)])
    first.flush()
    for again in (5.0, 6.0):
        resumed = TensorBoardWriter(tmp_path, purge_step=4)
        resumed.write([logged for logged in kept if logged.step >= 4])
        resumed.write([row(4, evaluation__loss=0.4), row(6, train__loss=again)])
        resumed.flush()
    assert len(list(tmp_path.iterdir())) == 3
    assert read_scalars(tmp_path) == {
        "train.loss": [(2, 2.0), (4, 4.0), (6, 6.0)],
        "evaluation.loss": [(4, pytest.approx(0.4))],
    }


def test_a_record_torn_by_a_kill_does_not_hide_the_resumed_file(tmp_path):
    first = TensorBoardWriter(tmp_path)
    first.write([row(1, a=1.0), row(2, a=2.0)])
    first.close()
    with first.path.open("r+b") as file:
        file.truncate(first.path.stat().st_size - 5)
    resumed = TensorBoardWriter(tmp_path, purge_step=2)
    resumed.write([row(2, a=2.5)])
    resumed.close()
    assert read_scalars(tmp_path) == {"a": [(1, 1.0), (2, 2.5)]}


def test_event_files_sort_in_the_order_they_were_made(tmp_path):
    paths = [TensorBoardWriter(tmp_path).path for _ in range(12)]
    assert sorted(paths) == paths


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingDependencyError, match="needs the package 'tensorboard'"):
        TensorBoardWriter(tmp_path)
