"""Everything measured: scalars, rows, images and histograms on their way to the writers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError, HezarTrainError
from hezar_train.events import EventStorage, EventWriter, Histogram, Image, Row, get_event_storage


class Collector(EventWriter):
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.images: list[Image] = []
        self.histograms: list[Histogram] = []
        self.calls: list[str] = []
        self.error: Exception | None = None

    def write(self, rows):
        if self.error is not None:
            raise self.error
        self.rows.extend(rows)

    def write_images(self, images):
        self.images.extend(images)

    def write_histograms(self, histograms):
        self.histograms.extend(histograms)

    def flush(self):
        self.calls.append("flush")

    def sync(self):
        self.calls.append("sync")

    def close(self):
        self.calls.append("close")


def test_a_put_value_comes_back_with_its_step():
    storage = EventStorage(step=3)
    storage.put_scalar("loss", 0.5)
    storage.step = 4
    storage.put_scalars(loss=0.25, accuracy=1)
    assert storage.history("loss").values() == [(0.5, 3), (0.25, 4)]
    assert storage.latest() == {"loss": (0.25, 4), "accuracy": (1.0, 4)}
    assert storage.history("loss").latest() == 0.25


def test_a_tensor_is_read_only_when_someone_asks(monkeypatch):
    reads = []
    for name in ("item", "tolist", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real: reads.append(1) or real(self))
    storage = EventStorage()
    for step in range(10):
        storage.step = step
        storage.put_scalar("loss", torch.tensor(step / 4))
    assert reads == []
    assert storage.history("loss").values() == [(step / 4, step) for step in range(10)]
    assert len(reads) == 1


def test_a_row_of_tensors_is_read_at_once(monkeypatch):
    reads = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or real(self))
    row = EventStorage().log({"a": torch.tensor(1.5), "b": 2, "c": torch.tensor([2.5])}, step=7, epoch=2)
    assert (row.step, row.epoch, row.values) == (7, 2, {"a": 1.5, "b": 2.0, "c": 2.5})
    assert all(type(value) is float for value in row.values.values())
    assert reads == [torch.Size([2])]


def test_values_of_different_dtypes_are_read_exactly():
    big = 2**40 + 1
    values = {"a": torch.tensor(big), "b": torch.tensor(0.1), "c": torch.tensor(1.5, dtype=torch.bfloat16), "d": 0.1}
    row = EventStorage().log(values, step=1, epoch=1)
    assert row.values == {"a": float(big), "b": torch.tensor(0.1).item(), "c": 1.5, "d": 0.1}


def test_a_put_loss_does_not_hold_its_graph():
    weight = torch.ones(1, requires_grad=True)
    storage = EventStorage()
    storage.put_scalar("loss", (weight * 2).sum())
    assert not storage.history("loss").peek()[0].requires_grad
    assert storage.history("loss").latest() == 2.0


@pytest.mark.parametrize("value", [torch.ones(2), "high", None])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(DataError, match="'loss'"):
        EventStorage().put_scalar("loss", value)


def test_an_unknown_name_is_answered_with_the_nearest():
    storage = EventStorage()
    storage.put_scalar("train.loss", 1.0)
    with pytest.raises(DataError, match=r"Measured: train\.loss\. Did you mean 'train\.loss'\?"):
        storage.history("train.los")
    with pytest.raises(KeyError, match=r"^nothing was measured"):
        storage.history("train.los")


def test_a_name_scope_ends_also_after_an_error():
    storage = EventStorage()
    with pytest.raises(DataError), storage.name_scope("val"), storage.name_scope("inner"):
        storage.put_scalars(x=1.0, y=None)
    storage.put_scalar("x", 2.0)
    assert storage.latest() == {"val/inner/x": (1.0, 0), "x": (2.0, 0)}


def test_a_changed_smoothing_hint_is_refused():
    storage = EventStorage()
    storage.put_scalar("x", 1.0, smoothing_hint=False)
    with pytest.raises(DataError, match="smoothing_hint=False"):
        storage.put_scalar("x", 1.0)


def test_each_writer_sees_each_row_once():
    first, late = Collector(), Collector()
    storage = EventStorage(writers=[first])
    one = storage.log({"a": 1.0}, step=1, epoch=1)
    storage.flush()
    storage.flush()
    storage.writers.append(late)
    two = storage.log({"a": 2.0}, step=1, epoch=1)
    storage.flush()
    assert first.rows == [one, two]
    assert late.rows == [two]
    assert storage.rows == []


def test_a_failing_writer_gets_its_rows_again_and_the_others_do_not():
    sound, broken = Collector(), Collector()
    storage = EventStorage(writers=[sound, broken])
    row = storage.log({"a": 1.0}, step=1, epoch=1)
    broken.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        storage.flush()
    broken.error = None
    storage.flush()
    assert sound.rows == broken.rows == [row]


def test_close_flushes_what_was_logged_last_and_closes_every_writer():
    broken, sound = Collector(), Collector()
    storage = EventStorage(writers=[sound, broken])
    row = storage.log({"a": 1.0}, step=1, epoch=1)
    broken.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        storage.close()
    assert sound.rows == [row]
    assert sound.calls[-1] == broken.calls[-1] == "close"


def test_a_row_logged_by_a_writer_is_not_lost():
    class Echo(Collector):
        def write(self, rows):
            super().write(rows)
            if len(self.rows) == 1:
                storage.log({"echo": 1.0}, step=2, epoch=1)

    storage = EventStorage(writers=[Echo(), other := Collector()])
    storage.log({"a": 1.0}, step=1, epoch=1)
    storage.flush()
    storage.flush()
    assert [row.values for row in storage.writers[0].rows] == [{"a": 1.0}, {"echo": 1.0}]
    assert [row.values for row in other.rows] == [{"a": 1.0}, {"echo": 1.0}]
    assert storage.rows == []


def test_put_values_wait_until_they_are_logged():
    storage = EventStorage(step=5)
    storage.put_scalar("mine", 1.0)
    storage.log({"train.loss": 0.5}, step=5, epoch=1)
    assert storage.unlogged() == {"mine": 1.0}
    storage.log(storage.unlogged(), step=5, epoch=1)
    assert storage.unlogged() == {}
    storage.put_scalar("mine", 2.0)
    assert storage.unlogged() == {"mine": 2.0}
    assert storage.history("mine").values() == [(1.0, 5), (2.0, 5)]


def test_logged_values_join_the_history():
    storage = EventStorage()
    for step, value in ((10, 0.5), (20, 0.75), (20, 0.8)):
        storage.log({"evaluation.accuracy": value}, step=step, epoch=1)
    assert storage.history("evaluation.accuracy").values() == [(0.5, 10), (0.75, 20), (0.8, 20)]


def test_a_value_put_before_the_step_it_is_logged_at_is_in_the_history_once():
    storage = EventStorage(step=1)  # as in a forward: the step is counted after it
    storage.put_scalar("model.mean", torch.tensor(0.5))
    storage.log(storage.unlogged(), step=2, epoch=1)
    assert storage.history("model.mean").values() == [(0.5, 1)]
    assert storage.unlogged() == {}


@pytest.mark.parametrize("name", ["step", "epoch", "time", "two\nlines"])
def test_a_name_that_a_log_line_cannot_hold_is_refused(name):
    with pytest.raises(DataError, match="another name"):
        EventStorage().log({name: 1.0}, step=1, epoch=1)


def test_the_step_has_a_second_name_and_samples_start_at_zero():
    storage = EventStorage(step=3)
    storage.advance()
    assert (storage.step, storage.iter, storage.samples) == (4, 4, 0)
    storage.iter = 9
    storage.put_scalar("x", 1.0)
    assert storage.latest() == {"x": (1.0, 9)}


def test_a_hint_asks_for_the_median_and_what_has_none_stays_raw():
    storage = EventStorage()
    for step in range(30):
        storage.step = step
        storage.put_scalar("smooth", torch.tensor(float(step)))
        storage.put_scalar("raw", step, smoothing_hint=False)
    storage.log({"logged": 7.0}, step=29, epoch=1)
    assert storage.latest_with_smoothing_hint() == {"smooth": (19.5, 29), "raw": (29.0, 29), "logged": (7.0, 29)}
    assert storage.latest_with_smoothing_hint(window_size=3)["smooth"] == (28.0, 29)
    assert storage.smoothing_hints() == {"smooth": True, "raw": False, "logged": False}
    assert list(storage.histories()) == ["smooth", "raw", "logged"]


def test_images_and_histograms_reach_each_writer_once_with_name_and_step():
    first, late = Collector(), Collector()
    storage = EventStorage(step=5, writers=[first])
    with storage.name_scope("model"):
        storage.put_image("input", torch.zeros(3, 2, 4))
        storage.put_histogram("weights", torch.ones(3))
    storage.flush()
    storage.writers.append(late)
    storage.put_image("again", torch.zeros(1, 2, 2))
    storage.flush()
    storage.flush()
    assert [(image.name, image.step) for image in first.images] == [("model/input", 5), ("again", 5)]
    assert [image.name for image in late.images] == ["again"]
    assert [(one.name, one.step, one.num) for one in first.histograms] == [("model/weights", 5, 3)]
    assert late.histograms == []


def test_images_and_histograms_that_nobody_writes_do_not_pile_up():
    storage = EventStorage()
    for number in range(3000):
        storage.put_image(f"{number}", torch.zeros(1, 1, 1))
        storage.put_histogram(f"{number}", [1.0], bins=1)
    storage.writers.append(late := Collector())
    storage.flush()
    assert [image.name for image in late.images] == [f"{number}" for number in range(2936, 3000)]
    assert [one.name for one in late.histograms] == [f"{number}" for number in range(1976, 3000)]


def test_what_is_cleared_is_not_written():
    storage = EventStorage(writers=[writer := Collector()])
    storage.put_image("image", torch.zeros(1, 1, 1))
    storage.put_histogram("histogram", [1.0])
    storage.clear_images()
    storage.flush()
    assert (len(writer.images), len(writer.histograms)) == (0, 1)
    storage.put_histogram("histogram", [1.0])
    storage.clear_histograms()
    storage.put_image("image", torch.zeros(1, 1, 1))
    storage.flush()
    assert (len(writer.images), len(writer.histograms)) == (1, 1)


def test_a_writer_that_only_takes_rows_is_not_troubled_by_images():
    class RowsOnly(EventWriter):
        def write(self, rows):
            self.seen = [row.values for row in rows]

    storage = EventStorage(writers=[writer := RowsOnly()])
    storage.put_image("image", torch.zeros(1, 1, 1))
    storage.put_histogram("histogram", [1.0])
    storage.log({"a": 1.0}, step=1, epoch=1)
    storage.close()
    assert writer.seen == [{"a": 1.0}]


def test_recalled_rows_stand_before_what_is_waiting_to_be_logged():
    storage = EventStorage(step=20, writers=[writer := Collector()])
    storage.put_scalar("mine", 3.0)
    storage.recall([Row(10, 1, 0.0, {"mine": 1.0, "train.loss": 0.5}), Row(20, 1, 0.0, {"mine": 2.0})])
    assert storage.history("mine").values() == [(1.0, 10), (2.0, 20), (3.0, 20)]
    assert storage.history("train.loss").values() == [(0.5, 10)]
    assert storage.unlogged() == {"mine": 3.0}
    storage.put_scalar("train.loss", 0.25, smoothing_hint=False)
    storage.flush()
    assert writer.rows == []


def test_a_second_recall_leaves_what_is_there():
    storage = EventStorage()
    rows = [storage.log({"a": 1.0}, step=1, epoch=1), storage.log({"a": 2.0}, step=2, epoch=1)]
    storage.recall([*rows, Row(2, 1, 0.0, {"b": 3.0})])
    storage.recall([*rows, Row(2, 1, 0.0, {"b": 3.0})])
    assert storage.history("a").values() == [(1.0, 1), (2.0, 2)]
    assert storage.history("b").values() == [(3.0, 2)]


class Axes:
    """The one method of matplotlib's axes that is used."""

    def plot(self, x, y, label):
        self.drawn = (x, y, label)


