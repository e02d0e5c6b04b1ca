from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from hezar_train.errors import MissingDependencyError
from hezar_train.events import EventStorage, Row, SummaryWriterAdapter, TensorBoardWriter, TensorboardXWriter


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


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_an_image_reads_back_pixel_by_pixel(tmp_path, channels, mode):
    image = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    storage = EventStorage(step=3, writers=[TensorBoardWriter(tmp_path)])
    storage.put_image("input/first", image)
    storage.close()
    (event,) = EventAccumulator(str(tmp_path)).Reload().Images("input/first")
    assert (event.step, event.height, event.width) == (3, 5, 7)
    picture = Picture.open(io.BytesIO(event.encoded_image_string))
    assert picture.mode == mode
    assert np.array_equal(np.array(picture).reshape(5, 7, channels), image.permute(1, 2, 0).numpy())


def test_a_histogram_reads_back_with_its_counts(tmp_path):
    values = torch.randn(1000)
    storage = EventStorage(step=3, writers=[TensorBoardWriter(tmp_path)])
    storage.put_histogram("weights", values, bins=10)
    storage.close()
    (event,) = EventAccumulator(str(tmp_path)).Reload().Histograms("weights")
    counts, edges = np.histogram(values.double().numpy(), 10)
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max) == (3, 1000, values.min().item(), values.max().item())
    assert (list(found.bucket), list(found.bucket_limit)) == (counts.tolist(), edges[1:].tolist())


def test_the_server_s_reader_knows_images_and_histograms_as_such(tmp_path):
    storage = EventStorage(writers=[TensorBoardWriter(tmp_path)])
    storage.put_image("image", torch.rand(3, 4, 4))
    storage.put_histogram("histogram", torch.randn(10), bins=4)
    storage.close()
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in ("image", "histogram")}
    assert plugins == {"image": "images", "histogram": "histograms"}


def test_what_was_dropped_at_a_resume_takes_its_images_along(tmp_path):
    for again in range(2):
        writer = TensorBoardWriter(tmp_path, purge_step=4 if again else None)
        storage = EventStorage(writers=[writer])
        for step in (4, 6) if again else (2, 4, 6, 8):
            storage.step = step
            storage.put_image("image", torch.zeros(1, 1, 1))
        storage.flush()
    assert [event.step for event in EventAccumulator(str(tmp_path)).Reload().Images("image")] == [2, 4, 6]


def test_libai_s_window_is_not_taken_for_a_purge(tmp_path):
    assert TensorboardXWriter is TensorBoardWriter
    with pytest.raises(TypeError):
        TensorboardXWriter(tmp_path, 20)


def test_a_summary_writer_of_the_user_gets_everything_and_stays_open(tmp_path):
    theirs = SummaryWriter(str(tmp_path))
    storage = EventStorage(step=3, writers=[SummaryWriterAdapter(theirs)])
    storage.log({"loss": 0.5}, step=3, epoch=1)
    storage.put_image("image", torch.zeros(3, 2, 2))
    storage.put_histogram("histogram", [1.0, 2.0, 2.0], bins=2)
    storage.close()
    theirs.add_scalar("after", 1.0, 4)
    theirs.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]
    assert [event.step for event in events.Images("image")] == [3]
    assert list(events.Histograms("histogram")[0].histogram_value.bucket) == [1.0, 2.0]
    assert events.Scalars("after")[0].step == 4


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