def test_a_plot_draws_one_point_per_value():
    storage, axes = EventStorage(), Axes()
    for step in (2, 4, 6):
        storage.step = step
        storage.put_scalar("train.loss", 1.0 / step)
    storage.plot(axes, "train.loss")
    assert axes.drawn == ([2, 4, 6], [1 / 2, 1 / 4, 1 / 6], "train.loss")
    storage.plot(axes, "train.loss", smoothing=0.9)
    assert len(axes.drawn[1]) == 3
    assert axes.drawn[1][0] == pytest.approx(0.5)


def test_the_current_storage_is_the_innermost_and_ends_with_its_block():
    with EventStorage() as outer:
        with EventStorage() as inner:
            assert get_event_storage() is inner
        assert get_event_storage() is outer
    with pytest.raises(HezarTrainError, match="while a trainer runs"):
        get_event_storage()


def test_importing_events_loads_neither_torch_nor_tensorboard_nor_accelerate():
    code = "import sys, hezar_train.events; print(sorted({'torch', 'tensorboard', 'accelerate'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


class Album(EventWriter):
    def __init__(self) -> None:
        self.images: list[Image] = []
        self.histograms: list[Histogram] = []

    def write_images(self, images):
        self.images.extend(images)

    def write_histograms(self, histograms):
        self.histograms.extend(histograms)


@pytest.fixture
def storage() -> EventStorage:
    return EventStorage(writers=[Album()])


def pixels(storage: EventStorage) -> list:
    storage.flush()
    return storage.writers[0].images[-1].pixels.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floats_become_pixels_and_are_cut_off_at_zero_and_one(storage, dtype):
    storage.put_image("x", torch.tensor([[[0.0, 0.5, 1.0, -1.0, 2.0, torch.nan, torch.inf]]], dtype=dtype))
    assert pixels(storage) == [[[0, 128, 255, 0, 255, 0, 255]]]


def test_an_image_is_what_it_was_when_it_was_put(storage):
    batch = torch.full((2, 3, 1, 1), 7, dtype=torch.uint8)
    storage.put_image("x", batch[0])
    batch.zero_()
    assert pixels(storage) == [[[7]], [[7]], [[7]]]


def test_an_image_does_not_hold_the_batch_or_its_graph(storage):
    batch = torch.rand(100, 1, 8, 8, requires_grad=True)
    storage.put_image("x", batch[0] * 1.0)
    storage.put_image("y", batch.detach()[0].mul(255).to(torch.uint8))
    storage.flush()
    for image in storage.writers[0].images:
        assert not image.pixels.requires_grad
        assert image.pixels.untyped_storage().nbytes() == 64


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(4, 4), r"'x' has the shape \(4, 4\), expected \(channels, height, width\)"),
        (torch.zeros(4, 4, 3, 1), "expected"),
        (torch.zeros(8, 8, 3), r"\(8, 8, 3\), expected .* 1, 3 or 4 channels"),
        (torch.zeros(3, 0, 4), "expected"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"'x' is of torch\.int64, expected floats in 0\.\.1 or torch\.uint8"),
    ],
)
def test_what_is_no_image_is_refused_by_name(storage, image, message):
    with pytest.raises(DataError, match=message):
        storage.put_image("x", image)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 20))
def test_a_histogram_counts_every_number_once(values, bins):
    storage = EventStorage(writers=[album := Album()])
    storage.put_histogram("x", torch.tensor(values, dtype=torch.float64), bins)
    storage.flush()
    (found,) = album.histograms
    assert sum(found.bucket_counts) == found.num == len(values)
    assert found.bucket_limits == sorted(found.bucket_limits)
    assert len(found.bucket_limits) == len(found.bucket_counts) == bins
    assert (found.min, found.max) == (min(values), max(values))
    assert found.sum == pytest.approx(sum(values), abs=1e-6)
    assert found.sum_squares == pytest.approx(float(np.square(values).sum()))


def test_numbers_that_are_not_finite_are_left_out_and_none_at_all_is_no_error(storage):
    storage.put_histogram("some", torch.tensor([1.0, torch.nan, torch.inf, 3.0], requires_grad=True))
    storage.put_histogram("none", torch.tensor([torch.nan]))
    storage.put_histogram("empty", [])
    storage.flush()
    found = {one.name: (one.num, one.min, one.max, sum(one.bucket_counts)) for one in storage.writers[0].histograms}
    assert found == {"some": (2, 1.0, 3.0, 2), "none": (0, 0.0, 0.0, 0), "empty": (0, 0.0, 0.0, 0)}


def test_a_histogram_needs_a_bucket(storage):
    with pytest.raises(DataError, match="bins=0 of 'x' must be at least 1"):
        storage.put_histogram("x", [1.0], bins=0)


@pytest.mark.parametrize("value", [0.1, torch.tensor(0.25)])
def test_what_is_logged_at_a_later_step_is_there_once_also_if_it_was_read_before(value: object) -> None:
    storage = EventStorage(step=4)
    storage.put_scalar("loss", value)  # type: ignore[arg-type]
    storage.history("loss").latest()
    storage.log(storage.unlogged(), step=5, epoch=1)
    assert [step for _, step in storage.history("loss").values()] == [4]
    assert storage.unlogged() == {}
